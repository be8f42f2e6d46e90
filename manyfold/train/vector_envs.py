"""The training environments of G groups, stepped together; no number of one group reaches another.

To train policies in another kind of environment, register a vector environment and PPO's settings for its class.
"""

from functools import singledispatch
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyfold.envs.base import Environment
from manyfold.envs.binned_mujoco import BinnedMujoco, make_envpool
from manyfold.envs.gridworld import N_ACTIONS, Gridworld
from manyfold.policies.mlp import Spec
from manyfold.streams import stream


class GridworldVector:
    """`envs` copies of each group's Gridworld (its own rewards); an observation is the index t * m^2 + cell."""

    continuous = False
    n_actions = N_ACTIONS

    def __init__(self, m: int, groups: list[int], envs: int) -> None:
        self.worlds = [Gridworld.draw(m, group) for group in groups]
        self.groups, self.envs, self.horizon = groups, envs, m
        self.n_groups, self.n_states, self.n_features = len(groups), m * m, 0
        self._rewards = np.stack([world.rewards for world in self.worlds]).astype(np.float32).ravel()
        self._row = np.arange(len(groups))[:, None] * (m * m * N_ACTIONS)
        self._returns = np.zeros((len(groups), envs))
        self._mean_returns = np.full(len(groups), np.nan)

    def start(self, segment: int) -> NDArray[np.int64]:
        self._rngs = [stream("gridworld-groups", self.horizon, group, segment) for group in self.groups]
        self._draws: list[NDArray[np.float32]] = []
        self._t = 0
        self._returns[:] = 0
        self._cells = np.full((self.n_groups, self.envs), self.worlds[0].centre)
        return self._cells

    def step(self, actions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.bool_]]:
        if not self._draws:  # many steps' random numbers at once: a call for each step would cost more than the step
            block = np.stack([rng.random((128, self.envs), dtype=np.float32) for rng in self._rngs], 1)
            self._draws = list(block[::-1])
        rewards = self._rewards[self._row + self._cells * N_ACTIONS + actions]
        self._cells = self.worlds[0].move(self._cells, actions, self._draws.pop())
        self._returns += rewards
        self._t += 1
        ended = self._t == self.horizon  # all at once: every episode has exactly T steps
        if ended:
            self._mean_returns = self._returns.mean(1)
            self._t = 0
            self._returns[:] = 0
            self._cells = np.full_like(self._cells, self.worlds[0].centre)
        obs = self._t * self.n_states + self._cells
        return obs, rewards, np.full(rewards.shape, ended)

    def normaliser(self) -> dict[str, NDArray[np.float64]]:
        return {}

    def save(self) -> dict[str, NDArray[Any]]:
        return {}

    def load(self, saved: dict[str, NDArray[Any]]) -> None:
        pass

    def mean_returns(self) -> NDArray[np.float64]:
        return self._mean_returns


class MujocoVector:
    """One MuJoCo environment for each group, with CleanRL's wrappers: clipped actions, observations and rewards
    normalised by running statistics and clipped at 10. Observations are vectors `[G, 1, d]`.
    """

    continuous = True
    n_states = 0
    limit = 10.0
    epsilon = 1e-8

    def __init__(self, robot: str, groups: list[int], gamma: float, horizon: int = 1000, threads: int = 1) -> None:
        self.robot, self.groups, self.gamma, self.horizon, self.threads = robot, groups, gamma, horizon, threads
        self.n_groups = len(groups)
        space = make_envpool(robot, [0], horizon, 1)
        self.n_features, self.n_actions = space.observation_space.shape[0], space.action_space.shape[0]
        self._low, self._high = space.action_space.low, space.action_space.high
        self._obs = Running(self.n_groups, self.n_features)
        self._return = Running(self.n_groups, 1)
        self._discounted = np.zeros((self.n_groups, 1))
        self.recent = np.full((self.n_groups, 20), np.nan)  # returns of each group's last episodes, newest last

    def start(self, segment: int) -> NDArray[np.float32]:
        seeds = [int(stream("mujoco-groups", self.robot, group, segment).integers(2**31)) for group in self.groups]
        self._pool = make_envpool(self.robot, seeds, self.horizon, self.threads)
        obs, _ = self._pool.reset()
        self._discounted[:] = 0
        self._episode = np.zeros(self.n_groups)
        self._obs.update(obs)
        return self._normalise(obs)

    def step(self, actions: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_]]:
        executed = np.clip(actions[:, 0], self._low, self._high).astype(np.float64)
        obs, rewards, terminated, truncated, _ = self._pool.step(executed)
        self._obs.update(obs)
        self._discounted = self._discounted * self.gamma * ~terminated[:, None] + rewards[:, None]
        self._return.update(self._discounted)
        scaled = rewards / np.sqrt(self._return.var[:, 0] + self.epsilon)
        self._episode += rewards
        done = terminated | truncated
        if done.any():  # an ended episode starts anew within the step, so that no dummy step enters the data
            ended = np.flatnonzero(done)
            self.recent[ended] = np.roll(self.recent[ended], -1, axis=1)
            self.recent[ended, -1] = self._episode[ended]
            self._episode[ended] = 0
            obs = obs.copy()
            obs[ended], _ = self._pool.reset(ended.astype(np.int32))
            self._obs.update(obs, ended)
        clipped = np.clip(scaled, -self.limit, self.limit).astype(np.float32)
        return self._normalise(obs), clipped[:, None], done[:, None]

    def _normalise(self, obs: NDArray[np.float64]) -> NDArray[np.float32]:
        z = (obs - self._obs.mean) / np.sqrt(self._obs.var + self.epsilon)
        return np.clip(z, -self.limit, self.limit).astype(np.float32)[:, None]

    def normaliser(self) -> dict[str, NDArray[np.float64]]:
        return {"obs_mean": self._obs.mean, "obs_var": self._obs.var}

    def save(self) -> dict[str, NDArray[Any]]:
        obs, returns = self._obs, self._return
        names = ("obs_mean", "obs_var", "obs_count", "return_mean", "return_var", "return_count", "recent")
        values = (obs.mean, obs.var, obs.count, returns.mean, returns.var, returns.count, self.recent)
        return dict(zip(names, values, strict=True))

    def load(self, saved: dict[str, NDArray[Any]]) -> None:
        for running, prefix in ((self._obs, "obs"), (self._return, "return")):
            running.mean, running.var, running.count = (saved[f"{prefix}_{x}"].copy() for x in ("mean", "var", "count"))
        self.recent = saved["recent"].copy()

    def mean_returns(self) -> NDArray[np.float64]:
        return self.recent[:, -1].copy()


class Running:
    """Running mean and variance of each group, one sample at a time (Gymnasium's RunningMeanStd)."""

    def __init__(self, groups: int, width: int) -> None:
        self.mean, self.var = np.zeros((groups, width)), np.ones((groups, width))
        self.count = np.full((groups, 1), 1e-4)

    def update(self, x: NDArray[np.float64], groups: NDArray[np.int64] | slice = slice(None)) -> None:
        """Takes in one sample `[G, d]` of the given groups."""
        mean, var, count = self.mean[groups], self.var[groups], self.count[groups]
        total = count + 1
        delta = x[groups] - mean
        self.mean[groups] = mean + delta / total
        self.var[groups] = (var * count + delta**2 * count / total) / total
        self.count[groups] = total


VectorEnvs = GridworldVector | MujocoVector


@singledispatch
def vector_envs(env: Environment, groups: list[int], envs: int, gamma: float) -> VectorEnvs:
    """The environments in which PPO trains these groups, `envs` of them for each."""
    raise ValueError(f"{env.name}: PPO here trains Gridworlds and robots; give its policies as files (targets.source)")


@vector_envs.register
def _(env: Gridworld, groups: list[int], envs: int, gamma: float) -> VectorEnvs:
    return GridworldVector(env.m, groups, envs)


@vector_envs.register
def _(env: BinnedMujoco, groups: list[int], envs: int, gamma: float) -> VectorEnvs:
    return MujocoVector(env.robot, groups, gamma)


@singledispatch
def policy_spec(env: Environment, name: str, names: tuple[str, ...]) -> Spec:
    """What the trained networks mean as policies of this environment."""
    return Spec(name, "softmax", env.horizon, env.n_actions, names, env.n_states, 0 if env.n_states else env.width)


@policy_spec.register
def _(env: BinnedMujoco, name: str, names: tuple[str, ...]) -> Spec:
    low, high = float(env.low[0]), float(env.high[0])
    return Spec(name, "binned_gaussian", env.horizon, env.n_actions, names, 0, env.n_features, low, high)
