"""A hundred policies, of which only some run: what does that cost? `python -m benchmarks.subsets`, after `.policies`.

Every density of the hundred is needed for every step whoever runs, so fewer loggers save no time of that kind. They
save episodes where few are wanted, as each logger should run ten: a hundred loggers, a thousand episodes. But only who
runs has weights of at most 1 / alpha_k. Gridworld 1,000, the checkpoints of `benchmarks.policies`, J of them in turns,
evenly spread, the first and the last among them, 2,000 episodes. *cost*: n times the variance that `Estimate.variance`
says, mean over policies and over trainings (its standard error: over these), in the unit of `benchmarks.policies`;
*worst* that of the worst policy; *z* the root mean square of how far the values are from the exact ones, in standard
errors: above 1, the variance was said to be too small, as what was never seen is in no variance.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import manyfold as mf
from benchmarks.policies import MANY, SPREADS, WORLDS, M, chosen, tables
from benchmarks.pooled_sets import Table, logged
from manyfold import exact
from manyfold.arrays import Array
from manyfold.data.episodes import Episodes
from manyfold.envs import Gridworld
from manyfold.mdp import FiniteMDP
from manyfold.streams import stream
from manyfold.tables import markdown, write_table

LOGGERS, EPISODES = (5, 10, 30, 100), 2000
OUT = Path("data/scale/subsets")


def run(mdp: FiniteMDP, pi: Array, which: list[int], rng: np.random.Generator) -> Episodes:
    """Episodes of some of the policies, as all of them see them."""
    found = logged(mdp, pi[which], EPISODES // len(which) * len(which), rng)
    probs = pi[:, found.t, found.states[:, 0]]  # [K, M, A]
    with np.errstate(divide="ignore"):
        taken = np.log(probs[:, np.arange(len(found.t)), found.actions])
    own = np.full(len(pi), -1)
    own[which] = np.arange(len(which))
    names = tuple(str(k) for k in range(len(pi)))
    return replace(found, log_targets=taken, own=own, names=names, probs=probs)


def measured(spread: str, j: int, repeats: int, work: Path) -> Iterator[tuple[Array, Array, Array]]:
    """n Var without q and with the exact one, and the squared z of the latter, `[K]` each."""
    world = WORLDS["Gridworld"]
    for seed in range(world.seeds):
        mdp, pi = Gridworld.draw(M, seed).mdp(), tables(world, work / "gridworld" / f"seed-{seed}", spread)
        truth, q = exact.values(mdp, pi), Table(exact.action_values(mdp, pi))
        unit = np.mean([exact.pdis_variance(mdp, one[None], one)[0] for one in pi])
        for repeat in range(repeats):
            episodes = run(mdp, pi, chosen(j), stream("benchmark-subsets", spread, seed, j, repeat))
            plain, with_q = mf.pool(episodes), mf.pool(episodes, q)
            z = (with_q.mean - truth) / with_q.standard_error
            yield plain.variance / unit, with_q.variance / unit, z**2


def cell(each: list[Array]) -> str:
    """The mean over policies with its standard error."""
    means = np.array([x.mean() for x in each])
    return f"{means.mean():.3f} +- {means.std(ddof=1) / np.sqrt(len(means)):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1, help="of each training")
    parser.add_argument("--work", type=Path, default=Path("build/policies"), help="of benchmarks.policies")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[tuple[str, ...]] = [
        ("checkpoints from", "loggers", "cost, nothing logged", "worst", "cost, exact q", "worst", "z")
    ]
    for spread, said in SPREADS.items():
        for j in LOGGERS:
            plain, with_q, squares = zip(*measured(spread, j, args.repeats, args.work), strict=True)
            worst = [f"{np.mean(x, 0).max():.2f}" for x in (plain, with_q)]
            z = f"{np.sqrt(np.mean(squares)):.2f}"
            rows.append((said, f"{j} of {MANY}", cell(list(plain)), worst[0], cell(list(with_q)), worst[1], z))
    print(markdown(rows))
    write_table(rows, OUT, ("md",))


if __name__ == "__main__":
    main()
