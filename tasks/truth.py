"""Shows once that the exact values are those of on-policy episodes: `python -m tasks.truth --study gridworld-1000`.

The paper takes its ground truth from 10^6 on-policy episodes of every target; where the environment is a finite MDP,
dynamic programming gives it without any. Both are printed side by side.
"""

import sys

import numpy as np
from rich.console import Console
from rich.progress import track

from manyfold import exact
from manyfold.arrays import Array
from manyfold.envs import Environment
from manyfold.mdp import FiniteMDP
from manyfold.rollout import rollout_tabular
from manyfold.streams import stream
from tasks import commands, studies
from tasks.groups import Group

CHUNK = 20_000  # episodes of each target at once


def monte_carlo(env: Environment, targets: Array, episodes: int, rng: np.random.Generator) -> Array:
    """Mean and standard error of every target's return, `[2, K]`."""
    sums = np.zeros((2, len(targets)))
    for _ in track(range(episodes // CHUNK), description="episodes", console=Console(stderr=True)):
        returns = rollout_tabular(env, targets, CHUNK * len(targets), rng).rewards.sum(-1).reshape(-1, len(targets))
        sums += returns.sum(0), (returns**2).sum(0)
    n = episodes // CHUNK * CHUNK
    mean = sums[0] / n
    return np.stack([mean, np.sqrt((sums[1] / n - mean**2) / n)])


def main(arguments: list[str] | None = None) -> int:
    parser = commands.parser("truth", " ".join((__doc__ or "").split("\n")[2:]), study="gridworld-1000")
    parser.add_argument("--group", type=int, default=0, help="group of targets (default 0)")
    parser.add_argument(
        "--episodes", type=int, default=1_000_000, help=f"of each target, at least {CHUNK:,} (default 1,000,000)"
    )
    args = parser.parse_args(arguments)

    def work() -> None:
        if args.episodes < CHUNK:
            raise ValueError(f"--episodes is {args.episodes}, expected at least {CHUNK}")
        group = Group(studies.read(args.study), args.group, args.data)
        if not group.folder("targets").exists():
            raise ValueError(f"{group.folder('targets')}: no such folder, expected the stage `targets` to have run")
        env = group.environment()
        mdp = env.mdp()
        if mdp is None:
            raise ValueError(f"--study {args.study} has no exact values, expected one with a finite MDP")
        compare(env, mdp, group, args.episodes)

    return commands.guarded("truth", work)


def compare(env: Environment, mdp: FiniteMDP, group: Group, episodes: int) -> None:
    """Prints both values of every target side by side."""
    targets, name = group.policies().table(), group.study.name
    known = exact.values(mdp, targets)
    mean, error = monte_carlo(env, targets, episodes, stream("truth", name, group.number))
    off = (mean - known) / error
    rows = [("policy", "exact J", "mean return", "standard error", "difference / error")]
    for k in range(len(known)):
        rows.append((str(k), f"{known[k]:.5f}", f"{mean[k]:.5f}", f"{error[k]:.5f}", f"{off[k]:+.2f}"))
    counted = f"{episodes // CHUNK * CHUNK:,} on-policy episodes of each target"
    commands.show(f"{name}, group {group.number}: {counted}", rows)
    print(f"Largest difference: {np.abs(off).max():.2f} standard errors.")


if __name__ == "__main__":
    sys.exit(main())
