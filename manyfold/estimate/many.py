"""Coefficients of pooled evaluation where loggers are many: their columns, the same for every policy, are held once.

`pooled.choose` solves a system of C = P + J columns for each policy, P its own ones and J the loggers'. Of these

    [A_k  B_k] [y]   [r_k]        A_k [P, P],  B_k [P, J],  D [J, J]
    [B_k' D  ] [z] = [s_k],

D is one for all policies: it is factored once, and (A_k - B_k D^-1 B_k') y = r_k - B_k D^-1 s_k is a small system each.
Moments are kept in the same three parts, so neither [K, N, C] nor [K, C, C] is ever held.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from manyfold.arrays import Array, Bools, Ints

if TYPE_CHECKING:  # which imports this module
    from manyfold.estimate.pooled import Recipe


class Parts(NamedTuple):
    """Sums of products of columns: of each policy's own, of these with the loggers', of the loggers'."""

    own: Array  # [K, P, P]
    mixed: Array  # [K, P, J]
    loggers: Array  # [J, J]

    def form(self, own: Array, loggers: Array) -> Array:
        """c' M c of coefficients c, `[R, K, P]` and `[R, K, J]` -> `[R, K]`."""
        found = np.einsum("rkp,kpq,rkq->rk", own, self.own, own, optimize=True)
        rows = loggers.reshape(-1, loggers.shape[-1])
        found += ((rows @ self.loggers) * rows).sum(-1).reshape(found.shape)
        along = (np.moveaxis(loggers, 0, 1) @ self.mixed.mT) * np.moveaxis(own, 0, 1)  # [K, R, P]
        return np.asarray(found + 2 * along.sum(-1).T)


def products(own: Array, loggers: Array) -> Parts:
    """Of columns `[K, n, P]` and `[n, J]`."""
    k, n, p = own.shape
    mixed = np.moveaxis(own, 1, 2).reshape(k * p, n) @ loggers
    return Parts(own.mT @ own, mixed.reshape(k, p, -1), loggers.T @ loggers)


class Solved(NamedTuple):
    """Of every recipe: what it leaves of the variance in the folds that did not fit it, and its coefficients."""

    scores: Array  # [R, K]
    own: Array  # from all training folds, [R, K, P]
    loggers: Array  # [R, K, J]


def solved(
    own: Array, loggers: Array, logger: Ints, fold: Ints, train: list[int], choices: list["Recipe"]
) -> tuple[Solved, Ints]:
    """Of columns `[K, N, P]` and `[N, J]`, from the training folds alone, and how many episodes each of these has."""
    means = _means(own, loggers, logger, np.isin(fold, train))
    firsts, seconds, within = [], [], []
    for g in train:
        here = np.flatnonzero(fold == g)
        x, y = own[:, here], loggers[here]
        firsts.append((x.sum(1), y.sum(0)))
        seconds.append(products(x, y))
        within.append(products(x - means[0][:, logger[here]], y - means[1][logger[here]]))
    sizes = np.array([np.sum(fold == g) for g in train])
    scores = np.zeros((len(choices), len(own)))
    for i in range(len(train)):
        kept = [h for h in range(len(train)) if h != i]
        scores += within[i].form(*_fitted(_covariance(firsts, seconds, sizes, kept), choices))
    every = _covariance(firsts, seconds, sizes, list(range(len(train))))
    return Solved(scores, *_fitted(every, choices)), sizes


def _means(own: Array, loggers: Array, logger: Ints, inside: Bools) -> tuple[Array, Array]:
    """Of each logger's episodes in the training folds, `[K, J, P]` and `[J, J]`."""
    j = int(logger.max()) + 1
    means = np.zeros((len(own), j, own.shape[-1])), np.zeros((j, loggers.shape[-1]))
    for i in np.unique(logger):
        here = np.flatnonzero(inside & (logger == i))
        means[0][:, i], means[1][i] = own[:, here].mean(1), loggers[here].mean(0)
    return means


def _covariance(firsts: list[tuple[Array, Array]], seconds: list[Parts], sizes: Ints, kept: list[int]) -> Parts:
    """Over the episodes of some folds."""
    n = int(sizes[kept].sum())
    x, y = (np.sum([firsts[h][i] for h in kept], 0) / n for i in range(2))  # means, [K, P] and [J]
    a, b, d = (np.sum([seconds[h][i] for h in kept], 0) / n for i in range(3))
    return Parts(a - x[:, :, None] * x[:, None, :], b - x[:, :, None] * y, d - y[:, None] * y)


def _fitted(covariance: Parts, choices: list["Recipe"]) -> tuple[Array, Array]:
    """`pooled.ridges` of all recipes, `[R, K, P]` and `[R, K, J]`."""
    k, p, j = covariance.mixed.shape
    own = np.stack([np.broadcast_to(recipe.start[:p], (k, p)) for recipe in choices])
    loggers = np.stack([np.broadcast_to(recipe.start[p:], (k, j)) for recipe in choices])
    for key in {(tuple(recipe.free.tolist()), recipe.ridge) for recipe in choices if len(recipe.free)}:
        same = [i for i, recipe in enumerate(choices) if (tuple(recipe.free.tolist()), recipe.ridge) == key]
        free = choices[same[0]].free
        mine = free[free < p]
        if len(free) - len(mine) != j:
            raise ValueError(f"{len(free) - len(mine)} of {j} loggers are free, expected all of them")
        starts = np.stack([choices[i].start[:p] for i in same], -1)  # [P, S]; the loggers' are 0
        y, z = _block_solution(covariance, mine, starts, key[1])
        for s, i in enumerate(same):
            own[i][:, mine] += y[..., s]
            loggers[i] += z[..., s]
    return own, loggers


def _block_solution(covariance: Parts, mine: Ints, starts: Array, ridge: float) -> tuple[Array, Array]:
    """What is added to the starts `[P, S]`: of own free columns `[K, p, S]`, of loggers `[K, J, S]`."""
    a, b, d = covariance.own[:, mine][..., mine], covariance.mixed[:, mine], covariance.loggers
    (k, p, j), s = b.shape, starts.shape[-1]
    unit = np.sqrt(_positive(np.einsum("kpp->kp", a)))  # [K, p]
    units = np.sqrt(_positive(np.diagonal(d)))  # [J]
    a = a / (unit[:, :, None] * unit[:, None, :]) + ridge * np.eye(p)
    b = b / (unit[:, :, None] * units)
    d = d / (units[:, None] * units) + ridge * np.eye(j)
    r = -(covariance.own[:, mine] @ starts) / unit[..., None]  # [K, p, S]
    t = -(covariance.mixed.mT @ starts) / units[:, None]  # [K, J, S]
    columns = np.concatenate([b.mT, t], -1)  # [K, J, p + S]
    inverse = np.linalg.solve(d, np.moveaxis(columns, 0, 1).reshape(j, -1)).reshape(j, k, p + s)
    d_b, d_t = np.split(np.moveaxis(inverse, 0, 1), [p], -1)  # D^-1 B', D^-1 t
    y = np.linalg.solve(a - b @ d_b, r - b @ d_t)
    return y / unit[..., None], (d_t - d_b @ y) / units[:, None]


def _positive(variance: Array) -> Array:
    return np.where(variance > 0, variance, 1.0)
