"""Policies without densities: their own returns, round by round from common starts."""

from collections.abc import Callable
from functools import cached_property

import numpy as np

from manyfold.arrays import Array, Ints, check_number
from manyfold.envs.base import Environment
from manyfold.estimate.evaluation import Estimate
from manyfold.estimate.stopping import Played, Returns, play
from manyfold.policies.actors import ActorSet
from manyfold.streams import stream


class PlainEstimate(Estimate):
    """As an `Estimate`, but a column of `values` is a round: one return of every policy, from the same start."""

    @property
    def episodes(self) -> int:
        """K times the rounds."""
        return int(self.values.size)

    @cached_property
    def variance(self) -> Array:
        return self.on_policy_variance


def plain(
    env: Environment,
    actors: ActorSet,
    episodes: int,
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> PlainEstimate:
    """Plays `episodes` in all, as many of each policy, rounded up."""
    k = actors.n_policies
    check_number("episodes", episodes, 2 * k)
    played = play(env, actors.acts, -(-episodes // k), stream("play", env.name, seed), progress)
    nothing = np.zeros(played.returns.shape[1], dtype=np.int64)
    weights, starts = np.zeros_like(played.returns), np.zeros((k, k))
    own = tuple(played.returns)
    return PlainEstimate(actors.names, played.returns, nothing, nothing, own, weights, starts, (), played.steps)


def returns(env: Environment, actors: ActorSet, seed: int = 0) -> Returns:
    """Where `stopping.until` gets its rounds from: every call plays new ones."""
    rng = stream("play", env.name, seed)

    def run(which: Ints, rounds: int) -> Played:
        return play(env, [actors.acts[k] for k in which], rounds, rng)

    return Returns(actors.names, run)
