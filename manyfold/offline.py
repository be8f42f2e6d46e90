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

from manyfold import environments, slots
from manyfold.gridworld import Gridworld
from manyfold.mdp import Array, Ints
from manyfold.networks import NetworkPolicySet
from manyfold.rollout import rollout
from manyfold.streams import stream
from manyfold.transitions import About

Columns = dict[str, NDArray[Any]]


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
    """(loggers of the episodes, rows) of a robot's group, some episodes at a time; a state is (s, a_rest)."""
    rng = stream("offline", env, group)
    many = history.n_policies
    loggers = np.repeat(np.arange(len(rule.epsilons) * many), _split(rule.episodes, len(rule.epsilons) * many))
    loggers = rng.permutation(loggers)  # so that episodes of all kinds run side by side
    noise = np.asarray(rule.epsilons)

    def choose(states: Array, t: Ints, episode: Ints) -> tuple[Array, slots.Note]:
        policy, epsilon = loggers[episode] % many, noise[loggers[episode] // many, None]
        probs = history.probs(states, t)[policy, np.arange(len(t))]  # [n, A]
        return (1 - epsilon) * probs + epsilon / history.n_actions, lambda actions: np.empty((len(t), 0))

    world = slots.fill(env, companion, rule.episodes, rng)
    for rows in slots.blocks(slots.play(world, rule.episodes, choose, rng), rule.episodes, slots.BLOCK):
        columns: Columns = {name: x for name, x in rows._asdict().items() if name not in ("prob", "noted")}
        yield loggers[np.unique(rows.episode)], columns | {"behavior_log_prob": np.log(rows.prob)}


def _split(episodes: int, loggers: int) -> list[int]:
    """Episodes of each logger: as equal as can be."""
    return [episodes // loggers + (i < episodes % loggers) for i in range(loggers)]
