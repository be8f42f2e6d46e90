"""Plain returns in the form that rliable takes, and its two measures that need no bootstrap.

    scores = rliable_scores(returns, names)                       # of rliable.library.get_interval_estimates
    improvement = probability_of_improvement(returns)             # P(X_i > X_j), [K, K]
    profile = performance_profile(returns, taus)                  # share of episodes above tau, [K, T]

rliable (Agarwal et al., 2021) compares algorithms by the scores of runs on tasks. Here an algorithm is a policy and a
run is an episode of it, on one task or on several. Values of episodes that another policy ran are no returns: their
mean is right, their spread says nothing of the policy, so that they belong to `ranking`, not here.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from manyfold.arrays import Array


def rliable_scores(returns: Sequence[ArrayLike], names: Sequence[str]) -> dict[str, Array]:
    """By policy's name, scores `[runs, tasks]`.

    Args:
        returns: of each policy, `[runs]` on one task or `[runs, tasks]`; numbers of runs may differ.
    """
    each = _scores(returns)
    if len(names) != len(each) or len(set(names)) != len(each):
        raise ValueError(f"{len(set(names))} different names of {len(each)} policies, expected one each")
    return dict(zip(names, each, strict=True))


def probability_of_improvement(returns: Sequence[ArrayLike]) -> Array:
    """That an episode of i returns more than one of j, ties counted half, mean over tasks; `[K, K]`.

    Not the probability that i is better: a policy of the higher mean may lose most of the duels. The numbers are those
    of rliable's `probability_of_improvement` (compared with version 1.2.0, ties and single runs included).
    """
    each = _scores(returns)
    out = np.full((len(each), len(each)), 0.5)
    for i, x in enumerate(each):
        for j, y in enumerate(each[:i]):
            wins = stats.mannwhitneyu(x, y, axis=0, method="asymptotic").statistic  # the p-value is not used
            out[i, j] = np.mean(wins) / (len(x) * len(y))
            out[j, i] = 1 - out[i, j]
    return out


def performance_profile(returns: Sequence[ArrayLike], taus: ArrayLike) -> Array:
    """The share of scores above each tau, `[K, T]`, as rliable's `plot_performance_profiles` takes rows by name."""
    levels = np.asarray(taus, dtype=np.float64)
    if levels.ndim != 1 or np.isnan(levels).any():
        raise ValueError(f"taus have shape {levels.shape} or are not numbers, expected one row of numbers")
    return np.stack([(x.reshape(-1, 1) > levels).mean(0) for x in _scores(returns)])


def _scores(returns: Sequence[ArrayLike]) -> list[Array]:
    """Of each policy, `[runs, tasks]`, checked."""
    each = [np.asarray(x, dtype=np.float64) for x in returns]
    each = [x[:, None] if x.ndim == 1 else x for x in each]
    if not each:
        raise ValueError("returns of no policy, expected one or more")
    for k, x in enumerate(each):
        if x.ndim != 2 or not x.size:
            raise ValueError(f"policy {k}: returns have shape {x.shape}, expected [runs] or [runs, tasks], none empty")
        if not np.isfinite(x).all():
            raise ValueError(f"policy {k}: {np.sum(~np.isfinite(x))} of {x.size} returns are not finite; leave no gaps")
    if len({x.shape[1] for x in each}) > 1:
        raise ValueError(f"policies have {[x.shape[1] for x in each]} tasks, expected the same number")
    return each
