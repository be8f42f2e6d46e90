"""Shows once that the exact values are those of on-policy episodes: `python -m tasks.truth --env gridworld-1000`.

The paper takes its ground truth from 10^6 on-policy episodes of every target; on Gridworld dynamic programming gives it
without any. Both are printed side by side.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from manyfold import environments, exact
from manyfold.gridworld import Gridworld
from manyfold.rollout import rollout
from manyfold.streams import stream
from tasks.fits import Inputs
from tasks.params import ROOT

CHUNK = 20_000  # episodes of each target at once


def monte_carlo(world: Gridworld, targets: np.ndarray, episodes: int, rng: np.random.Generator) -> np.ndarray:
    """Mean and standard error of every target's return, `[2, K]`."""
    sums = np.zeros((2, len(targets)))
    for _ in track(range(episodes // CHUNK), description="episodes", console=Console(stderr=True)):
        returns = rollout(world, targets, CHUNK * len(targets), rng).rewards.sum(-1).reshape(-1, len(targets))
        sums += returns.sum(0), (returns**2).sum(0)
    n = episodes // CHUNK * CHUNK
    mean = sums[0] / n
    return np.stack([mean, np.sqrt((sums[1] / n - mean**2) / n)])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.truth", description=" ".join((__doc__ or "").split("\n")[2:])
    )
    parser.add_argument("--env", default="gridworld-1000", help=f"one of {', '.join(environments.GRIDWORLDS)}")
    parser.add_argument("--group", type=int, default=0, help="group of targets (default 0)")
    parser.add_argument(
        "--episodes", type=int, default=1_000_000, help=f"of each target, at least {CHUNK:,} (default 1,000,000)"
    )
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of all data (default data)")
    args = parser.parse_args(arguments)
    try:
        if args.env not in environments.GRIDWORLDS:
            raise ValueError(f"--env is {args.env!r}, expected {' or '.join(environments.GRIDWORLDS)}")
        if args.episodes < CHUNK:
            raise ValueError(f"--episodes is {args.episodes}, expected at least {CHUNK}")
        inputs = Inputs(args.env, args.group, args.data)
        if not inputs.folder("targets").exists():
            raise ValueError(f"{inputs.folder('targets')}: no such folder, expected the stage `targets` to have run")
        targets = inputs.policies().table()
    except (ValueError, OSError) as error:
        print(f"truth: {error}", file=sys.stderr)
        return 2
    world = Gridworld.draw(environments.GRIDWORLDS[args.env], args.group)
    known = exact.values(world.to_mdp(), targets)
    mean, error = monte_carlo(world, targets, args.episodes, stream("truth", args.env, args.group))
    off = (mean - known) / error
    table = Table(
        title=f"{args.env}, group {args.group}: {args.episodes // CHUNK * CHUNK:,} on-policy episodes of each target"
    )
    for column in ("policy", "exact J", "mean return", "standard error", "difference / error"):
        table.add_column(column, justify="right")
    for k in range(len(known)):
        table.add_row(str(k), f"{known[k]:.5f}", f"{mean[k]:.5f}", f"{error[k]:.5f}", f"{off[k]:+.2f}")
    Console().print(table)
    print(f"Largest difference: {np.abs(off).max():.2f} standard errors.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
