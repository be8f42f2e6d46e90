"""Distributions of actions that can't be counted: vectors, in all their dimensions.

A network gives P parameters of a distribution; its head says what they mean. The action that is kept is the one whose
density is known: before it is clipped or squashed for the environment. Where all policies of a set share a head, what
happens to the action afterwards is the same for all of them and cancels in every ratio.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax, ndtr, softmax

from manyfold.arrays import Array
from manyfold.draws import Draws
from manyfold.policies.base import sample_actions

Actions = NDArray[Any]  # [N, d]
SATURATED = 1 - 1e-6  # tanh of an action that is nearly at its bounds; the bounds themselves have no finite one
LARGEST_LOG_STD = 40.0  # beyond it a network has diverged


class Head(ABC):
    """What P parameters of a policy say of its action, a vector of d numbers."""

    @property
    @abstractmethod
    def size(self) -> int:
        """P."""

    @property
    @abstractmethod
    def n_features(self) -> int:
        """B: features of an action whose expectations are known exactly."""

    @abstractmethod
    def draw(self, parameters: Array, rng: np.random.Generator | Draws) -> Actions:
        """An action for each row, `[N, P] -> [N, d]`."""

    @abstractmethod
    def log_probs(self, parameters: Array, actions: Actions) -> Array:
        """Log-density (or log-probability) of the actions `[N, d]` under every policy, `[K, N, P] -> [K, N]`."""

    @abstractmethod
    def greedy(self, parameters: Array) -> Actions:
        """The most likely action, `[N, P] -> [N, d]`."""

    @abstractmethod
    def features(self, actions: Actions) -> Array:
        """Of the actions taken, `[N, d] -> [N, B]`."""

    @abstractmethod
    def expected(self, parameters: Array) -> Array:
        """The same features' expectations, `[..., P] -> [..., B]`."""

    def sent(self, actions: Actions) -> Actions:
        """What the environment gets, `[N, d]`."""
        return actions

    def meant(self, sent: Actions) -> Actions:
        """The action behind what an environment got, as logged data have it, `[N, d]`; clipped ones stay clipped."""
        return sent


@dataclass(frozen=True)
class Gaussian(Head):
    """Independent normals: the parameters are d means and d logarithms of standard deviations.

    Args:
        low, high: the environment's bounds, d numbers each.
        squashed: the environment gets tanh of the action, stretched to the bounds (SAC); otherwise the action clipped
            to them (PPO).
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    squashed: bool = False

    def __post_init__(self) -> None:
        if not self.low or len(self.low) != len(self.high) or not all(np.less(self.low, self.high)):
            raise ValueError(f"bounds are {self.low!s:.40} and {self.high!s:.40}, expected low < high, d numbers each")
        if self.squashed and not np.isfinite([*self.low, *self.high]).all():
            raise ValueError("a squashed action has infinite bounds, expected finite ones")

    @property
    def size(self) -> int:
        return 2 * len(self.low)

    @property
    def n_features(self) -> int:
        return 2 * len(self.low)

    def split(self, parameters: Array) -> tuple[Array, Array]:
        """Means and logarithms of standard deviations, `[..., d]` each."""
        d = len(self.low)
        mean, log_std = np.asarray(parameters[..., :d], np.float64), np.asarray(parameters[..., d:], np.float64)
        if not (np.isfinite(mean).all() and (np.abs(log_std) < LARGEST_LOG_STD).all()):
            raise ValueError("a policy gave NaN, infinity or a vanishing deviation, expected a mean and a log_std")
        return mean, log_std

    def draw(self, parameters: Array, rng: np.random.Generator | Draws) -> Actions:
        mean, log_std = self.split(parameters)
        return mean + np.exp(log_std) * rng.standard_normal(mean.shape)

    def log_probs(self, parameters: Array, actions: Actions) -> Array:
        mean, log_std = self.split(parameters)
        z = (actions - mean) * np.exp(-log_std)
        constant = 0.5 * np.log(2 * np.pi) * len(self.low)
        return np.asarray(-0.5 * np.einsum("...d,...d->...", z, z) - log_std.sum(-1) - constant)

    def greedy(self, parameters: Array) -> Actions:
        return self.split(parameters)[0]

    def sent(self, actions: Actions) -> Actions:
        low, high = np.array(self.low), np.array(self.high)
        if self.squashed:
            return low + (np.tanh(actions) + 1) / 2 * (high - low)
        return np.clip(actions, low, high)

    def meant(self, sent: Actions) -> Actions:
        if not self.squashed:
            return sent
        low, high = np.array(self.low), np.array(self.high)
        share = 2 * (np.asarray(sent, np.float64) - low) / (high - low) - 1
        return np.arctanh(np.clip(share, -SATURATED, SATURATED))

    def features(self, actions: Actions) -> Array:
        """z and z^2 of each dimension, z the action in units of the bounds, as the environment gets it: clipped."""
        centre, half, most = self._units()
        z = np.clip((actions - centre) / half, -most, most)
        return np.concatenate([z, z**2], -1)

    def expected(self, parameters: Array) -> Array:
        """Moments of a clipped normal: with a, b the bounds in deviations from the mean m,

        E z = m (F(b) - F(a)) + s (f(a) - f(b)) - F(a) + 1 - F(b), and E z^2 alike.
        """
        mean, log_std = self.split(parameters)
        centre, half, most = self._units()
        m, s = (mean - centre) / half, np.exp(log_std) / half
        a, b = (-most - m) / s, (most - m) / s
        below, above = ndtr(a), ndtr(-b)  # chances of being clipped
        at_a, at_b = (np.exp(-0.5 * x**2) / np.sqrt(2 * np.pi) for x in (a, b))
        inside, end = 1 - below - above, np.where(np.isfinite(most), most, 0.0)
        a, b = (np.where(np.isfinite(x), x, 0.0) for x in (a, b))
        first = m * inside + s * (at_a - at_b) + end * (above - below)
        second = (m**2 + s**2) * inside + 2 * m * s * (at_a - at_b) + s**2 * (a * at_a - b * at_b)
        return np.concatenate([first, second + end**2 * (above + below)], -1)

    def _units(self) -> tuple[Array, Array, Array]:
        """Centre and half-width of each dimension, and where it is clipped in these units."""
        low, high = np.array(self.low), np.array(self.high)
        finite = np.isfinite(low) & np.isfinite(high) & (not self.squashed)
        low, high = np.where(finite, low, -1.0), np.where(finite, high, 1.0)
        return (low + high) / 2, (high - low) / 2, np.where(finite, 1.0, np.inf)


@dataclass(frozen=True)
class MultiCategorical(Head):
    """Several choices at once, independent of each other: the parameters are all logits side by side."""

    nvec: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.nvec or min(self.nvec) < 1:
            raise ValueError(f"nvec is {self.nvec!s:.40}, expected the number of choices of each dimension")

    @property
    def size(self) -> int:
        return sum(self.nvec)

    @property
    def n_features(self) -> int:
        return sum(self.nvec)

    def split(self, parameters: Array) -> list[Array]:
        """The logits of each choice."""
        if not np.isfinite(parameters).all():
            raise ValueError("a policy gave NaN or infinity, expected finite logits; are the observations finite?")
        return np.split(np.asarray(parameters, np.float64), np.cumsum(self.nvec)[:-1], axis=-1)

    def draw(self, parameters: Array, rng: np.random.Generator | Draws) -> Actions:
        return np.stack([sample_actions(softmax(part, -1), rng) for part in self.split(parameters)], -1)

    def log_probs(self, parameters: Array, actions: Actions) -> Array:
        rows = np.arange(len(actions))
        parts = self.split(parameters)
        return np.sum([log_softmax(part, -1)[..., rows, actions[:, i]] for i, part in enumerate(parts)], 0)

    def greedy(self, parameters: Array) -> Actions:
        return np.stack([part.argmax(-1) for part in self.split(parameters)], -1)

    def features(self, actions: Actions) -> Array:
        each = [np.asarray(actions[:, i : i + 1] == np.arange(n), np.float64) for i, n in enumerate(self.nvec)]
        return np.concatenate(each, -1)

    def expected(self, parameters: Array) -> Array:
        return np.concatenate([softmax(part, -1) for part in self.split(parameters)], -1)
