"""Do intervals and decisions hold? Where the truth is known, runs can be counted.

    found = sample_of("pooled", values, 100)   # of a run's episodes
    held = at_once(found, truth)               # a fixed number of episodes
    held, wrong = along(path, truth)           # the same run, looked at again and again

An interval holds where the p-value of the truth is not below its level. Of several at once that level is between alpha
divided by their number and alpha, which decides most runs without the level itself.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from manyfold.arrays import Array, Bools, Ints
from manyfold.estimate import intervals, pooled, ranking, runs
from manyfold.estimate.intervals import AROUND, Contrasts, Interval, Sample, sample
from manyfold.estimate.methods import METHODS, n_loggers

KINDS = ("single", "simultaneous", "difference", "anytime")
FIRST = 5  # rounds, at the first look
GROWTH = 1.2  # of the rounds from look to look
TIE = 1e-9  # policies so near the best are as good as the best; an interval of no width may be so far off


class Held(NamedTuple):
    """Of one run after a fixed number of episodes."""

    single: Bools  # each policy's own interval, [K]
    simultaneous: bool
    difference: bool
    wrong: bool  # a best policy is claimed, and it is another one


def looks(rounds: int, also: Iterable[int] = ()) -> list[int]:
    """Rounds at which a run is looked at, growing by a fifth up to the last one."""
    found, last = {rounds, *(x for x in also if x <= rounds)}, float(FIRST)
    while round(last) < rounds:
        found.add(round(last))
        last *= GROWTH
    return sorted(found)


def sample_of(estimator: str, values: runs.Values, episodes: int, names: tuple[str, ...] | None = None) -> Sample:
    """What an estimator of `METHODS` says after the first episodes of a run, whose loggers ran in turns."""
    return sample(*values_of(estimator, values, episodes), names)


def values_of(estimator: str, values: runs.Values, episodes: int) -> tuple[Array, Ints, Ints]:
    """The values whose mean is the estimate `[K, N]`, and the logger and fold of each episode.

    An estimator that uses own episodes alone gives policy k's return K times where logger k ran the episode, 0
    elsewhere: the mean is the same, and policies have nothing in common.
    """
    method = METHODS[estimator]
    x = values[method.loggers, method.returns][..., :episodes]
    k = x.shape[-2]
    logger = np.arange(episodes) % n_loggers(method.loggers, k)
    if method.returns == "pooled":
        return pooled.in_turns(runs.columns_of(x)), logger, pooled.folds_of(logger)[0]
    if method.own:
        x = np.where(logger == np.arange(k)[:, None], k * x, 0.0)
    return x, logger, np.zeros_like(logger)


def at_once(found: Sample, truth: Array, alpha: float = 0.05) -> Held:
    """What holds of a run that was looked at once."""
    first, second = found.pairs
    each, pairs = found.each(), found.differences()
    own = p_values(each, truth)
    return Held(
        own >= alpha,
        _all_hold(found, each, own, alpha),
        _all_hold(found, pairs, p_values(pairs, truth[first] - truth[second]), alpha),
        is_wrong(found, truth, alpha),
    )


def along(path: Iterable[Sample], truth: Array, alpha: float = 0.05, around: float = AROUND) -> tuple[bool, bool]:
    """Whether the anytime intervals of all policies hold at all looks, and whether the first best policy is wrong."""
    held, wrong, claimed = True, False, False
    for found in path:
        held &= bool(holds(intervals.anytime(found.each(), alpha / len(truth), around), truth).all())
        if not claimed and (best := ranking.best(found, alpha, anytime=True, around=around)) is not None:
            claimed, wrong = True, bool(truth[best] < truth.max() - TIE)
    return held, wrong


def is_wrong(found: Sample, truth: Array, alpha: float = 0.05) -> bool:
    """Whether a best policy is claimed that is not; only the one of the highest mean can be."""
    return bool(truth[found.mean.argmax()] < truth.max() - TIE) and ranking.best(found, alpha) is not None


def holds(interval: Interval, truth: Array) -> Bools:
    """Each by itself."""
    return np.asarray((interval.low - TIE <= truth) & (truth <= interval.high + TIE))


def p_values(found: Contrasts, truth: Array) -> Array:
    """Two-sided, of the truth: a two-sided interval holds where it is at least the interval's level."""
    real = found.error > 0
    t = np.abs(found.estimate - truth) / np.where(real, found.error, 1.0)
    return np.where(real, 2 * stats.t.sf(t, found.freedom), np.where(t <= TIE, 1.0, 0.0))


def _all_hold(found: Sample, every: Contrasts, p: Array, alpha: float) -> bool:
    """Whether all intervals at one joint level hold."""
    least = p.min(initial=1.0)
    if least >= alpha or least < alpha / max(1, len(p)):
        return bool(least >= alpha)
    return bool(least >= intervals.joint_level(found, every.weights, alpha))


class Followed(NamedTuple):
    """One run."""

    fixed: list[Held]  # after each number of episodes
    anytime: bool
    wrong: bool  # as the first look said that claimed a best policy


def of_runs(
    estimators: Sequence[str], run: Iterable[runs.Values], truth: Array, points: Ints, last: int
) -> dict[str, list[Followed]]:
    """What held of every estimator and run, after `points` episodes and along the path to the last episode."""
    found: dict[str, list[Followed]] = {name: [] for name in estimators}
    k = len(truth)
    at = looks(last // k, points // k)
    for values in run:
        for name in estimators:
            path = {rounds * k: sample_of(name, values, rounds * k) for rounds in at}
            fixed = [at_once(path[n], truth) for n in points.tolist()]
            found[name].append(Followed(fixed, *along(path.values(), truth)))
    return found


def shares(found: Sequence[Followed]) -> Array:
    """The share that held of each of KINDS after each number of episodes, `[points, 4]`; anytime is the path's."""
    fixed = [[(held.single.mean(), held.simultaneous, held.difference) for held in run.fixed] for run in found]
    mean = np.mean(fixed, 0)
    return np.column_stack([mean, np.full(len(mean), np.mean([run.anytime for run in found]))])
