"""The paper's Gridworld: m x m cells, horizon T = m, hence m^3 states (cell, t); four moves, slips and walls.

Observation space: Discrete, the cell's index `row * m + column`; as a Gymnasium environment one-hot cell and t/T
(`[m * m + 1]`).
Actions: 0 up, 1 down, 2 left, 3 right. The move happens as asked with 0.9, in a uniformly random direction with 0.1;
a move into the wall keeps the place.
Rewards: r(cell, action), drawn once per group from N(0, 1) by the group's seed.
Start: the centre cell. End: after exactly T steps, which terminates the episode, as t is part of the state.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from manyfold.arrays import Array, Ints, check_actions, check_finite, check_number, check_shape
from manyfold.envs.base import Environment, RunningWorld
from manyfold.mdp import FiniteMDP
from manyfold.streams import stream

SLIP = 0.1
N_ACTIONS = 4  # up, down, left, right


class Gridworld(Environment):
    """N episodes in one call: `start` them, then `step` all of them; no Python loop over episodes.

    Args:
        m: width, height and horizon.
        rewards: r(cell, action), `[m * m, 4]`.
    """

    slots = 0

    def __init__(self, m: int, rewards: ArrayLike) -> None:
        check_number("m (the width, height and horizon)", m, 1, 1000)
        self.m = self.horizon = int(m)
        self.name = f"gridworld-{self.m**3}"
        self.observation_space, self.action_space = spaces.Discrete(self.m * self.m), spaces.Discrete(N_ACTIONS)
        self.rewards: Array = np.array(rewards, dtype=np.float64)
        check_shape("rewards", self.rewards, (self.n_states, N_ACTIONS), "[m * m, 4]")
        check_finite("rewards", self.rewards)
        self.centre = (self.m // 2) * self.m + self.m // 2
        row, column = np.divmod(np.arange(self.n_states), self.m)
        neighbours = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
        self.moves: Ints = np.stack(  # the cell that a move in each direction ends in, [S, 4]
            [r.clip(0, self.m - 1) * self.m + c.clip(0, self.m - 1) for r, c in neighbours], axis=1
        )

    @classmethod
    def draw(cls, m: int, seed: int) -> "Gridworld":
        """The Gridworld of one group: rewards from N(0, 1), the same for the same m and seed."""
        check_number("m (the width, height and horizon)", m, 1, 1000)
        return cls(m, stream("gridworld", m, "rewards", seed).standard_normal((m * m, N_ACTIONS)))

    def start(self, episodes: int, rng: np.random.Generator) -> Ints:
        """S_0 of every episode, `[N]`: the centre (`rng` is not needed)."""
        return np.full(episodes, self.centre)

    def step(self, states: Ints, actions: Ints, rng: np.random.Generator) -> tuple[Ints, Array]:
        """One step of N episodes: the next cells and the rewards, `[N]` each."""
        check_actions(actions, N_ACTIONS)
        rewards = self.rewards.ravel()[states * N_ACTIONS + actions]
        return self.move(states, actions, rng.random(len(states), dtype=np.float32)), rewards

    def move(self, states: Ints, actions: Ints, u: NDArray[np.float32]) -> Ints:
        """Where a move ends, given a uniform random number for each."""
        # One number serves both draws: below SLIP it is uniform there, and its quarter is the random direction.
        slipped = np.minimum((u * np.float32(N_ACTIONS / SLIP)).astype(np.int64), N_ACTIONS - 1)
        return self.moves.ravel()[states * N_ACTIONS + np.where(u < SLIP, slipped, actions)]

    def observe(self, states: Ints, t: int) -> NDArray[np.float32]:
        """Observations of N cells at step t: one-hot cell and t/T, `[N, m * m + 1]`."""
        obs = np.zeros((len(states), self.n_states + 1), dtype=np.float32)
        obs[np.arange(len(states)), states] = 1.0
        obs[:, -1] = t / self.horizon
        return obs

    def open(self, n: int, rng: np.random.Generator) -> RunningWorld:
        return RunningWorld(self, n, rng)

    def mdp(self) -> FiniteMDP:
        """The same Gridworld as a FiniteMDP over cells, for exact computations."""
        rows = np.arange(self.n_states * N_ACTIONS)
        slips = sparse.coo_array(
            (
                np.full(rows.size * N_ACTIONS, SLIP / N_ACTIONS),
                (rows.repeat(N_ACTIONS), self.moves.repeat(N_ACTIONS, axis=0).ravel()),
            ),
            shape=(rows.size, self.n_states),
        )
        asked = sparse.coo_array((np.full(rows.size, 1 - SLIP), (rows, self.moves.ravel())), shape=slips.shape)
        initial = np.zeros(self.n_states)
        initial[self.centre] = 1.0
        return FiniteMDP(slips + asked, self.rewards, initial, self.horizon)


class GridworldEnv(gymnasium.Env[NDArray[np.float32], np.int64]):
    """One Gridworld episode at a time, as `gymnasium.make("manyfold/Gridworld-v0", m=10, reward_seed=0)`."""

    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}  # noqa: RUF012 - Gymnasium's own convention

    def __init__(self, m: int = 10, reward_seed: int = 0, render_mode: str | None = None) -> None:
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"render_mode is {render_mode!r}, expected None, 'ansi' or 'rgb_array'")
        self.world = Gridworld.draw(m, reward_seed)
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (m * m + 1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(N_ACTIONS)
        self.render_mode = render_mode
        self._cell, self._t = self.world.start(1, self.np_random), 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self._cell, self._t = self.world.start(1, self.np_random), 0
        return self.world.observe(self._cell, 0)[0], {}

    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        if self._t >= self.world.horizon:
            raise ValueError(f"the episode ended after {self._t} steps, expected reset() before the next step")
        self._cell, reward = self.world.step(self._cell, np.array([action]), self.np_random)
        self._t += 1
        obs = self.world.observe(self._cell, self._t)[0]
        return obs, float(reward[0]), self._t >= self.world.horizon, False, {}

    def render(self) -> str | NDArray[np.uint8] | None:
        """The grid as text with the agent as @, or as a picture with a square of 16 pixels for each cell."""
        if self.render_mode is None:
            return None
        if self.render_mode == "rgb_array":
            grid = np.full((self.world.n_states, 3), 255, dtype=np.uint8)
            grid[self._cell[0]] = (0, 114, 178)
            return grid.reshape(self.world.m, self.world.m, 3).repeat(16, axis=0).repeat(16, axis=1)
        cells = ["@" if cell == self._cell[0] else "." for cell in range(self.world.n_states)]
        return "\n".join(" ".join(cells[i : i + self.world.m]) for i in range(0, len(cells), self.world.m))
