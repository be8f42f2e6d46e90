"""q where actions are vectors: linear in features of (s, t) and of the action, so that its mean over actions is exact.

    q_k(s, t, a) = theta_k . x(s, t) + sum_b delta_kb . x'(s, t) f_b(a) = w_k . phi(s, t, a)
    v_k(s, t)    = theta_k . x(s, t) + sum_b delta_kb . x'(s, t) E_pi_k[f_b(A) | s] = w_k . phi_k(s, t)

x are the features of the baselines (`estimate.baselines.features`), x' the first few of them, f_b those of the
policies' head: of a Gaussian each dimension and its square, of several choices one for each. From logged tuples of any
loggers, with phi'_k the next step's features averaged over policy k's actions, and c = 0 where s' is terminal or the
horizon ends, else 1,

    d = phi - c phi'_k,   w_k minimises |P (r - d . w)|^2 + RESIDUAL |(1 - P) (r - d . w)|^2,

where P projects onto phi. Without the second term it is the fixed point of fitted Q-evaluation (LSTD-Q: Lagoudakis and
Parr, 2003), exact where q is in the span, but prone to run away where the loggers were others than the policies; with
RESIDUAL = 1 it would be the least squared Bellman error, which never does, but takes noise of next states for error.
A little of it is enough (the hybrid of Johns, Petrik and Mahadevan, 2009).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyfold.arrays import Array, Bools, Ints
from manyfold.estimate.baselines import ACTION_FEATURES, Scale, features
from manyfold.policies.base import PolicySet
from manyfold.policies.heads import Head

RESIDUAL = 1e-3  # weight of the part of the Bellman error that no features can explain
RIDGE = 1e-9  # of each feature's second moment
ROWS = 4096  # whose features are held at once


class Tuples(NamedTuple):
    """N logged (t, s, a, r, s'); `a` as the policies' densities know it."""

    t: Ints  # [N]
    state: NDArray[Any]  # [N, width]
    action: NDArray[Any]  # [N, d], or [N] where actions are counted
    reward: Array  # [N]
    next_state: NDArray[Any]  # [N, width]
    terminated: Bools  # [N]

    def take(self, rows: Any) -> "Tuples":
        """Some of them, by number, slice or mask."""
        return Tuples._make(x[rows] for x in self)

    def goes_on(self, horizon: int) -> Bools:
        """Where a next value counts, `[N]`."""
        return np.asarray(~self.terminated & (self.t < horizon - 1))


@dataclass(frozen=True)
class LinearValues:
    """q of K policies: `weights` for pooled evaluation, which adds the action's features and their expectations."""

    theta: Array  # [K, p]
    delta: Array  # [K, B, p'], p' <= p
    scale: Scale
    horizon: int
    n_states: int = 0  # states are indices 0..n_states - 1; 0: they are vectors

    def weights(self, states: NDArray[Any], t: Ints) -> Array:
        """w of q_k(s, a) = w_0 + sum_b w_b f_b(a), and of v_k with expectations for f; `[K, N, 1 + B]`."""
        x = features(np.asarray(states), np.asarray(t), self.horizon, self.scale, self.n_states).astype(np.float64)
        plain = x @ self.theta.T  # [N, K]
        acting = np.einsum("np,kbp->knb", x[:, : self.delta.shape[-1]], self.delta, optimize=True)
        return np.concatenate([plain.T[..., None], acting], -1)


def fit_linear(
    rows: Tuples,
    policies: PolicySet,
    head: Head,
    horizon: int,
    progress: Callable[[float], None] = lambda share: None,
) -> LinearValues:
    """q of all policies from logged tuples.

    Args:
        progress: sees the share of the rows that is done.
    """
    k, b, scale = policies.n_policies, head.n_features, _scale(rows.state)
    width = _features(rows.take(slice(0, 1)), scale, horizon, policies.n_states).shape[1]
    part = min(max(1, ACTION_FEATURES // b), width)
    size = width + b * part
    moments, phi_r = np.zeros((size, size)), np.zeros(size)
    phi_d, d_d, d_r = np.zeros((k, size, size)), np.zeros((k, size, size)), np.zeros((k, size))
    for i, block in enumerate(_blocks(rows)):
        phi = _with_actions(_features(block, scale, horizon, policies.n_states), head.features(block.action), part)
        after = block._replace(state=block.next_state, t=np.minimum(block.t + 1, horizon - 1))
        x_after = _features(after, scale, horizon, policies.n_states)
        x_after *= block.goes_on(horizon)[:, None]
        moments += phi.T @ phi
        phi_r += phi.T @ block.reward
        for j, mean in enumerate(head.expected(policies.parameters(after.state, after.t))):
            d = phi - _with_actions(x_after, mean, part)
            phi_d[j] += phi.T @ d
            d_d[j] += d.T @ d
            d_r[j] += d.T @ block.reward
        progress(min(1.0, (i + 1) * ROWS / len(rows.t)))
    w = np.stack([_solve(moments, phi_r, *each) for each in zip(phi_d, d_d, d_r, strict=True)])
    return LinearValues(w[:, :width], w[:, width:].reshape(k, b, part), scale, horizon, policies.n_states)


def taken(q: LinearValues, rows: Tuples, head: Head) -> Array:
    """q at the actions taken, `[K, N]`."""
    w = q.weights(rows.state, rows.t)
    return np.asarray(w[..., 0] + np.einsum("knb,nb->kn", w[..., 1:], head.features(rows.action)))


def _blocks(rows: Tuples) -> Iterator[Tuples]:
    for first in range(0, len(rows.t), ROWS):
        yield rows.take(slice(first, first + ROWS))


def _features(rows: Tuples, scale: Scale, horizon: int, n_states: int) -> Array:
    return features(rows.state, rows.t, horizon, scale, n_states).astype(np.float64)


def _with_actions(x: Array, acting: Array, part: int) -> Array:
    """phi: x, and the first of x times each feature of the action, `[n, p + B p']`."""
    product = acting[:, :, None] * x[:, None, :part]
    return np.concatenate([x, product.reshape(len(x), -1)], 1)


def _scale(states: NDArray[Any]) -> Scale:
    mean, deviation = states.mean(0, dtype=np.float64), states.std(0, dtype=np.float64)
    return Scale(tuple(mean.tolist()), tuple(np.where(deviation > 0, deviation, 1.0).tolist()))


def _solve(moments: Array, phi_r: Array, phi_d: Array, d_d: Array, d_r: Array) -> Array:
    """w from sums of phi phi', phi r, phi d', d d' and d r, `[size]`; a feature that was never seen gets 0."""
    unit = _unit(moments)
    gram = moments * unit[:, None] * unit + RIDGE * np.eye(len(unit))
    projected = np.linalg.solve(gram, np.column_stack([phi_d * unit[:, None], phi_r * unit]))
    onto = (phi_d * unit[:, None]).T @ projected  # [size, size + 1]
    left = (1 - RESIDUAL) * onto[:, :-1] + RESIDUAL * d_d
    right = (1 - RESIDUAL) * onto[:, -1] + RESIDUAL * d_r
    unit = _unit(left)
    return np.linalg.solve(left * unit[:, None] * unit + RIDGE * np.eye(len(unit)), right * unit) * unit


def _unit(moments: Array) -> Array:
    diagonal = np.diagonal(moments)
    return 1 / np.sqrt(np.where(diagonal > 0, diagonal, 1.0))
