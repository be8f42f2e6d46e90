"""Baselines that need no logged data: regressions of the reward-to-go on other folds of the online episodes themselves.

A baseline b_k(s, t) that does not look at the action has D_k = sum_t (W_{t-1} - W_t) b_k(S_t, t). With b = features
times theta, D is linear in theta, so that the regressions of all folds cost one pass over the episodes:

    Z_k = sum_t (W_{t-1} - W_t) features(S_t, t),   D_k = Z_k . theta_k.

Fold f must not see itself, and the folds by which it chooses coefficients must not see it either: theta for an episode
of fold g, as fold f sees it, is fitted on policy k's own episodes outside of f and g.
"""

import numpy as np
from numpy.typing import NDArray

from manyfold.arrays import Array, Bools, Ints

RIDGE = 1e-3  # of each feature's second moment


def differences(log_w: Array, inside: Bools) -> Array:
    """W_{t-1} - W_t with W_{-1} = 1, and 0 behind an episode's end; `[K, N, T]`."""
    w = np.exp(log_w)
    before = np.concatenate([np.ones_like(w[..., :1]), w[..., :-1]], -1)
    return np.where(inside, before - w, 0.0)


def by_step(inside: Bools) -> NDArray[np.float64]:
    """One feature for each step t: the baseline is the mean reward-to-go of the episodes alive at t; `[N, T, T]`."""
    n, horizon = inside.shape
    return np.broadcast_to(np.eye(horizon), (n, horizon, horizon))


def quadratic(states: Array, horizon: int) -> Array:
    """1, s, all products of two of its numbers, t/T and (t/T)^2 of states `[N, T, d]`; `[N, T, features]`."""
    n, steps, width = states.shape
    i, j = np.triu_indices(width)
    time = np.broadcast_to((np.arange(steps) / horizon)[:, None], (n, steps, 1))
    return np.concatenate([np.ones_like(time), states, states[..., i] * states[..., j], time, time**2], -1)


def fold_controls(
    difference: Array,
    features: Array,
    rewards: Array,
    inside: Bools,
    logger: Ints,
    own: Ints,
    fold: Ints,
    folds: int,
    ridge: float = RIDGE,
) -> Array:
    """D of every episode and policy as each fold sees it; `[F, K, N]`.

    Args:
        difference: of `differences`, `[K, N, T]`.
        features: `[N, T, p]`.
        rewards: `[N, T]`, 0 behind an end.
        own: the logger that is target k itself, -1 where none is (then all episodes are regressed on), `[K]`.
    """
    k, n, _ = difference.shape
    to_go = np.flip(np.cumsum(np.flip(rewards, -1), -1), -1)  # [N, T]
    x = np.where(inside[..., None], features, 0.0)
    z = np.einsum("knt,ntp->knp", difference, x, optimize=True)  # [K, N, p]
    size = x.shape[-1]
    left, right = np.zeros((folds, k, size, size)), np.zeros((folds, k, size))
    for g in range(folds):
        for i in range(k):
            rows = (fold == g) & ((logger == own[i]) if own[i] >= 0 else True)
            seen = x[rows][inside[rows]]  # [steps, p]
            left[g, i] = seen.T @ seen
            right[g, i] = seen.T @ to_go[rows][inside[rows]]
    out = np.empty((folds, k, n))
    for f in range(folds):
        for g in range(folds):
            others = [h for h in range(folds) if h not in (f, g)]
            theta = _solve(left[others].sum(0), right[others].sum(0), ridge)  # [K, p]
            here = fold == g
            out[f, :, here] = np.einsum("knp,kp->nk", z[:, here], theta)
    return out


def _solve(left: Array, right: Array, ridge: float) -> Array:
    """theta of each policy; a feature that was never seen gets 0."""
    diagonal = np.einsum("kpp->kp", left)
    scale = np.sqrt(np.where(diagonal > 0, diagonal, 1.0))
    scaled = left / (scale[:, :, None] * scale[:, None, :]) + ridge * np.eye(left.shape[-1])
    return np.asarray(np.linalg.solve(scaled, (right / scale)[..., None])[..., 0] / scale)
