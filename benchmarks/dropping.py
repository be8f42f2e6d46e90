"""Shall policies that can't be the best any more run on? Episodes until the best one is known, by the rule for that.

    python -m benchmarks.dropping          # after `make`; `... 1` for one run of each set instead of four

A segment ends when somebody is dropped, and its values are final. Where policies share episodes, the values of few
rounds spread much, and what is added later can't mend them; by themselves, plain returns lose nothing by it. Sets:
Gridworld 1,000's groups, pooled with and without the study's q; ten policies that have little in common on random MDPs;
plain returns of ten policies whose values lie three apart in all.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.show import show
from manyfold import exact
from manyfold.arrays import Array, Ints
from manyfold.envs import Environment, Finite
from manyfold.estimate import stopping
from manyfold.estimate.sources import Pooling
from manyfold.estimate.stopping import Played, Returns, Source, until
from manyfold.mdp import FiniteMDP
from manyfold.policies import PolicySet, TabularPolicySet
from manyfold.streams import stream
from tasks import studies
from tasks.groups import Group

K, BUDGET, TIE = 10, 2400, 1e-9
GROUPS, WORLDS = 30, 20
RULES: dict[str, tuple[bool, int]] = {
    "nobody": (False, 0),
    "as soon as half can't": (True, 1),
    f"half can't, {stopping.SETTLED} rounds": (True, stopping.SETTLED),
}


class Case(NamedTuple):
    """One set of policies, evaluated once: a source that is made anew for each rule."""

    truth: Array
    source: Callable[[], Source]


def pooling(env: Environment, policies: PolicySet, q: Any, *name: str | int) -> Callable[[], Source]:
    """The same episodes whenever it is made, until somebody is dropped."""
    return lambda: Pooling(env, policies, stream("dropping", *name), q)


def gridworld(runs: int, with_q: bool) -> Iterator[Case]:
    study = studies.read("gridworld-1000")
    for number in range(GROUPS):
        group = Group(study, number, Path("data"))
        env, policies, q = group.environment(), group.policies(), group.values("q") if with_q else None
        truth = exact.values(env.mdp(), policies.table())
        for run in range(runs):
            yield Case(truth, pooling(env, policies, q, str(with_q), number, run))


def random_mdps(runs: int) -> Iterator[Case]:
    for number in range(WORLDS):
        rng = stream("dropping", "random", number)
        transitions = rng.dirichlet(np.full(5, 0.3), size=(5, 3))
        mdp = FiniteMDP(transitions, rng.standard_normal((5, 3)), rng.dirichlet(np.ones(5)), 20)
        pi = 0.95 * np.repeat(rng.dirichlet(np.full(3, 0.3), size=(K, 1, 5)), 20, 1) + 0.05 / 3
        truth, env, policies = exact.values(mdp, pi), Finite(mdp), TabularPolicySet(pi)
        for run in range(runs):
            yield Case(truth, pooling(env, policies, None, "random", number, run))


def plain(runs: int) -> Iterator[Case]:
    for number in range(GROUPS * runs):
        truth = stream("dropping", "plain", number).permutation(np.linspace(0, 3, K))

        def source(truth: Array = truth, number: int = number) -> Source:
            rng = stream("dropping", "returns", number)

            def run(which: Ints, rounds: int) -> Played:
                return Played(truth[which][:, None] + 0.5 * rng.standard_normal((len(which), rounds)))

            return Returns([str(k) for k in range(K)], run)

        yield Case(truth, source)


def measure(cases: Iterator[Case]) -> list[tuple[str, ...]]:
    """A row for each rule."""
    found: dict[str, list[tuple[int, bool, bool]]] = {rule: [] for rule in RULES}
    for case in cases:
        for rule, (drop, stopping.SETTLED) in RULES.items():
            done = until(case.source(), "best", None, BUDGET, drop=drop)
            wrong = done.best is not None and bool(case.truth[done.best] < case.truth.max() - TIE)
            found[rule].append((done.episodes, done.best is not None, wrong))
    rows = []
    for rule, every in found.items():
        episodes, known, wrongs = np.array(every).T
        numbers = (np.median(episodes), episodes.mean(), np.quantile(episodes, 0.9), episodes.max())
        rows.append((rule, f"{known.sum()} of {len(known)}", f"{wrongs.sum()}", *(f"{x:,.0f}" for x in numbers)))
    return rows


def main(runs: int = 4) -> None:
    sets = {
        f"Gridworld 1,000, {GROUPS} groups x {runs}, pooled with q": gridworld(runs, True),
        f"Gridworld 1,000, {GROUPS} groups x {runs}, nothing logged": gridworld(runs, False),
        f"{WORLDS} random MDPs x {runs}, policies far apart": random_mdps(runs),
        f"Plain returns, {GROUPS * runs} runs": plain(runs),
    }
    for title, cases in sets.items():
        header = ("who is dropped", "best known", "wrong", "episodes, median", "mean", "90%", "most")
        show(title, header, measure(cases))


if __name__ == "__main__":
    main(*(int(x) for x in sys.argv[1:2]))
