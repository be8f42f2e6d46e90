"""Any Gymnasium environment, by id or factory, as N episodes at a time.

Every slot is an environment of its own with its own seed. Gymnasium's vector environments with autoreset off refuse to
step while any slot has ended, so a slot without an episode left to begin could not wait: here only running slots step.

Observations: Box (flattened) or Discrete (an index). Actions: Discrete (an index), Box, MultiDiscrete or MultiBinary (a
vector). Rewards and ends are the environment's own; its
own truncation (a TimeLimit) ends an episode as well as our horizon does.
"""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from manyfold.arrays import Array, Bools, Ints, check_actions, check_number
from manyfold.draws import Seeds
from manyfold.envs.base import Environment, Observations
from manyfold.policies.base import check_indices

MOST_STEPS = 1_000_000  # of an episode
KINDS = (spaces.Discrete, spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)  # of actions
CRASHES = (Exception, SystemExit)  # whatever somebody's code raises; sys.exit there would pass for our exit code
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

    seeded = True

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
        self.settings = dict(kwargs)
        self.name = name or (make if isinstance(make, str) else str(getattr(make, "__name__", "environment")))
        # Of an id, a missing module and wrong arguments are the user's; of a factory, they are its own errors.
        refused = (gymnasium.error.Error, ImportError, TypeError) if isinstance(make, str) else gymnasium.error.Error
        try:
            env = self._make()
        except refused as error:
            unknown = isinstance(error, gymnasium.error.UnregisteredEnv)
            hint = " Expected a Gymnasium id, or module:function" if unknown else ""
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"environment {make!r}: {said}{hint}") from None
        except CRASHES as error:
            raise _crashed(f"{self.name}: making it failed", error) from error
        if not isinstance(env, gymnasium.Env):
            raise ValueError(f"{self.name}: made {env!r:.40}, expected a gymnasium.Env")
        try:
            self.observation_space, self.action_space, own = env.observation_space, env.action_space, _time_limit(env)
            env.close()
        except CRASHES as error:
            raise _crashed(f"{self.name}: asking for its spaces or closing it failed", error) from error
        limit = horizon if horizon is not None else own
        if limit is None:
            raise ValueError(
                f"{self.name} has no TimeLimit, expected a horizon: horizon=500 or --horizon 500, steps at most"
            )
        check_number("horizon", limit, 1, MOST_STEPS)
        self.horizon, self.time_limit = int(limit), own
        if not isinstance(self.observation_space, spaces.Box | spaces.Discrete):
            raise ValueError(
                f"{self.name}: observations are {self.observation_space}, expected a Box or Discrete space"
            )
        if not isinstance(self.action_space, KINDS):
            kinds = ", ".join(kind.__name__ for kind in KINDS)
            raise ValueError(f"{self.name}: actions are {self.action_space}, expected one of {kinds}")
        # Making one takes as long as dozens of steps, so that those of an id whose episodes have all ended serve again.
        # A factory may draw what it makes, such as masses: each episode gets its own.
        self.again, self.idle = isinstance(make, str), list[gymnasium.Env[Any, Any]]()
        weakref.finalize(self, _close, self.idle)

    def __getstate__(self) -> dict[str, Any]:  # for other processes
        return vars(self) | {"idle": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        weakref.finalize(self, _close, self.idle)

    def open(self, n: int, rng: np.random.Generator) -> "RunningGymnasium":
        envs: list[gymnasium.Env[Any, Any]] = []
        with contextlib.suppress(IndexError):  # of an empty list; several threads may take from it
            while len(envs) < n:
                envs.append(self.idle.pop())
        try:
            envs += [self._make() for _ in range(n - len(envs))]
        except CRASHES as error:
            raise _crashed(f"{self.name}: making it failed", error) from error
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


def _close(envs: Sequence[gymnasium.Env[Any, Any]]) -> None:
    """Simulators may be processes of their own; their episodes are over, so that a failure costs nothing."""
    for env in envs:
        with contextlib.suppress(*CRASHES):
            env.close()


def _crashed(what: str, error: BaseException) -> ValueError:
    """One line for whatever went wrong inside of somebody's environment."""
    said = " ".join(str(error).split())[:200]
    return ValueError(f"{what} inside of the environment ({type(error).__name__}: {said}), expected it to run")


class RunningGymnasium:
    """N Gymnasium environments; a slot's first episode starts by its own seed, the later ones follow from it."""

    def __init__(
        self, env: GymnasiumEnvironment, envs: list[gymnasium.Env[Any, Any]], rng: np.random.Generator
    ) -> None:
        self.env, self.envs, self.n = env, envs, len(envs)
        weakref.finalize(self, _close, envs)
        self._seeds: list[int | None] = rng.integers(2**31, size=self.n).tolist()
        self.t: Ints = np.zeros(self.n, dtype=np.int64)
        self.done: Bools = np.ones(self.n, dtype=np.bool_)
        self._first = int(getattr(env.observation_space, "start", 0))  # of a Discrete space
        self._obs: Observations = np.zeros((self.n, env.width), dtype=np.int64 if env.n_states else np.float64)

    def seed(self, slots: Ints, seeds: Seeds) -> None:
        for i, seed in zip(slots.tolist(), seeds.tolist(), strict=True):
            self._seeds[i] = seed % 2**31

    def reset(self, slots: Ints) -> Observations:
        raw = []
        for i in slots.tolist():
            try:
                raw.append(self.envs[i].reset(seed=self._seeds[i])[0])
            except CRASHES as error:
                raise _crashed(f"{self.env.name}: reset failed", error) from error
            self._seeds[i] = None
        self.t[slots], self.done[slots] = 0, False
        return self._observe(slots, raw)

    def step(self, actions: NDArray[Any]) -> tuple[Observations, Array, Bools, Bools]:
        sent, going = self._sent(actions), np.flatnonzero(~self.done)
        rewards = np.zeros(self.n)
        terminated, truncated = np.zeros(self.n, dtype=np.bool_), np.zeros(self.n, dtype=np.bool_)
        raw, found = [], []
        for i in going.tolist():
            try:
                obs, reward, ended, cut, _ = self.envs[i].step(sent[i])
            except CRASHES as error:
                raise _crashed(f"{self.env.name}: step {self.t[i] + 1} of an episode failed", error) from error
            raw.append(obs)
            try:
                found.append((np.nan if reward is None else float(reward), bool(ended), bool(cut)))
            except (TypeError, ValueError):
                raise ValueError(
                    f"{self.env.name}: step {self.t[i] + 1} gave reward {reward!r:.40}, terminated {ended!r:.20} and "
                    f"truncated {cut!r:.20}, expected a number, True or False, and True or False"
                ) from None
        if found:
            rewards[going], terminated[going], truncated[going] = zip(*found, strict=True)
        self.t[going] += 1
        bad = ~(np.abs(rewards) < LARGEST)
        if bad.any():
            i = int(bad.argmax())
            raise ValueError(f"{self.env.name}: reward {rewards[i]} at step {self.t[i]}, expected a finite number")
        truncated = ~terminated & ~self.done & (truncated | (self.t >= self.env.horizon))
        self.done = self.done | terminated | truncated
        return self._observe(going, raw), rewards, terminated, truncated

    def close(self) -> None:
        if self.env.again:
            self.env.idle += self.envs
        else:
            _close(self.envs)
        self.envs.clear()

    def _sent(self, actions: NDArray[Any]) -> Sequence[Any] | NDArray[Any]:
        """Actions as the environment wants them: Discrete spaces may start elsewhere, vectors have a shape."""
        space = self.env.action_space
        if isinstance(space, spaces.Discrete):
            check_actions(actions, int(space.n))
            return (np.asarray(actions, dtype=np.int64) + int(space.start)).tolist()  # Python's own: quicker to step by
        shaped = np.asarray(actions, dtype=space.dtype).reshape(self.n, *(space.shape or ()))
        return shaped + space.start if isinstance(space, spaces.MultiDiscrete) else shaped

    def _observe(self, slots: Ints, raw: list[Any]) -> Observations:
        """Observations of all slots, after these ones' new ones were checked, all at once."""
        self._obs = self._obs.copy()
        if not raw:
            return self._obs
        try:
            x = _flat(raw)
        except ValueError:  # of several shapes
            x = np.empty((0, 0))
        if x.shape[1] != self.env.width or not (np.abs(x) < LARGEST).all():
            for slot, obs in zip(slots, raw, strict=True):
                one = _flat([obs])
                if one.shape[1] != self.env.width or not (np.abs(one) < LARGEST).all():
                    raise ValueError(
                        f"{self.env.name}: observation {obs!r:.60} after {self.t[slot]} steps, "
                        f"expected {self.env.width} finite numbers"
                    )
        if self.env.n_states:
            found = check_indices(f"{self.env.name}: observation", x - self._first, self.env.n_states)
            self._obs[slots] = found[:, None]
        else:
            self._obs[slots] = x
        return self._obs


def _flat(raw: list[Any]) -> Array:
    """Observations of one shape, as rows."""
    return np.array(raw, dtype=np.float64).reshape(len(raw), -1)
