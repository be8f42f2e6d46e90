"""More stored episodes than memory holds: in parts, each of which is pooled by itself, so that only values are kept.

A part holds every target in its share, by the numbers of its episodes, never by what happened in them. A target with
few episodes of its own has some in every part all the same, since W_t <= 1 / alpha_k holds there alone: its episodes
make fewer groups than there are parts, and a group serves several of them. With parts of N_p episodes, n different ones
in all of them, the estimate is the parts' mean by size,

    sum_p N_p / N' * (mean of part p) = 1 / n sum_i V_i,   N' = sum_p N_p,
    V_i = n / N' * the sum of the values that the parts give episode i,

so that it is as unbiased as every part is, and the V_i of a group and fold are independent and alike.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from manyfold.arrays import Ints
from manyfold.data.episodes import Episodes
from manyfold.estimate.evaluation import Estimate
from manyfold.estimate.pooled import FOLDS, folds_of

HELD = 2**28  # bytes of steps that are pooled together; of more, each such part is an estimate by itself
LEAST_ROUNDS = 6  # of such a part; of 10 are as good as all together, of 5 have a tenth more variance
LEAST = 4  # episodes of a logger, without which there are no folds to choose by


class Parts(NamedTuple):
    """Stored episodes by their numbers in what is known of the store."""

    group: Ints  # of each episode, one logger's, [N]
    each: tuple[Ints, ...]
    folds: int  # the same in all parts, so that those of a group are of one fold everywhere


def enough(episodes: Episodes) -> Episodes:
    """Without loggers of too few episodes to be in every fold, unless that leaves nothing."""
    counts = np.bincount(episodes.logger, minlength=episodes.n_loggers)
    keep = counts >= LEAST
    if not keep.any() or keep[episodes.logger].all():
        return episodes
    return episodes.chosen(keep[episodes.logger])


def divided(logger: Ints, steps: Ints, targets: int, a_step: float, an_episode: float, held: float = HELD) -> Parts:
    """As few parts as stay within `held` bytes, or the smallest ones.

    Args:
        logger: who ran each episode, in increasing order, targets first, `[N]`.
        steps: of each, `[N]`.
        a_step, an_episode: bytes.
    """
    counts, size = np.bincount(logger), np.bincount(logger, weights=steps)
    kept = counts >= LEAST if (counts >= LEAST).any() else counts > 0
    target = np.arange(len(counts)) < targets

    def groups(number: int) -> Ints:
        """Of each logger: others are spread over the parts, or all of theirs are in one."""
        few = np.minimum(number, np.maximum(counts // LEAST_ROUNDS, 1))
        return np.where(target, few, np.where(few < number, 1, number))

    def needed(number: int) -> float:
        """Bytes of a part."""
        share = np.where(kept, 1 / np.where(target, groups(number), number), 0.0)
        return max(a_step * float(size @ share), an_episode * float(counts @ share))

    most = 4 * int(needed(1) // held) + 1
    number = next((p for p in range(1, most + 1) if needed(p) <= held), None)
    number = number or min(range(1, most + 1), key=needed)
    of_logger = groups(number)
    place = np.arange(len(logger)) - (np.cumsum(counts) - counts)[logger]  # among its logger's own
    group = place * of_logger[logger] // counts[logger]
    alone = kept & ~target & (of_logger == 1) & (number > 1)
    middle = np.cumsum(np.where(alone, counts, 0)) - counts / 2
    part = (middle * number // max(1, counts[alone].sum())).astype(np.int64)  # where those are that are in one
    each = []
    for p in range(number):
        here = np.where(alone[logger], part[logger] == p, group == p % of_logger[logger])
        each.append(np.flatnonzero(here & kept[logger]))
    folds = min(folds_of(logger[one])[1] for one in each)
    first = np.cumsum(of_logger) - of_logger
    return Parts(first[logger] + group, tuple(each), folds or FOLDS)


def estimated(
    parts: Parts,
    logger: Ints,
    described: Callable[[Ints], Episodes],
    pooled: Callable[[Episodes, int], Estimate],
    progress: Callable[[str], None] = lambda said: None,
) -> Estimate:
    """All parts, one after the other.

    Args:
        logger: who ran each stored episode, `[N]`.
        described: some of them.
        pooled: an estimate of these with so many folds.
        progress: sees which part is read.
    """
    rows = np.unique(np.concatenate(parts.each))
    n, together = len(rows), sum(map(len, parts.each))
    scale, recipes = n / together, list[tuple[str, ...]]()
    fold, returns, lengths = np.empty(n, dtype=np.int64), np.empty(n), np.empty(n, dtype=np.int64)
    for p, some in enumerate(parts.each):
        progress(f"stored episodes, part {p + 1} of {len(parts.each)}")
        episodes, here = described(some), np.searchsorted(rows, some)
        one = pooled(episodes, parts.folds)
        if not p:
            k = len(one.names)
            values, log_w, covariance = np.zeros((k, n)), np.full((k, n), -np.inf), np.zeros((k, k))
        values[:, here] += scale * one.values
        log_w[:, here] = np.logaddexp(log_w[:, here], one.log_weights)
        fold[here], returns[here], lengths[here] = one.fold, episodes.returns, episodes.lengths
        covariance += one.episodes / together * one.start_covariance  # at most: other starts are the same in all parts
        recipes += one.recipes
    log_w += np.log(scale)
    own = tuple(returns[logger[rows] == k] for k in range(len(one.names)))
    group = parts.group[rows]
    return Estimate(one.names, values, group, fold, own, log_w, covariance, tuple(recipes), int(lengths.sum()))
