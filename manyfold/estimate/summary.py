"""What evaluation runs say: relative variance, relative error, episodes to match, and whether anything is biased."""

from typing import NamedTuple

import numpy as np

from manyfold.arrays import Array, Ints


class Summary(NamedTuple):
    """Over G groups; `[E]` each."""

    mean: Array
    standard_error: Array  # of the mean, over groups
    median: Array


def summarise(per_group: Array) -> Summary:
    """Of `[G, E]`; one group alone has no standard error (NaN)."""
    groups = len(per_group)
    error = per_group.std(0, ddof=1) / groups**0.5 if groups > 1 else np.full(per_group.shape[1:], np.nan)
    return Summary(per_group.mean(0), error, np.median(per_group, axis=0))


def relative_variances(variances: Array) -> Array:
    """sum_k Var / sum_k Var of the first estimator, on-policy MC; `[G, E, K]` -> `[G, E]`."""
    total = variances.sum(-1)
    return np.asarray(total / total[:, :1])


def relative_errors(estimates: Array, truth: Array) -> tuple[Array, Array]:
    """Absolute errors, means over runs, divided by on-policy MC's at the first point.

    Of each policy `[G, E, points, K]`, and of all together `[G, E, points]`: sums over policies, as of variances. A
    mean of the policies' own would be decided by one whose returns hardly vary, where on-policy MC has hardly an error.

    Args:
        estimates: `[G, R, E, points, K]`, on-policy MC the first estimator.
        truth: J, `[G, K]`.
    """
    errors = np.abs(estimates - truth[:, None, None, None]).mean(1)  # [G, E, points, K]
    total = errors.sum(-1)
    return np.asarray(errors / errors[:, :1, :1]), np.asarray(total / total[:, :1, :1])


def episodes_to_match(points: Ints, errors: Array, at: int) -> Array:
    """Episodes with which each estimator's error is that of the first one at `at` episodes; `[E]`.

    Each curve is smoothed by a parabola in log-log, whose noise would otherwise decide where it crosses. Outside of the
    points, the law of all these estimators continues it: error ~ 1 / sqrt(episodes).

    Args:
        errors: mean errors `[E, points]`.
        at: one of the points.
    """
    if at not in points:
        raise ValueError(f"at is {at}, expected one of the points {points.tolist()!s:.80}")
    if np.isnan(errors).any():
        raise ValueError("errors have NaN, expected the mean errors of every estimator at every point")
    x, positive = np.log(points), np.maximum(errors, np.finfo(np.float64).tiny)
    fine = np.append(np.linspace(x[0], x[-1], 2001), np.log(at))
    fine.sort()
    smooth = [np.polyval(np.polyfit(x, np.log(curve), min(2, len(x) - 1)), fine) for curve in positive]
    wanted = smooth[0][np.searchsorted(fine, np.log(at))]
    out = []
    for curve in smooth:
        falling = np.minimum.accumulate(curve)
        if wanted >= falling[0]:
            out.append(points[0] * np.exp(2 * (falling[0] - wanted)))
        elif wanted < falling[-1]:
            out.append(points[-1] * np.exp(2 * (falling[-1] - wanted)))
        else:
            out.append(np.exp(fine[np.searchsorted(-falling, -wanted)]))
    return np.array(out)


def match_errors(points: Ints, errors: Array, at: int, rng: np.random.Generator, draws: int = 500) -> Array:
    """Standard errors of `episodes_to_match` over groups, by the bootstrap; `[E]`, NaN of one group alone.

    Args:
        errors: mean errors of each group, `[G, E, points]`.
    """
    groups = len(errors)
    if groups < 2:
        return np.full(errors.shape[1], np.nan)
    which = rng.integers(groups, size=(draws, groups))
    found = [episodes_to_match(points, errors[some].mean(0), at) for some in which]
    return np.asarray(np.std(found, axis=0, ddof=1))


def bias(estimates: Array, truth: Array) -> tuple[Array, Array]:
    """The mean error over all groups and runs and its standard error, `[E, K]` each; `[G, R, E, K]` and `[G, K]`.

    One policy at a time: over all K together, the errors of pooled estimators cancel by construction.
    """
    errors = estimates - truth[:, None, None]  # [G, R, E, K]
    groups, runs = errors.shape[:2]
    within = errors.var(1, ddof=1).sum(0) / runs / groups**2
    return errors.mean((0, 1)), np.sqrt(within)
