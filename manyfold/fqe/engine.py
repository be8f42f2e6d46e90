"""Fitted evaluation, one engine: `fit(reward, weights)` solves f = reward + E[sum_a' weights f(S', a')] for K policies.

    q            reward r                weights pi_k(a'|s')
    q_hat        reward 2 r q - r^2      weights pi_k(a'|s')              (floor it at q^2)
    m of a mu    reward 2 r q - r^2      weights pi_k(a'|s')^2 / mu(a'|s')

m = E[(R + G')^2 | s, a] is the second moment of the PDIS return under mu: the predicted variance of a plan before any
episode is spent. The next value is an expectation over actions, not a sample; nothing is bootstrapped where an episode
terminated or the horizon ends, and a truncated step (cut off before its horizon) still is.

One or two hidden layers of ReLUs for each policy, all K as one batch of matrices, the gradient written out. The time
enters as a learned row for each step t (or some cosines of t), not as the number t/T: values of neighbouring steps are
then not tied to a line, which matters most for m, whose weights sum to more than 1 and which can otherwise run away.
The target network is an exponential average of the trained one, and the average is what is returned.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyfold.adam import Adam
from manyfold.arrays import Ints, check_number, check_shape
from manyfold.data.transitions import Batch, Transitions
from manyfold.files import load_tensors, save_tensors
from manyfold.fqe.nets import Check, Shape, ValueNets, curves_of, size, views

PIECE = 2**19  # activations at once
CHECKS = 50  # of the held-out error in a fit
MOST_KNOWN = 2**27  # next weights that are computed once and cached

Reward = Callable[[Batch], NDArray[Any]]  # -> [K, N]


class Bounded(NamedTuple):
    """Next weights, and between what the function is known to lie at the next states; `[K, N, A]` each.

    Where weights sum to more than 1, a net's error at states that are seldom seen is amplified by every step back, and
    would run away: next values are kept inside.
    """

    weights: NDArray[Any]
    low: NDArray[Any]
    high: NDArray[Any]


Weights = Callable[[NDArray[np.float32], Ints], NDArray[Any] | Bounded]  # (states [N, width], t [N]) -> [K, N, A]


@dataclass(frozen=True)
class Config:
    """As in the paper (`PAPER`): one hidden layer of 64 and Adam at 1e-3; what it does not say is ours."""

    hidden: int = 64
    layers: int = 1  # hidden ones, 1 or 2
    cosines: int = 0  # of t, from which the time's part is made, so that it is smooth; 0: a learned row for each step
    learning_rate: float = 1e-3  # falls linearly to 0 over the second half
    batch: int = 512
    updates_per_step: int = 150  # gradient steps for each step of the horizon, which values must travel back
    most_updates: int = 4500  # in all; where it cuts them, the target network follows as much faster
    average: float = 0.98  # of the target network, per update
    patience: int = 20  # checks of the held-out error without improvement, in the second half, before stopping
    relabel: bool = False  # rows serve other steps t too, where dynamics and rewards don't depend on t

    def __post_init__(self) -> None:
        for name, most in (("hidden", 10**5), ("batch", 10**7), ("updates_per_step", 10**7), ("patience", 10**6)):
            check_number(name, getattr(self, name), 1, most)
        check_number("most_updates", self.most_updates, 1, 10**8)
        check_number("layers", self.layers, 1, 2)
        check_number("cosines", self.cosines, 0, 10**4)
        if self.cosines == 1:
            raise ValueError("cosines is 1, expected 0 or at least 2: the first one is constant")
        if not isinstance(self.relabel, bool):
            raise ValueError(f"relabel is {self.relabel!r}, expected true or false")
        for name in ("learning_rate", "average"):
            check_number(name, getattr(self, name), 0, 1, whole=False)
        if not 0 < self.learning_rate < 1:
            raise ValueError(f"learning_rate is {self.learning_rate!r}, expected a number between 0 and 1")
        if self.average == 1:
            raise ValueError(f"average is {self.average!r}, expected a number from 0 to below 1")

    def updates(self, horizon: int) -> int:
        """Gradient steps of a fit at this horizon."""
        return min(self.updates_per_step * horizon, self.most_updates)

    def follow(self, horizon: int) -> float:
        """The share of the trained network that the target network takes over per update."""
        return min(1.0, (1 - self.average) * (self.updates_per_step * horizon / self.updates(horizon)))


PAPER = Config()


class Diverged(ValueError):
    """A fit ran away; for q and q_hat a matter of the learning rate, for m also of weights that explode."""


class Fit(NamedTuple):
    nets: ValueNets
    curves: list[Check]


class Known(NamedTuple):
    """What is known of some rows before any fit, scaled."""

    reward: Tensor  # [K, N]
    weights: Tensor  # of the next values, 0 where nothing is bootstrapped, [K, N, A]
    low: Tensor | None  # bounds of the next values, [K, N, A]
    high: Tensor | None

    def take(self, rows: slice | Tensor) -> "Known":
        if isinstance(rows, slice):
            return Known._make(None if x is None else x[:, rows] for x in self)
        first = (None if x is None else x.transpose(0, 1) for x in self)  # the rows, as they are in memory
        return Known._make(None if x is None else x.index_select(0, rows).transpose(0, 1) for x in first)


def fit(
    data: Transitions,
    reward: Reward,
    weights: Weights,
    rng: np.random.Generator,
    config: Config = PAPER,
    n_states: int = 0,
    progress: Callable[[Check, int], None] = lambda check, updates: None,
    state: Path | None = None,
    save_every: float = 5.0,
) -> Fit:
    """Fits K functions at once.

    Args:
        progress: sees every check of the held-out error, and the number of updates in all.
        n_states: states are indices 0..n_states - 1; 0: they are vectors.
        state: file in which an unfinished fit is saved, every `save_every` seconds; one that is there is resumed, to
            the same numbers.
    """
    work = _Work(data, reward, weights, int(rng.integers(2**62)), config, n_states)
    if state is not None and state.exists():
        work.load(state)
    saved = time.monotonic()
    for check in work.checks():
        progress(check, work.updates)
        if state is not None and time.monotonic() - saved >= save_every:
            work.save(state)
            saved = time.monotonic()
    work.average.flat.copy_(work.kept)
    return Fit(work.average, work.curves)


class _Work:
    """An unfinished fit: all that changes on the way, so that it can be saved and resumed."""

    def __init__(
        self,
        data: Transitions,
        reward: Reward,
        weights: Weights,
        seed: int,
        config: Config,
        n_states: int,
    ) -> None:
        data = data.relabelled() if config.relabel else data
        self.data, self.reward, self.weights, self.seed, self.config = data, reward, weights, seed, config
        first = next(iter(data.batches(8192, np.random.default_rng([seed, 0]), "train")), None)
        if first is None or not len(first.t):
            raise ValueError(f"{data.rows} logged rows, expected more: some are held out, and none is left to fit")
        self.nets = _initialise(data, reward(first), first, n_states, config, np.random.default_rng([seed, 1]))
        shape, flat = self.nets.shape, self.nets.flat
        self.average = ValueNets(shape, flat.clone(), self.nets.centre, self.nets.spread, self.nets.scale)
        self.kept = flat.clone()  # the best average so far
        self.optimiser = Adam(flat, torch.zeros_like(flat))
        self.slots = views(shape, self.optimiser.gradient)
        self.updates, self.follow = config.updates(shape.horizon), config.follow(shape.horizon)
        self.update = self.passes = self.batches = self.since = 0
        self.best = float("inf")
        self.errors: list[float] = []
        self.curves: list[Check] = []
        held_out = next(iter(data.batches(4 * config.batch, np.random.default_rng(0), "held_out")))
        self.held_out = held_out, self.known(held_out)  # the same rows at every check
        self.kept_known = None if n_states else self.know_all()  # of indices, they are a look-up

    def known(self, batch: Batch) -> Known:
        horizon, scale = self.nets.shape.horizon, self.nets.scale
        goes_on = ~batch.terminated & (batch.t < horizon - 1)
        after = _after(batch, horizon)
        found = self.weights(batch.next_state, after)
        pi, *ends = found if isinstance(found, Bounded) else (found, None, None)
        next_weights = torch.from_numpy(np.asarray(pi, np.float32))
        given = np.array(self.reward(batch), dtype=np.float32)
        shape = (self.nets.shape.n_policies, len(batch.t), self.nets.shape.n_actions)
        check_shape("weights", next_weights.numpy(), shape, "[K, N, A]")
        check_shape("reward", given, shape[:2], "[K, N]")
        now = torch.from_numpy(given) / scale[:, None]
        low, high = (None if x is None else torch.from_numpy(x).float() / scale[:, None, None] for x in ends)
        return Known(now, next_weights * torch.from_numpy(goes_on)[:, None], low, high)

    def know_all(self) -> Known | None:
        """`known` of all rows to train with, if that fits into memory: policies are slow to evaluate."""
        rows, shape = self.data.whole("train"), self.nets.shape
        if rows is None or len(rows.t) * shape.n_policies * shape.n_actions > MOST_KNOWN:
            return None
        kept: list[Tensor | None] = []
        for some in self.pieces(rows):
            found = self.known(Batch._make(x[some] for x in rows))
            if not kept:  # rows first in memory, as they are picked one by one; half precision is enough for bounds
                types = (torch.float32, torch.float32, torch.float16, torch.float16)
                sizes = (None if x is None else (len(rows.t), *x.transpose(0, 1).shape[1:]) for x in found)
                kept = [None if n is None else torch.empty(n, dtype=d) for n, d in zip(sizes, types, strict=True)]
            for out, x in zip(kept, found, strict=True):
                if out is not None and x is not None:
                    out[some] = x.transpose(0, 1)
        return Known._make(None if x is None else x.transpose(0, 1) for x in kept)

    def target(self, batch: Batch, known: Known) -> Tensor:
        """reward + sum_a' weights f(s', a') by the averaged nets; `[K, N]`."""
        after = self.average.inputs(batch.next_state, _after(batch, self.nets.shape.horizon))
        values = self.average.scaled(after)
        if known.low is not None and known.high is not None:
            values = torch.minimum(torch.maximum(values, known.low.float()), known.high.float())
        return known.reward + (known.weights * values).sum(-1)

    def checks(self) -> Iterator[Check]:
        """Trains to the end, from wherever it is; stops at every check of the held-out error."""
        every = max(1, self.updates // CHECKS)
        while self.update < self.updates:
            rng = np.random.default_rng([self.seed, 2, self.passes])
            passing = self.data.numbered(self.config.batch, rng, "train")
            for numbers, batch in itertools.islice(passing, self.batches, None):
                self.errors.append(self.gradient(batch, numbers))
                self.optimiser.step(self.rate())
                self.average.flat.lerp_(self.nets.flat, self.follow)
                self.update += 1
                self.batches += 1
                if self.update % every == 0 or self.update == self.updates:
                    yield self.check()
                if self.update >= self.updates:
                    return
            self.passes, self.batches = self.passes + 1, 0

    def gradient(self, batch: Batch, numbers: Ints) -> float:
        """Of the mean squared error of a batch, whose rows have these numbers; returns the error."""
        for slot in self.slots.values():
            slot.zero_()
        error = 0.0
        for rows in self.pieces(batch):
            piece = Batch._make(x[rows] for x in batch)
            all_known = self.kept_known
            known = self.known(piece) if all_known is None else all_known.take(torch.from_numpy(numbers[rows]))
            error += _add_gradient(self.nets, self.slots, piece, self.target(piece, known), len(batch.t))
        return error

    def pieces(self, batch: Batch, most: int = PIECE) -> list[slice]:
        """Rows whose activations, of all policies, are about as many as a core's cache holds."""
        n, shape = len(batch.t), self.nets.shape
        rows = max(32, most // (shape.n_policies * shape.hidden))
        return [slice(start, start + rows) for start in range(0, n, rows)]

    def check(self) -> Check:
        """Looks at the held-out error; the best of the second half is kept."""
        batch, known = self.held_out
        error = 0.0
        for rows in self.pieces(batch, 4 * PIECE):
            piece = Batch._make(x[rows] for x in batch)
            out = self.average.scaled(self.average.inputs(piece.state, piece.t.astype(np.int64)))
            action = torch.from_numpy(piece.action.astype(np.int64))
            taken = out.gather(-1, action.expand(len(out), -1)[..., None])[..., 0]
            target = self.target(piece, known.take(rows))
            error += float((taken - target).square().mean()) * len(piece.t) / len(batch.t)
        check = Check(self.update, float(np.mean(self.errors)), error)
        _refuse_divergence(check, self.curves)
        self.curves.append(check)
        self.errors = []
        if self.update > self.updates / 2:  # before that, values are still on their way: a small error means little
            self.since += 1
            if error < self.best:
                self.best, self.since = error, 0
                self.kept.copy_(self.average.flat)
            if self.since >= self.config.patience:
                self.update = self.updates
        return check

    def rate(self) -> float:
        """Falls to 0 over the second half."""
        return self.config.learning_rate * min(1.0, 2 * (1 - self.update / self.updates))

    def tensors(self) -> dict[str, Tensor]:
        """What changes, in place."""
        return {"flat": self.nets.flat, "average": self.average.flat, "kept": self.kept, **self.optimiser.state}

    def save(self, path: Path) -> None:
        """Atomically, all that `load` needs to resume."""
        counts = [self.seed, self.update, self.passes, self.batches, self.since, self.best, self.curves]
        save_tensors(path, self.tensors(), "fit", 1, {"counts": counts, "config": str(self.config)})

    def load(self, path: Path) -> None:
        """Resumes from what `save` wrote; the state of another fit is refused."""
        tensors, about = load_tensors(path, "fit", 1)
        here = self.tensors()
        fits = {name: x.shape for name, x in tensors.items()} == {name: x.shape for name, x in here.items()}
        counts: Any = about.get("counts")
        whole = isinstance(counts, list) and len(counts) == 7 and all(isinstance(x, int | float) for x in counts[:-1])
        curves = curves_of(counts[-1]) if whole else None
        if not fits or about.get("config") != str(self.config) or curves is None or counts[0] != self.seed:
            raise ValueError(f"{path}: the state of another fit; remove it to start over")
        for name, x in here.items():
            x.copy_(tensors[name])
        _, self.update, self.passes, self.batches, self.since, self.best, _ = counts
        self.curves = curves


def _after(batch: Batch, horizon: int) -> Ints:
    """The step that follows; at the horizon's end its value is not used."""
    return np.minimum(batch.t.astype(np.int64) + 1, horizon - 1)


def _initialise(
    data: Transitions, rewards: NDArray[Any], first: Batch, n_states: int, config: Config, rng: np.random.Generator
) -> ValueNets:
    about = data.about
    shape = Shape(
        about.horizon,
        about.n_actions,
        len(rewards),
        config.hidden,
        n_states,
        about.width,
        config.layers,
        config.cosines,
    )
    flat = torch.zeros(size(shape))
    p = views(shape, flat)
    generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
    limit = (2 if n_states else about.width + 1) ** -0.5  # by the inputs that are not 0 at once
    p["w1"].uniform_(-limit, limit, generator=generator)
    ends = torch.empty(2, 1, shape.n_policies * config.hidden).uniform_(-limit, limit, generator=generator)
    part = (torch.arange(shape.horizon) / shape.horizon)[:, None]
    if config.cosines:
        p["w1_time"][:2].copy_(ends[:, 0])
    else:
        p["w1_time"].copy_(ends[0] + part * ends[1])  # at first linear in t
    for name in ("w2", "w_mid")[: config.layers]:
        p[name].uniform_(-(config.hidden**-0.5), config.hidden**-0.5, generator=generator)
    centre, spread = torch.zeros(about.width), torch.ones(about.width)
    if not n_states:
        centre = torch.from_numpy(first.state.mean(0))
        spread = torch.from_numpy(np.maximum(first.state.std(0), 1e-3))
    # A sum of T rewards: about T times their mean, or sqrt(T) times their spread, whichever is larger.
    magnitude = np.maximum(about.horizon * np.abs(rewards.mean(1)), about.horizon**0.5 * rewards.std(1))
    scale = torch.from_numpy(np.where(magnitude > 0, magnitude, 1.0).astype(np.float32))
    return ValueNets(shape, flat, centre, spread, scale)


def _add_gradient(nets: ValueNets, slots: dict[str, Tensor], batch: Batch, target: Tensor, of: int) -> float:
    """Adds some rows' part of the gradient of the mean squared error over `of` rows to `slots`; returns their part."""
    p, n = nets.parameters, len(batch.t)
    x, time = nets.inputs(batch.state, batch.t.astype(np.int64))
    h = nets.hidden((x, time))  # [N, K * h]
    last = nets.last(h)  # [K, N, h]
    action = torch.from_numpy(batch.action.astype(np.int64))
    w = p["w2"].index_select(0, action)  # [N, K * h]
    error = (last * nets.apart(w)).sum(-1).add_(p["b2"][:, 0].index_select(1, action)).sub_(target)  # [K, N]
    d = error * (2 / of)
    taken = torch.nn.functional.one_hot(action, nets.shape.n_actions).float()  # [N, A]
    nets.apart(slots["w2"]).add_(torch.bmm(d[:, None] * taken.T, last))  # [K, A, h]
    slots["b2"][:, 0].addmm_(d, taken)
    w.view(n, nets.shape.n_policies, -1).mul_(d.T[..., None])
    if nets.shape.layers == 2:
        d_last = torch.ops.aten.threshold_backward(nets.apart(w), last, 0.0)  # [K, N, h]
        slots["w_mid"].baddbmm_(nets.apart(h).mT, d_last)
        slots["b_mid"].add_(d_last.sum(1, keepdim=True))
        w = torch.bmm(d_last, p["w_mid"].mT).transpose(0, 1).reshape(n, -1)  # [N, K * h]
    d_h = torch.ops.aten.threshold_backward(w, h, 0.0)  # through the ReLUs
    if nets.shape.cosines:
        slots["w1_time"].addmm_(nets.cosines(time).T, d_h)
    else:
        slots["w1_time"].index_add_(0, time, d_h)
    if nets.shape.n_states:
        slots["w1"].index_add_(0, x, d_h)
    else:
        slots["w1"].addmm_(x.T, d_h)
    return float(error.square().mean()) * n / of


def _refuse_divergence(check: Check, curves: list[Check]) -> None:
    if not np.isfinite(check.held_out) or (curves and check.held_out > 1e4 * (curves[0].held_out + 1e-6)):
        raise Diverged(
            f"the fit diverged: held-out error {check.held_out:.3g} after {check.update} updates, "
            f"{curves[0].held_out if curves else float('nan'):.3g} at first; lower the learning rate"
        )
