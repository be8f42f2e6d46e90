"""Decisions from intervals: which policy is best, which may still be, which can't be told apart, and how sure that is.

    found = sample(values, logger, fold, names)
    print(decide(found))                # for one look
    print(decide(found, anytime=True))  # may be repeated after every episode, and stopped at will

The best policy is among `may_be_best` with probability 1 - alpha: a policy leaves the set when another one is better by
more than the largest of K - 1 correlated errors explains (one-sided max-t; Hsu's comparison with the best). Where one
is left alone, it is the best, and that is wrong with probability alpha at most, also where it is as good as another
(`_level`). The model confidence set of `arch` says the same of losses; ours needs no bootstrap, knows loggers, and has
an anytime version.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from manyfold.arrays import Array, Bools, Ints, check_number
from manyfold.estimate import intervals
from manyfold.estimate.intervals import AROUND, Interval, Sample, sample

SHOWN = 3  # policies that a row names; of more it says how many


@dataclass(frozen=True)
class Decision:
    """What may be said of K policies, all of it together wrong with probability `alpha` at most for each kind.

    Attributes:
        interval: of every policy, all at once, `[K]`.
        difference: J(i) - J(j), all pairs at once, `[K, K]`.
        may_be_best: the best policy is one of these, `[K]`.
    """

    sample: Sample
    alpha: float
    anytime: bool
    interval: Interval
    difference: Interval
    may_be_best: Bools

    @property
    def names(self) -> tuple[str, ...]:
        return self.sample.names

    @cached_property
    def order(self) -> Ints:
        """Policies from the highest to the lowest mean, `[K]`."""
        return np.argsort(-self.sample.mean, kind="stable")

    @cached_property
    def p_best(self) -> Array:
        """How probable it is that a policy is the best, as seen from these episodes; ties share; `[K]`."""
        return p_best(self.sample)

    @property
    def best(self) -> int | None:
        """The best policy's number where it is known."""
        return int(self.may_be_best.argmax()) if self.may_be_best.sum() == 1 else None

    @cached_property
    def better(self) -> Bools:
        """Whether i is known to be better than j: by their difference, or because i is the best of all; `[K, K]`."""
        found = np.asarray(self.difference.low > 0)
        if self.best is not None:
            found[self.best], found[:, self.best] = np.arange(len(self.names)) != self.best, False
        return found

    @cached_property
    def told_apart(self) -> Bools:
        """`[K, K]`."""
        return self.better | self.better.T

    def summary(self) -> dict[str, Any]:
        """For programs, as JSON takes it: the ranked policies, and who is best."""
        low, high = self.ranks
        policies = [
            {
                "name": self.names[k],
                "value": _number(self.sample.mean[k]),
                "standard_error": _number(self.sample.standard_error[k]),
                "low": _number(self.interval.low[k]),
                "high": _number(self.interval.high[k]),
                "half_width": _number(self.half_width[k]),
                "rank_low": int(low[k]),
                "rank_high": int(high[k]),
                "p_best": _number(self.p_best[k]),
                "may_be_best": bool(self.may_be_best[k]),
                "not_told_apart_from": [self.names[j] for j in self.order if j != k and not self.told_apart[k, j]],
            }
            for k in self.order.tolist()
        ]
        best = None if self.best is None else self.names[self.best]
        return {
            "best": best,
            "verdict": self.verdict,
            "alpha": self.alpha,
            "anytime": self.anytime,
            "policies": policies,
        }

    @property
    def order_known(self) -> bool:
        """Whether every pair is told apart by its difference, all of them at once."""
        k = len(self.names)
        return int((self.difference.low > 0).sum()) == k * (k - 1) // 2

    @property
    def ranks(self) -> tuple[Ints, Ints]:
        """From 1 (best) to K, lowest and highest, `[K]` each: so many are known to be better, and so many worse.

        Who can't be the best is second at most, although it may be unknown to whom.
        """
        low = np.maximum(1 + self.better.sum(0), np.where(self.may_be_best, 1, 2))
        return low, np.maximum(low, len(self.names) - self.better.sum(1))

    @property
    def half_width(self) -> Array:
        """Of the simultaneous intervals, `[K]`."""
        return (self.interval.high - self.interval.low) / 2

    def rows(self) -> list[tuple[str, ...]]:
        """The ranked table, header first."""
        out: list[tuple[str, ...]] = [("policy", "value", "interval", "rank", "P(best)", "not told apart from")]
        low, high = self.ranks
        for k in self.order:
            rank = f"{low[k]}" if low[k] == high[k] else f"{low[k]} to {high[k]}"
            near = [self.names[i] for i in self.order if i != k and not self.told_apart[k, i]]
            more = f" and {len(near) - SHOWN} more" if len(near) > SHOWN else ""
            between = f"{self.interval.low[k]:.4g} to {self.interval.high[k]:.4g}"
            said = ", ".join(near[:SHOWN]) + more
            out.append((self.names[k], f"{self.sample.mean[k]:.4g}", between, rank, probability(self.p_best[k]), said))
        return out

    @property
    def verdict(self) -> str:
        """One sentence: who is the best."""
        sure = f"with {1 - self.alpha:.4g} confidence"
        if len(self.names) == 1:
            return f"One policy, {self.names[0]}: nothing to compare."
        if self.best is not None:
            return f"{self.names[self.best]} is the best, {sure}{' at whatever time' if self.anytime else ''}."
        left = [self.names[k] for k in self.order if self.may_be_best[k]]
        more = f" and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
        return f"Not known which is best: {', '.join(left[:SHOWN])}{more} may be, {sure}."

    def trusted(self, warnings: Sequence[str | None]) -> str:
        """The verdict, and whether it rests on an estimate that is not to be trusted; a warning or none of each."""
        doubt = self.best is not None and warnings[self.best]
        return self.verdict + (" That rests on an estimate that is not to be trusted: see below." if doubt else "")

    def __str__(self) -> str:
        return "\n".join([aligned(self.rows()), self.verdict])


def decide(found: Sample, alpha: float = 0.05, anytime: bool = False, around: float = AROUND) -> Decision:
    """Everything that may be decided.

    Args:
        alpha: the probability of a wrong simultaneous interval, of a wrong difference, and of a wrong best policy.
        anytime: valid at all times at once, for whoever looks again and again; wider.
        around: of `intervals.anytime`.
    """
    k, alpha = len(found.names), intervals.check_alpha(alpha)
    if anytime:
        every, pairs = found.each(), found.differences()
        interval = intervals.anytime(every, alpha / k, around)
        apart = intervals.anytime(pairs, alpha / max(1, len(pairs.error)), around)
        difference = intervals.square(found, apart)
        beaten = _beaten_ever(found, alpha, around)
    else:
        leads = np.stack([intervals.largest_lead(found, i) for i in range(k)])
        interval, difference = intervals.simultaneous(found, alpha), intervals.differences(found, alpha, leads)
        beaten = np.array([_beaten(found, i, alpha, leads[i]) for i in range(k)])
    return Decision(found, alpha, anytime, interval, difference, ~beaten)


def best(found: Sample, alpha: float = 0.05, anytime: bool = False, around: float = AROUND) -> int | None:
    """`decide(...).best` alone, which is faster: mostly the second policy already can't be told from the first."""
    order = np.argsort(-found.mean, kind="stable")
    if anytime:
        left = np.flatnonzero(~_beaten_ever(found, intervals.check_alpha(alpha), around))
        return int(left[0]) if len(left) == 1 else None
    known = all(_beaten(found, k, intervals.check_alpha(alpha)) for k in order[1:])
    return int(order[0]) if known else None


def _level(alpha: float, k: int) -> float:
    """The probability with which some policy may seem better than a best one: alpha (K - 1) / K, in all.

    Had it been alpha, each of two equal policies could be called the better one with probability alpha. Of m equals one
    is left alone when the other m - 1 are beaten; each of their m (m - 1) pairs errs with about alpha / K, so that
    happens with probability m alpha / K, alpha at most.
    """
    return alpha * max(1, k - 1) / max(2, k)


def _beaten_ever(found: Sample, alpha: float, around: float) -> Bools:
    """Whether some policy is better than each, at whatever time, `[K]`."""
    k = len(found.names)
    one_sided = intervals.anytime(found.differences(), 2 * _level(alpha, k) / max(1, k - 1), around)
    return np.asarray((intervals.square(found, one_sided).low > 0).any(0))


def _beaten(found: Sample, k: int, alpha: float, lead: Array | None = None) -> bool:
    """Whether some policy is better than k; `lead` is `intervals.largest_lead` of it, if it is known."""
    others = np.delete(np.arange(len(found.names)), k)
    if not len(others) or found.mean[others].max() <= found.mean[k]:
        return False
    every, level = found.less(others, np.full(len(others), k)), _level(alpha, len(found.names))
    if (real := int((every.error > 0).sum())) > 1:
        level = intervals.level_of(intervals.largest_lead(found, k) if lead is None else lead, level, real, 1)
    return bool((every.interval(level, 1).low > 0).any())


def p_best(found: Sample, draws: int = 20_000) -> Array:
    """The probability that each policy is the best, by draws of Student's t about the means; ties are shared; `[K]`."""
    k = len(found.names)
    freedom = found.differences().freedom if k > 1 else np.array([np.inf])
    rng, f = np.random.default_rng(0), float(freedom.min())
    scale = np.sqrt(f / rng.chisquare(f, (draws, 1))) if np.isfinite(f) else 1.0
    z = rng.standard_normal((draws, k)) @ found.root.T
    drawn = found.mean + z * scale
    top = drawn >= drawn.max(1, keepdims=True) - 1e-7 * found.standard_error.max()
    return np.asarray((top / top.sum(1, keepdims=True)).mean(0))


class Winner(NamedTuple):
    """The policy with the highest mean, and what it is worth on episodes that did not choose it."""

    policy: int
    value: float
    error: float
    fresh: float  # NaN where there are too few episodes to set some aside
    fresh_error: float

    def describe(self, names: tuple[str, ...]) -> str:
        """One sentence with both numbers."""
        if not np.isfinite(self.fresh):
            return f"{names[self.policy]} looks best with {self.value:.4g}; too few episodes to correct for the choice."
        fresh = f"{self.fresh:.4g} +- {self.fresh_error:.2g}"
        value = f"{self.value:.4g} +- {self.error:.2g}"
        return f"The highest mean is {value}; on episodes that did not choose the winner it is worth {fresh}."


def winner(values: ArrayLike, logger: ArrayLike | None = None, fold: ArrayLike | None = None, parts: int = 5) -> Winner:
    """Corrects the winner's curse: the highest of K means is too high, the more so the nearer the policies.

    Each part of the episodes is asked for the value of the policy that all other parts would have chosen. (The folds of
    pooled evaluation share coefficients; what that adds is far below the error.)

    Args:
        fold: parts that hold every logger, such as an Estimate's folds; if left out, each logger's episodes in turns.
    """
    x = np.atleast_2d(np.asarray(values, dtype=np.float64))
    who = np.zeros(x.shape[-1], dtype=np.int64) if logger is None else np.asarray(logger)
    found = sample(x, who, fold)
    top, error = int(found.mean.argmax()), float(found.standard_error[found.mean.argmax()])
    part = np.zeros(len(who), dtype=np.int64) if fold is None else np.array(fold)  # ours: it may be changed
    if len(np.unique(part)) < 2:
        check_number("parts", parts, 2)
        rounds = int(np.unique(who, return_counts=True)[1].min())
        for j in np.unique(who):
            part[who == j] = np.arange((who == j).sum()) % max(1, min(parts, rounds // 2))
    if len(np.unique(part)) < 2:
        return Winner(top, float(found.mean[top]), error, np.nan, np.nan)
    fresh = np.empty(x.shape[-1])
    for g in np.unique(part):
        fresh[part == g] = x[x[:, part != g].mean(-1).argmax(), part == g]
    again = sample(fresh, who, part)
    return Winner(top, float(found.mean[top]), error, float(again.mean[0]), float(again.standard_error[0]))


def probability(p: float) -> str:
    """For people: 20,000 draws can't tell 0 from 1 in 10,000."""
    return "<0.001" if p < 0.001 else ">0.999" if p > 0.999 else f"{p:.3f}"


def aligned(rows: list[tuple[str, ...]]) -> str:
    """Rows under each other, text to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = {0, len(widths) - 1}
    return "\n".join(
        "  ".join(
            x.ljust(w) if i in left else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _number(x: float) -> float | None:
    """None where something is unknown: JSON has no NaN and no infinity."""
    return float(x) if np.isfinite(x) else None
