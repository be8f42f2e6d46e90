"""Does pooled evaluation ever lose? Random MDPs and sets of policies, from near together to far apart.

    python -m benchmarks.pooled_sets            # 100 sets, some minutes on all cores
    python -m benchmarks.pooled_sets 1000

Each set: an MDP of 2 to 7 states, 2 to 4 actions, T of 1 to 100, rewards of one or both signs; 2 to 20 policies, from
3% to 100% of their own; a q from exact to useless; 100, 200 or 1,000 episodes. The mean squared error over repeated
samples, summed over the policies, is divided by on-policy MC's from the very same episodes.
"""

import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.show import show
from manyfold import exact
from manyfold.arrays import Array, Ints
from manyfold.data.episodes import Episodes
from manyfold.estimate.evaluation import pool
from manyfold.mdp import FiniteMDP
from manyfold.rollout import rollout_tabular

REPEATS = 40


def draw(rng: np.random.Generator) -> tuple[FiniteMDP, Array, Array, int]:
    """An MDP, policies `[K, T, S, A]`, a baseline and a number of episodes."""
    states, actions = int(rng.integers(2, 8)), int(rng.integers(2, 5))
    horizon, k = int(rng.choice([1, 5, 20, 50, 100])), int(rng.choice([2, 5, 10, 20]))
    transitions = rng.dirichlet(np.full(states, rng.choice([0.1, 1.0])), size=(states, actions))
    rewards = rng.standard_normal((states, actions))
    rewards = [rewards, np.abs(rewards), rewards + 3][int(rng.integers(3))]
    apart = rng.choice([0.03, 0.1, 0.3, 1.0])
    common, own = (
        rng.dirichlet(np.full(actions, x), size=(count, 1, states))
        for x, count in ((1.0, 1), (rng.choice([0.2, 1.0]), k))
    )
    policies = np.repeat((1 - apart) * common + apart * own, horizon, 1)
    mdp = FiniteMDP(transitions, rewards, rng.dirichlet(np.ones(states)), horizon)
    q = exact.action_values(mdp, policies)
    error = rng.choice([0.0, 0.3, 3.0]) * q.std() * rng.standard_normal(q.shape)
    n = max(4, int(rng.choice([100, 200, 1000])) // k) * k  # four rounds or more
    return mdp, policies, q + error if rng.random() < 0.75 else np.zeros_like(q), n


class Table(NamedTuple):
    """q as a table `[K, T, S, A]`."""

    q: Array

    def predict(self, states: NDArray[Any], t: Ints) -> Array:
        return self.q[:, t, np.asarray(states)[:, 0].astype(np.int64)]


def logged(mdp: FiniteMDP, pi: Array, n: int, rng: np.random.Generator) -> Episodes:
    """n episodes of all policies in turns."""
    k, horizon = len(pi), mdp.horizon
    found = rollout_tabular(mdp, pi, n, rng)
    t, states, actions = np.tile(np.arange(horizon), n), found.states.ravel(), found.actions.ravel()
    probs = pi[:, t, states]
    with np.errstate(divide="ignore"):
        taken = np.log(probs[:, np.arange(len(t)), actions])
    names = tuple(str(i) for i in range(k))
    lengths, logger = np.full(n, horizon), np.arange(n) % k
    return Episodes(
        states[:, None],
        t,
        actions,
        found.rewards.ravel(),
        lengths,
        logger,
        taken,
        taken,
        np.arange(k),
        names,
        horizon,
        mdp.n_states,
        probs,
    )


def measure(seed: int) -> tuple[float, float, Counter[str]]:
    """Pooled evaluation's error over on-policy MC's on one set, its own idea of it, how often recipes were chosen."""
    rng = np.random.default_rng(seed)
    mdp, pi, b, n = draw(rng)
    j, q = exact.values(mdp, pi), Table(b) if b.any() else None
    errors, chosen, claimed = np.zeros(2), Counter[str](), 0.0
    for _ in range(REPEATS):
        episodes = logged(mdp, pi, n, rng)
        result = pool(episodes, q)
        alone = np.array([x.mean() for x in result.own_returns])
        errors += ((result.mean - j) ** 2).sum(), ((alone - j) ** 2).sum()
        claimed += float((result.standard_error**2).sum())
        chosen.update(name.partition(",")[0] for names in result.recipes for name in names)
    if not errors[1]:
        return 1.0, 1.0, chosen
    return float(errors[0] / errors[1]), float(claimed / max(errors[0], 1e-300)), chosen


def main() -> None:
    sets = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as workers:
        found = list(workers.map(measure, range(sets)))
    ratios, claims = np.array([one[:2] for one in found]).T
    chosen = sum((one[2] for one in found), Counter[str]())
    rows: list[tuple[str, ...]] = [
        ("geometric mean", f"{np.exp(np.log(np.maximum(ratios, 1e-12)).mean()):.3f}"),
        ("median", f"{np.median(ratios):.3f}"),
        ("largest", f"{ratios.max():.3f}"),
        ("sets where it loses at all", f"{np.mean(ratios > 1):.1%}"),
        ("sets above 1.1", f"{np.mean(ratios > 1.1):.1%}"),
        ("claimed squared error over the true one, median", f"{np.median(claims):.2f}"),
        *((f"chosen: {name}", f"{count / chosen.total():.0%}") for name, count in chosen.most_common()),
    ]
    show(f"{sets} random sets: squared error over on-policy MC's, {REPEATS} samples each", ("", "pooled"), rows)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
