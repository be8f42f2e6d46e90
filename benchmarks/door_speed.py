"""What an evaluation costs beside the bare episodes: `python -m benchmarks.door_speed`.

Stable-Baselines3 checkpoints, ten of Hopper-v5 in all three dimensions (those of `benchmarks.vectors`) and eight of
CartPole-v1. `collect` runs their episodes in one process and one thread: own actions, and every action's density under
every policy. *Bare* are the same episodes again, the same actions in the same environments, and nothing else; *vector
API* is what people write instead: Gymnasium's SyncVectorEnv of as many slots, one policy at a time, its own actions.
CPU time of all threads, so that other programs don't count.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

import manyfold as mf
from benchmarks.show import show
from benchmarks.vectors import GROUPS, files, train
from manyfold import envs
from manyfold.streams import stream

ROUNDS = 3
Call = tuple[int, str, tuple[Any, ...], dict[str, Any]]  # which environment, what it was asked to do


class Recorder:
    """An environment, or an envpool, that remembers what it was asked to do."""

    def __init__(self, inner: Any, number: int, calls: list[Call]) -> None:
        self.inner, self.number, self.calls = inner, number, calls

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((self.number, "reset", args, kwargs))
        return self.inner.reset(*args, **kwargs)

    def step(self, *args: Any) -> Any:
        self.calls.append((self.number, "step", args, {}))
        return self.inner.step(*args)


def recorded(env: mf.Environment) -> tuple[list[Call], Callable[[], list[Any]]]:
    """What `env` will be asked to do, and the same environments anew."""
    calls: list[Call] = []
    opened: list[tuple[int, list[int]]] = []
    plain = env.open

    def open_(n: int, rng: np.random.Generator) -> Any:
        running: Any = plain(n, rng)
        opened.append((n, []))
        if isinstance(env, mf.GymnasiumEnvironment):
            running.envs = [Recorder(one, i, calls) for i, one in enumerate(running.envs)]
        else:
            running._pool = Recorder(running._pool, 0, calls)
        return running

    def again() -> list[Any]:
        running: Any = plain(opened[0][0], stream("benchmark-door", env.name))  # collect draws the seeds first
        return running.envs if isinstance(env, mf.GymnasiumEnvironment) else [running._pool]

    env.open = open_
    return calls, again


def measure(name: str, policies: mf.PolicySet, episodes: int) -> tuple[str, ...]:
    """One row: steps/s of all three."""
    found = []
    for _ in range(ROUNDS):
        start = time.process_time()
        steps = mf.collect(envs.make(name), policies, episodes, stream("benchmark-door", name)).steps
        ours = time.process_time() - start
        env = envs.make(name)
        calls, again = recorded(env)
        mf.collect(env, policies, episodes, stream("benchmark-door", env.name))
        fresh = again()
        start = time.process_time()
        for number, what, args, kwargs in calls:
            getattr(fresh[number], what)(*args, **kwargs)
        bare = time.process_time() - start
        found.append((steps / ours, steps / bare, vector(name, policies, steps)))
    ours_, bare_, theirs = np.max(found, 0)
    share = f"{ours_ / bare_:.0%}", f"{ours_ / theirs:.0%}"
    return (name, f"{policies.n_policies}", f"{steps:,}", *(f"{x:,.0f}" for x in (bare_, theirs, ours_)), *share)


def vector(name: str, policies: mf.PolicySet, steps: int) -> float:
    """Steps/s of Gymnasium's SyncVectorEnv, the policies one after the other."""
    id, rng = name.removeprefix("envpool:"), np.random.default_rng(0)
    assert isinstance(policies, mf.ModulePolicySet)
    start, slots = time.process_time(), envs.GymnasiumEnvironment.slots
    vec = gymnasium.make_vec(id, num_envs=slots, vectorization_mode="sync")
    done = 0
    for module in policies.modules:
        alone = mf.ModulePolicySet([module], policies.head or policies.n_actions, policies.width)
        obs, _ = vec.reset(seed=0)
        for _ in range(steps // slots // policies.n_policies):
            x, which = obs.astype(np.float64), np.zeros(slots, dtype=np.int64)
            if alone.head is None:
                actions: Any = alone.sample(which, x, 0, rng)
            else:
                actions = alone.head.sent(alone.head.draw(alone.parameters(x, 0)[0], rng)).astype(np.float32)
            obs, *_ = vec.step(actions)
            done += slots
    return done / (time.process_time() - start)


def hopper(work: Path) -> mf.PolicySet:
    """Ten checkpoints."""
    update, steps = GROUPS["3,000 steps, 2 updates, early"]
    folder = work / f"update-{update}" / "seed-0"
    train(folder, 0, update, steps)
    return load([files(folder, step)[0] for step in steps])


def cartpole(work: Path) -> mf.PolicySet:
    """Eight checkpoints, one every 4,096 steps."""
    paths = [work / "cartpole" / f"ppo_{4096 * i}_steps.zip" for i in range(1, 9)]
    if not paths[-1].exists():
        from stable_baselines3 import PPO

        model = PPO("MlpPolicy", "CartPole-v1", seed=0, device="cpu")
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            model.learn(4096, reset_num_timesteps=False).save(path)
    return load(paths)


def load(paths: list[Path]) -> mf.PolicySet:
    """As the door reads them."""
    policies = mf.load_policies(list(paths))
    assert isinstance(policies, mf.PolicySet)
    return policies


def main(work: Path) -> None:
    torch.set_num_threads(1)
    robots, poles = hopper(work), cartpole(work)
    rows = [
        measure("Hopper-v5", robots, 300),
        measure("envpool:Hopper-v5", robots, 300),
        measure("CartPole-v1", poles, 200),
        measure("envpool:CartPole-v1", poles, 200),
    ]
    rates = "bare, steps/s", "vector API", "manyfold"
    header = ("", "K", "steps", *rates, "share of bare", "of vector API")
    show("Episodes with all densities, one process, CPU time", header, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/vectors"), help="checkpoints")
    main(parser.parse_args().work)
