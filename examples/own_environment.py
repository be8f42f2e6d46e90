"""Your own environment and your own policies, of different kinds, side by side.

A shop orders goods every morning: any `gymnasium.Env` will do, given as a function that makes one. Three policies are
torch modules that give logits, two are plain functions that give probabilities. They must be able to say how probable
each action was, so rules get a little noise.

    python examples/own_environment.py

writes shop.html. It takes some ten seconds. It
needs `pip install .` in a clone of this repository, and nothing else.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

import manyfold as mf

ROOM, MOST = 10, 4  # goods that the shop holds, and that it can order a day
PRICE, COST, KEEPING = 3.0, 1.5, 0.2  # of one: sold, ordered, kept overnight


class Shop(gymnasium.Env):
    """Each morning: order 0 to 4. Then customers come, more of them on every seventh day."""

    observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)  # stock and weekday
    action_space = spaces.Discrete(MOST + 1)

    def __init__(self, days: int) -> None:
        self.days = days

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.day, self.stock = 0, int(self.np_random.integers(ROOM // 2))
        return self.seen(), {}

    def step(self, action: int) -> Any:
        held = min(ROOM, self.stock + int(action))
        sold = min(held, int(self.np_random.poisson(4.0 if self.day % 7 == 6 else 2.0)))
        earned = PRICE * sold - COST * (held - self.stock) - KEEPING * (held - sold)
        self.stock, self.day = held - sold, self.day + 1
        return self.seen(), earned, self.day == self.days, False, {}

    def seen(self) -> np.ndarray:
        return np.array([self.stock / ROOM, self.day % 7 / 7], np.float32)


def network(seed: int) -> torch.nn.Module:
    """As it would come from training: logits of the five orders."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, MOST + 1))


def rule(target: int) -> Any:
    """(obs [N, 2], t [N]) -> probabilities [N, 5]: order up to a target, and in one day of ten anything."""

    def probabilities(obs: np.ndarray, t: np.ndarray) -> np.ndarray:
        order = np.clip(target - np.rint(obs[:, 0] * ROOM), 0, MOST).astype(int)
        return 0.9 * np.eye(MOST + 1)[order] + 0.1 / (MOST + 1)

    return probabilities


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=Path("shop.html"), help="what to write")
    parser.add_argument("--days", type=int, default=28, help="of an episode")
    parser.add_argument("--episodes", type=int, default=1000, help="of all policies together")
    parser.add_argument("--workers", type=int, default=1, help="processes that run episodes")
    args = parser.parse_args()

    make = partial(Shop, args.days)
    env = mf.GymnasiumEnvironment(make, horizon=args.days, name="Shop")
    networks = mf.ModulePolicySet(
        [network(seed) for seed in range(3)], env.n_actions, env.width, args.days, [f"network {i}" for i in range(3)]
    )
    targets = 3, 5
    rules = mf.CallablePolicySet(
        [rule(target) for target in targets], env.n_actions, env.width, args.days, [f"up to {x}" for x in targets]
    )
    result = mf.evaluate(env, mf.JoinedPolicySet([networks, rules]), episodes=args.episodes, workers=args.workers)
    print(result)
    print(f"{result.report(args.page, environment='Shop', seed=0)} has it all, with pictures.")


if __name__ == "__main__":  # more than one process needs this line
    main()
