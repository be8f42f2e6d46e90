"""Policies of torch modules as one safetensors file: their layers by name, with their numbers; no pickle, no code.

What the importers make of checkpoints can be written (normaliser, layers, images, epsilon-greedy, ONNX graphs), where
actions are counted. Programs of torch can't: they are code.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from manyfold.files import field, save_tensors, with_ending
from manyfold.policies.layers import ACTIVATIONS, EpsilonGreedy, Image, Normaliser
from manyfold.policies.modules import ModulePolicySet
from manyfold.policies.running import OnnxProgram, Parameters

Said = dict[str, Any]
GRAPH = "graph"  # the bytes of an ONNX program, among the tensors


class Kind(NamedTuple):
    """How a layer is described, and made again, on torch's meta device: its numbers follow."""

    describe: Callable[[Any], Said]
    make: Callable[[Said, list[nn.Module]], nn.Module]  # of what was described, and its parts
    said: tuple[str, ...] = ()  # numbers that the description has: those that may be infinite


def _nothing(module: nn.Module) -> Said:
    return {}


def _plain(kind: type[nn.Module]) -> Kind:
    """A layer without settings."""
    return Kind(_nothing, lambda said, inner: kind())


KINDS: dict[type[nn.Module], Kind] = {
    **{kind: _plain(kind) for kind in (*ACTIVATIONS.values(), nn.Flatten)},
    nn.Sequential: Kind(_nothing, lambda said, inner: nn.Sequential(*inner)),
    nn.Linear: Kind(
        lambda x: {"inputs": x.in_features, "outputs": x.out_features, "bias": x.bias is not None},
        lambda said, inner: nn.Linear(said["inputs"], said["outputs"], said["bias"]),
    ),
    nn.Conv2d: Kind(
        lambda x: {"inputs": x.in_channels, "outputs": x.out_channels, "size": x.kernel_size, "stride": x.stride},
        lambda said, inner: nn.Conv2d(said["inputs"], said["outputs"], tuple(said["size"]), tuple(said["stride"])),
    ),
    Normaliser: Kind(
        lambda x: {"width": len(x.mean), "clip": float(x.clip) if x.clip.isfinite() else None},
        lambda said, inner: _normaliser(said),
        said=("clip",),
    ),
    Image: Kind(
        lambda x: {"shape": x.shape, "scaled": x.scale != 1, "channels_last": x.channels_last},
        lambda said, inner: _image(said),
    ),
    EpsilonGreedy: Kind(_nothing, lambda said, inner: EpsilonGreedy(inner[0], 0.0)),
    Parameters: Kind(
        lambda x: {"transform": x.transform},
        lambda said, inner: Parameters(inner[0], _graph(inner[1]), said["transform"]),
    ),
}
NAMES = {kind.__name__: kind for kind in KINDS}


def _normaliser(said: Said) -> Normaliser:
    made = Normaliser(said["width"])
    clip = np.inf if said["clip"] is None else said["clip"]
    made.clip = torch.tensor(clip, dtype=torch.float64, device="cpu")
    return made


def _image(said: Said) -> Image:
    made = Image(said["shape"], said["scaled"])
    made.channels_last = bool(said["channels_last"])
    return made


def _graph(module: nn.Module) -> OnnxProgram:
    if not isinstance(module, OnnxProgram):
        raise ValueError(f"a program is a {type(module).__name__}")
    return module


def save(policies: ModulePolicySet, path: Path | str) -> None:
    """Writes `path`.safetensors, which `manyfold.policies.load` reads."""
    if policies.head is not None:
        raise ValueError("policies over vectors, expected counted actions; keep their own files")
    tensors: dict[str, Tensor] = {}
    modules = [_described(module, f"{k}", tensors) for k, module in enumerate(policies.modules)]
    numbers = {name: getattr(policies, name) for name in ("n_actions", "width", "horizon")}
    about = {"kind": "modules", "names": list(policies.names), "how": policies.how, **numbers, "modules": modules}
    save_tensors(with_ending(Path(path)), tensors, "policies", 2, about)


def build(path: Path, tensors: dict[str, Tensor], about: Said) -> ModulePolicySet:
    """The set that a file describes; anything else is refused with one line."""
    n_actions, width, horizon = (field(path, about, name, int) for name in ("n_actions", "width", "horizon"))
    names, how, left = tuple(map(str, field(path, about, "names", list))), field(path, about, "how", str), dict(tensors)
    try:
        made = [_made(said, f"{k}", left) for k, said in enumerate(field(path, about, "modules", list))]
        if left:
            raise ValueError(f"{next(iter(left))} belongs to no layer")
        return ModulePolicySet(made, n_actions, width, horizon, names, how)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        said = " ".join(str(error).split())[:160]
        raise ValueError(f"{path}: its layers can't be made ({said}); was it written by another program?") from None


def _described(module: nn.Module, name: str, tensors: dict[str, Tensor]) -> Said:
    """A module and its parts; their own numbers go to `tensors` under `name`."""
    if isinstance(module, OnnxProgram):
        tensors[f"{name}.{GRAPH}"] = torch.from_numpy(np.frombuffer(module.whole(), dtype=np.uint8).copy())
        return {"kind": OnnxProgram.__name__, "path": Path(module.path).name}
    kind = KINDS.get(type(module))
    plain = type(module) in (*ACTIVATIONS.values(), nn.Flatten)
    if kind is None or (plain and repr(module) != repr(type(module)())):
        raise ValueError(
            f"{module!r:.60} can't be written into a file, expected layers of {', '.join(NAMES)!s:.200}; export the "
            "policy to ONNX"
        )
    own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    tensors |= {f"{name}.{key}": x for key, x in own.items() if key not in kind.said}
    parts = [_described(part, f"{name}.{i}", tensors) for i, part in enumerate(module.children())]
    return {"kind": type(module).__name__, **kind.describe(module), "parts": parts}


def _made(said: Said, name: str, tensors: dict[str, Tensor]) -> nn.Module:
    """The module that was described; its numbers are taken out of `tensors`."""
    if said["kind"] == OnnxProgram.__name__:
        return OnnxProgram(Path(said["path"]), tensors.pop(f"{name}.{GRAPH}").numpy().tobytes())
    inner = [_made(part, f"{name}.{i}", tensors) for i, part in enumerate(said["parts"])]
    kind = KINDS[NAMES[said["kind"]]]
    with torch.device("meta"):
        made = kind.make(said, inner)
    own = [*made.named_parameters(recurse=False), *made.named_buffers(recurse=False)]
    for key, x in own:
        if key in kind.said:
            continue
        number = tensors.pop(f"{name}.{key}")
        if number.shape != x.shape:
            raise ValueError(f"{name}.{key} has shape {list(number.shape)}, expected {list(x.shape)}")
        setattr(made, key, nn.Parameter(number, False) if isinstance(x, nn.Parameter) else number)
    return made
