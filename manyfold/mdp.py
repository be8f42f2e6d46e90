"""Finite-horizon Markov decision processes, validated."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse

from manyfold.arrays import (
    SUM_TOLERANCE,
    Array,
    Ints,
    check_actions,
    check_distributions,
    check_finite,
    check_number,
    check_shape,
)


class FiniteMDP:
    """States 0..S-1, actions 0..A-1, rewards r(s, a), an initial distribution and a horizon T.

    Args:
        transitions: p(s' | s, a), dense `[S, A, S]` or a SciPy sparse `[S * A, S]` whose row is `s * A + a`.
        rewards: r(s, a), `[S, A]`.
        initial: p_0(s), `[S]`.
        horizon: T >= 1; an episode has exactly T steps, t = 0..T-1.
    """

    def __init__(self, transitions: Any, rewards: ArrayLike, initial: ArrayLike, horizon: int) -> None:
        self.rewards: Array = np.array(rewards, dtype=np.float64)
        self.initial: Array = np.array(initial, dtype=np.float64)
        if self.rewards.ndim != 2 or 0 in self.rewards.shape:
            raise ValueError(f"rewards has shape {list(self.rewards.shape)}, expected [S, A] with S, A >= 1")
        check_number("horizon", horizon, 1)
        self.horizon = int(horizon)
        self.n_states, self.n_actions = self.rewards.shape
        check_finite("rewards", self.rewards)
        check_shape("initial", self.initial, (self.n_states,), "[S]")
        check_distributions("initial", self.initial, ())
        self.transitions = self._check_transitions(transitions)  # CSR [S * A, S]

    def _check_transitions(self, transitions: Any) -> sparse.csr_array:
        n_states, n_actions = self.n_states, self.n_actions
        if sparse.issparse(transitions):
            if transitions.shape != (n_states * n_actions, n_states):
                raise ValueError(
                    f"transitions has shape {list(transitions.shape)}, expected "
                    f"{[n_states * n_actions, n_states]} = [S * A, S] (sparse; the row is s * A + a)"
                )
        else:
            transitions = np.asarray(transitions, dtype=np.float64)
            check_shape("transitions", transitions, (n_states, n_actions, n_states), "[S, A, S]")
            transitions = transitions.reshape(n_states * n_actions, n_states)
        p = sparse.csr_array(transitions, dtype=np.float64, copy=True)
        p.sum_duplicates()
        p.eliminate_zeros()
        rows = np.repeat(np.arange(p.shape[0]), np.diff(p.indptr))
        bad = ~(np.isfinite(p.data) & (p.data > 0))
        if bad.any():
            i = int(bad.argmax())
            s, a = divmod(int(rows[i]), n_actions)
            raise ValueError(
                f"transitions: p(s'={p.indices[i]} | s={s}, a={a}) is {p.data[i]:g}, expected a probability"
            )
        total = np.asarray(p.sum(axis=1)).ravel()
        off = np.abs(total - 1) > SUM_TOLERANCE
        if off.any():
            s, a = divmod(int(off.argmax()), n_actions)
            raise ValueError(f"transitions: row s={s}, a={a} sums to {total[s * n_actions + a]:.6g}, expected 1")
        self._rows: Ints = rows
        return p

    def check_policies(self, policies: ArrayLike) -> Array:
        """The target policies `[K, T, S, A]` as float64, or a ValueError that names the first bad row."""
        pi = np.asarray(policies, dtype=np.float64)
        if pi.ndim != 4 or pi.shape[0] == 0:
            raise ValueError(f"policies has shape {list(pi.shape)}, expected [K, T, S, A] with K >= 1")
        tsa = (self.horizon, self.n_states, self.n_actions)
        check_shape("policies", pi, (pi.shape[0], *tsa), "[K, T, S, A]")
        check_distributions("policies", pi, ("k", "t", "s", "a"))
        return pi

    def check_behavior(self, mu: ArrayLike) -> Array:
        """The behavior policy `[T, S, A]` as float64, or a ValueError that names the first bad row."""
        table = np.asarray(mu, dtype=np.float64)
        check_shape("mu", table, (self.horizon, self.n_states, self.n_actions), "[T, S, A]")
        check_distributions("mu", table, ("t", "s", "a"))
        return table

    def expect(self, f: Array) -> Array:
        """E[f(S') | s, a] of `f [..., S]` -> `[..., S, A]`."""
        flat = f.reshape(-1, self.n_states)
        out = np.asarray(self.transitions @ flat.T).T  # [..., S * A]
        return np.ascontiguousarray(out).reshape(*f.shape, self.n_actions)

    def variance(self, f: Array) -> Array:
        """Var(f(S') | s, a) of `f [..., S]` -> `[..., S, A]`; centred, hence never below 0."""
        flat = np.ascontiguousarray(f.reshape(-1, self.n_states).T)  # [S, F]
        mean = np.asarray(self.transitions @ flat)  # [S * A, F]
        squared = (flat[self.transitions.indices] - mean[self._rows]) ** 2 * self.transitions.data[:, None]  # [nnz, F]
        out = np.add.reduceat(squared, self.transitions.indptr[:-1], axis=0)  # every row has an entry: it sums to 1
        return np.ascontiguousarray(out.T).reshape(*f.shape, self.n_actions)

    def push(self, x: Array) -> Array:
        """sum_{s, a} x(s, a) p(s' | s, a) of `x [..., S, A]` -> `[..., S]`: the adjoint of `expect`."""
        flat = x.reshape(-1, self.n_states * self.n_actions)
        out = np.asarray(self.transitions.T @ flat.T).T
        return np.ascontiguousarray(out).reshape(*x.shape[:-1])

    def start(self, episodes: int, rng: np.random.Generator) -> Ints:
        """Draws S_0 of every episode, `[N]`."""
        return rng.choice(self.n_states, size=episodes, p=self.initial / self.initial.sum())

    def step(self, states: Ints, actions: Ints, rng: np.random.Generator) -> tuple[Ints, Array]:
        """One step of N episodes: the next states and the rewards, `[N]` each."""
        check_actions(actions, self.n_actions)
        rows = states * self.n_actions + actions
        p = self.transitions
        below = np.cumsum(p.data) - p.data  # probability mass before each entry, over the whole table
        first, last = p.indptr[rows], p.indptr[rows + 1] - 1
        mass = below[last] + p.data[last] - below[first]
        entry = np.searchsorted(below, below[first] + rng.random(len(rows)) * mass, side="right") - 1
        return p.indices[np.clip(entry, first, last)].astype(np.int64), self.rewards.ravel()[rows]
