"""Policies as programs: ONNX graphs, torch.export programs and TorchScript that give a distribution's parameters.

One output `[N, A]` is logits (probabilities if its rows sum to 1); two of `[N, d]` are mean and log_std, or std if the
output's name says so. Names are those of ONNX outputs, or the keys of a dictionary that a torch program gives. Anything
else must be said by `head`.

ONNX graphs are data and run as they are. `torch.export.load` unpickles weights with `weights_only=False` and
TorchScript is code: both need `trust`.
"""

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from manyfold.policies.heads import Gaussian, MultiCategorical
from manyfold.policies.imported import Actions, Imported, Options, described, parts, size, unbounded
from manyfold.policies.layers import WIDEST, Normaliser, Statistics
from manyfold.policies.running import OnnxProgram, Parameters, TorchProgram, run
from manyfold.policies.weights import UNREADABLE, reason

PROBE = 16  # observations by which outputs are told apart
BOUNDS_NOTE = "the file has no action bounds: the environment's are used to clip"


def read_onnx(path: Path, options: Options, statistics: Statistics | None) -> Imported:
    """One policy from an ONNX graph."""
    return _imported(path, "onnx", OnnxProgram(path), options, statistics)


def read_export(path: Path, options: Options, statistics: Statistics | None) -> Imported:
    """One policy from a torch.export program (.pt2); only if it is trusted."""
    if not options.trust:
        raise ValueError(
            f"{path}: a torch.export program, which torch loads by running its pickles; expected trust=True if you "
            "know where it comes from, or ONNX"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.load(path)
            module = exported.module()
        found = [
            node.meta["val"].shape for node in exported.graph.nodes if node.name in exported.graph_signature.user_inputs
        ]
        if len(found) != 1:
            raise ValueError(f"{len(found)} inputs, expected one: the observations [N, width]")
        batch = found[0][0] if isinstance(found[0][0], int) else 0
        program = TorchProgram(module, batch, tuple(n if isinstance(n, int) else 0 for n in found[0][1:]))
    except UNREADABLE as error:
        raise ValueError(f"{path}: not a readable torch.export program ({reason(error)})") from None
    return _imported(path, "torch.export", program, options, statistics)


def read_script(path: Path, options: Options, statistics: Statistics | None) -> Imported:
    """One policy from a TorchScript program; only if it is trusted."""
    if not options.trust:
        raise ValueError(
            f"{path}: a TorchScript program, which is code; expected trust=True if you know where it comes from, or "
            "ONNX"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated, its files are still around
            script = torch.jit.load(str(path), map_location="cpu").eval()  # type: ignore[no-untyped-call]
    except UNREADABLE as error:
        raise ValueError(f"{path}: not a readable TorchScript program ({reason(error)})") from None
    width = next((x.shape[1] for x in script.state_dict().values() if x.ndim == 2), 0)  # of its first layer
    return _imported(path, "torchscript", TorchProgram(script, 0, (width,)), options, statistics)


def _imported(
    path: Path, kind: str, program: OnnxProgram | TorchProgram, options: Options, statistics: Statistics | None
) -> Imported:
    width = math.prod(program.shape)
    if not width and statistics is not None:
        width = len(statistics.mean)
    if not 0 < width <= WIDEST:
        raise ValueError(
            f"{path}: observations of shape {list(program.shape)} (0: unknown), expected a fixed one; export it with "
            "only the first axis dynamic"
        )
    outputs = _probe(path, program, width)
    notes: list[str] = []
    actions = _actions(path, outputs, options, notes)
    transform = _transform(path, outputs, program.outputs, actions, notes)
    if program.batch:
        notes.append(f"exported for batches of {program.batch}: slow; export it with a dynamic first axis")
    module = Parameters(Normaliser(width, statistics), program, transform)
    return Imported(path.stem, path, kind, width=width, notes=tuple(notes), **parts(module, actions, options.greedy))


def _probe(path: Path, program: OnnxProgram | TorchProgram, width: int) -> list[NDArray[Any]]:
    """The outputs at a few observations, `[PROBE, ...]` each."""
    obs = np.random.default_rng(0).normal(size=(PROBE, width)).astype(np.float32)
    try:
        with torch.no_grad():
            found = [x.double().numpy() for x in run(program, torch.from_numpy(obs))]
    except Exception as error:  # whatever a program raises
        raise ValueError(
            f"{path}: it failed on float32 [{PROBE}, {width}] ({reason(error)}), expected [N, width]"
        ) from None
    shapes = [list(x.shape) for x in found]
    if len(found) not in (1, 2) or any(x.ndim != 2 or len(x) != PROBE for x in found) or shapes[0] != shapes[-1]:
        raise ValueError(
            f"{path}: outputs {shapes} for {PROBE} observations, expected logits [N, A], or mean and log_std [N, d]; "
            "does it give actions? Export the distribution's parameters"
        )
    if not all(np.isfinite(x).all() for x in found):
        raise ValueError(f"{path}: it gives NaN or infinity at ordinary observations, expected finite numbers")
    return found


def _actions(path: Path, outputs: list[NDArray[Any]], options: Options, notes: list[str]) -> Actions:
    """As the caller says, else by the number of outputs."""
    found = sum(x.shape[1] for x in outputs)
    if options.head is None:
        if len(outputs) == 1:
            return found
        notes.append(BOUNDS_NOTE)
        return unbounded(found // 2)
    if size(options.head) != found or (len(outputs) == 2 and not isinstance(options.head, Gaussian)):
        raise ValueError(
            f"{path}: {len(outputs)} outputs of {found} numbers together, expected {size(options.head)} to choose "
            f"{described(options.head)}"
        )
    return options.head


def _transform(
    path: Path, outputs: list[NDArray[Any]], names: tuple[str, ...], actions: Actions, notes: list[str]
) -> str:
    """What makes parameters of the outputs: "" if they are parameters, "log" of probabilities, "log_std" of a std."""
    first = outputs[0]
    if len(outputs) == 1:
        if isinstance(actions, Gaussian):
            return ""
        nvec = actions.nvec if isinstance(actions, MultiCategorical) else (first.shape[1],)
        sums = [part.sum(-1) for part in np.split(first, np.cumsum(nvec)[:-1], axis=1)]
        if (first >= 0).all() and np.abs(np.array(sums) - 1).max() < 1e-5:
            notes.append("its outputs are probabilities (rows sum to 1), taken as such")
            return "log"
        notes.append("its outputs are taken as logits; if they are values of actions, this is another policy")
        return ""
    name, second = names[1].lower() if len(names) == 2 else "", outputs[1]
    if "value" in name:
        raise ValueError(
            f"{path}: its second output is {name}, expected log_std or std; export the actor without values"
        )
    if "log" in name:
        return ""
    if "std" in name or name in ("scale", "sigma"):
        if (second <= 0).any():
            raise ValueError(f"{path}: output {name} is 0 or less, expected deviations; is it a logarithm?")
        notes.append(f"its second output, {name}, is taken as a standard deviation")
        return "log_std"
    if (second > 0).all():
        raise ValueError(
            f"{path}: its second output{f' {name!r}' if name else ''} is positive, so that it may be a deviation or a "
            "logarithm; expected names mean and std, or log_std: of ONNX outputs, or keys of a dictionary"
        )
    notes.append("its second output is negative somewhere, so it is taken as log_std")
    return ""
