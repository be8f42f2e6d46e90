"""Offline data: episodes logged by policies of widely varying quality, never by those of the evaluation itself.

The loggers are given policies (checkpoints from the first training step to the last), each with several amounts of
uniform noise: `(1 - epsilon) pi + epsilon / A`. Every logger runs the same number of episodes, fixed beforehand:
stopping at the first n that end would favour short ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyfold.arrays import Ints, check_number
from manyfold.envs.base import Environment
from manyfold.policies.base import PolicySet
from manyfold.rollout import Choice, Steps, rollout
from manyfold.streams import stream

Columns = dict[str, NDArray[Any]]
MOST_EPISODES = 10_000_000


@dataclass(frozen=True)
class Rule:
    """How much is logged, and with how much noise."""

    episodes: int  # of a group
    epsilons: tuple[float, ...]

    def __post_init__(self) -> None:
        check_number("offline.episodes", self.episodes, 1, MOST_EPISODES)
        if not self.epsilons:
            raise ValueError("offline.epsilons is [], expected one or more numbers from 0 to 1")
        for epsilon in self.epsilons:
            check_number("offline.epsilons", epsilon, 0, 1, whole=False)


def logger_names(policies: PolicySet, rule: Rule) -> list[str]:
    """One name for each logger, in the order of their numbers."""
    return [f"{name}, epsilon {epsilon:g}" for epsilon in rule.epsilons for name in policies.names]


def log(env: Environment, policies: PolicySet, rule: Rule, name: str, group: int) -> Iterator[tuple[Ints, Columns]]:
    """(loggers of the episodes `[N]`, rows) of all episodes, some at a time; columns as `transitions.schema` says.

    Args:
        name, group: of the random stream.
    """
    noise, many = np.asarray(rule.epsilons), policies.n_policies
    counts = _split(rule.episodes, len(noise) * many)

    def choose(obs: NDArray[Any], t: Ints, loggers: Ints) -> Choice:
        epsilon = noise[loggers // many, None]
        return Choice((1 - epsilon) * policies.probs_of(loggers % many, obs, t) + epsilon / policies.n_actions)

    if not env.slots:  # all episodes of a logger at once, each logger with a stream of its own
        first = 0
        for logger, count in enumerate(counts):
            if count:
                loggers = np.full(count, logger)
                for rows in rollout(env, choose, loggers, stream("offline", name, group, logger)):
                    yield loggers, _columns(rows, first)
            first += count
        return
    rng = stream("offline", name, group)
    loggers = rng.permutation(np.repeat(np.arange(len(counts)), counts))  # so that all kinds run side by side
    for rows in rollout(env, choose, loggers, rng):
        yield loggers[np.unique(rows.episode)], _columns(rows)


def _columns(rows: Steps, first: int = 0) -> Columns:
    """The columns of Parquet, the episodes numbered from `first` on."""
    columns: Columns = {name: x for name, x in vars(rows).items() if name not in ("prob", "noted")}
    return columns | {"episode": rows.episode + first, "behavior_log_prob": np.log(rows.prob)}


def _split(episodes: int, loggers: int) -> list[int]:
    """Episodes of each logger: as equal as can be."""
    return [episodes // loggers + (i < episodes % loggers) for i in range(loggers)]
