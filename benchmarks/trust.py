"""Is `diagnostics.trust` right? How often 95% intervals hold among estimates that it flags and that it does not.

python -m benchmarks.trust            # 200 random sets of `pooled_sets`, about two minutes on one core
python -m benchmarks.trust 1000
"""

import sys
from collections import defaultdict

import numpy as np

from benchmarks.pooled_sets import draw
from benchmarks.show import show
from manyfold import exact
from manyfold.arrays import Array, Bools, Ints
from manyfold.estimate import diagnostics, estimators, pooled
from manyfold.rollout import rollout_tabular

FIRST = 2000  # seeds below chose the rule
REPEATS = 6
Found = dict[str, list[tuple[Bools, Bools]]]


def judge(log_w: Array, values: Array, truth: Array, strata: Ints | None = None) -> tuple[Bools, Bools]:
    """Which policies are flagged, and whose interval holds, `[K]` each."""
    found = estimators.estimate(values, strata)
    holds = np.abs(found.mean - truth) <= 1.96 * found.standard_error + 1e-9 * (1 + np.abs(truth))
    return np.array([bool(x) for x in diagnostics.trust(diagnostics.diagnose(log_w, values))]), holds


def measure(seed: int, out: Found) -> None:
    """One random set: MPE by its exact mu, the same with a baseline, on-policy MC and pooled."""
    rng = np.random.default_rng(seed)
    mdp, pi, b, n = draw(rng)
    k = len(pi)
    if n * mdp.horizon * k > 1_000_000:  # seconds a sample
        return
    truth, mu = exact.values(mdp, pi), exact.shared_behavior(pi, exact.second_moments(mdp, pi))
    v, logger = (pi * b).sum(-1), np.arange(n) % k
    fold, folds = pooled.folds_of(logger)
    shares = pooled.shares_of(logger, fold, k)
    # Folds may choose different recipes, whose values differ in their loggers' means: that is no error of the mean.
    strata = logger * folds + fold if n >= 2 * folds * k else logger
    for _ in range(REPEATS):
        episodes = rollout_tabular(mdp, mu, n, rng)
        log_rho = estimators.log_ratios(episodes.probs(pi), episodes.probs(mu))
        robust = estimators.baseline_return(episodes.rewards, log_rho, episodes.probs(b), episodes.at(v))
        out["MPE"].append(judge(log_rho.sum(-1), estimators.pdis(episodes.rewards, log_rho), truth))
        out["MPE + q baseline"].append(judge(log_rho.sum(-1), robust, truth))
        episodes = rollout_tabular(mdp, pi, n, rng)
        own = np.stack([episodes.rewards[i::k].sum(-1) for i in range(k)])
        out["On-policy MC"].append(judge(np.zeros_like(own), own, truth))
        log_pi = estimators.log_probs(episodes.probs(pi))
        log_w, log_w_loggers = pooled.log_weights(log_pi, log_pi, shares)
        given = [(episodes.probs(b), episodes.at(v))]
        columns = pooled.columns(episodes.rewards, log_w, log_w_loggers, logger, np.arange(k), shares, given)
        values = pooled.combine(columns, logger, fold, folds).values
        out["Pooled"].append(judge(log_w[..., -1], values, truth, strata))


def main() -> None:
    sets = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    found: Found = defaultdict(list)
    for seed in range(FIRST, FIRST + sets):
        measure(seed, found)
    rows = []
    for name, parts in found.items():
        flagged, holds = (np.concatenate(x) for x in zip(*parts, strict=True))
        cells = [f"{x.mean():.1%}" if len(x) else "-" for x in (holds[flagged], holds[~flagged], flagged[~holds])]
        rows.append((name, f"{len(holds):,}", f"{flagged.mean():.1%}", *cells))
    header = ("", "intervals", "flagged", "hold if flagged", "if not", "misses flagged")
    show(f"95% intervals on {sets} random sets", header, rows)


if __name__ == "__main__":
    main()
