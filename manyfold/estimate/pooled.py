"""Pooled evaluation: every episode of every logger serves all K policies, and never costs more than on-policy MC.

The targets themselves (other loggers may join) run in turns. The mixture of whole episodes acts like one
history-dependent behavior policy, so the prefix balance weights

    W_t = prod_{i<=t} pi_k / sum_j alpha_j prod_{i<=t} mu_j  <=  1 / alpha_k,   alpha_j = n_j / n,

never exceed 1 / alpha_k, however long the episode. From them, for each episode and policy, estimates of J(pi_k) and
controls, which all have mean 0 under the mixture:

    own        G / alpha_k where logger k ran the episode, 0 elsewhere: on-policy MC itself
    whole      W_T G, one weight for the whole episode's return G
    decisions  sum_t (W_t - W_T) R_{t+1}: whole + decisions is the per-decision return
    D          sum_t (W_{t-1} v_t - W_t q_t), q a baseline and v_t = sum_a pi q: whole + decisions + D is doubly robust
    loggers    W^j_T - 1 of each logger j

An episode's value is own + coefficients times controls. The coefficients come from the other folds of the same episodes
(folds hold every logger in its share), so the estimate is exactly unbiased. Which controls are used, fitted or not, is
decided by cross-validation within those other folds: recipes are averaged, weighted by one over the third power of
their variance within loggers there (after few rounds, that of all policies together). `own` is one of the recipes, so
what the controls cannot do costs little.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from manyfold.arrays import Array, Bools, Ints, check_number, check_shape
from manyfold.estimate import many

FOLDS = 5
RIDGE = 0.1  # of correlations between controls; 0.03 and 0.3 side by side were no better over 50 random sets
SHARP = 3  # recipes are averaged, weighted by this power of one over their variance; the best alone was worse
LENT = 5  # rounds: all policies together count as so many of one policy's own when recipes are weighed
ROUNDING = 1e-9  # of returns, or of weights: controls that never are larger are none
MANY = 32  # loggers, from which on their columns are kept once for all policies
FIXED = 3  # columns before the baselines': own, whole - own, decisions


class Columns(NamedTuple):
    """What an episode says of each policy, before coefficients; estimates and controls as in the module's docstring."""

    own: Array  # [K, N]
    whole: Array  # [K, N]
    decisions: Array  # [K, N]
    baselines: Array  # D of each baseline as fold f sees it, [B, F, K, N]; F = 1 where a baseline needs no fold
    loggers: Array  # [J, N]


class Recipe(NamedTuple):
    """A start and which coefficients are fitted from there."""

    name: str
    start: Array  # [C]
    free: Ints  # columns whose coefficients are fitted; none: the start as it is
    ridge: float


@dataclass(frozen=True)
class Pooled:
    """The values of all episodes; their mean is the estimate."""

    values: Array  # [K, N]
    recipes: tuple[tuple[str, ...], ...]  # chosen for each fold and policy
    fold: Ints  # of each episode, [N]
    coefficients: Array  # of the baselines' controls, for each fold and policy, [F, K, B]

    @property
    def mean(self) -> Array:
        """J(pi_k), `[K]`."""
        return self.values.mean(-1)


def folds_of(logger: ArrayLike, folds: int = FOLDS) -> tuple[Ints, int]:
    """The fold of each episode, `[N]`, and their number: each logger's episodes go to the folds in turns.

    Three folds are the least: two to compare recipes by, one to apply the choice to; and one of them needs two episodes
    of every logger, which have a variance. With fewer than four rounds there are none (0).
    """
    who = np.asarray(logger)
    counts = np.bincount(who)
    check_number("folds", folds, 3, 1000)
    rounds = int(counts[counts > 0].min())
    number = min(folds, max(3, rounds // 2)) if rounds >= 4 else 0
    order = np.empty(len(who), dtype=np.int64)
    for j in range(len(counts)):
        order[who == j] = np.arange(counts[j])
    return (order % number if number else np.zeros_like(order)), number


def shares_of(logger: Ints, fold: Ints, loggers: int) -> Array:
    """alpha_j = n_j / n within each episode's own fold, so that each fold is unbiased by itself; `[J, N]`."""
    counts = np.zeros((fold.max(initial=0) + 1, loggers))
    np.add.at(counts, (fold, logger), 1)
    return (counts / counts.sum(1, keepdims=True))[fold].T


def log_weights(
    log_targets: Array, log_loggers: Array, shares: Array, lengths: Ints | None = None
) -> tuple[Array, Array]:
    """log W_t of every target `[K, N, T]`, and log W^j_T of every logger `[J, N]`.

    Args:
        log_targets, log_loggers: log-probabilities of the actions taken, `[K, N, T]` and `[J, N, T]`, 0 behind an end.
        shares: alpha of each episode, `[J, N]`.
    """
    targets, loggers = np.cumsum(log_targets, -1), np.cumsum(log_loggers, -1)
    with np.errstate(divide="ignore"):
        mixture = np.logaddexp.reduce(loggers + np.log(shares)[..., None], axis=0)  # [N, T]
    if np.isneginf(mixture).any():
        n, t = np.unravel_index(int(np.isneginf(mixture).argmax()), mixture.shape)
        raise ValueError(f"no logger could have run episode {n} up to t={t}; are these its loggers?")
    return targets - mixture, loggers[..., -1] - mixture[..., -1]


def columns(
    rewards: Array,
    log_w: Array,
    log_w_loggers: Array,
    logger: Ints,
    own: Ints,
    shares: Array,
    baselines: Sequence[tuple[Array, Array]] = (),
) -> Columns:
    """The columns of N episodes.

    Args:
        rewards: `[N, T]`, 0 behind an end.
        log_w, log_w_loggers: of `log_weights`.
        logger: who ran each episode, `[N]`.
        own: the logger that is target k itself, -1 where none is, `[K]`.
        shares: alpha of each episode, `[J, N]`.
        baselines: (b at the action taken, its expectation under the target), `[K, N, T]` each, 0 behind an end.
    """
    w, g = np.exp(log_w), rewards.sum(-1)
    check_shape("rewards", rewards, w.shape[1:], "[N, T]")
    w_end = w[..., -1]  # [K, N]
    whole = w_end * g
    decisions = np.einsum("knt,nt->kn", w, rewards) - whole
    before = np.concatenate([np.ones_like(w[..., :1]), w[..., :-1]], -1)
    found = [(before * expected - w * taken).sum(-1) for taken, expected in baselines]
    d = np.stack(found)[:, None] if found else np.empty((0, 1, *whole.shape))
    mine = np.where(logger == own[:, None], g / np.where(own[:, None] < 0, 1.0, shares[own]), 0.0)
    mine = np.where(own[:, None] < 0, whole, mine)
    return Columns(mine, whole, decisions, d, np.exp(log_w_loggers) - 1)


class Start(NamedTuple):
    """A baseline by its name: the controls that, with coefficient 1, make it doubly robust."""

    name: str
    controls: tuple[int, ...]  # of `Columns.baselines`


def recipes(baselines: Sequence[Start], size: int, loggers: int, ridge: float = RIDGE) -> list[Recipe]:
    """All recipes: own, whole, per-decision and doubly robust starts, as they are or with fitted controls.

    Args:
        size: controls of the baselines, B.
    """
    first, total = FIXED + size, FIXED + size + loggers
    weights, inner = (
        np.arange(first, total),
        np.arange(2, total),
    )  # whole - own is rounding where policies are far apart
    starts = {"own": [0], "whole": [0, 1], "decisions": [0, 1, 2]}
    starts |= {name: [0, 1, 2, *(FIXED + b for b in controls)] for name, controls in baselines}
    found = []
    for name, ones in starts.items():
        start = np.zeros(total)
        start[ones] = 1.0
        found.append(Recipe(name, start, np.empty(0, dtype=np.int64), 0.0))
        if name != "own":
            found.append(Recipe(f"{name}, loggers fitted", start, weights, ridge))
            found.append(Recipe(f"{name}, all fitted", start, inner, ridge))
    return found


def combine(
    found: Columns,
    logger: Ints,
    fold: Ints,
    folds: int,
    baselines: Sequence[Start] | None = None,
    few: int | None = None,
) -> Pooled:
    """Cross-fitted values of all episodes; on-policy MC where there are no folds.

    Args:
        baselines: the starts that are tried; if left out, every baseline's control is one by itself.
        few: a baseline that is taken where there are no folds, by its number: without a look at the episodes.
    """
    (k, n), b = found.whole.shape, len(found.baselines)
    starts = [Start(f"baseline {i}", (i,)) for i in range(b)] if baselines is None else baselines
    choices = recipes(starts, b, len(found.loggers))
    if not folds:
        name = "own" if few is None else starts[few].name
        start = next(recipe.start for recipe in choices if recipe.name == name)
        return Pooled(_matrix(found, 0) @ start, (), fold, np.broadcast_to(start[FIXED : FIXED + b], (1, k, b)))
    values, chosen, fitted = np.empty((k, n)), [], np.empty((folds, k, b))
    for f in range(folds):
        train, here = [g for g in range(folds) if g != f], fold == f
        if len(found.loggers) < MANY:
            x = _matrix(found, f)  # [K, N, C]
            picked, coefficients = _choose(x, logger, fold, train, choices, len(found.loggers))
            values[:, here] = np.einsum("knc,kc->kn", x[:, here], coefficients)
        else:
            own, shared = _own(found, f), _loggers(found)
            best, sizes = many.solved(own, shared, logger, fold, train, choices)
            weights = _weights(best.scores, sizes[:, None, None], len(shared[0]))
            coefficients, z = (np.einsum("rk,rkc->kc", weights, x) for x in (best.own, best.loggers))
            picked = weights.argmax(0)
            values[:, here] = np.einsum("knc,kc->kn", own[:, here], coefficients) + z @ shared[here].T
        chosen.append(tuple(choices[i].name for i in picked))
        fitted[f] = coefficients[:, FIXED : FIXED + b]
    return Pooled(values, tuple(chosen), fold, fitted)


def _matrix(found: Columns, f: int) -> Array:
    """All columns as fold f sees them, own first; `[K, N, C]`."""
    own, loggers = _own(found, f), _loggers(found)
    return np.concatenate([own, np.broadcast_to(loggers, (len(own), *loggers.shape))], -1)


def _own(found: Columns, f: int) -> Array:
    """Those of each policy, `[K, N, FIXED + B]`."""
    d = found.baselines[:, min(f, found.baselines.shape[1] - 1)]
    x = np.stack([found.own, found.whole - found.own, found.decisions, *d], -1)
    x *= (np.abs(x).max(1) > ROUNDING * np.abs(found.own).max(1)[:, None])[:, None]
    return x


def _loggers(found: Columns) -> Array:
    """Those of the loggers, the same for all policies, `[N, J]`."""
    # where all policies act alike, W - 1 is rounding: no mean of 0
    return np.asarray((found.loggers * (np.abs(found.loggers).max(1) > ROUNDING)[:, None]).T)


def _choose(
    x: Array, logger: Ints, fold: Ints, train: list[int], choices: list[Recipe], loggers: int
) -> tuple[Ints, Array]:
    """The recipe of the smallest cross-validated variance within loggers, and its coefficients, `[K]` and `[K, C]`."""
    parts = [x[:, fold == g] for g in train]
    first, second = np.stack([part.sum(1) for part in parts]), np.stack([part.mT @ part for part in parts])
    sizes = np.array([part.shape[1] for part in parts])
    return choose(first, second, sizes, np.stack(_within(x, logger, fold, train)), choices, loggers)


def choose(
    first: Array, second: Array, sizes: Array, within: Array, choices: list[Recipe], loggers: int
) -> tuple[Ints, Array]:
    """The best recipe and all of them averaged, `[..., K]` and `[..., K, C]`, from the moments of G training folds.

    Args:
        first, second: sums of x and of its products over each fold, `[G, ..., K, C]` and `[G, ..., K, C, C]`.
        sizes: episodes of each fold, `[G]` or `[G, ...]`.
        within: products of x about its loggers' means, `[G, ..., K, C, C]`.
        choices: `recipes`, `own` first.

    From a few rounds nobody can tell one policy's recipes apart, so each borrows from all: what a recipe leaves of
    on-policy MC's variance, of all policies together, counts as LENT rounds.
    """
    n = sizes.reshape(*sizes.shape, *[1] * (first.ndim - sizes.ndim))  # [G, ..., 1, 1]

    def covariance(left_out: int | None) -> Array:
        which = [i for i in range(len(first)) if i != left_out]
        count = n[which].sum(0)
        mean = first[which].sum(0) / count
        return np.asarray(second[which].sum(0) / count[..., None] - mean[..., :, None] * mean[..., None, :])

    covariances = np.stack([covariance(None), *(covariance(i) for i in range(len(first)))])  # [1 + G, ..., K, C, C]
    scores, coefficients = [], []
    for fits in ridges(covariances, choices):
        coefficients.append(fits[0])
        scores.append(np.einsum("...c,...cd,...d->...", fits[1:], within, fits[1:], optimize=True).sum(0))
    weights = _weights(np.stack(scores), n, loggers)
    return weights.argmax(0), np.einsum("r...,r...c->...c", weights, np.stack(coefficients))


def _weights(found: Array, n: NDArray[Any], loggers: int) -> Array:
    """Of every recipe `[R, ..., K]`, by what it leaves of the variance; `n` episodes of each fold, `[G, ..., 1, 1]`."""
    own, total = found[:1], found.sum(-1, keepdims=True)
    relative = np.divide(total, total[:1], out=np.ones_like(total), where=total[:1] > 0)
    found = found + LENT * loggers / n.sum(0)[..., 0] * own * relative
    least = found.min(0)
    weights = np.where(found > least, np.divide(least, found, out=np.ones_like(found), where=found > 0) ** SHARP, 1.0)
    return np.asarray(weights / weights.sum(0))


def _within(x: Array, logger: Ints, fold: Ints, train: list[int]) -> list[Array]:
    """Second moments about the loggers' means over all training folds, of each fold; `[K, C, C]` each."""
    inside = np.isin(fold, train)
    means = np.zeros((x.shape[0], logger.max() + 1, x.shape[-1]))
    for j in np.unique(logger):
        means[:, j] = x[:, inside & (logger == j)].mean(1)
    out = []
    for g in train:
        rest = x[:, fold == g] - means[:, logger[fold == g]]
        out.append(rest.mT @ rest)
    return out


def ridges(covariance: Array, choices: list[Recipe]) -> list[Array]:
    """Coefficients of every recipe: those that minimise the variance of x . c, shrunk towards its start.

    `[..., C, C] -> [..., C]` each. Recipes that fit the same columns share one system of equations.
    """
    out = [np.broadcast_to(recipe.start, covariance.shape[:-1]).copy() for recipe in choices]
    for key in {(tuple(recipe.free.tolist()), recipe.ridge) for recipe in choices if len(recipe.free)}:
        same = [i for i, recipe in enumerate(choices) if (tuple(recipe.free.tolist()), recipe.ridge) == key]
        free, starts = choices[same[0]].free, np.stack([choices[i].start for i in same], -1)  # [C, S]
        some = covariance[..., free, :][..., free]
        variance = np.einsum("...cc->...c", some)
        scale = np.sqrt(np.where(variance > 0, variance, 1.0))
        left = some / (scale[..., :, None] * scale[..., None, :]) + key[1] * np.eye(len(free))
        right = -(covariance[..., free, :] @ starts) / scale[..., None]
        found = np.linalg.solve(left, right) / scale[..., None]  # [..., free, S]
        for s, i in enumerate(same):
            out[i][..., free] += found[..., s]
    return out


def in_turns(found: Columns) -> Array:
    """`combine` of loggers in turns: the values of all episodes, `[K, N]`."""
    logger = np.arange(found.whole.shape[-1]) % len(found.loggers)
    fold, folds = folds_of(logger)
    return combine(found, logger, fold, folds, few=0 if len(found.baselines) else None).values


def at_points(found: Columns, points: Ints) -> tuple[Array, Array]:
    """Estimates after each number of episodes `[points, K]`, and n times the variance after the last, `[K]`.

    For loggers in turns (episode i is logger i mod J's) and baselines that need no fold: `combine` of the first n
    episodes, for all n at once, since moments are sums over rounds. With fewer than four rounds, where nothing can be
    chosen, the first baseline's doubly robust return is taken if there is one: a q that was fitted for the purpose.
    Coefficients are found anew when episodes have grown by a fifth, and at the last point; others take the last ones.
    """
    x, j = _matrix(found, 0), len(found.loggers)  # [K, N, C]
    k, _, c = x.shape
    b = len(found.baselines)
    choices = recipes([Start(f"baseline {i}", (i,)) for i in range(b)], b, j)
    out, rounds = np.empty((len(points), k)), points // j
    many = np.flatnonzero(rounds >= 2 * FOLDS)
    last = np.empty((0, 0))
    for i in np.flatnonzero(rounds < 2 * FOLDS):
        logger = np.arange(points[i]) % j
        fold, folds = folds_of(logger)
        cut = Columns(*(part[..., : points[i]] for part in found))
        last = combine(cut, logger, fold, folds, few=0 if b else None).values
        out[i] = last.mean(-1)
    if not len(many):
        return out, _stratified(last, j, max(folds, 1))
    by_round = x[:, : rounds[-1] * j].reshape(k, rounds[-1], j, c)
    sums = np.zeros((FOLDS, len(many), k, j, c))  # of each logger's episodes
    second = np.zeros((FOLDS, len(many), k, c, c))
    sizes = np.zeros((FOLDS, len(many)))
    for g in range(FOLDS):
        part = by_round[:, g::FOLDS]
        until = (rounds[many] - g + FOLDS - 1) // FOLDS - 1  # index of the last round that counts
        sums[g] = np.moveaxis(part.cumsum(1)[:, until], 1, 0)
        second[g] = np.moveaxis((part.mT @ part).cumsum(1)[:, until], 1, 0)
        sizes[g] = until + 1
    grown = _grown(rounds[many])
    at, latest = np.flatnonzero(grown), np.cumsum(grown) - 1  # where coefficients are found, and whose a point takes
    first, coefficients = sums.sum(-2), np.empty((FOLDS, len(many), k, c))
    for f in range(FOLDS):
        train = [g for g in range(FOLDS) if g != f]
        s, n = sums[train][:, at], sizes[train][:, at]
        means = s.sum(0) / n.sum(0)[:, None, None, None]  # [points, K, J, C]
        cross = s.mT @ means[None]  # [G, points, K, C, C]
        spread = second[train][:, at] - cross - cross.mT + n[:, :, None, None, None] * (means.mT @ means)[None]
        _, fitted = choose(first[train][:, at], second[train][:, at], n * j, spread, choices, j)
        coefficients[f] = fitted[latest]
    out[many] = np.einsum("gpkc,gpkc->pk", first, coefficients) / points[many][:, None]
    values = np.empty((k, rounds[-1], j))
    for f in range(FOLDS):
        values[:, f::FOLDS] = np.einsum("krjc,kc->krj", by_round[:, f::FOLDS], coefficients[f, -1])
    return out, _stratified(values.reshape(k, -1), j, FOLDS)


def _grown(counts: Ints) -> Bools:
    """The first, the last, and each that is a fifth more than the last one of these before it; `[points]`."""
    out, last = np.zeros(len(counts), dtype=np.bool_), 0.0
    for i, count in enumerate(counts):
        if count >= 1.2 * last or i == len(counts) - 1:
            out[i], last = True, float(count)
    return out


def _stratified(values: Array, loggers: int, folds: int) -> Array:
    """`within` of loggers in turns and their folds, `[K, N] -> [K]`."""
    rounds = np.arange(values.shape[-1] // loggers)
    return within(values, np.tile(np.arange(loggers), len(rounds)), np.repeat(rounds % folds, loggers))


def within(values: Array, logger: Ints, fold: Ints) -> Array:
    """The variance of a value within loggers, weighted by their episodes; `[K, N] -> [K]`."""
    return np.asarray((centred(values, logger, fold) ** 2).mean(-1))


def centred(values: Array, logger: Ints, fold: Ints) -> Array:
    """Values about the mean of their logger and fold, scaled so that their squares have the variance as mean; `[K, N]`.

    Values of one fold are made by coefficients of their own, so folds may differ in what they give which logger's
    episodes, without any error in the sum.
    """
    out = np.empty_like(values)
    for j in np.unique(logger):
        here, freedom = np.flatnonzero(logger == j), 0
        for f in np.unique(fold[here]):
            some = here[fold[here] == f]
            out[:, some] = values[:, some] - values[:, some].mean(-1, keepdims=True)
            freedom += len(some) - 1
        if not freedom:
            raise ValueError(f"logger {j} has one episode, expected at least 2: one has no variance")
        out[:, here] *= np.sqrt(len(here) / freedom)
    return out
