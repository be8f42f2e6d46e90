"""The one rollout: episodes of any environment under any set of loggers, from a list that is fixed beforehand.

All episodes of the list are run to their ends, so nothing favours short ones. Slots begin the next episode of the list
as soon as theirs has ended; a slot waits only when none is left to begin, and is neither stepped nor evaluated then.
The numbers follow from the generator and from how many slots the environment runs at the same time.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from manyfold.arrays import Array, Bools, Ints, check_distributions, check_number, check_shape
from manyfold.draws import Draws, Seeds
from manyfold.envs.base import Closable, Environment, Finite, Seedable
from manyfold.mdp import FiniteMDP
from manyfold.policies.base import PolicySet, sample_actions
from manyfold.policies.tabular import TabularPolicySet

BLOCK = 200  # episodes that are handed on together, where they don't all run at once

Noted = dict[str, NDArray[Any]]  # what is kept of each step beside the step itself, by name; [n, ...] each


class Choice(NamedTuple):
    """How a step is chosen."""

    probs: Array  # of the actions, under each episode's own logger, [n, A]
    note: Callable[[Ints], Noted] = lambda actions: {}  # what to keep of the step, given the actions taken [n]


class Drawn(NamedTuple):
    """A step that is chosen already, where actions are vectors."""

    actions: NDArray[Any]  # as they are kept, [n, d]
    sent: NDArray[Any]  # as the environment gets them, [n, d]
    prob: Array  # their density under each episode's own logger, [n]
    noted: Noted


# (observations [n, width], t [n], loggers [n]) -> Choice or Drawn
Choose = Callable[[NDArray[Any], Ints, Ints], Choice | Drawn]


@dataclass(frozen=True)
class Steps:
    """Steps of several episodes, `[n]` each, observations `[n, width]`."""

    episode: Ints
    t: Ints
    state: NDArray[Any]
    action: NDArray[Any]  # [n], or [n, d]
    reward: Array
    next_state: NDArray[Any]
    terminated: Bools
    truncated: Bools
    prob: Array  # of the action, under the logger that took it
    noted: Noted

    @property
    def lengths(self) -> Ints:
        """Steps of each episode, where whole episodes are in order; `[N]`."""
        return np.bincount(self.episode - self.episode[0])

    def take(self, rows: NDArray[Any]) -> "Steps":
        """Some of the steps, by number or mask."""
        values = {name: x[rows] for name, x in vars(self).items() if name != "noted"}
        return Steps(**values, noted={name: x[rows] for name, x in self.noted.items()})

    @staticmethod
    def stack(parts: list["Steps"]) -> "Steps":
        """Steps of the same episodes at t = 0, 1, ..., the rows of each episode together."""
        names = [name for name in vars(parts[0]) if name != "noted"]
        values = {name: _interleaved([vars(part)[name] for part in parts]) for name in names}
        return Steps(**values, noted={x: _interleaved([part.noted[x] for part in parts]) for x in parts[0].noted})

    @staticmethod
    def join(parts: list["Steps"]) -> "Steps":
        """One after the other."""
        values = {
            name: np.concatenate([vars(part)[name] for part in parts]) for name in vars(parts[0]) if name != "noted"
        }
        noted = {name: np.concatenate([part.noted[name] for part in parts]) for name in parts[0].noted}
        return Steps(**values, noted=noted)


def _interleaved(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """T arrays `[N, ...]` -> `[N * T, ...]`."""
    return np.stack(parts, 1).reshape(-1, *parts[0].shape[1:])


def in_turns(policies: PolicySet) -> Choose:
    """Every episode by one of the policies, nothing noted."""
    return lambda obs, t, loggers: Choice(policies.probs_of(loggers, obs, t))


def rollout(
    env: Environment,
    choose: Choose,
    loggers: Ints,
    rng: np.random.Generator,
    size: int = 0,
    seeded: tuple[Draws, Seeds] | None = None,
) -> Iterator[Steps]:
    """Runs one episode for each entry of `loggers`, and hands on whole episodes in their order.

    Args:
        choose: says how a step is chosen, given which logger runs each episode.
        loggers: the logger of each episode, `[N]`.
        size: episodes of a block; all of them, where all run at once, or `BLOCK` if left out.
        seeded: what actions are drawn by instead of `rng`, and each episode's own seed `[N]`: an episode is then the
            same whatever runs beside it, where the environment takes seeds.
    """
    check_number("size", size, 0)
    loggers = np.asarray(loggers)
    if loggers.ndim != 1 or not len(loggers) or not np.issubdtype(loggers.dtype, np.integer) or loggers.min() < 0:
        raise ValueError(
            f"loggers are {' '.join(str(loggers).split()):.60}, expected the number of each episode's logger"
        )
    episodes = len(loggers)
    size = size or (BLOCK if env.slots else episodes)
    return _blocks(play(env, choose, loggers, rng, seeded), episodes, size)


def play(
    env: Environment,
    choose: Choose,
    loggers: Ints,
    rng: np.random.Generator,
    seeded: tuple[Draws, Seeds] | None = None,
) -> Iterator[Steps]:
    """One step of all episodes that are running, again and again until the last one has ended; see `rollout`."""
    episodes = len(loggers)
    draws, seeds = seeded or (rng, None)
    running = env.open(min(env.slots or episodes, episodes), rng)
    begun, episode, obs = 0, np.zeros(running.n, dtype=np.int64), np.empty(0)
    while True:
        free = np.flatnonzero(running.done)[: episodes - begun]
        if free.size:
            episode[free] = np.arange(begun, begun + free.size)
            begun += free.size
            if seeds is not None and isinstance(running, Seedable):
                running.seed(free, seeds[episode[free]])
            obs = running.reset(free)
        going = np.flatnonzero(~running.done)
        if not going.size:
            if isinstance(running, Closable):
                running.close()
            return
        active: Any = going if going.size < running.n else slice(None)  # all of them: nothing to pick
        state, t, who = obs[active], running.t[active].copy(), episode[active].copy()
        if isinstance(draws, Draws) and seeds is not None:
            draws.at(seeds[who], t)
        chosen = choose(state, t, loggers[who])
        drawn = chosen if isinstance(chosen, Drawn) else _draw(chosen, len(who), env.n_actions, int(t[0]), draws)
        actions = np.zeros((running.n, *drawn.sent.shape[1:]), dtype=drawn.sent.dtype)
        actions[active] = drawn.sent
        obs, rewards, terminated, truncated = running.step(actions)
        moved = rewards[active], obs[active], terminated[active], truncated[active]
        noted = chosen.note(drawn.actions) if isinstance(chosen, Choice) else drawn.noted
        yield Steps(who, t, state, drawn.actions, *moved, drawn.prob, noted)


def _draw(choice: Choice, n: int, n_actions: int, t: int, rng: np.random.Generator | Draws) -> Drawn:
    """Counted actions by their probabilities; what is noted of them waits until the step was made."""
    probs = choice.probs
    if probs.shape != (n, n_actions) or not (probs.min() >= 0 and np.abs(probs.sum(-1) - 1).max() < 1e-5):
        raise ValueError(
            f"a logger's probabilities at t={t} have shape {list(probs.shape)} and sum to "
            f"{' '.join(str(probs.sum(-1)).split()):.40}, expected {[n, n_actions]} and 1"
        )
    taken = sample_actions(probs, rng)
    return Drawn(taken, taken, probs[np.arange(n), taken], {})


def _blocks(steps: Iterable[Steps], episodes: int, size: int) -> Iterator[Steps]:
    """Whole episodes in their order, `size` at a time: the rows of each one together, by t."""
    kept: list[Steps] = []
    ended, first = np.zeros(episodes, dtype=np.bool_), 0
    for step in steps:
        kept.append(step)
        ended[step.episode[step.terminated | step.truncated]] = True
        while first < episodes and ended[first : first + size].all():
            if size >= episodes and all(np.array_equal(part.episode, kept[0].episode) for part in kept):
                yield Steps.stack(kept)  # all have run side by side from the first step to the last
                return
            rows = Steps.join(kept)
            inside = rows.episode < first + size
            kept = [] if inside.all() else [rows.take(~inside)]
            whole = rows if inside.all() else rows.take(inside)
            yield whole.take(np.lexsort((whole.t, whole.episode)))
            first += size


class TabularEpisodes(NamedTuple):
    """N episodes of T steps where states are indices: S_t, A_t and R_{t+1}, `[N, T]` each."""

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


def rollout_tabular(
    world: Environment | FiniteMDP, mu: ArrayLike, episodes: int, rng: np.random.Generator
) -> TabularEpisodes:
    """N whole episodes of mu `[T, S, A]`, or of J loggers `[J, T, S, A]` in turns: episode i is i mod J's."""
    env = Finite(world) if isinstance(world, FiniteMDP) else world
    check_number("episodes", episodes, 1, 10**9)
    table = np.asarray(mu, dtype=np.float64)
    check_shape("mu", table, (*table.shape[:-3], env.horizon, env.n_states, env.n_actions), "[T, S, A]")
    loggers = table if table.ndim == 4 else table[None]
    check_distributions("mu", loggers, ("j", "t", "s", "a"))
    choose = in_turns(TabularPolicySet(loggers))
    (rows,) = rollout(env, choose, np.arange(episodes) % len(loggers), rng)
    shape = (episodes, env.horizon)
    columns = (np.asfortranarray(x.reshape(shape)) for x in (rows.state[:, 0], rows.action, rows.reward))
    return TabularEpisodes(*columns)  # steps first in memory, as everything after it goes step by step
