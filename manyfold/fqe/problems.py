"""The fits of the paper as named problems: what is the reward, and with which weights do next values count?

    q        reward r                  weights pi_k(a'|s')
    q_hat    reward r_hat = 2 r q - r^2  weights pi_k(a'|s')

`design.prediction` has the others: the variances of estimators, some of them with weights pi_k^2 / mu.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyfold.arrays import Array, Ints
from manyfold.data.transitions import Batch
from manyfold.fqe.engine import Reward, Weights
from manyfold.fqe.nets import ValueNets
from manyfold.policies.base import PolicySet


class Problem(NamedTuple):
    """What `fqe.fit` solves: f = reward + E[sum_a' weights f(S', a')]."""

    reward: Reward
    weights: Weights


def q_problem(policies: PolicySet) -> Problem:
    """Action values: the logged reward, for every policy (Algorithm 1, line 3)."""
    return Problem(lambda batch: np.repeat(batch.reward[None], policies.n_policies, axis=0), policy_weights(policies))


def q_hat_problem(policies: PolicySet, q: ValueNets) -> Problem:
    """Second moments of the on-policy return, by their Bellman equation (Algorithm 1, lines 4-6); floor them at q^2."""
    return Problem(moment_reward(q), policy_weights(policies))


def policy_weights(policies: PolicySet) -> Weights:
    """pi_k(a'|s') at the next states of a batch; a look-up where states are indices."""
    return look_up(policies.table()) if policies.n_states else policies.probs


def moment_reward(q: ValueNets) -> Reward:
    """r_hat = 2 r q(s, a) - r^2, the reward whose values are second moments."""
    table = q.table().astype(np.float32) if q.shape.n_states else None

    def r_hat(batch: Batch) -> NDArray[np.float64]:
        if table is not None:
            taken: NDArray[np.floating] = table[:, batch.t, batch.state[:, 0].astype(np.int64), batch.action]
        else:
            taken = q.predict(batch.state, batch.t)[:, np.arange(len(batch.t)), batch.action]
        return np.asarray(2 * batch.reward * taken - batch.reward**2)

    return r_hat


def look_up(table: Array) -> Weights:
    """Weights from a table `[K, T, S, A]`, in the precision of the fits."""
    small = table.astype(np.float32)

    def at(states: NDArray[np.float32], t: Ints) -> NDArray[np.float32]:
        return small[:, t, states[:, 0].astype(np.int64)]

    return at
