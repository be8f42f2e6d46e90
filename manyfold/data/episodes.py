"""Whole episodes of several loggers: as they were run, and padded with all that a return of K target policies needs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyfold.arrays import Array, Bools, Ints, check_shape
from manyfold.estimate import estimators

BLOCK = 2**21  # numbers of one kind that are padded at once


@dataclass(frozen=True)
class Episodes:
    """What was run: M steps of N whole episodes in a row, and how likely every action was under every policy."""

    states: NDArray[Any]  # [M, width]
    t: Ints  # [M]
    actions: NDArray[Any]  # [M], or [M, d] where they are vectors
    rewards: Array  # [M]
    lengths: Ints  # steps of each episode, [N]
    logger: Ints  # who ran each episode, [N]
    log_targets: Array  # log-probability of the action taken under every target, [K, M]
    log_loggers: Array  # under every logger, [J, M]
    own: Ints  # the logger that is target k itself, -1 where none is, [K]
    names: tuple[str, ...]  # of the targets
    horizon: int
    n_states: int = 0  # states are indices 0..n_states - 1; 0: they are vectors
    probs: Array | None = None  # of all actions under every target, where they can be counted, [K, M, A]
    features: NDArray[Any] | None = None  # of the actions taken, where they are vectors, [M, B]
    expected: NDArray[Any] | None = None  # the same features' expectations under every target, [K, M, B]

    def __post_init__(self) -> None:
        steps = int(self.lengths.sum())
        for name, x in (("t", self.t), ("rewards", self.rewards)):
            check_shape(name, x, (steps,), "[M]")
        check_shape("actions", self.actions, (steps, *self.actions.shape[1:]), "[M] or [M, d]")
        check_shape("log_targets", self.log_targets, (len(self.names), steps), "[K, M]")
        check_shape("log_loggers", self.log_loggers, (len(self.log_loggers), steps), "[J, M]")
        check_shape("logger", self.logger, self.lengths.shape, "[N]")
        check_shape("own", self.own, (len(self.names),), "[K]")

    @staticmethod
    def join(parts: Sequence["Episodes"]) -> "Episodes":
        """Of the same targets and loggers, one after the other; a logger need not have run in all of them."""
        if len(parts) == 1:
            return parts[0]
        axes = {"log_loggers": -1, "log_targets": -1, "probs": 1, "expected": 1}
        rows = ["states", "t", "actions", "rewards", "lengths", "logger", "features", *axes]
        once = all(np.may_share_memory(part.log_targets, part.log_loggers) for part in parts)
        if once:  # the targets are the first loggers: their numbers, the most of all, are kept once
            rows.remove("log_targets")
        joined: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts], axes.get(name, 0))
            for name in rows
            if getattr(parts[0], name) is not None
        }
        if once:
            joined["log_targets"] = joined["log_loggers"][: len(parts[0].names)]
        return replace(parts[0], own=np.max([part.own for part in parts], 0), **joined)

    def chosen(self, which: Bools) -> "Episodes":
        """Some of the episodes, `which [N]`."""
        steps = which[self.of_steps]
        axes = {"log_targets": -1, "log_loggers": -1, "probs": 1, "expected": 1}
        of_steps = ("states", "t", "actions", "rewards", "features", *axes)
        parts: dict[str, Any] = {
            name: np.compress(steps, getattr(self, name), axes.get(name, 0))
            for name in of_steps
            if getattr(self, name) is not None
        }
        logger = self.logger[which]
        own = np.where(np.isin(self.own, logger), self.own, -1)
        return replace(self, lengths=self.lengths[which], logger=logger, own=own, **parts)

    @property
    def all_probs(self) -> Array:
        """Of all actions under every target, `[K, M, A]`."""
        if self.probs is None:
            raise ValueError("these actions can't be counted, expected the probabilities of all of them")
        return self.probs

    @property
    def n_loggers(self) -> int:
        """J."""
        return len(self.log_loggers)

    @property
    def steps(self) -> int:
        """M, what they cost."""
        return len(self.t)

    @property
    def returns(self) -> Array:
        """The sum of each episode's rewards, `[N]`."""
        return np.bincount(self.of_steps, weights=self.rewards, minlength=len(self.lengths)).astype(np.float64)

    @property
    def of_steps(self) -> Ints:
        """The episode of each step, `[M]`."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def first_states(self) -> NDArray[Any]:
        """`[N, width]`."""
        return self.states[np.cumsum(self.lengths) - self.lengths]

    def blocks(self, width: int) -> Iterator["Block"]:
        """All of them, so many at a time that `width` numbers a step, padded, stay within `BLOCK`."""
        ends = np.cumsum(self.lengths)
        size = max(1, BLOCK // (int(self.lengths.max(initial=1)) * width))
        for first in range(0, len(self.lengths), size):
            last = min(first + size, len(self.lengths))
            steps = slice(int(ends[first] - self.lengths[first]), int(ends[last - 1]))
            lengths = self.lengths[first:last]
            yield Block(slice(first, last), steps, np.arange(lengths.max()) < lengths[:, None])


@dataclass(frozen=True)
class Block:
    """Some episodes in a row."""

    episodes: slice
    steps: slice  # theirs
    inside: Bools  # which padded steps are theirs, [n, T]

    def pad(self, x: NDArray[Any]) -> NDArray[Any]:
        """Of all steps in the last axis, `[..., M] -> [..., n, T]`, zeros behind the ends."""
        return self.pad_own(x[..., self.steps])

    def pad_own(self, x: NDArray[Any]) -> NDArray[Any]:
        """Of the block's own steps in the last axis, `[..., m] -> [..., n, T]`."""
        out = np.zeros((*x.shape[:-1], *self.inside.shape), dtype=x.dtype)
        out[..., self.inside] = x
        return out

    def pad_rows(self, x: NDArray[Any]) -> NDArray[Any]:
        """Of the block's own steps in the first axis, `[m, p] -> [n, T, p]`."""
        out = np.zeros((*self.inside.shape, x.shape[-1]), dtype=x.dtype)
        out[self.inside] = x
        return out


@dataclass(frozen=True)
class Padded:
    """N episodes of J loggers in turns, padded; what few returns need is computed when asked for."""

    rewards: Array  # [N, T]
    target_probs: Array  # of the actions taken, [K, N, T]
    own_probs: Array  # the same of the logger that ran the episode, [N, T]
    logger_probs: Callable[[], Array]  # the same of every logger, [J, N, T]
    baseline: Callable[[], tuple[Array, Array]]  # b at the actions taken, and its expectation, [K, N, T] each
    counts: Ints  # episodes of each logger, [J]
    lengths: Ints | None = None  # [N]; None: all of the horizon

    @cached_property
    def log_rho(self) -> Array:
        """Log ratios of each target to the logger that ran the episode; `[K, N, T]`."""
        return estimators.log_ratios(self.target_probs, self.own_probs, self.lengths)
