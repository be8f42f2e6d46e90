"""MuJoCo with action dimension 0 in bins: the one decision that target policies differ in.

Observation: Gymnasium's own (Ant without contact forces: 27 numbers). The other action dimensions come from a
companion, the same for every target policy, so no importance ratio contains them. If it acts by its mean, they follow
from s, and the state is s alone; if it samples, it does so before the bin is chosen, and they are appended: the state
is (s, a_rest).
Actions: equal bins over [low, high] of dimension 0, executed at the bin's midpoint.
Rewards: Gymnasium's, in float32 precision (envpool's); Ant without contact cost, which goes with the contact forces.
Start: Gymnasium's distribution, from each slot's own seed. End: termination, or truncation after `horizon` steps.

The physics is envpool's, compiled with MuJoCo 3.6.0. Gymnasium on MuJoCo 4 gives the same numbers except on Ant, which
alone has a free joint: up to 3.17, RK4 was of second order only in such a joint's rotation; 4.0 mended that.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike, NDArray

from manyfold.arrays import Array, Bools, Ints, check_finite, check_number, check_shape
from manyfold.envs.base import Environment
from manyfold.streams import stream

MOST_STEPS = 1_000_000  # of an episode

Companion = Callable[[Array, np.random.Generator], NDArray[np.floating[Any]]]


class Robot(NamedTuple):
    """Gymnasium's id of a robot, and the options under which envpool's and Gymnasium's are the same."""

    id: str
    envpool: dict[str, Any]
    gymnasium: dict[str, Any]


ROBOTS = {
    "ant": Robot(
        "Ant-v5",
        {"use_contact_force": False},  # drops the forces from the observation and their cost from the reward
        {"include_cfrc_ext_in_observation": False, "contact_cost_weight": 0.0},
    ),
    "hopper": Robot("Hopper-v5", {}, {}),
    "inverted-double-pendulum": Robot("InvertedDoublePendulum-v5", {}, {}),
    "inverted-pendulum": Robot("InvertedPendulum-v5", {}, {}),
    "walker": Robot("Walker2d-v5", {}, {}),
}


def make_envpool(robot: str, seeds: Sequence[int], horizon: int, threads: int) -> Any:
    """One envpool with a slot for every seed, cut off after `horizon` steps.

    Two habits of envpool to know: the step after an end is a dummy that resets (observation of the new start, reward
    0), and a termination in the very last step is reported as truncation.
    """
    if robot not in ROBOTS:
        raise ValueError(f"unknown robot {robot!r}, expected one of {', '.join(ROBOTS)}")
    check_number("horizon", horizon, 1, MOST_STEPS)
    check_number("threads", threads, 1, 1024)
    bad = [s for s in seeds if isinstance(s, bool) or not isinstance(s, int | np.integer) or not 0 <= s < 2**31]
    if bad or not len(seeds):
        found = f"seeds contains {bad[0]!r}" if bad else "seeds is empty"
        raise ValueError(f"{found}, expected one whole number from 0 to 2^31 - 1 for every slot")
    try:
        import envpool  # a second that Gridworlds need not wait for
    except ModuleNotFoundError:
        raise ValueError(
            f"{robot} needs envpool, which is not installed; install the extra `mujoco`: pip install '.[mujoco]'"
        ) from None

    return envpool.make(
        ROBOTS[robot].id,
        env_type="gymnasium",
        num_envs=len(seeds),
        num_threads=int(threads),
        seed=[int(s) for s in seeds],
        max_episode_steps=int(horizon),
        **ROBOTS[robot].envpool,
    )


class BinnedMujoco(Environment):
    """A robot whose first action dimension is chosen among equal bins.

    Args:
        robot: a name in `ROBOTS`.
        companion: `(observations [N, d_s], rng) -> [N, d_a - 1]`, the other action dimensions; may be left out where
            there are none, or where no episode is run.
        horizon: T of an evaluated episode; PPO trains on Gymnasium's own 1,000.
        bins: number of equal bins of dimension 0.
        threads: envpool's; the numbers don't depend on it.
        appended: the companion's actions are part of the observation; False where it is a function of s.
    """

    def __init__(
        self,
        robot: str,
        companion: Companion | None = None,
        horizon: int = 100,
        bins: int = 10,
        threads: int = 1,
        appended: bool = True,
    ) -> None:
        check_number("bins", bins, 1, 10_000)
        check_number("horizon", horizon, 1, MOST_STEPS)
        pool = make_envpool(robot, [0], horizon, threads)
        self.name = self.robot = robot
        self.companion, self.horizon, self.threads, self.appended = companion, int(horizon), threads, appended
        self.low, self.high = pool.action_space.low, pool.action_space.high  # [d_a]
        self.n_features = int(pool.observation_space.shape[0])  # of s, without the rest of the action
        self.action_space = spaces.Discrete(int(bins))
        width = self.n_features + (len(self.low) - 1 if appended else 0)
        self.observation_space = spaces.Box(-np.inf, np.inf, (width,), np.float64)

    def open(self, n: int, rng: np.random.Generator) -> "RunningMujoco":
        seeds = rng.integers(2**31, size=n).tolist()
        return RunningMujoco(
            self.robot,
            self.companion if len(self.low) > 1 else None,
            seeds,
            horizon=self.horizon,
            bins=self.n_actions,
            threads=self.threads,
            appended=self.appended,
        )


class RunningMujoco:
    """N episodes at a time: `reset` starts all of them, or some again; `step` moves those that have not ended.

    A slot that has ended stays ended until `reset`: its observation is frozen and its reward 0. Only the others are
    stepped, so envpool never resets by itself, and the k-th episode of a slot starts the same however long the
    episodes before it, or those of its neighbours, took.

    Args:
        robot: a name in `ROBOTS`.
        companion: `(observations [N, d_s], rng) -> [N, d_a - 1]`, the other action dimensions, clipped here to
            [low, high]; None where the action has one dimension. It always sees all N slots (ended ones frozen), so
            the random numbers of a slot don't depend on which others have ended.
        seeds: one for each slot.
        horizon: T.
        bins: number of equal bins of dimension 0.
        threads: envpool's; the numbers don't depend on it.
        appended: the companion's actions are part of the observation.

    Attributes:
        edges, midpoints: of the bins, `[bins + 1]` and `[bins]`.
        t: steps of each slot's episode, for the caller to append t/T, `[N]`; it stands still once the slot has ended.
        done: slots that have ended, `[N]`.
    """

    def __init__(
        self,
        robot: str,
        companion: Companion | None,
        seeds: Sequence[int],
        *,
        horizon: int = 100,
        bins: int = 10,
        threads: int = 1,
        appended: bool = True,
    ) -> None:
        check_number("bins", bins, 1, 10_000)
        check_number("horizon", horizon, 1, MOST_STEPS)
        # One step beyond the horizon, which is counted here: so a termination in the last step is seen as one.
        self._pool = make_envpool(robot, seeds, horizon + 1, threads)
        low, high = self._pool.action_space.low, self._pool.action_space.high  # [d_a]
        if companion is None and len(low) > 1:
            raise ValueError(
                f"{robot} has {len(low)} action dimensions, expected a companion for the last {len(low) - 1}"
            )
        self.robot, self.n, self.horizon, self.n_actions = robot, len(seeds), int(horizon), int(bins)
        self.edges: Array = np.linspace(low[0], high[0], self.n_actions + 1)
        self.midpoints: Array = (self.edges[:-1] + self.edges[1:]) / 2
        self._companion, self._low, self._high = companion, low[1:], high[1:]
        self._d_s = self._pool.observation_space.shape[0]
        self._rng = stream("mujoco", robot, "companion", *map(int, seeds))
        self._obs: Array = np.zeros((self.n, self._d_s + len(low) - 1))
        self._width = self._obs.shape[1] if appended else self._d_s
        self.t: Ints = np.zeros(self.n, dtype=np.int64)
        self.done: Bools = np.ones(self.n, dtype=np.bool_)
        self._started = False

    def reset(self, slots: Ints | None = None) -> Array:
        """Starts a new episode in every slot, or in these: s of all `[N, d_s]`, or (s, a_rest) `[N, d_s + d_a - 1]`."""
        begun = np.arange(self.n) if slots is None else np.asarray(slots)
        self.t[begun], self.done[begun], self._started = 0, False, True
        self._observe(begun, self._pool.reset(begun.astype(np.int32))[0])
        return self._obs[:, : self._width].copy()

    def step(self, bins: ArrayLike) -> tuple[Array, Array, Bools, Bools]:
        """One step of every slot that has not ended, in the bins `[N]`.

        Returns:
            s or (s, a_rest), rewards `[N]`, and terminated and truncated `[N]`: never both, and true
            only in the step that ends the episode (`done` stays true).
        """
        chosen = self._check_bins(bins)
        rewards = np.zeros(self.n)
        terminated, truncated = np.zeros(self.n, dtype=np.bool_), np.zeros(self.n, dtype=np.bool_)
        active = np.flatnonzero(~self.done)
        if active.size:
            actions = np.column_stack([self.midpoints[chosen[active]], self._obs[active, self._d_s :]])  # [active, d_a]
            raw, reward, ended, _, _ = self._pool.step(actions, active.astype(np.int32))
            self.t[active] += 1
            rewards[active], terminated[active] = reward, ended
            truncated = (self.t >= self.horizon) & ~self.done & ~terminated
            self.done |= terminated | truncated
            self._observe(active, raw)
        return self._obs[:, : self._width].copy(), rewards, terminated, truncated

    def _observe(self, slots: Ints, raw: Array) -> None:
        """Keeps the new observations `[len(slots), d_s]` of these slots with the companion's actions for them."""
        self._obs[slots, : self._d_s] = raw
        if self._companion is not None:
            rest = np.asarray(self._companion(self._obs[:, : self._d_s].copy(), self._rng), dtype=np.float64)
            check_shape("the companion's action", rest, (self.n, len(self._low)), "[N, d_a - 1]")
            check_finite("the companion's action", rest)
            self._obs[slots, self._d_s :] = rest[slots].clip(self._low, self._high)

    def _check_bins(self, bins: ArrayLike) -> Ints:
        chosen = np.asarray(bins)
        if not self._started:
            raise ValueError("step was called before reset, expected a started episode in every slot")
        if chosen.dtype.kind not in "iu":
            raise ValueError(f"bins are {chosen.dtype}, expected integers from 0 to {self.n_actions - 1}")
        check_shape("bins", chosen, (self.n,), "[N]")
        bad = (chosen < 0) | (chosen >= self.n_actions)
        if bad.any():
            i = int(bad.argmax())
            raise ValueError(f"bins[{i}] is {chosen[i]}, expected an integer from 0 to {self.n_actions - 1}")
        return chosen.astype(np.int64)
