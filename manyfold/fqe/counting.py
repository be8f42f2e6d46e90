"""The same equation as the engine's, f = reward + E[sum_a' weights f(S', a')], solved by counting: for states that are
indices, without networks, in a second.
"""

import numpy as np

from manyfold.arrays import Array
from manyfold.data.transitions import Batch, Transitions
from manyfold.fqe.engine import Bounded
from manyfold.fqe.problems import Problem

ROWS = 2**18  # at once


def count(data: Transitions, problem: Problem, n_states: int) -> Array:
    """f_t(s, a) is the mean of reward + sum_a' weights f_{t+1}(s', a') over the logged rows of (s, a); `[K, T, S, A]`.

    A row serves every step t, as neither dynamics nor rewards depend on t; rows of the last step serve that one only,
    since what followed them is not known. A pair without rows gets the mean of its step.
    """
    horizon, actions = data.about.horizon, data.about.n_actions
    pairs, every = n_states * actions, np.arange(n_states, dtype=np.float32)[:, None]
    found: list[Array] = []
    later: Array | None = None  # sum_a' weights f_{t+1}(s', a'), [K, S]
    for t in reversed(range(horizon)):
        totals, counts = np.zeros((1, pairs)), np.zeros(pairs)
        for batch in data.batches(ROWS, np.random.default_rng(0)):
            usable = np.flatnonzero((batch.t < horizon - 1) | (t == horizon - 1))
            rows = Batch._make(x[usable] for x in batch)._replace(t=np.full(len(usable), t, dtype=np.int16))
            values = np.array(problem.reward(rows), dtype=np.float64)  # [K, N]
            if later is not None:
                values += later[:, rows.next_state[:, 0].astype(np.int64)] * ~rows.terminated
            pair = rows.state[:, 0].astype(np.int64) * actions + rows.action
            totals = totals + np.stack([np.bincount(pair, weights=x, minlength=pairs) for x in values])
            counts += np.bincount(pair, minlength=pairs)
        mean = totals.sum(-1, keepdims=True) / max(1.0, counts.sum())
        f = np.where(counts > 0, totals / np.maximum(counts, 1), mean).reshape(len(totals), n_states, actions)
        weights = problem.weights(every, np.full(n_states, t))
        later = ((weights.weights if isinstance(weights, Bounded) else weights) * f).sum(-1)
        found.insert(0, f)
    return np.stack(found, 1)
