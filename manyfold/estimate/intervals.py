"""Intervals from the values of episodes, of any estimator or of plain returns: of policies and of their differences.

Every episode (or round) says something of all K policies, so that differences are measured on the same episodes. What
is needed of them is a `Sample`: the means, and how uncertain they are together,

    Cov(mean) = sum_j (n_j / n)^2 S_j / n_j,    S_j the covariance of the values within stratum j.

A stratum is a logger (its episodes are alike), or all rounds where one episode of each policy makes a round because
they began alike. Small samples: Student's t, where each contrast has the degrees of freedom of Welch and Satterthwaite.
Several intervals at once share one level, which their correlation decides (max-t): K policies that share episodes are
hardly more than one.

`anytime` may be looked at after every episode. It inverts the t-test of a mixture of effects (right Haar prior of the
scale, effects normal; Lai 1976, Wang and Ramdas 2025), whose probability of ever being wrong is at most alpha if values
are normal, and nearly so if they are not. `betting` needs no such thing, but values between known bounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from manyfold.arrays import Array, Ints, check_distinct, check_number

DRAWS = 20_000  # of the simulation that finds the level of several intervals; its own error is 3% of alpha
OPTIMAL = 8.2  # n / n_0 where the anytime interval at 95% is as narrow as it gets, relative to a fixed one
AROUND = 200.0  # units at which it is so by default


class Interval(NamedTuple):
    """From low to high, any shape; infinite where a side is not asked for."""

    low: Array
    high: Array


@dataclass(frozen=True)
class Sample:
    """What is known of K policies together.

    Attributes:
        parts: each stratum's part of the covariance of the means, `[J, K, K]`.
        freedom: degrees of freedom of each, `[J]`.
        units: episodes or rounds in all.
        units_each: those that say something of each policy, where they differ, `[K]`.
    """

    names: tuple[str, ...]
    mean: Array
    parts: Array
    freedom: Array
    units: int
    units_each: Array | None = None

    @cached_property
    def covariance(self) -> Array:
        """Of the means, `[K, K]`."""
        return self.parts.sum(0)

    @property
    def standard_error(self) -> Array:
        """`[K]`."""
        return np.sqrt(np.einsum("kk->k", self.covariance))

    @cached_property
    def root(self) -> Array:
        """A matrix whose product with its transpose is the covariance, `[K, K]`."""
        values, vectors = np.linalg.eigh(self.covariance)
        return np.asarray(vectors * np.sqrt(np.maximum(values, 0)))

    @cached_property
    def drawn(self) -> Array:
        """Errors of the means, always from the same normal draws, `[parts, K, 1000]`."""
        return np.stack([self.root @ some.T for some in _normal(len(self.names))])

    @cached_property
    def pairs(self) -> tuple[Ints, Ints]:
        """All i < j."""
        first, second = np.triu_indices(len(self.names), 1)
        return first, second

    def contrasts(self, weights: Array) -> "Contrasts":
        """Of linear combinations, `[C, K]`."""
        parts = np.einsum("ck,jkl,cl->jc", weights, self.parts, weights, optimize=True)
        size = np.einsum("ck,kk,ck->c", weights, self.covariance, weights, optimize=True)
        return self._contrasts(parts, size, weights)

    def _contrasts(self, parts: Array, size: Array, weights: Array) -> "Contrasts":
        """Given the parts of their variances `[J, C]`, and what these are small beside, `[C]`."""
        parts = np.where(parts > 1e-12 * size, parts, 0.0)  # policies that are the same: their difference is 0
        variance = parts.sum(0)
        spread = (parts**2 / self.freedom[:, None]).sum(0)
        freedom = np.divide(variance**2, spread, out=np.full_like(spread, np.inf), where=spread > 0)
        each = np.full(len(self.names), float(self.units)) if self.units_each is None else self.units_each
        units = np.where(weights != 0, each, np.inf).min(1)  # of the policy that ran least
        return Contrasts(weights @ self.mean, np.sqrt(variance), freedom, units, weights)

    def each(self) -> "Contrasts":
        """The policies themselves."""
        parts = np.einsum("jkk->jk", self.parts)
        return self._contrasts(parts, parts.sum(0), np.eye(len(self.names)))

    def less(self, first: Ints, second: Ints) -> "Contrasts":
        """J(i) - J(j) of some pairs `[C]`, i != j, from the covariances alone: many policies have very many pairs."""
        one, own = np.eye(len(self.names)), np.einsum("jkk->jk", self.parts)
        parts = own[:, first] + own[:, second] - self.parts[:, first, second] - self.parts[:, second, first]
        return self._contrasts(parts, own.sum(0)[first] + own.sum(0)[second], one[first] - one[second])

    def differences(self) -> "Contrasts":
        """J(i) - J(j) of all pairs i < j."""
        return self.less(*self.pairs)


class Contrasts(NamedTuple):
    """Linear combinations of the means."""

    estimate: Array  # [C]
    error: Array  # [C]
    freedom: Array  # [C]
    units: Array  # [C]
    weights: Array  # [C, K]

    def interval(self, level: ArrayLike, sides: int = 2) -> Interval:
        """Of each by itself; `level` is the probability to miss, of one side or of both together."""
        t = -special.stdtrit(self.freedom, np.asarray(level) / sides)  # as scipy.stats.t.isf, which is slow to import
        t = np.where(np.isneginf(t), np.inf, t)  # scipy's for levels below 1e-200 or so
        reach = np.where(self.error > 0, t * np.where(self.error > 0, self.error, 1.0), 0.0)
        high = self.estimate + reach if sides == 2 else np.full_like(self.estimate, np.inf)
        return Interval(self.estimate - reach, high)


def sample(
    values: ArrayLike,
    logger: ArrayLike | None = None,
    fold: ArrayLike | None = None,
    names: tuple[str, ...] | None = None,
) -> Sample:
    """What values `[K, N]` say.

    Args:
        logger: who ran each episode, `[N]`; left out, all columns are alike, such as rounds of plain returns.
        fold: episodes of one logger whose values have one mean, `[N]`; left out, all of a logger's.
    """
    x = np.atleast_2d(np.asarray(values, dtype=np.float64))
    if x.ndim != 2 or not x.size or not np.isfinite(x).all():
        raise ValueError(f"values are {x.shape} with {np.sum(~np.isfinite(x))} not finite, expected numbers [K, N]")
    k, n = x.shape
    who = np.zeros(n, dtype=np.int64) if logger is None else np.asarray(logger)
    part = np.zeros(n, dtype=np.int64) if fold is None else np.asarray(fold)
    if who.shape != (n,) or part.shape != (n,):
        raise ValueError(f"logger and fold have shapes {who.shape} and {part.shape}, expected ({n},): one per episode")
    if names is not None and len(names) != k:
        raise ValueError(f"{len(names)} names of {k} policies, expected one each")
    parts, freedom = [], []
    for j in np.unique(who):
        here, sums, free = np.flatnonzero(who == j), np.zeros((k, k)), 0
        for f in np.unique(part[here]):
            some = x[:, here[part[here] == f]]
            if (few := some.shape[1]) > 1:
                rest = some - some.mean(-1, keepdims=True)
                sums += rest @ rest.T
                free += few - 1
        if not free:
            raise ValueError(
                f"logger {j} has {len(here)} episodes, expected at least 2 of each fold: one has no variance"
            )
        parts.append(sums * len(here) / free / n**2)
        freedom.append(free)
    called = tuple(str(i) for i in range(k)) if names is None else names
    return Sample(called, x.mean(-1), np.stack(parts), np.array(freedom, dtype=np.float64), n)


def join(stages: Sequence[Sample]) -> Sample:
    """Stages of the same policies, or of fewer and fewer of them: each policy from the stages that it took part in.

    Every stage is unbiased whatever earlier ones decided about it, and they are weighted by their units alone.
    """
    if not stages or any(not set(stage.names) <= set(stages[0].names) for stage in stages):
        raise ValueError("stages are none or name other policies than the first one, expected the same or fewer")
    names = stages[0].names
    check_distinct(names)  # they say which row is whose
    where = [np.array([names.index(name) for name in stage.names]) for stage in stages]
    units = np.zeros(len(names))
    for stage, here in zip(stages, where, strict=True):
        units[here] += stage.units
    mean, parts = np.zeros(len(names)), []
    for stage, here in zip(stages, where, strict=True):
        share = stage.units / units[here]
        mean[here] += share * stage.mean
        part = np.zeros((len(stage.parts), len(names), len(names)))
        part[:, here[:, None], here] = stage.parts * share[:, None] * share
        parts.append(part)
    freedom = np.concatenate([stage.freedom for stage in stages])
    return Sample(names, mean, np.concatenate(parts), freedom, sum(stage.units for stage in stages), units)


def single(found: Sample, alpha: float = 0.05) -> Interval:
    """Of each policy by itself, `[K]`."""
    return found.each().interval(check_alpha(alpha))


def simultaneous(found: Sample, alpha: float = 0.05) -> Interval:
    """Of all policies at once, `[K]`: all of them hold with probability 1 - alpha."""
    every = found.each()
    return every.interval(joint_level(found, every.weights, check_alpha(alpha)))


def differences(found: Sample, alpha: float = 0.05, leads: Array | None = None) -> Interval:
    """J(i) - J(j) of all pairs at once, `[K, K]`.

    Args:
        leads: `largest_lead` of every policy, if it is known, `[K, DRAWS]`.
    """
    every, k = found.differences(), len(found.names)
    real = int((every.error > 0).sum())
    level = check_alpha(alpha)
    if real > 1:
        known = np.stack([largest_lead(found, i) for i in range(k)]) if leads is None else leads
        level = level_of(known.max(0), alpha, real, 2)  # all pairs either way around: both sides
    return square(found, every.interval(level))


def against(found: Sample, baseline: int | float, alpha: float = 0.05) -> Interval:
    """How much better each policy is at least than another (an int: its number) or a value (a float); one-sided, `[K]`.

    All bounds hold at once; that of the baseline policy itself is 0.
    """
    k = len(found.names)
    weights, shift = np.eye(k), 0.0
    if isinstance(baseline, int):
        check_number("baseline", baseline, 0, k - 1)
        weights[:, baseline] -= 1
    else:
        shift = float(baseline)
    every = found.contrasts(weights)
    low, high = every.interval(joint_level(found, weights, check_alpha(alpha), 1), 1)
    return Interval(np.where(every.error > 0, low, every.estimate) - shift, high)


def joint_level(found: Sample, weights: Array, alpha: float, sides: int = 2) -> float:
    """The level of each of several intervals at which all of them together have level alpha (max-t).

    The smallest of their p-values is simulated from normal means with the sample's own correlations, always with the
    same draws. Each interval then has Student's t of its own freedom at that level.
    """
    every = found.contrasts(weights)
    real = every.error > 0
    if real.sum() < 2:
        return alpha
    loads = (weights[real] / every.error[real, None]) @ found.root
    largest = [(np.abs(z) if sides == 2 else z).max(1) for z in (some @ loads.T for some in _normal(len(found.names)))]
    return level_of(np.concatenate(largest), alpha, len(loads), sides)


def level_of(largest: Array, alpha: float, number: int, sides: int) -> float:
    """The level of so many intervals whose largest errors are drawn, `[DRAWS]`."""
    level = sides * float(special.ndtr(-np.quantile(largest, 1 - alpha)))
    return min(alpha, max(level, alpha / number))


def largest_lead(found: Sample, k: int) -> Array:
    """By how many standard errors the policy ahead of k is ahead of it, at most, where all are equal; `[DRAWS]`.

    The draws of `joint_level`: a pair's difference is that of two policies' draws, so pairs need no products of theirs.
    """
    others = np.delete(np.arange(len(found.names)), k)
    error = found.less(others, np.full(len(others), k)).error
    real = error > 0
    if not real.any():
        return np.full(DRAWS, -np.inf)
    steep, others = 1 / error[real, None], others[real]
    return np.concatenate([((some[others] - some[k]) * steep).max(0) for some in found.drawn])


@lru_cache(maxsize=4)
def _normal(width: int) -> Array:
    """Always the same draws, `[parts, 1000, width]`."""
    return np.random.default_rng(0).standard_normal((DRAWS // 1000, 1000, width))


def anytime(found: Contrasts, level: ArrayLike, around: float = AROUND) -> Interval:
    """Intervals that hold at all times at once: however often one looks, and whatever one stops for.

    Args:
        level: the probability that an interval ever misses; several at once need alpha divided among them.
        around: units at which the interval is narrowest, relative to one for a single look; chosen beforehand.
    """
    check_number("around", around, 1, whole=False)
    reach = boundary(found.freedom, found.units, np.asarray(level, dtype=np.float64), around)
    wide = np.where(found.error > 0, reach * np.where(found.error > 0, found.error, 1.0), 0.0)
    return Interval(found.estimate - wide, found.estimate + wide)


def boundary(freedom: Array, units: ArrayLike, level: Array, around: float = AROUND) -> Array:
    """|t| at which the mixture of effects has 1 / level times the likelihood of none; infinite with too few units.

    With h = 1 + units / n_0 and f degrees of freedom the ratio is
    h^(-1/2) ((1 + t^2 / f) / (1 + t^2 / (f h)))^((f + 1) / 2), which is solved for t.
    """
    h = 1 + OPTIMAL * np.asarray(units) / around
    f = np.minimum(freedom, 1e9)
    much = np.exp(np.minimum((np.log(h) - 2 * np.log(level)) / (f + 1), 700))  # what the bracket must reach
    room = 1 - much / h
    return np.asarray(np.sqrt(f * np.divide(much - 1, room, out=np.full_like(room, np.inf), where=room > 0)))


def betting(values: ArrayLike, low: float, high: float, alpha: float = 0.05, grid: int = 1000) -> Interval:
    """After each of N values between `low` and `high`, an interval of their mean that holds at all times, `[N]` each.

    Exactly valid for any distribution within the bounds: whoever bets against a candidate mean and multiplies the
    stakes by 1 / alpha refutes it (Waudby-Smith and Ramdas 2024, hedged capital with predictable stakes).
    """
    check_alpha(alpha)
    x = np.asarray(values, dtype=np.float64)
    if not (low < high) or x.ndim != 1 or not ((x >= low) & (x <= high)).all():
        raise ValueError(f"values from {x.min(initial=low)} to {x.max(initial=high)}, expected within {low} and {high}")
    y, m = (x - low) / (high - low), np.linspace(0, 1, grid + 1)
    t = np.arange(1, len(y) + 1)
    mean = (0.5 + np.cumsum(y)) / (t + 1)
    variance = (0.25 + np.cumsum((y - mean) ** 2)) / (t + 1)
    before = np.concatenate([[0.25], variance[:-1]])
    stake = np.minimum(np.sqrt(2 * np.log(2 / alpha) / (before * t * np.log(t + 1))), 1e6)
    up, down = np.zeros_like(m), np.zeros_like(m)
    below, above = np.empty(len(y)), np.empty(len(y))
    inside = np.ones(len(m), dtype=np.bool_)
    for i in range(len(y)):
        up += np.log1p(np.minimum(stake[i], 0.5 / np.maximum(m, 1e-9)) * (y[i] - m))
        down += np.log1p(-np.minimum(stake[i], 0.5 / np.maximum(1 - m, 1e-9)) * (y[i] - m))
        inside &= np.maximum(up, down) < np.log(2 / alpha)
        kept = np.flatnonzero(inside)
        step = 1 / grid
        below[i] = max(m[kept[0]] - step, 0) if len(kept) else below[i - 1]
        above[i] = min(m[kept[-1]] + step, 1) if len(kept) else above[i - 1]
    return Interval(low + below * (high - low), low + above * (high - low))


def bounded(own_returns: Sequence[Array], low: float, high: float, alpha: float = 0.05) -> Interval:
    """Of each policy by itself, from the plain returns of its own episodes, which are all between `low` and `high`.

    `betting` after the last of them: valid for any number of episodes and at whatever time one stops, where returns
    hardly vary as well; wider than `single` where they do. `[K]`; of a policy without episodes all is possible.
    """
    ends = [betting(x, low, high, alpha) for x in own_returns]
    return Interval(
        np.array([x.low[-1] if len(x.low) else low for x in ends]),
        np.array([x.high[-1] if len(x.high) else high for x in ends]),
    )


def square(found: Sample, interval: Interval) -> Interval:
    """Of pairs i < j as matrices: J(i) - J(j)."""
    k, (first, second) = len(found.names), found.pairs
    low, high = np.zeros((k, k)), np.zeros((k, k))
    low[first, second], high[first, second] = interval
    low[second, first], high[second, first] = -interval.high, -interval.low
    return Interval(low, high)


def check_alpha(alpha: float) -> float:
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is {alpha}, expected the probability of being wrong, between 0 and 1, such as 0.05")
    return alpha
