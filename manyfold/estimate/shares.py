"""Which logger should run how many of the episodes: the shares alpha that a pilot sample says are best.

With the baseline's residuals d_t = R_{t+1} + v_{t+1} - q_t, pooled evaluation of policy k has (up to the starts)

    n Var_k(alpha) = sum_t E_pi[W_t d_t^2],   W_t = pi_{0:t} / sum_j alpha_j mu_{j,0:t},

which is convex in alpha (He and Owen, 2014). A pilot whose densities under every candidate logger are known gives it
for any alpha: sum_t E_pilot[(pi / mu_pilot) W_t d_t^2]. Each target keeps a floor, and with it its guarantee: no worse
than on-policy MC with that share.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from manyfold.arrays import Array, check_number, check_shape
from manyfold.data.episodes import Episodes
from manyfold.estimate.pooled import centred, folds_of

Goal = Literal["sum", "largest"]


def predicted_variances(shares: ArrayLike, terms: Array, ratios: Array) -> Array:
    """n Var_k of these shares; `[K]`.

    Args:
        shares: alpha `[J]`.
        terms: (pi / mu_pilot)^2 d^2 of every step of the pilot, divided by its number of episodes, `[K, M]`.
        ratios: mu_j / mu_pilot of the same steps, `[J, M]`.
    """
    return np.asarray((terms / (np.asarray(shares) @ ratios)).sum(-1))


def best_shares(
    terms: Array, ratios: Array, floor: ArrayLike, goal: Goal = "sum", weights: Array | None = None
) -> Array:
    """The shares `[J]` that minimise the sum of the predicted variances, or the largest of them.

    Args:
        terms, ratios: of `predicted_variances`.
        floor: the smallest share of each logger, `[J]` or one number; their sum is at most 1.
        weights: of the policies in the sum, or by which their variances are compared; 1 if left out, `[K]`.
    """
    from scipy import optimize  # slow to import, and most evaluations plan nothing

    k, j = len(terms), len(ratios)
    low = np.broadcast_to(np.asarray(floor, dtype=np.float64), (j,))
    for x in low:
        check_number("floor", float(x), 0, 1, whole=False)
    if low.sum() > 1 + 1e-12:
        raise ValueError(f"floor sums to {low.sum():g}, expected at most 1")
    importance = np.ones(k) if weights is None else np.asarray(weights, dtype=np.float64)
    start = low + (1 - low.sum()) / j

    def objective(alpha: Array) -> Array:
        return importance * predicted_variances(alpha, terms, ratios)

    def gradient(alpha: Array) -> Array:  # [K, J]
        return -importance[:, None] * ((terms / (alpha @ ratios) ** 2) @ ratios.T)

    scale = float(objective(start).max()) or 1.0
    simplex = {"type": "eq", "fun": lambda x: x[:j].sum() - 1, "jac": lambda x: np.r_[np.ones(j), np.zeros(len(x) - j)]}
    bounds = [(float(x), 1.0) for x in low]
    if goal == "sum":
        found = optimize.minimize(
            lambda x: objective(x).sum() / scale,
            start,
            jac=lambda x: gradient(x).sum(0) / scale,
            bounds=bounds,
            constraints=[simplex],
            method="SLSQP",
        ).x
    else:  # minimise z where every policy's variance is at most z
        below = {
            "type": "ineq",
            "fun": lambda x: x[j] - objective(x[:j]) / scale,
            "jac": lambda x: np.column_stack([-gradient(x[:j]) / scale, np.ones(k)]),
        }
        found = optimize.minimize(
            lambda x: x[j],
            np.r_[start, 1.0],
            jac=lambda x: np.r_[np.zeros(j), 1.0],
            bounds=[*bounds, (0.0, None)],
            constraints=[simplex, below],
            method="SLSQP",
        ).x[:j]
    found = np.maximum(found, low)
    total = objective(found / found.sum())
    equal = objective(start)
    better = total.sum() < equal.sum() if goal == "sum" else total.max() < equal.max()
    return np.asarray(found / found.sum() if better else start)  # a solver that failed must not make it worse


@dataclass(frozen=True)
class Plan:
    """Who should run how many of the next episodes, as a pilot has it."""

    alpha: Array  # share of each logger, [J]
    variance: Array  # n times the variance of each policy that they promise, [K]
    equal: Array  # the same of the targets alone, in equal shares, [K]
    length: float  # steps of an episode, on average

    def cost(self, precision: float) -> tuple[int, int]:
        """Episodes and steps in all after which every policy's standard error is at most `precision`."""
        return cost_of(self.variance, self.length, precision)


def cost_of(variance: Array, length: float, precision: float) -> tuple[int, int]:
    """Episodes and steps after which every standard error is at most `precision`; n times the variances are known."""
    check_number("precision", precision, 1e-100, whole=False)
    episodes = int(np.ceil(variance.max() / precision**2))
    return episodes, int(np.ceil(episodes * length))


def plan(
    pilot: Episodes,
    values: Array,
    goal: Goal = "sum",
    floor: float = 0.25,
    cost: Literal["episodes", "steps"] = "episodes",
) -> Plan:
    """The shares that minimise the sum of the predicted variances, or the largest of them.

    The spread of a value about its logger's mean belongs to the whole episode: with other shares, the episode would
    come as much more often as it is likelier under them, and count as much less. That is exact where values are
    weighted by whole episodes, and an approximation where per-decision weights and baselines did better.

    Args:
        pilot: episodes whose densities under every candidate logger are known; a candidate need not have run any. Its
            targets are its first loggers, as `collect` has them.
        values: of the pilot's episodes, of `evaluation.pool`, `[K, N]`.
        floor: of each target's share, as a share of 1 / K; it keeps the guarantee: never worse than on-policy MC with
            that share of the episodes.
        cost: what is scarce. Loggers differ in how long their episodes are.
    """
    k, j, n = len(pilot.names), pilot.n_loggers, len(pilot.lengths)
    check_number("floor", floor, 0, 1, whole=False)
    check_shape("values", values, (k, n), "[K, N] of the pilot")
    fold, _ = folds_of(pilot.logger)
    counts = np.bincount(pilot.logger, minlength=j)
    starts = np.cumsum(pilot.lengths) - pilot.lengths
    log_mu = np.add.reduceat(pilot.log_loggers, starts, axis=-1)  # of whole episodes, [J, N]
    with np.errstate(divide="ignore"):
        ratios = np.exp(log_mu - np.logaddexp.reduce(log_mu + np.log(counts / n)[:, None], axis=0))
    terms = centred(values, pilot.logger, fold) ** 2 / n
    length = (ratios @ pilot.lengths) / ratios.sum(-1)  # of each logger's episodes, whoever ran them
    price = length / length.mean() if cost == "steps" else np.ones(j)
    targets = np.arange(j) < k
    paid = best_shares(terms, ratios / price[:, None], np.where(targets, floor / k, 0.0), goal)  # shares of the cost
    alpha = paid / price / (paid / price).sum()
    variance, equal = (predicted_variances(x, terms, ratios) for x in (alpha, targets / k))
    return Plan(alpha, variance, equal, float(alpha @ length))
