"""A behavior policy as one self-contained file, for a machine without manyfold: torch.export (.pt2) and ONNX (.onnx).

    inputs   observation [N, width] float32 (on Gridworld the cell's number), t [N] int64
    outputs  mu [N, A], targets [K, N, A]: the probabilities to act by, and those to weigh the episodes with later

Normalisation, floors and Theorem 2 are inside. All is in float32; the ratio of two outputs of the same file is what
makes an estimate unbiased, so log both of them, not mu alone.
"""

import hashlib
import json
import logging
import warnings
from pathlib import Path

import torch
from torch import Tensor

from manyfold import networks
from manyfold.behavior import FLOOR, Behavior
from manyfold.values import LIMIT


class Exported(torch.nn.Module):
    """The forward pass of a `Behavior`, in operations that every runtime has."""

    def __init__(self, behavior: Behavior) -> None:
        super().__init__()
        self.spec, self.alpha = behavior.policies.spec, behavior.alpha
        self.n_policies, self.n_actions = behavior.policies.n_policies, behavior.policies.n_actions
        for name, x in behavior.policies.tensors.items():
            self.register_buffer(f"policy_{name}", x.float())
        for prefix, nets in (("q", behavior.q), ("q_hat", behavior.q_hat)):
            tensors = {**nets.parameters, "centre": nets.centre, "spread": nets.spread, "scale": nets.scale}
            for name, x in tensors.items():
                self.register_buffer(f"{prefix}_{name}", x.clone())
        edges = torch.linspace(self.spec.low, self.spec.high, self.n_actions + 1, dtype=torch.float64)
        self.register_buffer("edges", edges[1:-1].float())

    def forward(self, observation: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """mu `[N, A]` and the targets `[K, N, A]`."""
        targets = self.targets(observation, t)
        q, fitted = self.values("q", observation, t), self.values("q_hat", observation, t)
        least = FLOOR * self.q_hat_scale[:, None, None]  # type: ignore[index]
        weights = targets * torch.sqrt(torch.maximum(torch.maximum(fitted, q * q), least))  # [K, N, A]
        largest = weights.amax((0, 2), keepdim=True)
        mu = torch.sqrt(((weights / largest) ** 2).sum(0))
        mu = mu / mu.sum(-1, keepdim=True)
        if self.alpha:
            mu = (1 - self.alpha) * mu + self.alpha * targets.mean(0)
        return mu, targets

    def targets(self, observation: Tensor, t: Tensor) -> Tensor:
        """As `NetworkPolicySet.probs`."""
        p = {name: getattr(self, f"policy_{name}") for name in ("w1", "b1", "w2", "b2", "w3", "b3")}
        if self.spec.n_cells:
            time = (t.float() / self.spec.horizon)[:, None]
            x = p["w1"][:, observation[:, 0].long()] + time * p["w1"][:, -1:] + p["b1"]
        else:
            z = observation[:, : self.spec.n_features]
            if self.spec.kind == "binned_gaussian":
                spread = torch.sqrt(self.policy_obs_var[:, None] + networks.EPSILON)  # type: ignore[index]
                z = ((z - self.policy_obs_mean[:, None]) / spread).clamp(-networks.LIMIT, networks.LIMIT)  # type: ignore[index]
            else:
                z = z.expand(self.n_policies, -1, -1)
            x = torch.matmul(z, p["w1"]) + p["b1"]
        x = torch.tanh(torch.matmul(torch.tanh(x), p["w2"]) + p["b2"])
        out = torch.matmul(x, p["w3"]) + p["b3"]
        if self.spec.kind == "softmax":
            return torch.softmax(out, -1)
        z = (self.edges - out[..., :1]) / self.policy_log_std[..., :1].exp()  # type: ignore[index]
        below = 0.5 * (1 + torch.erf(z / 2**0.5))  # [K, N, A - 1]
        none = torch.zeros_like(below[..., :1])
        return torch.cat([below, none + 1], -1) - torch.cat([none, below], -1)

    def values(self, name: str, observation: Tensor, t: Tensor) -> Tensor:
        """As `ValueNets.predict`."""
        p = {
            part: getattr(self, f"{name}_{part}") for part in ("w1", "w1_time", "w2", "b2", "centre", "spread", "scale")
        }
        if self.spec.n_cells:
            h = p["w1"][observation[:, 0].long()]
        else:
            h = torch.matmul(((observation - p["centre"]) / p["spread"]).clamp(-LIMIT, LIMIT), p["w1"])
        h = torch.relu(h + p["w1_time"][t]).view(-1, self.n_policies, p["w1"].shape[1] // self.n_policies)
        w2 = p["w2"].view(self.n_actions, self.n_policies, -1).permute(1, 2, 0)  # [K, h, A]
        return (torch.matmul(h.transpose(0, 1), w2) + p["b2"]) * p["scale"][:, None, None]


class Exporter:
    """Traces the forward pass once, for all behavior policies of one shape; `save` puts another one's numbers in."""

    def __init__(self, behavior: Behavior) -> None:
        self.module = Exported(behavior).eval()
        example = torch.zeros(2, behavior.q.shape.width), torch.zeros(2, dtype=torch.int64)
        n = torch.export.Dim("N")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's exporters warn about their own deprecations
            logging.getLogger("torch.onnx").setLevel(logging.ERROR)
            self.program = torch.export.export(self.module, example, dynamic_shapes=({0: n}, {0: n}))
            self.onnx = torch.onnx.export(
                self.program,
                dynamo=True,
                verbose=False,
                optimize=False,
                input_names=["observation", "t"],
                output_names=["mu", "targets"],
            )

    def save(self, behavior: Behavior, folder: Path, data_sha256: str) -> None:
        """Writes mu.pt2, mu.onnx and mu.json (what they are for) into `folder`."""
        for (name, old), (also, new) in zip(
            self.module.named_buffers(), Exported(behavior).named_buffers(), strict=True
        ):
            if name != also or old.shape != new.shape:
                raise ValueError(f"{also} has shape {list(new.shape)}, expected {list(old.shape)} as traced")
            old.copy_(new)  # in place: both programs hold these very tensors
        torch.export.save(self.program, folder / "mu.pt2")
        self.onnx.save(folder / "mu.onnx")  # type: ignore[union-attr]
        (folder / "mu.json").write_text(json.dumps(describe(behavior, folder, data_sha256), indent=1) + "\n")


def describe(behavior: Behavior, folder: Path, data_sha256: str) -> dict[str, object]:
    """What somebody who finds the files must know."""
    spec = behavior.policies.spec
    return {
        "format": "manyfold-behavior",
        "env": spec.env,
        "horizon": spec.horizon,
        "inputs": {"observation": ["N", behavior.q.shape.width], "t": ["N"]},
        "outputs": {"mu": ["N", spec.n_actions], "targets": [len(spec.names), "N", spec.n_actions]},
        "observation": "number of the cell" if spec.n_cells else "observation, then the other action dimensions",
        "actions": spec.n_actions,
        "action_range": [spec.low, spec.high] if spec.kind == "binned_gaussian" else None,
        "policies": list(spec.names),
        "alpha": behavior.alpha,
        "offline_data_sha256": data_sha256,
        "sha256": {name: sha256(folder / name) for name in ("mu.pt2", "mu.onnx")},
    }


def sha256(path: Path) -> str:
    """Of a file, read as a stream."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
