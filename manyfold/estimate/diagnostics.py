"""After an evaluation: does each policy's estimate deserve trust?

Its interval says nothing where a few episodes carry all the weight, or where the episodes that matter were never drawn.
What shows it are the whole-episode weights `[K, N]`, in log space, and the values `[K, N]` whose mean is the estimate.
Nor does it where nearly all returns are the same one: `hardly_vary` looks at the plain returns for that.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from manyfold.arrays import Array, check_shape

WORST_K = 0.7  # of the residuals
LEAST_TAIL = 5  # values that a fit of the tail needs, the largest fifth of 21 episodes or more
LEAST_BORROWED, LEAST_Z = 20.0, -2.0  # where a policy ran no episodes itself; `benchmarks.newcomers`
LEAST_RARE = 5  # episodes that must differ from a return that most have


class Diagnosis(NamedTuple):
    """What N episodes say of themselves; `[K]` each."""

    episodes: int
    effective_sample_size: Array  # (sum w)^2 / sum w^2, out of N; 0 where every weight is 0
    largest_share: Array  # of the largest weight in their sum
    mean_z: Array  # the mean weight minus 1 in standard errors; -inf where every weight is 0
    weights_k: Array  # of `pareto_k`
    residuals_k: Array  # of |value - mean|


def diagnose(log_w: ArrayLike, values: ArrayLike) -> Diagnosis:
    """Diagnoses every policy.

    Args:
        log_w: logs of the weights of whole episodes, rho_{0:T-1} or pooled evaluation's W_T, `[K, N]`; -inf is legal.
        values: of the same episodes, `[K, N]`; their mean is the estimate.
    """
    log_w, x = np.asarray(log_w, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if log_w.ndim != 2 or 0 in log_w.shape:
        raise ValueError(f"log_w has shape {list(log_w.shape)}, expected [K, N], none of them 0")
    check_shape("values", x, log_w.shape, "[K, N] as log_w")
    for name, y, wanted, bad in (
        ("log_w", log_w, "a number or -inf", np.isnan(log_w) | np.isposinf(log_w)),
        ("values", x, "a finite number", ~np.isfinite(x)),
    ):
        if bad.any():
            where = np.unravel_index(int(bad.argmax()), bad.shape)
            raise ValueError(f"{name}[{where[0]}, {where[1]}] is {y[where]}, expected {wanted}")
    n = log_w.shape[1]
    top = log_w.max(-1)
    top = np.where(np.isneginf(top), 0.0, top)  # [K]
    w = np.exp(log_w - top[:, None])  # the largest is 1, or all are 0
    total, squares = w.sum(-1), (w**2).sum(-1)
    some = total > 0
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        error = w.std(-1, ddof=1) / np.sqrt(n) if n > 1 else np.zeros(len(w))
        off = w.mean(-1) - np.exp(-top)  # the mean minus 1, in units of the largest weight
        z = np.where(np.abs(off) <= 1e-9 * w.mean(-1), 0.0, off / error)
    residuals = np.abs(x - x.mean(-1, keepdims=True))
    residuals[residuals < 1e-12 * np.abs(x).max(-1, keepdims=True)] = 0.0  # rounding has no tail
    return Diagnosis(
        n,
        np.divide(total**2, squares, out=np.zeros_like(total), where=some),
        np.divide(1.0, total, out=np.zeros_like(total), where=some),
        z,
        np.array([pareto_k(row) for row in w]),
        np.array([pareto_k(row) for row in residuals]),
    )


def trust(found: Diagnosis, names: Sequence[str] | None = None) -> list[str]:
    """For each policy "", or why its estimate can't be trusted and what to do.

    Not trusted: residuals of Pareto k > 0.7 with an effective sample size below a tenth of the episodes, or weights of
    k > 1 with one below 5. Chosen by simulation (`benchmarks.trust`): a heavy tail alone is harmless where the weights
    are bounded, few effective episodes are where late steps hardly count. The mean weight would flag 1% more, and a mu
    that leaves out what does not matter moves it as well.
    """
    n, out = found.episodes, []
    for k in range(len(found.effective_sample_size)):
        name = names[k] if names else f"policy {k}"
        ess, tail, weights = found.effective_sample_size[k], found.residuals_k[k], found.weights_k[k]
        remedy = f"run more episodes of {name} itself"
        if ess == 0:
            out.append(f"all {n} weights are 0: no episode says anything of {name}; {remedy}")
        elif ess > n * (1 - 1e-9):
            out.append("")  # equal weights: plain Monte Carlo
        elif np.isnan(tail):
            out.append(f"{n} episodes are too few to judge their weights, expected at least 21; {remedy}")
        elif tail > WORST_K and ess < n / 10:
            out.append(
                f"Pareto k {tail:.1f} > {WORST_K}: a few of {n} episodes decide this estimate (effective sample size "
                f"{ess:.1f}); {remedy}"
            )
        elif weights > 1 and ess < LEAST_TAIL:
            out.append(f"effective sample size {ess:.1f} of {n}, expected at least {LEAST_TAIL}; {remedy}")
        else:
            out.append("")
    return out


def borrowed(found: Diagnosis, own_returns: Sequence[Array], names: Sequence[str] | None = None) -> list[str]:
    """For each policy "", or why others' episodes alone don't tell enough of it: a stricter `trust` without own ones.

    Flagged: no own episodes, and an effective sample size below 20 or a mean weight 2 standard errors below 1. The mean
    is 1 where all that the policy does may be seen; where it does better than anybody before, much of it never was, and
    neither its value nor its interval knows. A few own episodes mend both, as they bound the weights.
    """
    out = []
    for k, x in enumerate(own_returns):
        ess, z = found.effective_sample_size[k], found.mean_z[k]
        enough = len(x) > 0 or (ess >= LEAST_BORROWED and z >= LEAST_Z)
        name = names[k] if names else f"policy {k}"
        out.append(
            ""
            if enough
            else f"no episodes of its own, and others' say too little (effective sample size {ess:.1f}, mean weight "
            f"{z:.1f} standard errors from 1; expected {LEAST_BORROWED:g} and {LEAST_Z:g} at least); run {name} itself"
        )
    return out


def hardly_vary(own_returns: Sequence[Array], names: Sequence[str] | None = None) -> list[str]:
    """For each policy "", or a warning that nearly all plain returns of its own episodes are the same one.

    Flagged: more than half are equal, and fewer than five differ from these. An interval knows only what the sample has
    seen. With two outcomes, 95% intervals (Student's t) that are not flagged miss in 5 to 8% of samples at worst, of
    any probability and size; without the rule they miss in 82% of samples of 100 with a probability of 0.002.

    Args:
        own_returns: an array for each policy; fewer than two returns say nothing.
    """
    out = []
    for k, x in enumerate(own_returns):
        name, n = names[k] if names else f"policy {k}", len(x)
        values, counts = np.unique(x, return_counts=True)
        rest = n - int(counts.max(initial=0))
        if n < 2 or rest >= min(LEAST_RARE, n / 2):
            out.append("")
        elif not rest:
            out.append(
                f"all returns of {name} were equal: what is rarer than 1 in {max(1, n // 3):,} may not have been seen"
            )
        else:
            out.append(
                f"only {rest} of {n:,} returns of {name} differ from {values[counts.argmax()]:g}, expected at least "
                f"{LEAST_RARE}; run more episodes of {name}, or in Python take the intervals of "
                "result.bounded(low, high)"
            )
    return out


def pareto_k(x: ArrayLike) -> float:
    """The tail index k of non-negative `x [N]`: moments from 1/k on are infinite.

    A generalised Pareto distribution is fitted to the largest min(N / 5, 3 sqrt(N)) values (Zhang and Stephens 2009), k
    drawn towards 0.5 by ten observations' worth (Vehtari et al. 2024, PSIS). -inf where the largest are all equal, inf
    where fewer than five stand out from equal ones, NaN where N < 21 leaves fewer than five.
    """
    ordered = np.sort(np.asarray(x, dtype=np.float64))
    n = len(ordered)
    size = int(np.ceil(min(n / 5, 3 * np.sqrt(n))))
    if size < LEAST_TAIL:
        return float("nan")
    cutoff = ordered[-size - 1]
    tail = ordered[-size:] - cutoff
    tail = tail[tail > 1e-9 * cutoff]  # equal up to rounding: no tail
    if len(tail) < LEAST_TAIL:
        return float("inf") if len(tail) else float("-inf")
    return _fit(tail)


def _fit(x: Array) -> float:
    """k of exceedances, increasing: the mean over a grid of b = -k / sigma, weighted by the profile likelihood."""
    n = len(x)
    many = 30 + int(np.sqrt(n))
    b = 1 / x[-1] + (1 - np.sqrt(many / (np.arange(many) + 0.5))) / (3 * x[int(n / 4 + 0.5) - 1])
    b[b == 0] = 1e-9 / x[-1]  # an exponential tail: only the limit exists
    k = np.log1p(-b[:, None] * x).mean(-1)
    likelihood = n * (np.log(-b / k) - k - 1)
    weights = np.exp(likelihood - likelihood.max())
    mean = (weights * b).sum() / weights.sum()
    return float((n * np.log1p(-mean * x).mean() + 10 * 0.5) / (n + 10))
