"""K value functions as one batch of small networks: what a fit finds, how it predicts, and how it is kept on disk."""

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from manyfold.arrays import Array, Ints, check_number
from manyfold.files import field as field_of
from manyfold.files import load_tensors, save_tensors
from manyfold.policies.base import check_steps

VERSION = 4
LIMIT = 10.0  # standardised states are clipped there
OPTIONAL = {"layers": 1, "cosines": 0}  # of a shape; files don't name them where they are these


class Check(NamedTuple):
    """The state of a fit at some moment; errors are mean squares of the scaled Bellman error over policies."""

    update: int
    train: float
    held_out: float


@dataclass(frozen=True)
class Shape:
    """What the tensors alone don't say."""

    horizon: int
    n_actions: int
    n_policies: int
    hidden: int
    n_states: int  # a state is an index, the input its one-hot; 0: it is a vector
    width: int  # of a state
    layers: int = 1  # hidden ones, 1 or 2
    cosines: int = 0  # of t, which make up the time's part of the first layer; 0: a row for each step


class ValueNets:
    """K functions f_k(t, s, a): `predict(states, t) -> [K, N, A]`.

    Tables have the K policies side by side in a row, `[rows, K * h]`, so that a state is one look-up for all of them.
    """

    def __init__(self, shape: Shape, flat: Tensor, centre: Tensor, spread: Tensor, scale: Tensor) -> None:
        self.shape, self.flat = shape, flat
        self.centre, self.spread, self.scale = centre, spread, scale  # of states [width]; of the values [K]
        self.parameters = views(shape, flat)

    def inputs(self, states: NDArray[np.float32], t: Ints) -> tuple[Tensor, Tensor]:
        """Indices `[N]` or standardised states `[N, width]`, and the step t `[N]`."""
        time = torch.from_numpy(np.array(t, dtype=np.int64))
        if self.shape.n_states:
            return torch.from_numpy(states[:, 0].astype(np.int64)), time
        z = (torch.from_numpy(np.asarray(states, dtype=np.float32)) - self.centre) / self.spread
        return z.clamp_(-LIMIT, LIMIT), time

    def hidden(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Activations `[N, K * h]`."""
        x, time = inputs
        p = self.parameters
        h = self.cosines(time) @ p["w1_time"] if self.shape.cosines else p["w1_time"].index_select(0, time)
        h = h.add_(p["w1"].index_select(0, x)) if self.shape.n_states else h.addmm_(x, p["w1"])  # a one-hot is an index
        return h.relu_()

    def cosines(self, time: Tensor) -> Tensor:
        """cos(pi j (t + 1/2) / T) for j = 0, 1, ...; `[N, cosines]`."""
        return torch.cos((time[:, None] + 0.5) * torch.arange(self.shape.cosines) * (torch.pi / self.shape.horizon))

    def last(self, h: Tensor) -> Tensor:
        """Activations of the last hidden layer from those of the first, `[N, K * h]` -> `[K, N, h]`."""
        if self.shape.layers == 1:
            return self.apart(h)
        return torch.baddbmm(self.parameters["b_mid"], self.apart(h), self.parameters["w_mid"]).relu_()

    def apart(self, x: Tensor) -> Tensor:
        """A view with the policies first, `[N, K * h]` -> `[K, N, h]`."""
        return x.view(len(x), self.shape.n_policies, -1).transpose(0, 1)

    def scaled(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Outputs before scaling, `[K, N, A]`."""
        b2, w2, h = self.parameters["b2"], self.apart(self.parameters["w2"]), self.last(self.hidden(inputs))
        if self.shape.n_states:
            return torch.baddbmm(b2, h, w2.mT)
        return torch.baddbmm(b2.mT, w2, h.mT).mT  # the same product, three times as fast with the long side last

    def predict(self, states: ArrayLike, t: int | ArrayLike) -> Array:
        """f_k(t, s, a) for all K policies and actions at N states `[N, width]` and their steps; `[K, N, A]`."""
        x = np.asarray(states, dtype=np.float32)
        if x.ndim != 2 or x.shape[1] != self.shape.width:
            raise ValueError(f"states has shape {list(x.shape)}, expected [N, {self.shape.width}]")
        steps = check_steps(t, len(x), self.shape.horizon)
        return (self.scaled(self.inputs(x, steps)) * self.scale[:, None, None]).double().numpy()

    def table(self) -> Array:
        """At every step and state, where states are indices; `[K, T, S, A]`."""
        states = np.arange(self.shape.n_states, dtype=np.float32)[:, None]
        return np.stack([self.predict(states, t) for t in range(self.shape.horizon)], 1)

    def save(self, path: Path, curves: list["Check"] | None = None) -> None:
        """One safetensors file; the shape and the learning curves are in its description."""
        tensors = {"flat": self.flat, "centre": self.centre, "spread": self.spread, "scale": self.scale}
        shape = {name: x for name, x in asdict(self.shape).items() if OPTIONAL.get(name) != x}
        save_tensors(path, tensors, "values", VERSION, {"shape": shape, "curves": curves or []})

    @classmethod
    def load(cls, path: Path) -> tuple["ValueNets", list["Check"]]:
        """The nets and their learning curves; what doesn't fit is refused with one line."""
        tensors, about = load_tensors(path, "values", VERSION)
        said, wanted = about.get("shape"), {field.name for field in fields(Shape)} - OPTIONAL.keys()
        if not isinstance(said, dict) or said.keys() - OPTIONAL.keys() != wanted:
            raise ValueError(f"{path}: expected a shape with {', '.join(sorted(wanted))}; is it another program's?")
        for name in wanted:
            check_number(f"{path}: {name}", said[name], int(name != "n_states"), 10**9)
        check_number(f"{path}: layers", said.get("layers", 1), 1, 2)
        check_number(f"{path}: cosines", said.get("cosines", 0), 0, 10**9)
        shape = Shape(**said)
        expected = {"flat": (size(shape),), "centre": (shape.width,), "spread": (shape.width,)}
        expected["scale"] = (shape.n_policies,)
        for name, wanted_shape in expected.items():
            if name not in tensors or tuple(tensors[name].shape) != wanted_shape:
                raise ValueError(f"{path}: {name} does not have shape {list(wanted_shape)}")
            if tensors[name].dtype != torch.float32:
                raise ValueError(f"{path}: {name} is {tensors[name].dtype}, expected float32")
        if extra := sorted(tensors.keys() - expected.keys()):
            raise ValueError(f"{path}: {', '.join(extra):.60} belongs to no value nets, expected {', '.join(expected)}")
        curves = curves_of(field_of(path, about, "curves", list))
        if curves is None:
            raise ValueError(f"{path}: curves are not [update, train, held_out] each; is it another program's?")
        nets = cls(shape, tensors["flat"], tensors["centre"], tensors["spread"], tensors["scale"])
        return nets, curves

    def module(self) -> nn.Module:
        """The same function as a torch module for export: (obs `[N, width]` float32, t `[N]`) -> `[K, N, A]`."""
        return ValueModule(self)


class ValueModule(nn.Module):
    """As `ValueNets.predict`, in float32 and in operations that every runtime has."""

    def __init__(self, nets: ValueNets) -> None:
        super().__init__()
        self.shape = nets.shape
        tensors = {**nets.parameters, "centre": nets.centre, "spread": nets.spread, "scale": nets.scale}
        if nets.shape.cosines:
            tensors["w1_time"] = nets.cosines(torch.arange(self.shape.horizon)) @ tensors["w1_time"]  # [T, K * h]
        for name, x in tensors.items():
            self.register_buffer(name, x.clone(memory_format=torch.contiguous_format))

    def forward(self, obs: Tensor, t: Tensor) -> Tensor:
        p, shape = dict(self.named_buffers()), self.shape
        if shape.n_states:
            h = p["w1"][obs[:, 0].long()]
        else:
            h = torch.matmul(((obs - p["centre"]) / p["spread"]).clamp(-LIMIT, LIMIT), p["w1"])
        h = torch.relu(h + p["w1_time"][t]).view(-1, shape.n_policies, shape.hidden).transpose(0, 1)  # [K, N, h]
        if shape.layers == 2:
            h = torch.relu(torch.matmul(h, p["w_mid"]) + p["b_mid"])
        w2 = p["w2"].view(shape.n_actions, shape.n_policies, -1).permute(1, 2, 0)  # [K, h, A]
        return (torch.matmul(h, w2) + p["b2"]) * p["scale"][:, None, None]


def curves_of(rows: Any) -> list[Check] | None:
    """Learning curves as a description holds them; None where it holds anything else."""
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == len(Check._fields) for row in rows):
        return None
    if any(isinstance(x, bool) or not isinstance(x, int | float) for row in rows for x in row):
        return None
    return [Check(*row) for row in rows]


def views(shape: Shape, flat: Tensor) -> dict[str, Tensor]:
    """The parameters by name, in one flat tensor."""
    counts = {name: math.prod(s) for name, s in _shapes(shape).items()}
    parts = torch.split(flat, list(counts.values()))
    return {name: x.view(s) for (name, s), x in zip(_shapes(shape).items(), parts, strict=True)}


def _shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    k, h, a = shape.n_policies, shape.hidden, shape.n_actions
    first: dict[str, tuple[int, ...]] = {
        "w1": (shape.n_states or shape.width, k * h),
        "w1_time": (shape.cosines or shape.horizon, k * h),
    }
    second: dict[str, tuple[int, ...]] = {"w_mid": (k, h, h), "b_mid": (k, 1, h)} if shape.layers == 2 else {}
    return first | {"w2": (a, k * h), "b2": (k, 1, a)} | second


def size(shape: Shape) -> int:
    """How many numbers the flat tensor holds."""
    return sum(math.prod(s) for s in _shapes(shape).values())  # of Python's numbers, which don't overflow
