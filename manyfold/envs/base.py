"""Where episodes happen. Everything else in manyfold asks an `Environment` what it is, never what it is called."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from manyfold.arrays import Array, Bools, Ints, check_actions
from manyfold.draws import Seeds
from manyfold.mdp import FiniteMDP

Observations = NDArray[Any]  # [N, width]; whole numbers where the observation space is Discrete


class Running(Protocol):
    """N episodes under way, one in each slot.

    A slot that has ended stays ended until `reset`: its observation is frozen, its reward 0, its t stands still.
    """

    n: int
    t: Ints  # steps of each slot's episode, [N]
    done: Bools  # slots that have ended, [N]; all of them before the first `reset`

    def reset(self, slots: Ints) -> Observations:
        """Starts a new episode in these slots; observations of all, `[N, width]`."""

    def step(self, actions: NDArray[Any]) -> tuple[Observations, Array, Bools, Bools]:
        """One step of every slot that has not ended, by the actions `[N]`, or `[N, d]` where they are vectors.

        Returns:
            Observations `[N, width]`, rewards, terminated and truncated `[N]`: never both, and true only in the step
            that ends the episode (`done` stays true).
        """


@runtime_checkable
class Seedable(Protocol):
    """What `Running` is of environments that are `seeded`."""

    def seed(self, slots: Ints, seeds: Seeds) -> None:
        """All that happens in the next episodes of these slots follows from these numbers and the actions."""


@runtime_checkable
class Closable(Protocol):
    """What `Running` is where the environment's `open` is slow: what it stepped may serve the next one."""

    def close(self) -> None:
        """Every episode has ended, and none will begin here any more."""


class Environment(ABC):
    """One environment with a finite horizon.

    Attributes:
        name: names its random streams.
        horizon: T; an episode has at most so many steps.
        observation_space: Discrete (an observation is an index) or Box (a vector).
        action_space: Discrete (an action is an index), or of vectors.
        slots: episodes that run at the same time; 0 where all of them can.
        seeded: an episode can be started by a seed of its own; elsewhere all of them follow from the generator.
        time_limit: steps after which the environment itself ends an episode, if it says so.
    """

    name: str
    horizon: int
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    slots: ClassVar[int] = 100
    seeded: ClassVar[bool] = False
    time_limit: int | None = None

    @abstractmethod
    def open(self, n: int, rng: np.random.Generator) -> Running:
        """N slots whose episodes follow from `rng`."""

    def mdp(self) -> FiniteMDP | None:
        """The same environment as a finite MDP, for exact computations; None where there is none."""
        return None

    @property
    def n_actions(self) -> int:
        """A."""
        if not isinstance(self.action_space, spaces.Discrete):
            raise ValueError(f"{self.name}: its actions are {self.action_space}, expected a Discrete action space")
        return int(self.action_space.n)

    @property
    def n_states(self) -> int:
        """How many observations there are where they are indices; 0 where they are vectors."""
        return int(self.observation_space.n) if isinstance(self.observation_space, spaces.Discrete) else 0

    @property
    def width(self) -> int:
        """Numbers of an observation."""
        return 1 if self.n_states else int(np.prod(self.observation_space.shape or ()))


class World(Protocol):
    """Counted states and a fixed horizon: a FiniteMDP, or a Gridworld, which is faster than its MDP."""

    @property
    def horizon(self) -> int: ...
    @property
    def n_actions(self) -> int: ...
    def start(self, episodes: int, rng: np.random.Generator) -> Ints: ...
    def step(self, states: Ints, actions: Ints, rng: np.random.Generator) -> tuple[Ints, Array]: ...


class RunningWorld:
    """N episodes of a world with counted states; each ends by termination after exactly T steps."""

    def __init__(self, world: World, n: int, rng: np.random.Generator) -> None:
        self.world, self.n, self._rng = world, n, rng
        self.t: Ints = np.zeros(n, dtype=np.int64)
        self.done: Bools = np.ones(n, dtype=np.bool_)
        self._states: Ints = np.zeros((n, 1), dtype=np.int64)

    def reset(self, slots: Ints) -> Ints:
        self.t[slots], self.done[slots] = 0, False
        self._states = self._states.copy()
        self._states[slots, 0] = self.world.start(len(slots), self._rng)
        return self._states

    def step(self, actions: Ints) -> tuple[Ints, Array, Bools, Bools]:
        check_actions(actions, self.world.n_actions)
        active: Any = np.flatnonzero(~self.done) if self.done.any() else slice(None)
        rewards, never = np.zeros(self.n), np.zeros(self.n, dtype=np.bool_)
        self._states = self._states.copy()
        after, rewards[active] = self.world.step(self._states[active, 0], actions[active], self._rng)
        self._states[active, 0] = after
        self.t[active] += 1
        terminated = ~self.done & (self.t >= self.world.horizon)
        self.done = self.done | terminated
        return self._states, rewards, terminated, never


class Finite(Environment):
    """Any `FiniteMDP` as an environment."""

    slots = 0

    def __init__(self, mdp: FiniteMDP, name: str = "finite") -> None:
        self.name, self._mdp, self.horizon = name, mdp, mdp.horizon
        self.observation_space, self.action_space = spaces.Discrete(mdp.n_states), spaces.Discrete(mdp.n_actions)

    def mdp(self) -> FiniteMDP:
        return self._mdp

    def open(self, n: int, rng: np.random.Generator) -> RunningWorld:
        return RunningWorld(self._mdp, n, rng)
