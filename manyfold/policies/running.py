"""Programs as torch modules: ONNX graphs and torch's programs, for any number of observations.

An ONNX graph is data: its bytes may be kept in a file of ours (`saved.py`) and run from there.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyfold.policies.layers import NEVER, normal


class OnnxProgram(nn.Module):
    """An ONNX graph as a module; the session is opened again wherever a copy of it goes.

    Args:
        path: of the file.
        data: the graph with all its weights, where it is in no file of its own; `path` is then its name only.
    """

    def __init__(self, path: Path, data: bytes | None = None) -> None:
        super().__init__()
        self.path, self._data, self._session = str(path), data, None
        self.sha256 = hashlib.sha256(data).hexdigest() if data else ""  # tells programs of one name apart
        session = self.session()
        inputs = session.get_inputs()
        if len(inputs) != 1:
            raise ValueError(f"{path}: inputs {[x.name for x in inputs]}, expected one: the observations [N, width]")
        self.input, shape = inputs[0].name, inputs[0].shape
        self.dtype = "float64" if "double" in inputs[0].type else "float32"
        self.outputs = tuple(x.name for x in session.get_outputs())
        self.batch = shape[0] if shape and isinstance(shape[0], int) else 0  # 0: any
        self.shape = tuple(n if isinstance(n, int) else 0 for n in shape[1:])

    def session(self) -> Any:
        """The open session, of one thread."""
        if self._session is None:
            try:
                import onnxruntime
            except ImportError:
                raise ValueError(
                    f"{self.path}: ONNX files need onnxruntime, which is missing; pip install onnxruntime"
                ) from None
            settings = onnxruntime.SessionOptions()
            settings.intra_op_num_threads = settings.inter_op_num_threads = 1
            settings.log_severity_level = 3
            try:
                self._session = onnxruntime.InferenceSession(
                    self._data or self.path, settings, providers=["CPUExecutionProvider"]
                )
            except Exception as error:  # onnxruntime has classes of its own for each fault
                said = " ".join(str(error).split()).rpartition(" failed:")[2][:120]
                raise ValueError(
                    f"{self.path}: cannot be read ({said}), expected a whole ONNX file; was it cut off, or its .data "
                    "left behind?"
                ) from None
        return self._session

    def whole(self) -> bytes:
        """The graph with all its weights, those in a `.data` beside it included."""
        if self._data is None:
            import onnx

            return bytes(onnx.load(self.path).SerializeToString(deterministic=True))
        return self._data

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        obs = x.detach().numpy().astype(self.dtype)
        found = self.session().run(None, {self.input: obs})
        return tuple(torch.from_numpy(np.asarray(y)) for y in found)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None}  # sessions cannot be copied


class TorchProgram(nn.Module):
    """A torch.export or TorchScript program as a module."""

    def __init__(self, program: nn.Module, batch: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.program, self.batch, self.shape = program, batch, shape
        self.outputs: tuple[str, ...] = ()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = self.program(x)
        if isinstance(found, dict):
            self.outputs = tuple(map(str, found))
            return tuple(found.values())
        return tuple(found) if isinstance(found, tuple | list) else (found,)

    def train(self, mode: bool = True) -> "TorchProgram":
        return self  # an exported program is what it was exported as, and refuses to be switched


class Parameters(nn.Module):
    """A program's outputs as the parameters of a head, for any number of observations.

    Args:
        program: gives a tuple of tensors `[N, ...]`, for batches of `program.batch` (0: of any size).
        transform: "" as they are, "log" of probabilities, "log_std" of a second output that is a deviation.
    """

    def __init__(self, normaliser: nn.Module, program: OnnxProgram | TorchProgram, transform: str) -> None:
        super().__init__()
        self.normaliser, self.program, self.transform = normaliser, program, transform

    def forward(self, x: Tensor) -> Tensor:
        outputs = run(self.program, self.normaliser(x))
        if self.transform == "log":
            return torch.log(outputs[0]).clamp(min=NEVER)
        if self.transform == "log_std":
            return normal(*outputs)
        return torch.cat(outputs, -1)


def run(program: OnnxProgram | TorchProgram, x: Tensor) -> list[Tensor]:
    """Outputs `[N, ...]` for observations `[N, width]`, in pieces where the program was exported for a fixed number."""
    shaped = x.reshape(len(x), *program.shape) if all(program.shape) else x
    count = program.batch or len(x)
    padded = torch.cat([shaped, shaped[:1].expand(-len(x) % count, *shaped.shape[1:])])
    pieces = [_rows(program(padded[i : i + count]), count) for i in range(0, len(padded), count)]
    return [torch.cat(column)[: len(x)] for column in zip(*pieces, strict=True)]


def _rows(outputs: tuple[Tensor, ...], n: int) -> list[Tensor]:
    """A second output that is the same for all observations, `[d]` or `[1, d]`, as `[n, d]`."""
    return [y.expand(n, -1) if i and y.shape[:-1] in ((), (1,)) else y for i, y in enumerate(outputs)]
