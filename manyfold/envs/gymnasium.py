"""Any Gymnasium environment, by id or factory, as N episodes at a time.

Every slot is an environment of its own with its own seed. Gymnasium's vector environments with autoreset off refuse to
step while any slot has ended, so a slot without an episode left to begin could not wait: here only running slots step.

Observations: Box (flattened) or Discrete (an index). Actions: Discrete. Rewards and ends are the environment's own; its
own truncation (a TimeLimit) ends an episode as well as our horizon does.
"""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from manyfold.arrays import Array, Bools, Ints, check_actions, check_number
from manyfold.envs.base import Environment, Observations
from manyfold.policies.base import check_indices

MOST_STEPS = 1_000_000  # of an episode
LARGEST = float(np.finfo(np.float32).max)  # logged data are in float32


class GymnasiumEnvironment(Environment):
    """An environment by its Gymnasium id, or by a function that makes one.

    Args:
        make: an id such as "CartPole-v1" (or "my_module:MyEnv-v0", which imports my_module first), or a function
            without arguments that returns a `gymnasium.Env`.
        horizon: T; the environment's TimeLimit if left out.
        name: names the random streams; the id if left out.
        kwargs: passed to `gymnasium.make`.
    """

    def __init__(
        self,
        make: str | Callable[[], gymnasium.Env[Any, Any]],
        horizon: int | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._make: Callable[[], gymnasium.Env[Any, Any]] = (
            (lambda: gymnasium.make(make, **kwargs)) if isinstance(make, str) else make
        )
        # Of an id, a missing module and wrong arguments are the user's; of a factory, they are its own errors.
        refused = (gymnasium.error.Error, ImportError, TypeError) if isinstance(make, str) else gymnasium.error.Error
        try:
            env = self._make()
        except refused as error:
            raise ValueError(f"environment {make!r}: {str(error).splitlines()[0]}") from None
        self.name = name or (make if isinstance(make, str) else str(getattr(make, "__name__", "environment")))
        if not isinstance(env, gymnasium.Env):
            raise ValueError(f"{self.name}: made {env!r:.40}, expected a gymnasium.Env")
        limit = horizon if horizon is not None else _time_limit(env)
        if limit is None:
            raise ValueError(f"{self.name} has no TimeLimit, expected a horizon: the largest number of steps")
        check_number("horizon", limit, 1, MOST_STEPS)
        self.horizon = int(limit)
        self.observation_space, self.action_space = env.observation_space, env.action_space
        if not isinstance(self.observation_space, spaces.Box | spaces.Discrete):
            raise ValueError(
                f"{self.name}: observations are {self.observation_space}, expected a Box or Discrete space"
            )
        if not isinstance(self.action_space, spaces.Discrete):
            raise ValueError(f"{self.name}: actions are {self.action_space}, expected a Discrete space")
        env.close()

    def open(self, n: int, rng: np.random.Generator) -> "RunningGymnasium":
        envs = [self._make() for _ in range(n)]
        if len({id(env.unwrapped) for env in envs}) < n:
            raise ValueError(
                f"{self.name}: the factory returned the same environment twice, expected a new one each time"
            )
        return RunningGymnasium(self, envs, rng)


def _time_limit(env: gymnasium.Env[Any, Any]) -> int | None:
    """The TimeLimit that an environment's spec names, or that is wrapped around it."""
    if env.spec is not None and env.spec.max_episode_steps is not None:
        return env.spec.max_episode_steps
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, gymnasium.wrappers.TimeLimit):
            return int(env._max_episode_steps)
        env = env.env
    return None


class RunningGymnasium:
    """N Gymnasium environments; a slot's first episode starts by its own seed, the later ones follow from it."""

    def __init__(
        self, env: GymnasiumEnvironment, envs: list[gymnasium.Env[Any, Any]], rng: np.random.Generator
    ) -> None:
        self.env, self.envs, self.n = env, envs, len(envs)
        self._seeds: list[int | None] = rng.integers(2**31, size=self.n).tolist()
        self.t: Ints = np.zeros(self.n, dtype=np.int64)
        self.done: Bools = np.ones(self.n, dtype=np.bool_)
        self._first = int(getattr(env.observation_space, "start", 0))  # of a Discrete space
        self._first_action = int(getattr(env.action_space, "start", 0))
        self._obs: Observations = np.zeros((self.n, env.width), dtype=np.int64 if env.n_states else np.float64)

    def reset(self, slots: Ints) -> Observations:
        self._obs = self._obs.copy()
        for i in slots.tolist():
            self._observe(i, self.envs[i].reset(seed=self._seeds[i])[0])
            self._seeds[i] = None
        self.t[slots], self.done[slots] = 0, False
        return self._obs

    def step(self, actions: Ints) -> tuple[Observations, Array, Bools, Bools]:
        check_actions(actions, self.env.n_actions)
        rewards = np.zeros(self.n)
        terminated, truncated = np.zeros(self.n, dtype=np.bool_), np.zeros(self.n, dtype=np.bool_)
        self._obs = self._obs.copy()
        for i in np.flatnonzero(~self.done).tolist():
            obs, reward, terminated[i], cut, _ = self.envs[i].step(int(actions[i]) + self._first_action)
            self.t[i] += 1
            rewards[i] = reward = np.nan if reward is None else float(reward)
            if not abs(reward) < LARGEST:
                raise ValueError(f"{self.env.name}: reward {reward} at step {self.t[i]}, expected a finite number")
            truncated[i] = not terminated[i] and (cut or self.t[i] >= self.env.horizon)
            self._observe(i, obs)
        self.done = self.done | terminated | truncated
        return self._obs, rewards, terminated, truncated

    def _observe(self, slot: int, obs: Any) -> None:
        x, width = np.ravel(obs).astype(np.float64), self.env.width
        if x.size != width or not (np.abs(x) < LARGEST).all():
            raise ValueError(
                f"{self.env.name}: observation {obs!r:.60} after {self.t[slot]} steps, expected {width} finite numbers"
            )
        if self.env.n_states:
            self._obs[slot] = check_indices(f"{self.env.name}: observation", x - self._first, self.env.n_states)
        else:
            self._obs[slot] = x
