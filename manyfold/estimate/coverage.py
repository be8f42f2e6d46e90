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
from manyfold.estimate.diagnostics import diagnose, hardly_vary, trust
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
    best: int | None  # the policy that is claimed to be the best


class Along(NamedTuple):
    """Of one run that was looked at again and again."""

    held: bool  # the anytime intervals of all policies, at all looks
    best: int | None  # the first that was claimed to be the best
    wrong: bool  # whether some look claimed one that is not


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


def untrusted_of(estimator: str, values: runs.Values, episodes: int) -> Bools:
    """Which policies' estimates can't be trusted, by the diagnosis of the first episodes of a run, `[K]`.

    Where the policies log their own episodes, by the plain returns of these as well.
    """
    method = METHODS[estimator]
    log_w, x = values[method.loggers, method.weights][..., :episodes], values_of(estimator, values, episodes)[0]
    if method.own:
        log_w, x = (np.stack([y[i, i :: len(y)] for i in range(len(y))]) for y in (log_w, x))
    untrusted = np.array([bool(said) for said in trust(diagnose(log_w, x))])
    if method.loggers == "targets":
        plain = values["targets", "pdis"][..., :episodes]
        untrusted |= [bool(said) for said in hardly_vary([y[i :: len(plain)] for i, y in enumerate(plain)])]
    return untrusted


def at_once(found: Sample, truth: Array, alpha: float = 0.05) -> Held:
    """What holds of a run that was looked at once."""
    first, second = found.pairs
    each, pairs = found.each(), found.differences()
    own = p_values(each, truth)
    return Held(
        own >= alpha,
        _all_hold(found, each, own, alpha),
        _all_hold(found, pairs, p_values(pairs, truth[first] - truth[second]), alpha),
        claimed_best(found, pairs, alpha),
    )


def along(path: Iterable[Sample], truth: Array, alpha: float = 0.05, around: float = AROUND) -> Along:
    """What holds of a run at all looks."""
    held, first, wrong = True, None, False
    for found in path:
        held &= bool(holds(intervals.anytime(found.each(), alpha / len(truth), around), truth).all())
        best = ranking.best(found, alpha, anytime=True, around=around)
        first, wrong = best if first is None else first, wrong or is_wrong(best, truth)
    return Along(held, first, wrong)


def is_wrong(best: int | None, truth: Array) -> bool:
    """Whether a policy is claimed to be the best while another is better; one of several equal bests is not wrong."""
    return best is not None and bool(truth[best] < truth.max() - TIE)


def claimed_best(found: Sample, pairs: Contrasts, alpha: float = 0.05) -> int | None:
    """`ranking.best` of one look, mostly without its joint levels: each is between alpha / K and alpha."""
    k, (first, second) = len(found.names), found.pairs
    real = pairs.error > 0
    t = pairs.estimate / np.where(real, pairs.error, 1.0)
    p = np.ones((k, k))  # of "the row is no better than the column"
    p[first, second] = np.where(real, stats.t.sf(t, pairs.freedom), np.where(t > 0, 0.0, 1.0))
    p[second, first] = np.where(real, stats.t.sf(-t, pairs.freedom), np.where(t < 0, 0.0, 1.0))
    others = np.delete(p.min(0), found.mean.argmax())
    if (others >= alpha).any():
        return None
    if (others < alpha / max(2, k)).all():
        return int(found.mean.argmax())
    return ranking.best(found, alpha)


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
    path: Along  # to the last episode


def of_runs(
    estimators: Sequence[str], run: Sequence[runs.Values], truth: Array, points: Ints, last: int
) -> dict[str, list[Followed]]:
    """What held of every estimator and run, after `points` episodes and along the path to the last episode."""
    k = len(truth)
    at = [rounds * k for rounds in looks(last // k, points // k)]
    found: dict[str, list[Followed]] = {}
    for name in estimators:
        paths = samples_of(name, run, at)
        found[name] = [
            Followed([at_once(p[n], truth) for n in points.tolist()], along(p.values(), truth)) for p in paths
        ]
    return found


def samples_of(estimator: str, run: Sequence[runs.Values], at: Sequence[int]) -> list[dict[int, Sample]]:
    """`sample_of` of several runs after several numbers of episodes; pooled evaluation combines all runs at once."""
    method = METHODS[estimator]
    if method.returns != "pooled":
        return [{n: sample_of(estimator, values, n) for n in at} for values in run]
    x = np.stack([values[method.loggers, method.returns] for values in run])
    found: list[dict[int, Sample]] = [{} for _ in run]
    for n in at:
        logger = np.arange(n) % n_loggers(method.loggers, x.shape[-2])
        fold = pooled.folds_of(logger)[0]
        for path, values in zip(found, pooled_values(x[..., :n]), strict=True):
            path[n] = sample(values, logger, fold)
    return found


def pooled_values(x: Array) -> Array:
    """`pooled.in_turns` of R runs at once, which is several times as fast, `[R, 4 + J, K, N] -> [R, K, N]`."""
    n, j = x.shape[-1], x.shape[1] - pooled.FIXED - 1
    logger = np.arange(n) % j
    fold, folds = pooled.folds_of(logger)
    if not folds:
        return np.stack([pooled.in_turns(runs.columns_of(one)) for one in x])
    columns = np.moveaxis(np.concatenate([x[:, :1], x[:, 1:2] - x[:, :1], x[:, 2:]], 1), 1, -1)  # [R, K, N, C]
    choices = pooled.recipes([pooled.Start("baseline 0", (0,))], 1, j)
    parts = [columns[..., fold == g, :] for g in range(folds)]
    sizes, first = np.array([part.shape[-2] for part in parts]), np.stack([part.sum(-2) for part in parts])
    second, out = np.stack([part.mT @ part for part in parts]), np.empty((*columns.shape[:2], n))
    for f in range(folds):
        train = [g for g in range(folds) if g != f]
        within = []
        means = np.stack([columns[..., (fold != f) & (logger == i), :].mean(-2) for i in range(j)], -2)  # [R, K, J, C]
        for g in train:
            rest = parts[g] - means[..., logger[fold == g], :]
            within.append(rest.mT @ rest)
        _, fitted = pooled.choose(first[train], second[train], sizes[train], np.stack(within), choices, j)
        out[..., fold == f] = np.einsum("rknc,rkc->rkn", parts[f], fitted)
    return out


def shares(found: Sequence[Followed]) -> Array:
    """The share that held of each of KINDS after each number of episodes, `[points, 4]`; anytime is the path's."""
    fixed = [[(held.single.mean(), held.simultaneous, held.difference) for held in run.fixed] for run in found]
    mean = np.mean(fixed, 0)
    return np.column_stack([mean, np.full(len(mean), np.mean([run.path.held for run in found]))])
