"""A behavior policy as one self-contained file, for a machine without manyfold: torch.export (.pt2) and ONNX (.onnx).

    inputs   observation [N, width] float32 (an index where states can be counted), t [N] int64
    outputs  mu [N, A], targets [K, N, A]: the probabilities to act by, and those to weigh the episodes with later

Normalisation, floors and Theorem 2 are inside. All is in float32; the ratio of two outputs of the same file is what
makes an estimate unbiased, so log both of them, not mu alone. The same behavior policy gives the same bytes.
"""

import io
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from manyfold.design.behavior import FLOOR, Behavior
from manyfold.files import atomic, sha256, write_json
from manyfold.policies.base import PolicySet
from manyfold.policies.running import OnnxProgram


class Exported(nn.Module):
    """The forward pass of a `Behavior`, in operations that every runtime has."""

    def __init__(self, behavior: Behavior) -> None:
        super().__init__()
        self.alpha = behavior.alpha
        self.targets, self.q, self.q_hat = behavior.policies.module(), behavior.q.module(), behavior.q_hat.module()
        self.register_buffer("least", FLOOR * behavior.q_hat.scale[:, None, None].clone())

    def forward(self, observation: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """mu `[N, A]` and the targets `[K, N, A]`."""
        targets = self.targets(observation, t)
        q, fitted = self.q(observation, t), self.q_hat(observation, t)
        weights = targets * torch.sqrt(torch.maximum(torch.maximum(fitted, q * q), self.get_buffer("least")))
        largest = weights.amax((0, 2), keepdim=True)
        mu = torch.sqrt(((weights / largest) ** 2).sum(0))  # [N, A]
        mu = mu / mu.sum(-1, keepdim=True)
        if self.alpha:
            mu = (1 - self.alpha) * mu + self.alpha * targets.mean(0)
        return mu, targets


def exportable(policies: PolicySet) -> bool:
    """Whether the policies can be part of another program; those that are ONNX graphs themselves can't."""
    modules = getattr(policies, "modules", ())
    return not any(isinstance(part, OnnxProgram) for module in modules for part in module.modules())


def export(behavior: Behavior, folder: Path, env: str, data_sha256: str | None = None) -> None:
    """Writes mu.pt2, mu.onnx and mu.json (what they are for) into `folder`.

    Args:
        env: the environment's name, for the description.
        data_sha256: checksum of the offline data that the behavior policy was designed from.
    """
    if not exportable(behavior.policies):
        raise ValueError("the policies are ONNX graphs, expected networks or tables to make one program of")
    try:
        import onnxscript  # noqa: F401 - torch's ONNX exporter needs it
    except ModuleNotFoundError:
        raise ValueError("export needs onnx and onnxscript; install the extra `onnx`: pip install '.[onnx]'") from None
    module = Exported(behavior).eval()
    example = torch.zeros(2, behavior.q.shape.width), torch.zeros(2, dtype=torch.int64)
    n = torch.export.Dim("N")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporters warn about their own deprecations
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program = torch.export.export(module, example, dynamic_shapes=({0: n}, {0: n}))
        onnx = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            optimize=False,
            input_names=["observation", "t"],
            output_names=["mu", "targets"],
        )
        save_pt2(program, folder / "mu.pt2")
    if onnx is None:
        raise ValueError("torch.onnx gave no program, expected one")
    save_onnx(onnx, folder / "mu.onnx")
    write_json(folder / "mu.json", describe(behavior, folder, env, data_sha256))


def save_pt2(program: ExportedProgram, path: Path) -> None:
    """Writes `program` without its nodes' traces (folders, line numbers), which are removed from `program` too."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta = {key: x for key, x in node.meta.items() if key == "val"}  # shape and type; the rest is traces
    buffer = io.BytesIO()  # not the path, whose name would become the archive's inner folder
    torch.export.save(program, buffer)
    with atomic(path) as part:
        part.write_bytes(buffer.getvalue())


def save_onnx(program: torch.onnx.ONNXProgram, path: Path) -> None:
    """Writes `program` (at most 2 GB, protobuf's limit) without traces and comments."""
    model = program.model_proto  # made afresh at each access
    _without_comments(model)
    with atomic(path) as part:
        part.write_bytes(model.SerializeToString(deterministic=True))


def _without_comments(message: Any) -> None:
    """Clears what no runtime reads from a protobuf message and all messages inside it."""
    for field, value in message.ListFields():
        if field.name in ("metadata_props", "doc_string"):
            message.ClearField(field.name)
        elif field.message_type:
            for part in (value,) if hasattr(value, "ListFields") else value:  # one message, or a sequence of them
                _without_comments(part)


def describe(behavior: Behavior, folder: Path, env: str, data_sha256: str | None) -> dict[str, object]:
    """What somebody who finds the files must know."""
    policies = behavior.policies
    spec = getattr(policies, "spec", None)
    binned = spec is not None and spec.kind == "binned_gaussian"
    return {
        "format": "manyfold-behavior",
        "env": env,
        "horizon": policies.horizon,
        "inputs": {"observation": ["N", behavior.q.shape.width], "t": ["N"]},
        "outputs": {
            "mu": ["N", policies.n_actions],
            "targets": [policies.n_policies, "N", policies.n_actions],
        },
        "observation": "index of the state" if policies.n_states else "vector of the state",
        "actions": policies.n_actions,
        "action_range": [spec.low, spec.high] if spec is not None and binned else None,
        "policies": list(policies.names),
        "alpha": behavior.alpha,
        "offline_data_sha256": data_sha256,
        "sha256": {name: sha256(folder / name) for name in ("mu.pt2", "mu.onnx")},
    }
