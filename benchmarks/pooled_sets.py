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

import numpy as np

from benchmarks.show import show
from manyfold import exact
from manyfold.arrays import Array
from manyfold.estimate import baselines, pooled
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
    n = max(4, int(rng.choice([100, 200, 1000])) // k) * k
    return mdp, policies, q + error if rng.random() < 0.75 else np.zeros_like(q), n


def measure(seed: int) -> tuple[float, Counter[str]]:
    """Pooled evaluation's error over on-policy MC's on one set, and how often each recipe was chosen."""
    rng = np.random.default_rng(seed)
    mdp, pi, b, n = draw(rng)
    j, k = exact.values(mdp, pi), len(pi)
    logger, own, v = np.arange(n) % k, np.arange(k), (pi * b).sum(-1)
    fold, folds = pooled.folds_of(logger)
    shares, inside = pooled.shares_of(logger, fold, k), np.ones((n, mdp.horizon), dtype=np.bool_)
    errors, chosen = np.zeros(2), Counter[str]()
    for _ in range(REPEATS):
        episodes = rollout_tabular(mdp, pi, n, rng)
        with np.errstate(divide="ignore"):
            log_pi = np.log(episodes.probs(pi))
        log_w, log_w_loggers = pooled.log_weights(log_pi, log_pi, shares)
        given = [(episodes.probs(b), episodes.at(v))]
        found = pooled.columns(episodes.rewards, log_w, log_w_loggers, logger, own, shares, given)
        difference = baselines.differences(log_w, inside)
        by_step = baselines.fold_controls(
            difference, baselines.by_step(inside), episodes.rewards, inside, logger, own, fold, folds
        )
        found = found._replace(baselines=np.concatenate([np.repeat(found.baselines, folds, 1), by_step[None]]))
        result = pooled.combine(found, logger, fold, folds)
        errors += ((result.mean - j) ** 2).sum(), ((found.own.mean(-1) - j) ** 2).sum()
        chosen.update(name.partition(",")[0] for names in result.recipes for name in names)
    return float(errors[0] / errors[1]) if errors[1] else 1.0, chosen


def main() -> None:
    sets = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as workers:
        found = list(workers.map(measure, range(sets)))
    ratios = np.array([ratio for ratio, _ in found])
    chosen = sum((counts for _, counts in found), Counter[str]())
    rows = [
        ("geometric mean", f"{np.exp(np.log(np.maximum(ratios, 1e-12)).mean()):.3f}"),
        ("median", f"{np.median(ratios):.3f}"),
        ("largest", f"{ratios.max():.3f}"),
        ("sets where it loses at all", f"{np.mean(ratios > 1):.1%}"),
        ("sets above 1.1", f"{np.mean(ratios > 1.1):.1%}"),
        *((f"chosen: {name}", f"{count / chosen.total():.0%}") for name, count in chosen.most_common()),
    ]
    show(f"{sets} random sets: squared error over on-policy MC's, {REPEATS} samples each", ("", "pooled"), rows)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
