"""Baselines that need no logged data: regressions of the reward-to-go on other folds of the online episodes themselves.

A baseline that is linear, b_k(s, t) = features(s, t) . theta_k, has a D that is linear too, so that the regressions of
all folds cost one pass over the episodes:

    D_k = Z_k . theta_k,   Z_k = sum_t (W_{t-1} - W_t) features(S_t, t).

Three of them: the mean reward-to-go of the episodes that are alive at about t; a regression on the state and t; and one
on the action as well, theta + delta_a, where delta is shrunk towards 0:

    D_k = Z_k . theta_k + sum_a Z_ka . delta_ka,   Z_ka = sum_t (W_{t-1} pi_k(a|S_t) - W_t 1[A_t = a]) features(S_t, t).

Where actions are vectors, features of theirs (`Head.features`: of a Gaussian's, each dimension and its square) take the
place of 1[A_t = a], and their exact expectations that of pi_k: a baseline that is quadratic in the action.

All episodes serve the regressions of every policy, weighted by W_T: near policies learn from each other, far-apart ones
from their own. Fold f must not see itself, and the folds by which it chooses coefficients must not see it either: theta
for an episode of fold g, as fold f sees it, is fitted on the episodes outside of f and g. The features are scaled by
what the folds other than f have seen, rounded to powers of 2, so that all folds nearly always share them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from manyfold.arrays import Array, Ints, check_shape
from manyfold.data.episodes import Block, Episodes

CLASSES = 64  # of steps, in the baseline by t
DIRECTIONS = 64  # of the ReLUs
FAR = 3.0  # spreads from the centre: states beyond count as being there
MOST_PRODUCTS = 10  # numbers of an observation of which all products of two are features
MOST_STATES = 256  # that are counted one by one
ACTION_FEATURES = 128  # of all actions together
TOGETHER = 256  # episodes that are added to the sums of all policies at once
RIDGE, ACTION_RIDGE = 1e-4, 0.5  # of each feature's second moment

Floats = NDArray[np.float32]


@runtime_checkable
class CountedValues(Protocol):
    """q of K policies where actions can be counted: `ValueNets`, or anything else that can tell it."""

    def predict(self, states: NDArray[Any], t: Ints) -> Array:
        """q at N states and all actions; `[K, N, A]`."""


@runtime_checkable
class VectorValues(Protocol):
    """q of K policies where actions are vectors: linear in features f of the action, as the policies' head has them."""

    def weights(self, states: NDArray[Any], t: Ints) -> Array:
        """w of q(s, a) = w_0 + sum_b w_b f_b(a); `[K, N, 1 + B]`."""


ActionValues = CountedValues | VectorValues


def predicted(q: ActionValues, states: NDArray[Any], t: Ints) -> Array:
    """q at all actions, `[K, N, A]`."""
    if not isinstance(q, CountedValues):
        raise ValueError("q is one of vectors, expected predict(states, t) -> [K, N, A]: these actions are counted")
    return q.predict(states, t)


def weighted(q: ActionValues, states: NDArray[Any], t: Ints) -> Array:
    """Weights of the action's features, `[K, N, 1 + B]`."""
    if not isinstance(q, VectorValues):
        raise ValueError("q is one of counted actions, expected weights(states, t) -> [K, N, 1 + B]: these are vectors")
    return q.weights(states, t)


def taken_and_expected(q: ActionValues, episodes: Episodes, steps: slice) -> tuple[Array, Array]:
    """q at the actions taken and its exact expectation under every target, `[K, m]` each."""
    states, t = episodes.states[steps], episodes.t[steps]
    if episodes.features is None or episodes.expected is None:
        found = predicted(q, states, t)
        at_taken = found[:, np.arange(found.shape[1]), episodes.actions[steps]]
        return at_taken, (episodes.all_probs[:, steps] * found).sum(-1)
    w, mean = weighted(q, states, t), episodes.expected[:, steps]
    check_shape("weights of q", w, (*mean.shape[:2], 1 + mean.shape[2]), "[K, N, 1 + B]")
    at_taken = w[..., 0] + np.einsum("kmb,mb->km", w[..., 1:], episodes.features[steps])
    return at_taken, w[..., 0] + np.einsum("kmb,kmb->km", w[..., 1:], mean)


class Scale(NamedTuple):
    """Of an observation, in powers of 2."""

    centre: tuple[float, ...]
    spread: tuple[float, ...]


def scales(episodes: Episodes, fold: Ints, folds: int) -> list[Scale]:
    """What every fold sees of the spread of the others' states."""
    width = episodes.states.shape[-1]
    sums = np.zeros((3, folds, width))
    of_steps = fold[episodes.of_steps]
    for d in range(width):
        x = episodes.states[:, d].astype(np.float64)
        for i, value in enumerate((np.ones(len(x)), x, x**2)):
            sums[i, :, d] = np.bincount(of_steps, weights=value, minlength=folds)
    count, first, second = sums.sum(1, keepdims=True) - sums
    mean = first / count
    deviation = np.sqrt(np.maximum(second / count - mean**2, 0))
    spread = np.where(deviation > 0, 2.0 ** np.round(np.log2(np.where(deviation > 0, deviation, 1.0))), 1.0)
    centre = np.round(mean / spread) * spread
    return [Scale(tuple(c.tolist()), tuple(s.tolist())) for c, s in zip(centre, spread, strict=True)]


def features(states: NDArray[Any], t: NDArray[Any], horizon: int, scale: Scale, n_states: int = 0) -> Floats:
    """1, (s, t), their products and ReLUs of random directions; of counted states one number each; `[M, p]`."""
    time = (2.0 * t / horizon - 1)[:, None]
    one = np.ones((len(t), 1))
    if n_states:
        counted = np.asarray(states)[:, :1] == np.arange(n_states) if n_states <= MOST_STATES else one[:, :0]
        return np.concatenate([one, time, time**2, counted], 1, dtype=np.float32)
    near = np.clip((states - np.array(scale.centre)) / np.array(scale.spread), -FAR, FAR)  # no wild extrapolation
    z = np.concatenate([near, time], 1, dtype=np.float32)
    width = z.shape[1]
    rng = np.random.default_rng(width)  # the same directions every time
    directions, shifts = rng.standard_normal((width, DIRECTIONS)), rng.uniform(-2, 2, DIRECTIONS)
    bent = np.maximum(z @ (directions / np.sqrt(width)).astype(np.float32) + shifts.astype(np.float32), 0)
    i, j = np.triu_indices(width) if width <= MOST_PRODUCTS else (np.arange(width),) * 2
    return np.concatenate([one, z, z[:, i] * z[:, j], bent], 1, dtype=np.float32)


def bytes_of(width: int, horizon: int, n_states: int, actions: int) -> int:
    """What the regressions hold of an episode for each policy, whatever its length."""
    size = features(np.zeros((1, width)), np.zeros(1), horizon, Scale((0.0,) * width, (1.0,) * width), n_states).size
    return 4 * (min(horizon, CLASSES) + size + actions * min(size, ACTION_FEATURES // actions))


def steps_of(t: Ints, horizon: int) -> Floats:
    """One number for each class of steps, `[M, classes]`."""
    classes = min(horizon, CLASSES)
    return np.asarray((t * classes // horizon)[:, None] == np.arange(classes), dtype=np.float32)


class Acting(NamedTuple):
    """Of one action in a block of episodes: whether it was taken, or a feature of the action that was."""

    taken: NDArray[Any]  # [n, T], 0 behind an end
    expected: Floats  # under every policy, [K, n, T]


class Regression:
    """Sums of one linear baseline over all episodes, block by block.

    Args:
        starts: features of m other starts, `[m, p]`: the baseline's mean there takes the place of a share m / (n + m)
            of its value at the episodes' own starts.
        actions: A, or B features of vectors, where the action is regressed on as well.
        apart: every action has its own delta; features that are not 0 together need one regression on all of them.
    """

    def __init__(
        self, episodes: Episodes, fold: Ints, folds: int, starts: Floats, actions: int = 0, apart: bool = True
    ) -> None:
        k, n, (m, size) = len(episodes.names), len(episodes.lengths), starts.shape
        self.fold, self.folds, self.actions, self.starts = fold, folds, actions, starts
        self.share, self.start = m / (n + m), starts.mean(0) if m else np.zeros(size, dtype=np.float32)
        self.size, self.action_size = size, min(size, ACTION_FEATURES // actions) if actions else 0
        self.left, self.right = FoldSums(folds, k, (size, size)), FoldSums(folds, k, (size,))
        self.z = np.zeros((k, n, size), dtype=np.float32)
        self.apart = apart
        self.thetas: dict[tuple[int, int], tuple[Array, list[Array]]] = {}  # of `controls`: f and g may change places
        parts, together = (actions, self.action_size) if apart else (min(actions, 1), actions * self.action_size)
        wide = size if apart else size + together
        self.action_left = [FoldSums(folds, k, (together, wide)) for _ in range(parts)]
        self.action_right = [FoldSums(folds, k, (together,)) for _ in range(parts)]
        self.action_z = np.zeros((actions, k, n, self.action_size), dtype=np.float32)

    def add(
        self,
        block: Block,
        x: Floats,
        to_go: Floats,
        w: Floats,
        before: Floats,
        weights: Floats,
        acting: Sequence[Acting] = (),
    ) -> None:
        """A block of episodes.

        Args:
            x: features, `[n, T, p]`, 0 behind an end.
            to_go: the reward-to-go, `[n, T]`.
            w, before: W_t and W_{t-1}, 0 behind an end, `[K, n, T]`.
            weights: W_T, `[K, n]`.
            acting: of every action.
        """
        here = self.fold[block.episodes]
        self.left.add(x.mT @ x, weights, here)
        self.right.add((to_go[:, None] @ x)[:, 0], weights, here)
        self.z[:, block.episodes] = np.moveaxis(np.moveaxis(before - w, 0, 1) @ x, 1, 0)
        self.z[:, block.episodes] += self.share * (self.start - x[:, 0])
        part = x[..., : self.action_size]
        only = [part * taken[..., None] for taken, _ in acting]
        for a, (taken, expected) in enumerate(acting):
            found = np.moveaxis(before * expected - w * taken, 0, 1) @ part
            self.action_z[a][:, block.episodes] = np.moveaxis(found, 1, 0)
        if acting and not self.apart:
            only = [np.concatenate(only, -1)]
            x = np.concatenate([x, only[0]], -1)
        for a, each in enumerate(only):
            self.action_left[a].add(each.mT @ x, weights, here)
            self.action_right[a].add((to_go[:, None] @ each)[:, 0], weights, here)

    def theta(self, f: int, g: int) -> tuple[Array, list[Array]]:
        """theta `[K, p]`, and delta of each action, without the folds f and g."""
        theta = _solve(self.left.without(f, g), self.right.without(f, g), RIDGE)
        deltas: list[Array] = []
        for lefts, rights in zip(self.action_left, self.action_right, strict=True):
            left = lefts.without(f, g)
            right = rights.without(f, g) - np.einsum("kpq,kq->kp", left[..., : self.size], theta)
            own = left[..., : self.action_size] if self.apart else left[..., self.size :]
            delta = _solve(own, right, ACTION_RIDGE)
            deltas += [delta] if self.apart else np.split(delta, self.actions, axis=-1)
        return theta, deltas

    def controls(self, f: int) -> tuple[Array, Array, Array]:
        """D, what actions add to it, as fold f sees all episodes, `[K, N]` each, and v_0 at the starts, `[K, m]`."""
        plain, acting = np.empty(self.z.shape[:2]), np.zeros(self.z.shape[:2])
        values = np.empty((len(plain), len(self.starts)))
        for g in range(self.folds):
            here = self.fold == g
            if (pair := (min(f, g), max(f, g))) not in self.thetas:
                self.thetas[pair] = self.theta(*pair)
            theta, deltas = self.thetas[pair]
            plain[:, here] = (self.z[:, here] @ theta[..., None])[..., 0]
            for a, delta in enumerate(deltas):
                acting[:, here] += (self.action_z[a][:, here] @ delta[..., None])[..., 0]
            if f == g:
                values = theta @ self.starts.T
        return plain, acting, values


class Regressions:
    """The three baselines of an evaluation: by t, on (s, t), and on (s, t, a) where actions can be counted.

    Args:
        starts: first observations of m episodes elsewhere, `[m, width]`.
    """

    def __init__(self, episodes: Episodes, fold: Ints, folds: int, starts: NDArray[Any]) -> None:
        self.episodes, self.folds = episodes, folds
        self.scales, begin = scales(episodes, fold, folds), np.zeros(len(starts), dtype=np.int64)
        self.by_t = Regression(episodes, fold, folds, steps_of(begin, episodes.horizon))
        known = episodes.expected if episodes.probs is None else episodes.probs
        self.actions, apart = 0 if known is None else known.shape[-1], episodes.probs is not None
        self.by_state = {
            scale: Regression(episodes, fold, folds, self.features(starts, begin, scale), self.actions, apart)
            for scale in dict.fromkeys(self.scales)
        }

    @property
    def size(self) -> int:
        """Numbers of a step."""
        return self.by_t.size + max(one.size for one in self.by_state.values())

    def features(self, states: NDArray[Any], t: Ints, scale: Scale) -> Floats:
        """Of these steps, `[M, p]`."""
        return features(states, t, self.episodes.horizon, scale, self.episodes.n_states)

    def add(self, block: Block, log_w: Array, rewards: Array) -> None:
        """A block of episodes: log W_t `[K, n, T]`, rewards `[n, T]`."""
        steps, w = block.steps, np.where(block.inside, np.exp(log_w), 0).astype(np.float32)
        before = np.concatenate([np.ones_like(w[..., :1]), w[..., :-1]], -1) * block.inside
        to_go = np.flip(np.cumsum(np.flip(rewards, -1), -1), -1).astype(np.float32) * block.inside
        moments = to_go, w, before, np.exp(log_w[..., -1]).astype(np.float32)
        t, acting = self.episodes.t[steps], [self.acting(block, a) for a in range(self.actions)]
        self.by_t.add(block, block.pad_rows(steps_of(t, self.episodes.horizon)), *moments)
        for scale, regression in self.by_state.items():
            x = self.features(self.episodes.states[steps], t, scale)
            regression.add(block, block.pad_rows(x), *moments, acting)

    def acting(self, block: Block, a: int) -> Acting:
        """Of one action, or one feature of vectors."""
        known = self.episodes
        if known.probs is not None:
            taken = (block.pad(known.actions) == a) & block.inside
            return Acting(taken, block.pad(known.probs[..., a]).astype(np.float32))
        features, expected = np.asarray(known.features), np.asarray(known.expected)
        return Acting(*(block.pad(x[..., a]).astype(np.float32) for x in (features, expected)))

    def controls(self) -> tuple[Array, Array]:
        """D of every baseline as each fold sees it, `[B, F, K, N]`, and v_0 at the starts, `[B, F, K, m]`."""
        by_t = [self.by_t.controls(f) for f in range(self.folds)]
        by_state = [self.by_state[self.scales[f]].controls(f) for f in range(self.folds)]
        found = [[one[0] for one in by_t], [one[0] for one in by_state]]
        values = [[one[2] for one in by_t], [one[2] for one in by_state]]
        if self.actions:
            found.append([one[1] for one in by_state])
            values.append([np.zeros_like(one[2]) for one in by_state])
        return np.array(found), np.array(values)


class FoldSums:
    """Sums of one array of each episode over each fold's episodes, weighted for each policy: `[F, K, ...]`.

    Those of many policies are large beside a block's episodes, so that these wait until there are `TOGETHER`.
    """

    def __init__(self, folds: int, policies: int, shape: tuple[int, ...]) -> None:
        self.sums, self.shape = np.zeros((folds, policies, int(np.prod(shape)))), shape
        self.waiting: list[tuple[Floats, Floats, Ints]] = []
        self.n = 0

    def add(self, x: Floats, weights: Floats, fold: Ints) -> None:
        """Of n episodes: `[n, ...]`, their weights `[K, n]` and folds `[n]`."""
        self.waiting.append((x.reshape(len(x), -1), weights, fold))
        self.n += len(x)
        if self.n >= TOGETHER:
            self._sum()

    def without(self, f: int, g: int) -> Array:
        """Over all folds but these, `[K, ...]`."""
        if self.n:
            self._sum()
        first, *rest = (one for h, one in enumerate(self.sums) if h not in (f, g))
        out = first.copy()
        for one in rest:
            out += one
        return out.reshape(len(out), *self.shape)

    def _sum(self) -> None:
        x, weights, fold = (np.concatenate([one[i] for one in self.waiting], i % 2) for i in range(3))
        self.waiting, self.n = [], 0
        for g, out in enumerate(self.sums):
            if (here := fold == g).any():
                out += weights[:, here] @ x[here]


def _solve(left: Array, right: Array, ridge: float) -> Array:
    """theta of each policy; a feature that was never seen gets 0, and the first one, the mean, is not shrunk."""
    diagonal = np.einsum("kpp->kp", left)
    scale = np.sqrt(np.where(diagonal > 0, diagonal, 1.0))
    penalty = np.full(left.shape[-1], ridge)
    penalty[0] = 1e-9
    scaled = left / (scale[:, :, None] * scale[:, None, :]) + np.diag(penalty)
    return np.asarray(np.linalg.solve(scaled, (right / scale)[..., None])[..., 0] / scale)
