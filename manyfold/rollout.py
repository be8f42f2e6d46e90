"""Whole episodes under a tabular behavior policy, all N stepped together."""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike

from manyfold.mdp import Array, Ints, check_distributions, check_shape
from manyfold.policies import cumulative_probs, sample_actions


class World(Protocol):
    """What can be rolled out: a FiniteMDP, a Gridworld, or anything else with indexed states and a fixed horizon."""

    horizon: int
    n_states: int
    n_actions: int

    def start(self, episodes: int, rng: np.random.Generator) -> Ints: ...
    def step(self, states: Ints, actions: Ints, rng: np.random.Generator) -> tuple[Ints, Array]: ...


class Episodes(NamedTuple):
    """N episodes of T steps: S_t, A_t and R_{t+1}, `[N, T]` each."""

    states: Ints
    actions: Ints
    rewards: Array

    def probs(self, table: ArrayLike) -> Array:
        """The probability that each policy `[..., T, S, A]` gives the actions taken; `[..., N, T]`."""
        x = np.asarray(table, dtype=np.float64)
        return _look_up(x.reshape(*x.shape[:-2], -1), self.states * x.shape[-1] + self.actions)

    def own_probs(self, loggers: ArrayLike) -> Array:
        """The same of the logger that ran the episode, of J in turns `[J, T, S, A]`; `[N, T]`."""
        x = np.asarray(loggers, dtype=np.float64)
        n_loggers, horizon, n_states, n_actions = x.shape
        stacked = np.moveaxis(x, 0, 1).reshape(horizon, -1)  # [T, J * S * A]
        first = np.arange(len(self.states)) % n_loggers * n_states  # row of state 0 of each episode's logger
        return _look_up(stacked, (self.states + first[:, None]) * n_actions + self.actions)

    def at(self, table: ArrayLike) -> Array:
        """The value of each table `[..., T, S]` at the states; `[..., N, T]`."""
        return _look_up(np.asarray(table, dtype=np.float64), self.states)


def _look_up(tables: Array, rows: Ints) -> Array:
    """`[..., T, rows]` at `[N, T]` -> `[..., N, T]`, steps first in memory: each is one look-up in all tables."""
    *lead, horizon, size = tables.shape
    if rows.size and not 0 <= rows.min() <= rows.max() < size:
        raise ValueError(f"table has {size} entries a step, expected more than {rows.max()}: is it of this world?")
    out = np.empty((horizon, *lead, len(rows)))
    for t in range(horizon):
        np.take(tables[..., t, :], rows[:, t], axis=-1, out=out[t], mode="clip")
    return np.moveaxis(out, 0, -1)


def rollout(world: World, mu: ArrayLike, episodes: int, rng: np.random.Generator) -> Episodes:
    """Runs N whole episodes of mu `[T, S, A]`, or of J loggers `[J, T, S, A]` in turns: episode i is i mod J's."""
    table = np.asarray(mu, dtype=np.float64)
    loggers = table if table.ndim == 4 else table[None]
    check_shape("mu", table, (*table.shape[:-3], world.horizon, world.n_states, world.n_actions), "[T, S, A]")
    check_distributions("mu", loggers, ("j", "t", "s", "a"))
    stacked = np.moveaxis(loggers, 0, 1).reshape(world.horizon, -1, world.n_actions)  # [T, J * S, A]
    thresholds = cumulative_probs(stacked)  # [T, A - 1, J * S]
    first = np.arange(episodes) % len(loggers) * world.n_states  # row of state 0 of each episode's logger
    states, actions = (np.empty((world.horizon, episodes), dtype=np.int64) for _ in range(2))
    rewards = np.empty((world.horizon, episodes))
    s_t = world.start(episodes, rng)
    for t in range(world.horizon):
        states[t] = s_t
        actions[t] = sample_actions(thresholds[t], first + s_t, rng)
        s_t, rewards[t] = world.step(s_t, actions[t], rng)
    return Episodes(states.T, actions.T, rewards.T)
