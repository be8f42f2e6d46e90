"""K value functions as one batch of small networks: what a fit finds, how it predicts, and how it is kept on disk."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from manyfold.mdp import Array, Ints

VERSION = 3
LIMIT = 10.0  # standardised states are clipped there


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
    n_cells: int  # a state is a cell's number, the input its one-hot; 0: it is a vector
    width: int  # of a state


class ValueNets:
    """K functions f_k(t, s, a): `predict(states, t) -> [K, N, A]`.

    Tables have the K policies side by side in a row, `[rows, K * h]`, so that a state is one look-up for all of them.
    """

    def __init__(self, shape: Shape, flat: Tensor, centre: Tensor, spread: Tensor, scale: Tensor) -> None:
        self.shape, self.flat = shape, flat
        self.centre, self.spread, self.scale = centre, spread, scale  # of states [width]; of the values [K]
        self.parameters = views(shape, flat)

    def inputs(self, states: NDArray[np.float32], t: Ints) -> tuple[Tensor, Tensor]:
        """Cells `[N]` or standardised states `[N, width]`, and the step t `[N]`."""
        time = torch.from_numpy(np.array(t, dtype=np.int64))
        if self.shape.n_cells:
            return torch.from_numpy(states[:, 0].astype(np.int64)), time
        z = (torch.from_numpy(np.asarray(states, dtype=np.float32)) - self.centre) / self.spread
        return z.clamp_(-LIMIT, LIMIT), time

    def hidden(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Activations `[N, K * h]`."""
        x, time = inputs
        p = self.parameters
        h = p["w1_time"].index_select(0, time)
        h = h.add_(p["w1"].index_select(0, x)) if self.shape.n_cells else h.addmm_(x, p["w1"])  # a one-hot is an index
        return h.relu_()

    def apart(self, x: Tensor) -> Tensor:
        """A view with the policies first, `[N, K * h]` -> `[K, N, h]`."""
        return x.view(len(x), self.shape.n_policies, -1).transpose(0, 1)

    def scaled(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Outputs before scaling, `[K, N, A]`."""
        b2, w2, h = self.parameters["b2"], self.apart(self.parameters["w2"]), self.apart(self.hidden(inputs))
        if self.shape.n_cells:
            return torch.baddbmm(b2, h, w2.mT)
        return torch.baddbmm(b2.mT, w2, h.mT).mT  # the same product, three times as fast with the long side last

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
        about = {"format": "manyfold-values", "version": VERSION, "shape": asdict(self.shape), "curves": curves or []}
        tensors = {"flat": self.flat, "centre": self.centre, "spread": self.spread, "scale": self.scale}
        # one key: safetensors writes several in any order, and the same fit would be another file to DVC
        one = {"about": json.dumps(about)}
        save_file({name: x.contiguous() for name, x in tensors.items()}, path, metadata=one)

    @classmethod
    def load(cls, path: Path) -> tuple["ValueNets", list["Check"]]:
        """The nets and their learning curves; what doesn't fit is refused with one line."""
        tensors, metadata = read(path)
        about = json.loads(metadata.get("about", "{}"))
        if about.get("format") != "manyfold-values" or about.get("version") != VERSION:
            raise ValueError(f"{path}: expected value nets of version {VERSION}, found {about.get('format')!r}")
        said = about["shape"]
        shape = Shape(**{field.name: said[field.name] for field in fields(Shape)})
        expected = {"flat": (size(shape),), "centre": (shape.width,), "spread": (shape.width,)}
        for name, wanted in {**expected, "scale": (shape.n_policies,)}.items():
            if name not in tensors or tuple(tensors[name].shape) != wanted:
                raise ValueError(f"{path}: {name} does not have shape {list(wanted)}")
        nets = cls(shape, tensors["flat"], tensors["centre"], tensors["spread"], tensors["scale"])
        return nets, [Check(*check) for check in about["curves"]]


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error}); was it cut off?") from None


def views(shape: Shape, flat: Tensor) -> dict[str, Tensor]:
    """The parameters by name, in one flat tensor."""
    counts = {name: int(np.prod(s)) for name, s in _shapes(shape).items()}
    parts = torch.split(flat, list(counts.values()))
    return {name: x.view(s) for (name, s), x in zip(_shapes(shape).items(), parts, strict=True)}


def _shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    k, h, a = shape.n_policies, shape.hidden, shape.n_actions
    first: dict[str, tuple[int, ...]] = {"w1": (shape.n_cells or shape.width, k * h), "w1_time": (shape.horizon, k * h)}
    return first | {"w2": (a, k * h), "b2": (k, 1, a)}


def size(shape: Shape) -> int:
    """Of the flat tensor."""
    return sum(int(np.prod(s)) for s in _shapes(shape).values())
