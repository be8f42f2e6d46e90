"""Offline data: episodes logged by policies of widely varying quality, never by the policies under evaluation.

The loggers are checkpoints from the first training step to the last, each with several amounts of uniform noise:
`(1 - epsilon) pi + epsilon / A`. Every logger runs the same number of episodes, fixed beforehand: stopping at the first
n that end would favour short ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyfold import environments
from manyfold.gridworld import Gridworld
from manyfold.mdp import Array, Ints
from manyfold.mujoco import BinnedMujoco
from manyfold.networks import NetworkPolicySet
from manyfold.rollout import rollout
from manyfold.streams import stream
from manyfold.transitions import About

Columns = dict[str, NDArray[Any]]
SLOTS = 500  # episodes of a robot that run at the same time


@dataclass(frozen=True)
class Rule:
    """How much is logged, and with how much noise."""

    episodes: int  # of a group
    epsilons: tuple[float, ...]

    def __post_init__(self) -> None:
        if isinstance(self.episodes, bool) or not isinstance(self.episodes, int) or self.episodes < 1:
            raise ValueError(f"offline.episodes is {self.episodes!r}, expected a whole number of at least 1")
        numbers = [x for x in self.epsilons if isinstance(x, int | float) and not isinstance(x, bool)]
        if not self.epsilons or len(numbers) != len(self.epsilons) or not all(0 <= x <= 1 for x in numbers):
            raise ValueError(f"offline.epsilons is {list(self.epsilons)}, expected one or more numbers from 0 to 1")


def about(env: str, group: int, width: int, n_actions: int) -> About:
    """What the file's metadata says of a group's data."""
    return About(env, environments.horizon(env), n_actions, width, group)


def logger_names(history: NetworkPolicySet, rule: Rule) -> list[str]:
    """One name for each logger, in the order of their numbers."""
    return [f"{name}, epsilon {epsilon:g}" for epsilon in rule.epsilons for name in history.spec.names]


def log_gridworld(env: str, group: int, history: NetworkPolicySet, rule: Rule) -> Iterator[tuple[int, Columns]]:
    """(logger, rows) of all episodes of a Gridworld group, one logger after the other; a state is its cell's number."""
    world = Gridworld.draw(environments.GRIDWORLDS[env], group)
    table = history.table()  # [H, T, S, A]
    first = 0
    counts = _split(rule.episodes, len(rule.epsilons) * len(table))
    for logger, count in enumerate(counts):
        epsilon = rule.epsilons[logger // len(table)]
        mu = (1 - epsilon) * table[logger % len(table)] + epsilon / world.n_actions
        rng = stream("offline", env, group, logger)
        episodes = rollout(world, mu, count, rng)
        # the last step's next cell is nowhere in the episode: one more draw gives it
        after = world.move(episodes.states[:, -1], episodes.actions[:, -1], rng.random(count, dtype=np.float32))
        steps = np.broadcast_to(np.arange(world.horizon), episodes.states.shape)
        ended = steps == world.horizon - 1
        yield (
            logger,
            {
                "episode": np.repeat(np.arange(first, first + count), world.horizon),
                "t": steps.ravel(),
                "state": episodes.states.reshape(-1, 1),
                "action": episodes.actions.ravel(),
                "reward": episodes.rewards.ravel(),
                "next_state": np.column_stack([episodes.states[:, 1:], after]).reshape(-1, 1),
                "terminated": ended.ravel(),
                "truncated": np.zeros(ended.size, dtype=np.bool_),
                "behavior_log_prob": np.log(episodes.probs(mu)).ravel(),
            },
        )
        first += count


def log_robot(
    env: str, group: int, history: NetworkPolicySet, companion: NetworkPolicySet, rule: Rule
) -> Iterator[tuple[Ints, Columns]]:
    """(loggers of the episodes, rows) of a robot's group, `SLOTS` episodes at a time; a state is (s, a_rest)."""
    rng = stream("offline", env, group)
    many = history.n_policies
    loggers = np.repeat(np.arange(len(rule.epsilons) * many), _split(rule.episodes, len(rule.epsilons) * many))
    loggers = rng.permutation(loggers)  # so that every round has episodes of all kinds
    noise = np.asarray(rule.epsilons)
    for number, first in enumerate(range(0, rule.episodes, SLOTS)):
        mine = loggers[first : first + SLOTS]
        seeds = rng.integers(2**31, size=len(mine)).tolist()
        rest = companion.companion() if companion.tensors["w3"].shape[2] > 1 else None
        world = BinnedMujoco(env, rest, seeds, horizon=history.horizon, bins=history.n_actions)
        yield (
            mine,
            _play(world, history, mine % many, noise[mine // many], first, stream("offline", env, group, number)),
        )


def _play(
    world: BinnedMujoco, history: NetworkPolicySet, policy: Ints, epsilon: Array, first: int, rng: np.random.Generator
) -> Columns:
    """One episode in every slot: its rows, episode by episode."""
    rows: list[Columns] = []
    obs = world.reset()
    while not world.done.all():
        active = np.flatnonzero(~world.done)
        t = world.t
        probs = history.probs(obs[active], t)[policy[active], np.arange(len(active))]  # [active, A]
        probs = (1 - epsilon[active, None]) * probs + epsilon[active, None] / world.n_actions
        bins = np.zeros(world.n, dtype=np.int64)
        bins[active] = (rng.random((len(active), 1)) >= np.cumsum(probs, -1)[:, :-1]).sum(-1)
        after, rewards, terminated, truncated = world.step(bins)
        rows.append(
            {
                "episode": first + active,
                "t": np.full(len(active), t),
                "state": obs[active],
                "action": bins[active],
                "reward": rewards[active],
                "next_state": after[active],
                "terminated": terminated[active],
                "truncated": truncated[active],
                "behavior_log_prob": np.log(probs[np.arange(len(active)), bins[active]]),
            }
        )
        obs = after
    columns = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    order = np.lexsort((columns["t"], columns["episode"]))
    return {name: x[order] for name, x in columns.items()}


def _split(episodes: int, loggers: int) -> list[int]:
    """Episodes of each logger: as equal as can be."""
    return [episodes // loggers + (i < episodes % loggers) for i in range(loggers)]
