"""A robot's episodes under several loggers: a list fixed beforehand, run in slots that begin the next one at once.

All episodes of the list are run to their ends, so nothing favours short ones. A slot waits only when no episode is
left to begin; it is neither stepped nor evaluated then. The numbers follow from the seed and from SLOTS: envpool starts
an episode by its slot's own seed and by how many the slot has begun.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from manyfold.mdp import Array, Bools, Ints
from manyfold.mujoco import BinnedMujoco
from manyfold.networks import NetworkPolicySet
from manyfold.policies import cumulative_probs, sample_actions

SLOTS = 100  # episodes that run at the same time
BLOCK = 200  # episodes that are handed on together

Note = Callable[[Ints], Array]  # (actions taken [n]) -> [n, whatever is to be kept of the step]
Choose = Callable[[Array, Ints, Ints], tuple[Array, Note]]  # (states [n, width], t, episodes [n]) -> probs [n, A], note


class Steps(NamedTuple):
    """Steps of several episodes; `[n]` each, states `[n, width]`."""

    episode: Ints
    t: Ints
    state: Array  # (s, a_rest)
    action: Ints
    reward: Array
    next_state: Array
    terminated: Bools
    truncated: Bools
    prob: Array  # of the action, under the logger that took it
    noted: Array  # [n, ...]


def fill(env: str, companion: NetworkPolicySet, episodes: int, rng: np.random.Generator) -> BinnedMujoco:
    """The slots for that many episodes, with seeds drawn from `rng`."""
    seeds = rng.integers(2**31, size=min(SLOTS, episodes)).tolist()
    rest = companion.companion() if companion.tensors["w3"].shape[2] > 1 else None
    return BinnedMujoco(env, rest, seeds, horizon=companion.horizon, bins=companion.n_actions)


def play(world: BinnedMujoco, episodes: int, choose: Choose, rng: np.random.Generator) -> Iterator[Steps]:
    """Runs this many episodes: one step of all that are running, again and again until the last one has ended."""
    begun, episode, obs = 0, np.zeros(world.n, dtype=np.int64), np.empty(0)
    while True:
        free = np.flatnonzero(world.done)[: episodes - begun]
        if free.size:
            episode[free] = np.arange(begun, begun + free.size)
            begun += free.size
            obs = world.reset(free)
        active = np.flatnonzero(~world.done)
        if not active.size:
            return
        rows, t = np.arange(active.size), world.t[active]
        probs, note = choose(obs[active], t, episode[active])
        actions = sample_actions(cumulative_probs(probs), rows, rng)
        bins = np.zeros(world.n, dtype=np.int64)
        bins[active] = actions
        state = obs[active]
        obs, rewards, terminated, truncated = world.step(bins)
        moved = rewards[active], obs[active], terminated[active], truncated[active]
        yield Steps(episode[active], t, state, actions, *moved, probs[rows, actions], note(actions))


def blocks(steps: Iterable[Steps], episodes: int, size: int) -> Iterator[Steps]:
    """Whole episodes in their order, `size` at a time: the rows of each one together, by t."""
    kept: list[Steps] = []
    ended, first = np.zeros(episodes, dtype=np.bool_), 0
    for step in steps:
        kept.append(step)
        ended[step.episode[step.terminated | step.truncated]] = True
        while first < episodes and ended[first : first + size].all():
            rows = Steps._make(np.concatenate(x) for x in zip(*kept, strict=True))
            inside = rows.episode < first + size
            kept = [Steps._make(x[~inside] for x in rows)]
            whole = Steps._make(x[inside] for x in rows)
            order = np.lexsort((whole.t, whole.episode))
            yield Steps._make(x[order] for x in whole)
            first += size
