"""An environment that envpool steps in compiled code, by its Gymnasium id: Hopper twice as fast as Gymnasium's own.

Observations: Box (flattened) or Discrete (an index). Actions: Discrete (an index) or Box (a vector). Rewards are
Gymnasium's in float32. Starts follow from each slot's own seed, by other random numbers than Gymnasium's, and the
physics is that of envpool's MuJoCo (see `binned_mujoco`): so it is taken where it is asked for only.
"""

import warnings
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from manyfold.arrays import Array, Bools, Ints, check_actions, check_number
from manyfold.envs.base import Environment, Observations
from manyfold.envs.gymnasium import MOST_STEPS


class EnvpoolEnvironment(Environment):
    """An environment of envpool's.

    Args:
        id: Gymnasium's, such as "Hopper-v5".
        horizon: T; the environment's TimeLimit if left out.
        kwargs: envpool's own options of the environment.
    """

    def __init__(self, id: str, horizon: int | None = None, **kwargs: Any) -> None:
        self.id, self.name, self.settings = id, f"envpool:{id}", kwargs
        pool = self.pool([0])
        self.horizon = int(pool.spec.config.max_episode_steps if horizon is None else horizon)
        check_number("horizon", self.horizon, 1, MOST_STEPS)
        self.observation_space, self.action_space = pool.observation_space, pool.action_space
        for what, space in (("observations", self.observation_space), ("actions", self.action_space)):
            if not isinstance(space, spaces.Box | spaces.Discrete):
                raise ValueError(f"{self.name}: {what} are {space!s:.60}, expected a Box or Discrete space")

    def pool(self, seeds: list[int], **limit: int) -> Any:
        """An envpool of one thread with a slot for every seed."""
        try:
            import envpool  # a second that others need not wait for
        except ModuleNotFoundError:
            raise ValueError(
                f"{self.name} needs envpool, which is not installed; pip install 'manyfold[mujoco]', or {self.id} alone"
            ) from None
        options = {"num_envs": len(seeds), "num_threads": 1, "seed": seeds, **limit, **self.settings}
        try:
            made = envpool.make(self.id, env_type="gymnasium", **options)
        except (AssertionError, TypeError) as error:
            raise ValueError(f"{self.name}: {str(error).splitlines()[0]}; {self.id} alone is Gymnasium's") from None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of bounds that float32 rounds, once for each envpool
            _ = made.observation_space
        return made

    def open(self, n: int, rng: np.random.Generator) -> "RunningEnvpool":
        # One step beyond the horizon, which is counted here: envpool calls an end in the last step a truncation.
        seeds = rng.integers(2**31, size=n).tolist()
        return RunningEnvpool(self, self.pool(seeds, max_episode_steps=self.horizon + 1), n)


class RunningEnvpool:
    """N slots of one envpool; only running ones are stepped, so that it never starts an episode by itself."""

    def __init__(self, env: EnvpoolEnvironment, pool: Any, n: int) -> None:
        self.env, self.n, self._pool = env, n, pool
        self.t: Ints = np.zeros(n, dtype=np.int64)
        self.done: Bools = np.ones(n, dtype=np.bool_)
        self._obs: Observations = np.zeros((n, env.width), dtype=np.int64 if env.n_states else np.float64)

    def reset(self, slots: Ints) -> Observations:
        self.t[slots], self.done[slots] = 0, False
        return self._observe(slots, self._pool.reset(slots.astype(np.int32))[0])

    def step(self, actions: NDArray[Any]) -> tuple[Observations, Array, Bools, Bools]:
        space, going = self.env.action_space, np.flatnonzero(~self.done)
        if isinstance(space, spaces.Discrete):
            check_actions(actions, int(space.n))
        sent = np.asarray(actions[going], dtype=space.dtype).reshape(len(going), *(space.shape or ()))
        raw, reward, ended, cut, _ = self._pool.step(sent, going.astype(np.int32))
        self.t[going] += 1
        rewards, terminated, truncated = np.zeros(self.n), np.zeros(self.n, np.bool_), np.zeros(self.n, np.bool_)
        rewards[going], terminated[going] = reward, ended
        truncated[going] = ~ended & (cut | (self.t[going] >= self.env.horizon))
        self.done = self.done | terminated | truncated
        if not np.isfinite(rewards).all():
            raise ValueError(f"{self.env.name}: a reward is not finite, expected finite ones")
        return self._observe(going, raw), rewards, terminated, truncated

    def _observe(self, slots: Ints, raw: NDArray[Any]) -> Observations:
        if not np.isfinite(raw).all():
            raise ValueError(f"{self.env.name}: an observation is not finite, expected finite numbers")
        self._obs = self._obs.copy()
        self._obs[slots] = raw.reshape(len(slots), self.env.width)
        return self._obs
