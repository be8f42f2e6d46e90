"""K policies at once: what rollouts, fits, designs, estimators and exports need of them, whatever they are made of."""

import itertools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import nn

from manyfold.arrays import Array, Ints
from manyfold.draws import Draws

if TYPE_CHECKING:
    from manyfold.policies.heads import Head
    from manyfold.policies.imported import Imported

ENDLESS = 1_000_000_000  # the horizon of policies that don't depend on t


class PolicySet(ABC):
    """K policies over the same observations and actions.

    Attributes:
        names: of the K policies, for example the training step they were taken at.
        horizon: T; they are defined at t = 0..T-1. `ENDLESS` where they don't depend on t.
        n_actions: A; 0 where actions are vectors.
        head: what their parameters say of an action that is a vector; None where actions are counted.
        how: "stochastic" or "greedy", and how that came about, for the result's first line.
        n_states: observations are indices 0..n_states - 1; 0 where they are vectors.
        width: numbers of an observation; 1 where it is an index.
        imported: what is known of the file of each policy, where they come from files.
    """

    names: tuple[str, ...]
    horizon: int
    n_actions: int
    n_states: int
    width: int
    head: "Head | None" = None
    how: str = "stochastic"
    imported: "tuple[Imported, ...]" = ()

    @property
    def n_policies(self) -> int:
        """K."""
        return len(self.names)

    @abstractmethod
    def probs(self, obs: ArrayLike, t: int | ArrayLike) -> Array:
        """Action probabilities of all K policies at N observations `[N, width]` and their steps t; `[K, N, A]`."""

    def parameters(self, obs: ArrayLike, t: int | ArrayLike) -> Array:
        """Where actions are vectors, the parameters of all K policies' distributions; `[K, N, P]`."""
        raise ValueError(f"{type(self).__name__} has counted actions, expected policies over vectors")

    def probs_of(self, which: Ints, obs: ArrayLike, t: int | ArrayLike) -> Array:
        """The same of one policy for each observation, `which [N]`; `[N, A]`."""
        return self.probs(obs, t)[which, np.arange(len(which))]

    def sample(self, which: Ints, obs: ArrayLike, t: int | ArrayLike, rng: np.random.Generator) -> Ints:
        """An action of policy `which[i]` at each observation; `[N]`."""
        return sample_actions(self.probs_of(which, obs, t), rng)

    def table(self) -> Array:
        """Probabilities at every step and state, where observations are indices; `[K, T, S, A]`."""
        if not self.n_states:
            raise ValueError("these policies take vectors, expected observations that can be counted")
        states = np.arange(self.n_states)
        return np.stack([self.probs(states, t) for t in range(self.horizon)], 1)

    def module(self) -> nn.Module:
        """The same probabilities as a torch module for export: (obs `[N, width]` float32, t `[N]`) -> `[K, N, A]`."""
        raise ValueError(f"{type(self).__name__} cannot be exported, expected a table, MLPs or torch modules")


def check_indices(name: str, x: ArrayLike, size: int) -> Ints:
    """Whole numbers from 0 to size - 1, `[N]` or `[N, 1]` -> `[N]`; anything else is refused."""
    index: NDArray[Any] = np.asarray(x)
    if index.ndim == 2 and index.shape[1] == 1:
        index = index[:, 0]
    whole = np.issubdtype(index.dtype, np.integer) or (
        np.issubdtype(index.dtype, np.floating) and bool((index == np.floor(index)).all())
    )
    if index.ndim != 1 or not whole or (index.size and not 0 <= index.min() <= index.max() < size):
        raise ValueError(
            f"{name}: expected whole numbers [N] from 0 to {size - 1}, found {' '.join(str(x).split()):.60}"
        )
    return index.astype(np.int64)


def check_steps(t: int | ArrayLike, n: int, horizon: int) -> Ints:
    """The step of each of n observations, `[n]`; one number stands for all."""
    steps = np.asarray(t)
    if steps.ndim and len(steps) != n:
        raise ValueError(f"t: expected one step for each of {n} observations or one for all, found {len(steps)}")
    return check_indices("t", np.broadcast_to(steps, (n,)) if steps.ndim == 0 else steps, horizon)


def sample_actions(probs: Array, rng: np.random.Generator | Draws) -> Ints:
    """Draws an action for each row of `probs [N, A]`; one of probability 0 never comes."""
    cumulative = np.array(probs.T, order="C")  # [A, N], actions first: a loop over actions, not over episodes
    for below, here in itertools.pairwise(cumulative):
        here += below
    cumulative[:-1] /= cumulative[-1]  # exactly 1 from the last possible action on
    u = rng.random(len(probs))
    actions = np.zeros(len(probs), dtype=np.int64)
    for threshold in cumulative[:-1]:
        actions += u >= threshold
    return actions
