"""How often does `manyfold gate` answer wrongly? Two policies whose truth is known, looked at again and again.

    python -m benchmarks.gate          # `... 200` for 200 runs of each case instead of 1,000 (pooled: a fifth)

The command runs rounds of the candidate and the baseline until `until(stop="best")` knows which is better, 2,000
episodes at most. It may say "better" or "worse" wrongly with probability alpha at most, and of two equals both are
wrong. Returns: normal; the same with starts in common; 1 with probability 0.1 and else 0; minus an exponential; and
pooled evaluation of two policies of a random MDP whose values are equal.
"""

import sys

import numpy as np
from scipy import optimize

from benchmarks.show import show
from manyfold import exact
from manyfold.arrays import Array, Ints
from manyfold.envs import Finite
from manyfold.estimate.sources import Pooling
from manyfold.estimate.stopping import Played, Returns, Source, until
from manyfold.mdp import FiniteMDP
from manyfold.policies import TabularPolicySet
from manyfold.streams import stream

ALPHA, BUDGET = 0.05, 2000
BEHIND = 0.1  # of the candidate, where it is worse
KINDS = ("normal", "starts in common", "rare", "skewed", "pooled")


def returns(kind: str, shape: tuple[int, int], rng: np.random.Generator) -> Array:
    """Of policies with equal values, `[2, rounds]`; spread 0.3 to 1."""
    if kind == "rare":
        return (rng.random(shape) < 0.1).astype(np.float64)
    if kind == "skewed":
        return -rng.exponential(size=shape)
    if kind == "starts in common":
        return rng.standard_normal(shape[1]) + 0.3 * rng.standard_normal(shape)
    return rng.standard_normal(shape)


def source_of(kind: str, behind: float, number: int) -> Source:
    """The baseline, and the candidate, whose value is lower by `behind`."""
    rng = stream("gate", kind, number)
    if kind == "pooled":
        return Pooling(*equals(rng), rng)
    truth = np.array([0.0, -behind])

    def run(which: Ints, rounds: int) -> Played:
        return Played(truth[which][:, None] + returns(kind, (2, rounds), rng)[which])

    return Returns(("baseline", "candidate"), run)


def equals(rng: np.random.Generator) -> tuple[Finite, TabularPolicySet]:
    """A random MDP and two policies of the same value: the middle one of three, and a mixture of the others."""
    mdp = FiniteMDP(
        rng.dirichlet(np.full(4, 0.5), size=(4, 3)), rng.standard_normal((4, 3)), rng.dirichlet(np.ones(4)), 5
    )
    pi = np.repeat(rng.dirichlet(np.ones(3), size=(3, 1, 4)), 5, 1)
    low, middle, high = pi[np.argsort(exact.values(mdp, pi))]
    wanted = float(exact.values(mdp, middle[None])[0])

    def mixed(share: float) -> Array:
        return (1 - share) * low + share * high

    share = optimize.brentq(lambda x: float(exact.values(mdp, mixed(x)[None])[0]) - wanted, 0, 1, xtol=1e-14)
    return Finite(mdp), TabularPolicySet(np.stack([middle, mixed(share)]))


def measure(kind: str, behind: float, runs: int) -> tuple[int, int, float]:
    """How often the candidate is called better, and worse, and the mean number of episodes."""
    found = [until(source_of(kind, behind, number), "best", None, BUDGET, ALPHA) for number in range(runs)]
    said = [one.best for one in found]
    return said.count(1), said.count(0), float(np.mean([one.episodes for one in found]))


def main(runs: int = 1000) -> None:
    rows = []
    for kind in KINDS:
        for behind in (0.0, BEHIND) if kind != "pooled" else (0.0,):
            many = max(1, runs // 5) if kind == "pooled" else runs  # which takes fifty times as long
            better, worse, episodes = measure(kind, behind, many)
            wrong = better + (0 if behind else worse)
            truth = f"worse by {behind:g}" if behind else "equal"
            percents = (f"{100 * x / many:.1f}" for x in (better, worse, wrong))
            rows.append((kind, truth, f"{many:,}", *percents, f"{episodes:,.0f}"))
    header = ("returns", "candidate is", "runs", "called better, %", "called worse, %", "wrong, %", "episodes, mean")
    show(f"Two policies, alpha {ALPHA}, {BUDGET:,} episodes at most", header, rows)


if __name__ == "__main__":
    main(*(int(x) for x in sys.argv[1:2]))
