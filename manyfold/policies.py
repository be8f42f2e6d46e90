"""K policies at once, behind one interface: `probs(obs, t) -> [K, N, A]`."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr

from manyfold.mdp import Array, Ints, check_distributions, check_finite


class PolicySet(Protocol):
    """What estimators and rollouts need of K policies, tabular or networks."""

    n_policies: int
    n_actions: int

    def probs(self, obs: Any, t: int | Ints) -> Array:
        """Action probabilities of all K policies at N observations and their steps t; `[K, N, A]`."""


class TabularPolicySet:
    """K policies as one table `[K, T, S, A]`; an observation is a state's index."""

    def __init__(self, table: ArrayLike) -> None:
        self.table: Array = np.array(table, dtype=np.float64)
        if self.table.ndim != 4 or 0 in self.table.shape:
            raise ValueError(f"table has shape {list(self.table.shape)}, expected [K, T, S, A], none of them 0")
        check_distributions("table", self.table, ("k", "t", "s", "a"))
        self.n_policies, self.horizon, self.n_states, self.n_actions = self.table.shape

    def probs(self, obs: Ints, t: int | Ints) -> Array:
        """Action probabilities of all K policies at N states and their steps t; `[K, N, A]`."""
        states, steps = np.asarray(obs), np.asarray(t)
        for name, index, size in (("state", states, self.n_states), ("t", steps, self.horizon)):
            if not np.issubdtype(index.dtype, np.integer) or (
                index.size and not 0 <= index.min() <= index.max() < size
            ):
                raise ValueError(f"{name}: expected whole numbers from 0 to {size - 1}, found {index.tolist()!s:.80}")
        return self.table[:, steps, states]


def sample_actions(cumulative: Array, states: Ints, rng: np.random.Generator) -> Ints:
    """Draws an action for each state; `cumulative [A - 1, S]` is one step of `cumulative_probs`."""
    u = rng.random(len(states))
    actions = np.zeros(len(states), dtype=np.int64)
    for row in cumulative:  # over A - 1 thresholds, not over episodes
        actions += u >= row[states]
    return actions


def cumulative_probs(table: Array) -> Array:
    """Thresholds for `sample_actions`, `[..., S, A]` -> `[..., A - 1, S]`; an action of probability 0 never comes."""
    cumulative = np.cumsum(table, axis=-1)
    cumulative /= cumulative[..., -1:]  # exactly 1 from the last possible action on
    return np.ascontiguousarray(np.swapaxes(cumulative[..., :-1], -1, -2))


def bin_probs(mean: ArrayLike, std: ArrayLike, edges: ArrayLike) -> Array:
    """pi(bin | s) of a Gaussian policy N(mean, std^2), the tails going to the end bins.

    `Phi(z_{i+1}) - Phi(z_i)`, and above the mean `Phi(-z_i) - Phi(-z_{i+1})`: the difference of two numbers near 1
    would round a small probability, hence an importance ratio's denominator, to 0.

    Args:
        mean, std: of any shapes that broadcast, std > 0.
        edges: increasing, `[bins + 1]`; the outer two only say which bins are the end ones.

    Returns:
        `[..., bins]`.
    """
    mu, sigma, e = np.asarray(mean, np.float64), np.asarray(std, np.float64), np.asarray(edges, np.float64)
    if e.ndim != 1 or len(e) < 2 or not (np.diff(e) > 0).all():
        raise ValueError(f"edges are {np.array2string(e, threshold=12)}, expected increasing numbers [bins + 1]")
    check_finite("mean", mu)
    check_finite("std", sigma)
    if sigma.size and sigma.min() <= 0:
        raise ValueError(f"std is {sigma.min():g}, expected more than 0; was it saved as a logarithm?")
    with np.errstate(over="ignore"):  # an infinite z is right: the edge is that far away
        z = (e[1:-1] - mu[..., None]) / sigma[..., None]  # [..., bins - 1]
    outside = np.full((*z.shape[:-1], 1), np.inf)
    lower, upper = np.concatenate([-outside, z], axis=-1), np.concatenate([z, outside], axis=-1)  # [..., bins]
    above = lower > 0
    probs = ndtr(np.where(above, -lower, upper)) - ndtr(np.where(above, -upper, lower))
    return np.maximum(probs, 0.0)  # ndtr is monotone only up to rounding
