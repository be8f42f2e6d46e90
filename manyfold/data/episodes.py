"""Whole episodes of several loggers, with all that a return of K target policies needs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from manyfold.arrays import Array, Ints
from manyfold.estimate import estimators


@dataclass(frozen=True)
class Episodes:
    """N episodes of J loggers in turns; what few returns need is computed when asked for."""

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
