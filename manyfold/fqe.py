"""Fitted evaluation, one engine: `fit(reward, weights)` solves f = reward + E[sum_a' weights f(S', a')] for K policies.

    q            reward r                weights pi_k(a'|s')
    q_hat        reward 2 r q - r^2      weights pi_k(a'|s')              (floor it at q^2)
    m of a mu    reward 2 r q - r^2      weights pi_k(a'|s')^2 / mu(a'|s')

m = E[(R + G')^2 | s, a] is the second moment of the PDIS return under mu: the predicted variance of a plan before any
episode is spent. The next value is an expectation over actions, not a sample; nothing is bootstrapped where an episode
terminated or the horizon ends, and a truncated step (cut off before its horizon) still is.

One hidden layer of ReLUs for each policy, all K as one batch of matrices, the gradient written out. The time enters as
a learned row for each step t, not as the number t/T: values of neighbouring steps are then not tied to a line, which
matters most for m, whose weights sum to more than 1 and which can otherwise run away. The target network is an
exponential average of the trained one, and the average is what is returned.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from manyfold.mdp import Array, Ints
from manyfold.transitions import Batch, Transitions

VERSION = 1
LIMIT = 10.0  # standardised states are clipped there

Reward = Callable[[Batch], NDArray[Any]]  # -> [K, N]
Weights = Callable[[NDArray[np.float32], Ints], NDArray[Any]]  # (states [N, width], t [N]) -> [K, N, A]


@dataclass(frozen=True)
class Config:
    """One hidden layer of 64 and Adam at 1e-3, as in the paper; the rest is ours."""

    hidden: int = 64
    learning_rate: float = 1e-3  # falls linearly to 0 over the second half
    batch: int = 512
    updates_per_step: int = 500  # gradient steps for each step of the horizon, which values must travel back
    average: float = 0.98  # of the target network, per update
    patience: int = 20  # checks of the held-out error without improvement, in the second half, before stopping

    def __post_init__(self) -> None:
        for name in ("hidden", "batch", "updates_per_step", "patience"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}, expected a whole number of at least 1")
        if not 0 < self.learning_rate < 1:
            raise ValueError(f"learning_rate is {self.learning_rate!r}, expected a number between 0 and 1")
        if not 0 <= self.average < 1:
            raise ValueError(f"average is {self.average!r}, expected a number from 0 to below 1")


DEFAULT = Config()


@dataclass(frozen=True)
class Shape:
    """What the tensors alone don't say."""

    horizon: int
    n_actions: int
    n_policies: int
    hidden: int
    n_cells: int  # a state is a cell's number, the input its one-hot; 0: it is a vector
    width: int  # of a state


class ValueNets:
    """K functions f_k(t, s, a): `predict(states, t) -> [K, N, A]`."""

    def __init__(self, shape: Shape, flat: Tensor, centre: Tensor, spread: Tensor, scale: Tensor) -> None:
        self.shape, self.flat = shape, flat
        self.centre, self.spread, self.scale = centre, spread, scale  # of states [width]; of the values [K]
        self.parameters = _views(shape, flat)

    def inputs(self, states: NDArray[np.float32], t: Ints) -> tuple[Tensor, Tensor]:
        """Cells `[N]` or standardised states `[N, width]`, and the step t `[N]`."""
        time = torch.from_numpy(np.array(t, dtype=np.int64))
        if self.shape.n_cells:
            return torch.from_numpy(states[:, 0].astype(np.int64)), time
        z = (torch.from_numpy(np.asarray(states, dtype=np.float32)) - self.centre) / self.spread
        return z.clamp_(-LIMIT, LIMIT), time

    def hidden(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Activations `[K, N, h]`."""
        x, time = inputs
        if self.shape.n_cells:  # a one-hot input is an index
            h = self.pick("w1", x)
        else:
            h = torch.bmm(x.expand(self.shape.n_policies, -1, -1), self.parameters["w1"])
        return h.add_(self.pick("w1_time", time)).relu_()

    def pick(self, name: str, index: Tensor) -> Tensor:
        """Rows of each policy's table, `[K, size, h]` at `[N]` -> `[K, N, h]`; index_select is four times faster."""
        table = self.parameters[name]
        picked = table.flatten(0, 1).index_select(0, self.rows(index, table.shape[1]))
        return picked.view(len(table), len(index), -1)

    def rows(self, index: Tensor, size: int) -> Tensor:
        """Rows of K stacked tables with `size` rows each, policy after policy; `[K * N]`."""
        return (torch.arange(self.shape.n_policies)[:, None] * size + index).flatten()

    def scaled(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Outputs before scaling, `[K, N, A]`."""
        return torch.baddbmm(self.parameters["b2"], self.hidden(inputs), self.parameters["w2"].mT)

    def predict(self, states: ArrayLike, t: int | ArrayLike) -> Array:
        """f_k(t, s, a) for all K policies and actions at N states `[N, width]` and their steps; `[K, N, A]`."""
        x = np.asarray(states, dtype=np.float32)
        if x.ndim != 2 or x.shape[1] != self.shape.width:
            raise ValueError(f"states has shape {list(x.shape)}, expected [N, {self.shape.width}]")
        steps = np.broadcast_to(np.asarray(t), (len(x),))
        return (self.scaled(self.inputs(x, steps)) * self.scale[:, None, None]).double().numpy()

    def table(self) -> Array:
        """At every step and cell, where states are cells; `[K, T, S, A]`."""
        cells = np.arange(self.shape.n_cells, dtype=np.float32)[:, None]
        return np.stack([self.predict(cells, t) for t in range(self.shape.horizon)], 1)

    def save(self, path: Path, curves: list["Check"] | None = None) -> None:
        """One safetensors file; the shape and the learning curves are in its metadata."""
        about = {"format": "manyfold-values", "version": str(VERSION), "shape": json.dumps(asdict(self.shape))}
        about["curves"] = json.dumps([list(check) for check in curves or []])
        tensors = {"flat": self.flat, "centre": self.centre, "spread": self.spread, "scale": self.scale}
        save_file({name: x.contiguous() for name, x in tensors.items()}, path, metadata=about)

    @classmethod
    def load(cls, path: Path) -> tuple["ValueNets", list["Check"]]:
        """The nets and their learning curves; what doesn't fit is refused with one line."""
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path}: not a whole safetensors file ({error}); was it cut off?") from None
        if about.get("format") != "manyfold-values" or about.get("version") != str(VERSION):
            raise ValueError(f"{path}: expected value nets of version {VERSION}, found {about.get('format')!r}")
        said = json.loads(about["shape"])
        shape = Shape(**{field.name: said[field.name] for field in fields(Shape)})
        expected = {"flat": (_size(shape),), "centre": (shape.width,), "spread": (shape.width,)}
        for name, size in {**expected, "scale": (shape.n_policies,)}.items():
            if name not in tensors or tuple(tensors[name].shape) != size:
                raise ValueError(f"{path}: {name} does not have shape {list(size)}")
        nets = cls(shape, tensors["flat"], tensors["centre"], tensors["spread"], tensors["scale"])
        return nets, [Check(*check) for check in json.loads(about["curves"])]


class Check(NamedTuple):
    """The state of a fit at some moment; errors are mean squares of the scaled Bellman error over policies."""

    update: int
    train: float
    held_out: float


class Fit(NamedTuple):
    nets: ValueNets
    curves: list[Check]


def fit(
    data: Transitions,
    reward: Reward,
    weights: Weights,
    rng: np.random.Generator,
    config: Config = DEFAULT,
    n_cells: int = 0,
    progress: Callable[[Check, int], None] = lambda check, updates: None,
) -> Fit:
    """Fits K functions at once; `progress` sees every check of the held-out error and the updates in all."""
    first = next(iter(data.batches(8192, rng, "train")))
    nets = _initialise(data, reward(first), first, n_cells, config, rng)
    average = ValueNets(nets.shape, nets.flat.clone(), nets.centre, nets.spread, nets.scale)
    gradient = torch.zeros_like(nets.flat)
    nets.flat.grad = gradient
    optimiser = torch.optim.Adam([nets.flat], lr=config.learning_rate, fused=True)
    slots = _views(nets.shape, gradient)
    updates = config.updates_per_step * nets.shape.horizon
    every = max(1, updates // 100)
    curves: list[Check] = []
    best, kept, since = np.inf, average.flat.clone(), 0
    errors: list[float] = []
    update = 0
    while update < updates:
        for batch in data.batches(config.batch, rng, "train"):
            left = 1 - update / updates
            optimiser.param_groups[0]["lr"] = config.learning_rate * min(1.0, 2 * left)
            target = _target(average, batch, reward, weights)
            errors.append(_gradient(nets, slots, batch, target))
            optimiser.step()
            average.flat.lerp_(nets.flat, 1 - config.average)
            update += 1
            if update % every == 0 or update == updates:
                check = Check(update, float(np.mean(errors)), _held_out_error(average, data, reward, weights, config))
                _refuse_divergence(check, curves)
                curves.append(check)
                errors = []
                progress(check, updates)
                if update > updates / 2:  # before that, values are still on their way back: a small error means little
                    since += 1
                    if check.held_out < best:
                        best, kept, since = check.held_out, average.flat.clone(), 0
                    if since >= config.patience:
                        update = updates
            if update >= updates:
                break
    average.flat.copy_(kept)
    return Fit(average, curves)


def _initialise(
    data: Transitions, rewards: NDArray[Any], first: Batch, n_cells: int, config: Config, rng: np.random.Generator
) -> ValueNets:
    about = data.about
    shape = Shape(about.horizon, about.n_actions, len(rewards), config.hidden, n_cells, about.width)
    flat = torch.zeros(_size(shape))
    p = _views(shape, flat)
    generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
    limit = (2 if n_cells else about.width + 1) ** -0.5  # by the inputs that are not 0 at once
    p["w1"].uniform_(-limit, limit, generator=generator)
    ends = torch.empty(2, shape.n_policies, 1, config.hidden).uniform_(-limit, limit, generator=generator)
    part = (torch.arange(shape.horizon) / shape.horizon)[:, None]
    p["w1_time"].copy_(ends[0] + part * ends[1])  # at first linear in t
    p["w2"].uniform_(-(config.hidden**-0.5), config.hidden**-0.5, generator=generator)
    centre, spread = torch.zeros(about.width), torch.ones(about.width)
    if not n_cells:
        centre = torch.from_numpy(first.state.mean(0))
        spread = torch.from_numpy(np.maximum(first.state.std(0), 1e-3))
    # A sum of T rewards: about T times their mean, or sqrt(T) times their spread, whichever is larger.
    size = np.maximum(about.horizon * np.abs(rewards.mean(1)), about.horizon**0.5 * rewards.std(1))
    scale = torch.from_numpy(np.where(size > 0, size, 1.0).astype(np.float32))
    return ValueNets(shape, flat, centre, spread, scale)


def _target(average: ValueNets, batch: Batch, reward: Reward, weights: Weights) -> Tensor:
    """(reward + sum_a' weights f(s', a')) / scale, without the next value at an end; `[K, N]`."""
    goes_on = ~batch.terminated & (batch.t < average.shape.horizon - 1)
    t_tp1 = np.minimum(batch.t.astype(np.int64) + 1, average.shape.horizon - 1)
    next_weights = torch.from_numpy(np.asarray(weights(batch.next_state, t_tp1), dtype=np.float32))
    value = (next_weights * average.scaled(average.inputs(batch.next_state, t_tp1))).sum(-1)
    now = torch.from_numpy(np.array(reward(batch), dtype=np.float32)) / average.scale[:, None]
    return now.add_(value.mul_(torch.from_numpy(goes_on)))


def _gradient(nets: ValueNets, slots: dict[str, Tensor], batch: Batch, target: Tensor) -> float:
    """Writes the gradient of the mean squared error into `slots`; returns the error."""
    shape, p = nets.shape, nets.parameters
    inputs = nets.inputs(batch.state, batch.t.astype(np.int64))
    h = nets.hidden(inputs)  # [K, N, h]
    action = torch.from_numpy(batch.action.astype(np.int64))
    w = nets.pick("w2", action)  # [K, N, h]
    error = (h * w).sum(-1).add_(p["b2"][:, 0, action]).sub_(target)  # [K, N]
    d = error * (2 / error.shape[1])
    taken = torch.nn.functional.one_hot(action, shape.n_actions).float()
    d_out = d[..., None] * taken  # [K, N, A]
    torch.bmm(d_out.mT, h, out=slots["w2"])
    torch.sum(d_out, 1, keepdim=True, out=slots["b2"])
    d_h = w.mul_(d[..., None]).mul_(h.sign_())  # the ReLUs' slope: 1 where h > 0
    x, time = inputs
    slots["w1_time"].zero_().flatten(0, 1).index_add_(0, nets.rows(time, shape.horizon), d_h.flatten(0, 1))
    if shape.n_cells:
        slots["w1"].zero_().flatten(0, 1).index_add_(0, nets.rows(x, shape.n_cells), d_h.flatten(0, 1))
    else:
        torch.bmm(x.T.expand(shape.n_policies, -1, -1), d_h, out=slots["w1"])
    return float(error.square().mean())


def _held_out_error(average: ValueNets, data: Transitions, reward: Reward, weights: Weights, config: Config) -> float:
    """Mean squared Bellman error of the averaged nets on some rows that are never trained on, the same every time."""
    batch = next(iter(data.batches(4 * config.batch, np.random.default_rng(0), "held_out")))
    target = _target(average, batch, reward, weights)
    out = average.scaled(average.inputs(batch.state, batch.t.astype(np.int64)))
    action = torch.from_numpy(batch.action.astype(np.int64))
    taken = out.gather(-1, action.expand(len(out), -1)[..., None])[..., 0]
    return float((taken - target).square().mean())


def _refuse_divergence(check: Check, curves: list[Check]) -> None:
    if not np.isfinite(check.held_out) or (curves and check.held_out > 1e4 * (curves[0].held_out + 1e-6)):
        raise ValueError(
            f"the fit diverged: held-out error {check.held_out:.3g} after {check.update} updates, "
            f"{curves[0].held_out if curves else float('nan'):.3g} at first; lower the learning rate"
        )


def _views(shape: Shape, flat: Tensor) -> dict[str, Tensor]:
    sizes = {name: int(np.prod(s)) for name, s in _shapes(shape).items()}
    parts = torch.split(flat, list(sizes.values()))
    return {name: x.view(s) for (name, s), x in zip(_shapes(shape).items(), parts, strict=True)}


def _shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    k, h, a = shape.n_policies, shape.hidden, shape.n_actions
    first: dict[str, tuple[int, ...]] = {"w1": (k, shape.n_cells or shape.width, h), "w1_time": (k, shape.horizon, h)}
    return first | {"w2": (k, a, h), "b2": (k, 1, a)}


def _size(shape: Shape) -> int:
    return sum(int(np.prod(s)) for s in _shapes(shape).values())
