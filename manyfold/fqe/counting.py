"""The same equation as the engine's, f = reward + E[sum_a' weights f(S', a')], solved by counting: for states that are
indices, without networks, in a second.
"""

import numpy as np

from manyfold.arrays import Array
from manyfold.data.transitions import Batch, Transitions
from manyfold.fqe.engine import Bounded
from manyfold.fqe.problems import Problem

ROWS = 2**20  # at once


def count(data: Transitions, problem: Problem, n_states: int) -> Array:
    """f_t(s, a) is the mean of reward + sum_a' weights f_{t+1}(s', a') over the logged rows of (s, a); `[K, T, S, A]`.

    A row serves every step t, as neither dynamics nor rewards depend on t; rows of the last step serve that one only,
    since what followed them is not known. A pair without rows gets the mean of its step.
    """
    horizon, actions = data.about.horizon, data.about.n_actions
    pairs, every = n_states * actions, np.arange(n_states, dtype=np.float32)[:, None]
    distinct, times = distinct_rows(data)
    pair = distinct.state[:, 0].astype(np.int64) * actions + distinct.action
    after = distinct.next_state[:, 0].astype(np.int64)
    found: list[Array] = []
    later: Array | None = None  # sum_a' weights f_{t+1}(s', a'), [K, S]
    for t in reversed(range(horizon)):
        values = np.array(problem.reward(distinct._replace(t=np.full_like(distinct.t, t))), dtype=np.float64)  # [K, N]
        if later is not None:
            values += later[:, after] * ~distinct.terminated
        weight = times * ((distinct.t < horizon - 1) | (t == horizon - 1))
        totals = np.stack([np.bincount(pair, weights=weight * x, minlength=pairs) for x in values])
        counts = np.bincount(pair, weights=weight, minlength=pairs)
        mean = totals.sum(-1, keepdims=True) / max(1.0, counts.sum())
        f = np.where(counts > 0, totals / np.maximum(counts, 1), mean).reshape(len(totals), n_states, actions)
        weights = problem.weights(every, np.full(n_states, t))
        later = ((weights.weights if isinstance(weights, Bounded) else weights) * f).sum(-1)
        found.insert(0, f)
    return np.stack(found, 1)


def distinct_rows(data: Transitions) -> tuple[Batch, Array]:
    """Rows that differ in more than their step, and how often each was logged; t is the horizon's last step or 0."""
    last, kept = data.about.horizon - 1, np.empty((0, 7))
    for batch in data.batches(ROWS, np.random.default_rng(0)):
        columns = batch.t == last, batch.state, batch.action, batch.reward, batch.next_state, batch.terminated
        rows = np.concatenate([kept, np.column_stack([*columns, np.ones(len(batch.t))])])
        keys, which = np.unique(rows[:, :-1], axis=0, return_inverse=True)
        kept = np.column_stack([keys, np.bincount(which.ravel(), weights=rows[:, -1])])
    t, state, action, reward, after, ended, times = kept.T
    small, here, there = np.int16, state[:, None].astype(np.float32), after[:, None].astype(np.float32)
    taken, paid, no = action.astype(small), reward.astype(np.float32), np.zeros(len(t), dtype=np.bool_)
    return Batch((t * last).astype(small), here, taken, paid, there, ended > 0, no), np.asarray(times, dtype=np.float64)
