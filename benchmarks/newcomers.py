"""Do the intervals of policies hold that ran no episodes themselves? It is what a store promises of new checkpoints.

    python -m benchmarks.newcomers            # 60 random sets, 300 beams, 6 trainings; some minutes
    python -m benchmarks.newcomers 10 20 1

Others run episodes, a newcomer none; its value is known by dynamic programming. Two kinds of sets: those of
`benchmarks.pooled_sets`, the last policy being new; and a *beam*, as of CartPole: who falls off ends the episode, every
step pays 1, and each policy balances better than all before it, so that what it does is seldom or never seen. Single
95% intervals and those of `until` (95% at all looks), of all newcomers, of those that `diagnostics.trust` is content
with, and of those that `diagnostics.borrowed` is content with as well. The seeds that chose that rule are not used.

Then the store itself: twelve policies of a beam arrive one by one, `mf.evaluate(precision=10, store=folder)`; how often
is any of the intervals of an arrival wrong, and how many policies never ran an episode?
"""

import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

import manyfold as mf
from benchmarks.pooled_sets import draw
from benchmarks.show import show
from manyfold import exact
from manyfold.arrays import Array
from manyfold.envs import Finite
from manyfold.estimate import diagnostics, intervals
from manyfold.estimate.collecting import collect
from manyfold.estimate.evaluation import pool
from manyfold.mdp import FiniteMDP
from manyfold.policies import TabularPolicySet

FIRST = 5000  # seeds below chose the rule
REPEATS = 4
HALF, HORIZON, PRECISION, ALPHA = 4, 100, 10.0, 0.05
SKILLS = np.linspace(0, 3, 12)


class Newcomer(NamedTuple):
    """One estimate without own episodes."""

    trusted: bool
    enough: bool  # trusted, and others' episodes say enough
    single: bool  # whether its 95% interval holds
    anytime: bool


def beam() -> FiniteMDP:
    """Places -4..4, 0 first: a push moves as asked with probability 0.8, else the other way; beyond is the end."""
    places = 2 * HALF + 1
    p, r = np.zeros((places + 1, 2, places + 1)), np.zeros((places + 1, 2))
    p[places, :, places] = 1.0
    r[:places] = 1.0
    for s in range(places):
        for a, asked in enumerate((-1, 1)):
            for move, chance in ((asked, 0.8), (-asked, 0.2)):
                p[s, a, s + move if 0 <= s + move < places else places] += chance
    start = np.zeros(places + 1)
    start[HALF] = 1.0
    return FiniteMDP(p, r, start, HORIZON)


def balancing(skills: Array) -> Array:
    """Back to the middle with probability sigmoid(skill), `[K, T, S, A]`."""
    side = np.sign(np.arange(2 * HALF + 2) - HALF)
    side[-1] = 0
    up = 1 / (1 + np.exp(skills[:, None] * side))
    return np.repeat(np.stack([1 - up, up], -1)[:, None], HORIZON, 1)


def judge(mdp: FiniteMDP, pi: Array, each: int, rng: np.random.Generator) -> Newcomer:
    """The last policy from so many episodes of each other one."""
    others = len(pi) - 1
    alpha = np.append(np.full(others, 1 / others), 0.0)
    found = pool(collect(Finite(mdp), TabularPolicySet(pi), each * others, rng, alpha=alpha))
    truth = float(exact.values(mdp, pi)[-1])
    slack = 1e-9 * (1 + abs(truth))
    holds = [
        bool(interval.low[-1] - slack <= truth <= interval.high[-1] + slack)
        for interval in (intervals.single(found.sample), intervals.anytime(found.sample.each(), ALPHA))
    ]
    trusted = not diagnostics.trust(found.diagnosis)[-1]
    return Newcomer(trusted, trusted and not diagnostics.borrowed(found.diagnosis, found.own_returns)[-1], *holds)


def random_sets(sets: int) -> Iterator[Newcomer]:
    for seed in range(FIRST, FIRST + sets):
        rng = np.random.default_rng(seed)
        mdp, pi, _, n = draw(rng)
        if n * mdp.horizon * len(pi) > 1_000_000:  # seconds a sample
            continue
        for _ in range(REPEATS):
            yield judge(mdp, pi, max(5, n // len(pi)), rng)


def beams(sets: int) -> Iterator[Newcomer]:
    mdp = beam()
    for seed in range(FIRST, FIRST + sets):
        rng = np.random.default_rng(seed)
        step, others = rng.choice([0.05, 0.1, 0.2, 0.4, 0.8]), int(rng.integers(1, 8))
        skills = rng.uniform(-0.5, 2.5) + step * np.arange(others + 1)
        yield judge(mdp, balancing(skills), int(rng.choice([10, 30, 100])), rng)


def rows(name: str, found: list[Newcomer]) -> list[tuple[str, ...]]:
    """All, those that are trusted, and those of whom others' episodes say enough."""
    out = []
    for who, some in (
        ("all", found),
        ("trusted", [one for one in found if one.trusted]),
        ("and enough", [one for one in found if one.enough]),
    ):
        holds = (f"{np.mean([getattr(one, way) for one in some]):.1%}" if some else "" for way in ("single", "anytime"))
        out.append((name, who, f"{len(some):,}", f"{len(some) / len(found):.0%}", *holds))
    return out


def training(seed: int, skills: Array = SKILLS) -> tuple[int, int, int]:
    """Policies of a beam arrive: arrivals with any wrong interval, policies that never ran, episodes in all."""
    mdp, pi = beam(), balancing(skills)
    truth, wrong = exact.values(mdp, pi), 0
    with tempfile.TemporaryDirectory() as folder:
        for k in range(1, len(pi) + 1):
            policies = TabularPolicySet(pi[:k])
            found = mf.evaluate(Finite(mdp), policies, seed=seed, precision=PRECISION, store=folder, alpha=ALPHA)
            low, high = found.decision.interval  # type: ignore[union-attr]
            wrong += int(((truth[:k] < low - 1e-9) | (truth[:k] > high + 1e-9)).any())
    return wrong, sum(not len(x) for x in found.own_returns), found.episodes


def arriving(rule: bool, trainings: int) -> tuple[str, ...]:
    """A row: with the rule or without it."""
    kept = diagnostics.LEAST_BORROWED, diagnostics.LEAST_Z
    if not rule:
        diagnostics.LEAST_BORROWED, diagnostics.LEAST_Z = 0.0, -np.inf
    wrong, never, episodes = np.array([training(seed) for seed in range(trainings)]).T
    diagnostics.LEAST_BORROWED, diagnostics.LEAST_Z = kept
    numbers = f"{trainings * len(SKILLS)}", f"{wrong.sum()}", f"{never.sum()}", f"{episodes.mean():,.0f}"
    return "with the rule" if rule else "without it", *numbers


def main(sets: int = 60, many: int = 300, trainings: int = 6) -> None:
    header = ("others' sets", "whose", "intervals", "share", "95% hold", "at all looks")
    table = [*rows("random", list(random_sets(sets))), *rows("beams", list(beams(many)))]
    show("Intervals of policies without episodes of their own", header, table)
    header = ("", "arrivals", "with a wrong interval", "policies that never ran", "episodes of a training, mean")
    title = f"A store, every value to +- {PRECISION:g}, alpha {ALPHA}"
    show(title, header, [arriving(rule, trainings) for rule in (True, False)])


if __name__ == "__main__":
    main(*(int(x) for x in sys.argv[1:4]))
