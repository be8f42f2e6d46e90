"""Unbiased estimates of J(pi_k) from logged episodes, for K policies and N episodes at once.

Every estimator returns one value per policy and episode, `[K, N]`; its mean over the episodes is the estimate, and
`estimate` adds standard errors. Inputs are padded `[..., N, T]`, with `lengths [N]` where episodes end early (what
stands behind the end is never read); `pad` makes that of ragged data. Ratios live in log space: -inf is a legal
log-probability of a target, and a product over hundreds of steps does not overflow before it is used.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from manyfold.arrays import Array, Bools, Ints


def pad(flat: ArrayLike, lengths: ArrayLike) -> Array:
    """Ragged `[..., steps of all episodes in a row]` -> padded `[..., N, T]`, zeros behind the ends."""
    x, ends = np.asarray(flat, dtype=np.float64), np.asarray(lengths)
    if x.ndim < 1 or ends.ndim != 1:
        raise ValueError(
            f"flat has shape {list(x.shape)} and lengths {list(ends.shape)}, expected [..., steps] and [N]"
        )
    inside = _inside((*ends.shape, int(ends.max(initial=0))), ends)
    if inside.sum() != x.shape[-1]:
        raise ValueError(f"lengths sum to {inside.sum()} steps, found {x.shape[-1]}")
    out = np.zeros((*x.shape[:-1], *inside.shape))
    out[..., inside] = x
    return out


def mc(rewards: ArrayLike, lengths: ArrayLike | None = None) -> Array:
    """Monte Carlo: the sum of the rewards of each episode; `[N]`."""
    return _rewards(rewards, lengths)[0].sum(-1)


def log_ratios(target_probs: ArrayLike, behavior_probs: ArrayLike, lengths: ArrayLike | None = None) -> Array:
    """log rho_t = log pi_k(A_t|S_t) - log mu(A_t|S_t), 0 behind an episode's end; `[K, N, T]`.

    Args:
        target_probs: of the actions taken, `[K, N, T]`.
        behavior_probs: of the same actions under the policy that took them, `[N, T]`; never 0.
    """
    mu = _array("behavior_probs", behavior_probs, 2)
    inside = _inside(mu.shape, lengths)
    pi = _probs("target_probs", target_probs, 3, inside)
    _probs("behavior_probs", mu, 2, inside)
    if (inside & (mu == 0)).any():
        n, t = np.unravel_index(int((inside & (mu == 0)).argmax()), mu.shape)
        raise ValueError(
            f"behavior_probs: episode {n} took an action of probability 0 at t={t}; is this the policy that ran it?"
        )
    return _log(_fill(pi, inside, 1.0)) - _log(_fill(mu, inside, 1.0))


def log_probs(probs: ArrayLike, lengths: ArrayLike | None = None) -> Array:
    """Log-probabilities of the actions taken, 0 behind an episode's end; `[K, N, T]`."""
    p = _array("probs", probs, 3)
    inside = _inside(p.shape[1:], lengths)
    return _log(_fill(_probs("probs", p, 3, inside), inside, 1.0))


def pdis(rewards: ArrayLike, log_rho: ArrayLike, lengths: ArrayLike | None = None) -> Array:
    """Per-decision importance sampling: sum_t rho_{0:t} R_{t+1}; `[K, N]`.

    Each step is weighted with the ratio of its own logger, so episodes of several loggers can be pooled by giving
    `log_ratios` the probabilities of whoever took the action: that is what SON and SODI do.
    """
    r, inside = _rewards(rewards, lengths)
    return _total(_weighted(_cumulate(_array("log_rho", log_rho, 3, inside)), r))


def baseline_return(
    rewards: ArrayLike,
    log_rho: ArrayLike,
    b_taken: ArrayLike,
    b_expected: ArrayLike,
    lengths: ArrayLike | None = None,
) -> Array:
    """G_t = b_expected_t + rho_t (R_{t+1} + G_{t+1} - b_taken_t), unrolled; `[K, N]`.

    Args:
        b_taken: b(S_t, A_t), `[K, N, T]`; any function that does not depend on the episode, such as a fitted q.
        b_expected: sum_a pi_k(a|S_t) b(S_t, a), `[K, N, T]`.
    """
    r, inside = _rewards(rewards, lengths)
    log_w = _cumulate(_array("log_rho", log_rho, 3, inside))  # rho_{0:t}
    return _with_baseline(r, log_w, b_taken, b_expected, inside)


def balanced(
    rewards: ArrayLike,
    target_probs: ArrayLike,
    logger_probs: ArrayLike,
    counts: ArrayLike,
    lengths: ArrayLike | None = None,
    b: tuple[ArrayLike, ArrayLike] | None = None,
) -> Array:
    """Pools J loggers by the prefix balance heuristic: weight_t = pi_{0:t} / sum_j (n_j/n) mu_{j,0:t}; `[K, N]`.

    Unbiased for the mean over all n episodes, and bounded by n / n_k where target k is itself a logger. So it is with a
    baseline, sum_t weight_{t-1} b_expected_t + weight_t (R_{t+1} - b_taken_t): each weight turns expectations over all
    episodes into target k's, under which b_taken and b_expected are the same.

    Args:
        target_probs: of the actions taken, `[K, N, T]`.
        logger_probs: of the same actions under every logger, `[J, N, T]`, whoever ran the episode.
        counts: episodes n_j that each logger ran, `[J]`.
        b: b_taken and b_expected of `baseline_return`; None is 0.
    """
    r, inside = _rewards(rewards, lengths)
    pi = _probs("target_probs", target_probs, 3, inside)
    mu = _probs("logger_probs", logger_probs, 3, inside)
    n_j = np.asarray(counts)
    if n_j.shape != mu.shape[:1] or n_j.sum() != r.shape[0] or n_j.min() < 0:
        raise ValueError(f"counts is {n_j.tolist()}, expected one per logger ({len(mu)}) with sum N = {r.shape[0]}")
    log_pi, log_mu = (_cumulate(_log(_fill(p, inside, 1.0))) for p in (pi, mu))
    log_mix = np.logaddexp.reduce(log_mu + _log(n_j / n_j.sum())[:, None, None], axis=0)  # [N, T]
    if np.isneginf(log_mix).any():
        n, t = np.unravel_index(int(np.isneginf(log_mix).argmax()), log_mix.shape)
        raise ValueError(f"logger_probs: no logger could have run episode {n} up to t={t}; are these its loggers?")
    if b is None:
        return _total(_weighted(log_pi - log_mix, r))
    return _with_baseline(r, log_pi - log_mix, *b, inside)


def _with_baseline(r: Array, log_w: Array, b_taken: ArrayLike, b_expected: ArrayLike, inside: Bools) -> Array:
    """sum_t w_{t-1} b_expected_t + w_t (R_{t+1} - b_taken_t) with w_{-1} = 1; `[K, N]`."""
    residual = r - _fill(_array("b_taken", b_taken, 3, inside), inside, 0.0)
    expected = _fill(_array("b_expected", b_expected, 3, inside), inside, 0.0)
    later = _weighted(log_w[..., :-1], expected[..., 1:])  # the weight up to t-1 at t
    return _total(_weighted(log_w, residual)) + _total(later) + expected[..., 0]


class Estimate(NamedTuple):
    """What a sample says of each policy; `[K]` each."""

    mean: Array
    standard_error: Array
    variance: Array  # of one episode's value (pooled loggers: the average within loggers)


def estimate(values: ArrayLike, logger: ArrayLike | None = None) -> Estimate:
    """Means and standard errors of per-episode values `[..., N]`.

    Args:
        logger: which logger ran each episode, `[N]`, for pooled estimators: their episodes differ in distribution, so
            the error is that of a stratified sample, sum_j n_j Var_j / n^2.
    """
    x = np.atleast_1d(np.asarray(values, dtype=np.float64))
    strata = np.zeros(x.shape[-1], dtype=np.int64) if logger is None else np.unique(logger, return_inverse=True)[1]
    counts = np.bincount(strata)
    if x.shape[-1] == 0 or counts.min() < 2:
        raise ValueError(f"episodes per logger are {counts.tolist()}, expected at least 2: one has no standard error")
    n = x.shape[-1]
    within = sum(count * x[..., strata == j].var(-1, ddof=1) for j, count in enumerate(counts)) / n
    return Estimate(x.mean(-1), np.sqrt(within / n), np.asarray(within))


def _array(name: str, x: ArrayLike, ndim: int, inside: Bools | None = None) -> Array:
    """Refuses another number of axes, other episodes or steps than `inside [N, T]`, and NaN inside an episode."""
    out = np.asarray(x, dtype=np.float64)
    axes = {2: "[N, T]", 3: "[K, N, T]"}[ndim]
    if out.ndim != ndim:
        raise ValueError(f"{name} has shape {list(out.shape)}, expected {axes}")
    if inside is not None:
        if out.shape[-2:] != inside.shape:
            raise ValueError(f"{name} has shape {list(out.shape)}, expected {axes} with [N, T] = {list(inside.shape)}")
        if np.isnan(out.sum()) and (bad := inside & np.isnan(out)).any():
            raise ValueError(f"{name}{_first(bad)} is nan, expected a number")
    return out


def _rewards(rewards: ArrayLike, lengths: ArrayLike | None) -> tuple[Array, Bools]:
    """Rewards with 0 behind the ends, and which steps are inside, `[N, T]` each."""
    r = _array("rewards", rewards, 2)
    inside = _inside(r.shape, lengths)
    bad = inside & ~np.isfinite(r)
    if bad.any():
        raise ValueError(f"rewards{_first(bad)} is {r[bad][0]}, expected a finite number")
    return np.where(inside, r, 0.0), inside


def _probs(name: str, x: ArrayLike, ndim: int, inside: Bools) -> Array:
    p = _array(name, x, ndim, inside)
    if p.size and p.min() >= 0 and p.max() <= 1 + 1e-6:
        return p
    bad = inside & ~((p >= 0) & (p <= 1 + 1e-6))
    if bad.any():
        raise ValueError(f"{name}{_first(bad)} is {p[bad][0]:g}, expected a probability")
    return p


def _first(bad: Bools) -> list[int]:
    return [int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape)]


def _inside(shape: tuple[int, ...], lengths: ArrayLike | None) -> Bools:
    """Which steps belong to an episode, `[N, T]`."""
    if lengths is None:
        return np.ones(shape, dtype=np.bool_)
    ends: Ints = np.asarray(lengths)
    whole = np.issubdtype(ends.dtype, np.integer) or ends.size == 0
    if ends.shape != shape[:1] or not whole or (ends.size and not 0 <= ends.min() <= ends.max() <= shape[1]):
        raise ValueError(f"lengths is {ends.tolist()!s:.80}, expected {shape[0]} whole numbers from 0 to {shape[1]}")
    return np.arange(shape[1]) < ends[:, None]


def _weighted(log_w: Array, x: Array) -> Array:
    """exp(log_w) x, and 0 where x = 0 however large the weight: a ratio may overflow and return before it is used."""
    with np.errstate(over="ignore", invalid="ignore"):
        out = np.exp(log_w)
        out *= x
        if np.isfinite(out.sum()):
            return out
    return np.exp(np.where(x == 0, -np.inf, log_w)) * x


def _cumulate(x: Array) -> Array:
    """Cumulative sums over the steps, the last axis; the steps are first in memory, so that whole rows are added."""
    out = np.array(np.moveaxis(x, -1, 0), order="C")
    for t in range(1, len(out)):
        out[t] += out[t - 1]
    return np.moveaxis(out, 0, -1)


def _total(x: Array) -> Array:
    """The sum over the steps."""
    return np.moveaxis(x, -1, 0).sum(0)


def _fill(x: Array, inside: Bools, value: float) -> Array:
    """x, and `value` behind an episode's end."""
    return x if inside.all() else np.where(inside, x, value)


def _log(p: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.log(p)
