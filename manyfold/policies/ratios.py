"""Does a policy draw what its density says? Against copies of itself the mean ratio is 1.

For every density mu that is 0 where pi is, `E_pi[mu(A|S) / pi(A|S)] = 1`, and all our estimators rest on it. A ratio to
another policy can be as large as it likes, and its mean tells nothing then. The copies here are made from pi itself so
that the ratio stays between 0 and 2, with a variance v that is known if pi is right; by Bernstein's inequality, for any
number N of draws, independent ones at whatever observations,

    P(|mean - 1| > l + sqrt(l^2 + 2 v L / N)) <= delta,  L = ln(2 / delta), l = L / 3N.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from scipy.special import softmax

from manyfold.arrays import Array, Ints, divide
from manyfold.policies.heads import Actions, Gaussian, Head, MultiCategorical

SHIFT = 0.5  # of a normal's copy, in its deviations: far enough to tell means apart, and the ratio stays below 1.82


class Ratio(NamedTuple):
    """Ratios mu / pi of N draws from pi."""

    copy: str  # what mu is, in words
    values: Array  # [N]
    variance: float  # of one value, on average over the draws, if pi is right

    def tolerance(self, delta: float) -> float:
        """How far the mean may be from 1, with probability 1 - delta."""
        n, log = len(self.values), float(np.log(2 / delta))
        linear = log / (3 * n)
        return float(linear + np.sqrt(linear**2 + 2 * self.variance * log / n))


def ratios(head: Head | None, said: Array, other: Array | None, actions: Actions) -> list[Ratio]:
    """The ratios of every copy.

    Args:
        head: of actions that are vectors.
        said: the policy's probabilities `[N, A]`, or its head's parameters `[N, P]`, where it drew the actions.
        other: the same of another policy, for copies that lean towards it.
        actions: drawn, `[N]` or `[N, d]`.
    """
    if isinstance(head, Gaussian):
        return list(_of_normals(head, said, other, actions))
    if isinstance(head, MultiCategorical):
        found = []
        for i in range(len(head.nvec)):
            probs, others = (None if x is None else _conditional(head, x, actions, i) for x in (said, other))
            assert probs is not None
            found += [r._replace(copy=f"choice {i}, {r.copy}") for r in _of_counted(probs, others, actions[:, i])]
        return found
    return list(_of_counted(said, other, actions))


def _of_counted(probs: Array, other: Array | None, taken: Ints) -> Iterator[Ratio]:
    """mu(a) = pi(a) (1 + f(a)) / (1 + E_pi[f]) with f in [0, 1], so that the ratio is between 1/2 and 2."""
    rows = np.arange(len(taken))
    leans = {"sharpened": probs}
    if other is not None:
        leans["leaning towards another policy"] = divide(other, other + probs)
    for a in range(probs.shape[1]):
        leans[f"leaning towards action {a}"] = np.broadcast_to(np.arange(probs.shape[1]) == a, probs.shape)
    for name, f in leans.items():
        every = (1.0 + f) / (1.0 + (probs * f).sum(-1, keepdims=True))  # [N, A]
        yield Ratio(name, every[rows, taken], float((probs * (every - 1) ** 2).sum(-1).mean()))


def _conditional(head: MultiCategorical, parameters: Array, actions: Actions, i: int) -> Array:
    """Probabilities of choice i given the others', by the head's own density; `[N, nvec[i]]`."""
    logs = []
    for a in range(head.nvec[i]):
        changed = actions.copy()
        changed[:, i] = a
        logs.append(head.log_probs(parameters[None], changed)[0])
    return np.asarray(softmax(np.stack(logs, -1), -1))


def _of_normals(head: Gaussian, parameters: Array, other: Array | None, actions: Actions) -> Iterator[Ratio]:
    """For each dimension, copies with half the variance there: at the same mean, and SHIFT towards the other's.

    With z the draw in deviations and s the shift: `ratio = sqrt(2) exp(z^2 / 2 - (z - s)^2) <= sqrt(2) exp(s^2)`, below
    2 for our s, and `E[ratio^2] = 2 / sqrt(3) exp(2 s^2 / 3)`.
    """
    mean, log_std = head.split(parameters)
    own = head.log_probs(parameters[None], actions)[0]
    towards = np.ones_like(mean) if other is None else np.where(head.split(other)[0] < mean, -1.0, 1.0)
    for i in range(mean.shape[-1]):
        for name, s in (("sharpened", 0.0), ("shifted", SHIFT)):
            moved, narrow = mean.copy(), log_std.copy()
            moved[:, i] += s * towards[:, i] * np.exp(log_std[:, i])
            narrow[:, i] -= np.log(2) / 2
            copy = head.log_probs(np.concatenate([moved, narrow], -1)[None], actions)[0]
            variance = 2 / np.sqrt(3) * np.exp(2 * s**2 / 3) - 1
            with np.errstate(over="ignore"):  # of a density that is far off
                values = np.exp(copy - own)
            yield Ratio(f"number {i}, {name}", values, float(variance))


class Misfit(NamedTuple):
    """A policy whose draws its density does not explain."""

    policy: int
    copy: str
    mean: float
    tolerance: float
    draws: int


def misfits(head: Head | None, said: Array, draw: Callable[[int], Actions], repeats: int, level: float) -> list[Misfit]:
    """The policies whose mean ratio to some copy is not 1; a right one is among them with probability `level` at most.

    Args:
        head: of actions that are vectors.
        said: probabilities `[K, N, A]` or parameters `[K, N, P]` at N observations.
        draw: `repeats` actions of policy k at each of these observations, one observation after the other.
        repeats: draws at an observation.
        level: of one or more false alarms among all policies and copies.
    """
    found = []
    for k, own in enumerate(said):
        other = said[(k + 1) % len(said)] if len(said) > 1 else None
        rows, others = (None if x is None else np.repeat(x, repeats, 0) for x in (own, other))
        assert rows is not None
        actions = draw(k)
        if head is None and (never := rows[np.arange(len(rows)), actions] == 0).any():
            share = float(never.mean())
            found.append(Misfit(k, f"actions of probability 0 in {share:.1%} of draws", 1 + share, 0.0, len(rows)))
            continue
        every = ratios(head, rows, others, actions)
        delta = level / (len(said) * max(len(every), 1))
        off = [(abs(float(r.values.mean()) - 1) / r.tolerance(delta), r) for r in every]
        worst = max(off, key=lambda pair: pair[0], default=None)
        if worst is not None and not worst[0] <= 1:
            r = worst[1]
            found.append(Misfit(k, r.copy, float(r.values.mean()), r.tolerance(delta), len(rows)))
    return found
