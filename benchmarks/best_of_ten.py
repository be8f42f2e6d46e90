"""Episodes until the best of ten policies is known with 95% confidence: what people would use, and pooled evaluation.

    .venv/bin/pip install adastop && python -m benchmarks.best_of_ten      # after `make`; `... 10` for ten groups

Gridworld 1,000: PPO's checkpoints of the study's first groups (exact values). CartPole: ten checkpoints of one
training by Stable-Baselines3, several seeds of the evaluation. Everyone may spend 2,400 episodes, and the budget
counts in full where the best is still not known. MPE + q and pooled evaluation with q need logged data (10,000 episodes
of Gridworld, 400 of CartPole) and fits beforehand, which are not counted.

adastop (permutation tests, all pairs) is asked after every n = 6 episodes of each agent, 40 times at most: with B =
1,000 and more than 6 at once the number of permutations that it divides by becomes 1 after the first look, and it
decides nothing any more. Agents whose comparisons are all decided run no more, and it stops when one is known to be
larger than all others. On-policy MC looks at the same times with one-sided Welch tests, Bonferroni over looks and
rivals, and drops nobody.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from benchmarks.show import show
from manyfold import exact
from manyfold.arrays import Array, Ints
from manyfold.envs import Environment
from manyfold.estimate import runs
from manyfold.estimate.collecting import collect
from manyfold.estimate.loggers import logging_of
from manyfold.estimate.sources import Pooling
from manyfold.estimate.stopping import Part, until
from manyfold.policies import ChosenPolicySet, PolicySet
from manyfold.streams import stream
from tasks import apart, checkpoints, studies
from tasks.behavior import design
from tasks.groups import Group
from tasks.studies import Study

K, ALPHA, EACH, LOOKS = 10, 0.05, 6, 40
BUDGET = K * EACH * LOOKS
PERMUTATIONS = 1000  # above 12! / 6!^2
TIE = 1e-9


class Found(NamedTuple):
    best: int | None
    episodes: int
    steps: int


class OnPolicy:
    """Plain returns of each policy, run when they are asked for."""

    def __init__(self, env: Environment, policies: PolicySet, rng: np.random.Generator) -> None:
        self.env, self.policies, self.rng = env, policies, rng
        self.returns: list[Array] = [np.empty(0)] * policies.n_policies
        self.steps = 0

    def more(self, which: list[int], each: int) -> None:
        found = collect(self.env, ChosenPolicySet(self.policies, which), each * len(which), self.rng)
        for i, k in enumerate(which):
            self.returns[k] = np.concatenate([self.returns[k], found.returns[found.logger == i]])
        self.steps += found.steps

    @property
    def episodes(self) -> int:
        return sum(map(len, self.returns))


def welch(source: OnPolicy) -> Found:
    """Bonferroni over looks and rivals."""
    best = None
    for _ in range(LOOKS):
        source.more(list(range(K)), EACH)
        top = int(np.argmax([x.mean() for x in source.returns]))
        level = ALPHA / LOOKS / (K - 1)
        others = [x for k, x in enumerate(source.returns) if k != top]
        if all(better(source.returns[top], x) < level for x in others):
            best = top
            break
    return Found(best, source.episodes, source.steps)


def better(x: Array, y: Array) -> float:
    """p-value of "x's mean is not higher"."""
    if not x.var() and not y.var():
        return float(x.mean() <= y.mean())
    return float(stats.ttest_ind(x, y, equal_var=False, alternative="greater").pvalue)


def adastop(source: OnPolicy, seed: int) -> Found:
    from adastop import MultipleAgentsComparator

    comparator = MultipleAgentsComparator(n=EACH, K=LOOKS, B=PERMUTATIONS, alpha=ALPHA, seed=seed)
    which, best = list(range(K)), None
    while not comparator.is_finished and best is None:
        source.more(which, EACH)
        comparator.partial_compare({str(k): source.returns[k] for k in range(K)}, verbose=False)
        wins = np.zeros((K, K), dtype=bool)
        for (i, j), said in zip(comparator.comparisons, comparator.decisions.values(), strict=True):
            wins[i, j], wins[j, i] = said == "larger", said == "smaller"
        alone = np.flatnonzero(wins.sum(1) == K - 1)
        best = int(alone[0]) if len(alone) else None
        which = sorted({int(k) for k in np.ravel(comparator.current_comparisons)})
    return Found(best, source.episodes, source.steps)


class Designed:
    """MPE + q for `until`: all policies from episodes of mu."""

    known, selective = 0, False

    def __init__(self, group: Group, env: Environment, rng: np.random.Generator) -> None:
        self.names, self.rng = group.policies().names, rng
        self.logging = logging_of(env, design(group))
        self.values, self.steps = np.empty((K, 0)), 0

    def begin(self, which: Ints) -> None:
        """Always of all policies: mu was designed for them."""

    def more(self, rounds: int, focus: Ints | None = None) -> Part:
        blocks = list(self.logging.log("mu", rounds * K, self.rng))
        found = runs.returns(blocks, "mu")
        self.values = np.concatenate([self.values, found["mu", "baseline"]], -1)
        for block in blocks:
            self.steps += block.rewards.size if block.lengths is None else int(block.lengths.sum())
        return Part(self.values, None, None, self.values.shape[-1], self.steps)


def pooled(env: Environment, policies: PolicySet, rng: np.random.Generator, q: Any = None) -> Found:
    done = until(Pooling(env, policies, rng, q), "best", None, BUDGET, ALPHA)
    return Found(done.best, done.episodes, done.steps)


def mpe(group: Group, env: Environment, rng: np.random.Generator) -> Found:
    done = until(Designed(group, env, rng), "best", None, BUDGET, ALPHA, drop=False)
    return Found(done.best, done.episodes, done.steps)


def gridworld(groups: int) -> dict[str, list[tuple[Found, Array]]]:
    study, out = studies.read("gridworld-1000"), {}
    for number in range(groups):
        group = Group(study, number, Path("data"))
        env, policies = group.environment(), group.policies()
        truth = exact.values(env.mdp(), policies.table())
        run(out, env, policies, truth, number, group)
        print(f"Gridworld, group {number}", file=sys.stderr)
    return out


def cartpole(seeds: int) -> dict[str, list[tuple[Found, Array]]]:
    """Far apart: a whole training, every 16 epochs."""
    data, name, out = Path("data"), "best-of-ten", {}
    file = f".work/{name}/cartpole.safetensors"
    (data / file).parent.mkdir(parents=True, exist_ok=True)
    checkpoints.save("CartPole-v1", 500, {data / file: [16 * (i + 1) for i in range(K)]})
    params = studies.read("gridworld-1000").params | {"targets": {"source": file}}
    where = {"gymnasium": {"id": "CartPole-v1", "horizon": 500}}
    point = apart.point_of(0, Study(name, "CartPole", where, params, root=data.resolve()), apart.TRAINED, data)
    apart.fit(point)
    group = Group(point.study, 0, point.data)
    env, policies = group.environment(), group.policies()
    rng = stream("best_of_ten", "truth")
    truth = np.array([x.mean() for x in pool_of(env, policies, rng)])
    print("CartPole's values:", np.round(truth, 1), file=sys.stderr)
    for seed in range(seeds):
        run(out, env, policies, truth, seed, group)
        print(f"CartPole, seed {seed}", file=sys.stderr)
    return out


def pool_of(env: Environment, policies: PolicySet, rng: np.random.Generator, each: int = 1000) -> list[Array]:
    source = OnPolicy(env, policies, rng)
    source.more(list(range(K)), each)
    return source.returns


def run(out: Any, env: Environment, policies: PolicySet, truth: Array, number: int, group: Group) -> None:
    """Everyone on one set."""

    def rng(what: str) -> np.random.Generator:
        return stream("best_of_ten", env.name, what, number)

    ways: dict[str, Callable[[], Found]] = {
        "On-policy MC, Welch + Bonferroni": lambda: welch(OnPolicy(env, policies, rng("welch"))),
        "adastop 0.1.3": lambda: adastop(OnPolicy(env, policies, rng("adastop")), number),
        "MPE + q": lambda: mpe(group, env, rng("mpe")),
        "Pooled, with q": lambda: pooled(env, policies, rng("q"), group.values("q")),
        "Pooled, nothing logged": lambda: pooled(env, policies, rng("pooled")),
    }
    for name, way in ways.items():
        out.setdefault(name, []).append((way(), truth))


def main(groups: int = 10) -> None:
    for title, found in (("Gridworld 1,000", gridworld(groups)), ("CartPole", cartpole(groups))):
        rows = []
        for name, every in found.items():
            episodes, steps = (np.array([getattr(one, x) for one, _ in every]) for x in ("episodes", "steps"))
            known = sum(one.best is not None for one, _ in every)
            wrong = sum(one.best is not None and truth[one.best] < truth.max() - TIE for one, truth in every)
            rows.append(
                (
                    name,
                    f"{known} of {len(every)}",
                    f"{wrong}",
                    f"{np.median(episodes):,.0f}",
                    f"{episodes.mean():,.0f}",
                    f"{steps.mean():,.0f}",
                )
            )
        header = ("", "best known", "wrong", "episodes, median", "mean", "steps, mean")
        show(f"{title}: until the best of {K} is known at 95%, {BUDGET:,} episodes at most", header, rows)


if __name__ == "__main__":
    main(*(int(x) for x in sys.argv[1:2]))
