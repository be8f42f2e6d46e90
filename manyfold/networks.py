"""K network policies at once: softmax heads and binned Gaussians, with the frozen normalisation inside.

A policy is all of its weights AND its observation statistics: without them it is a different policy. A set is saved as
`<name>.safetensors` and `<name>.json`; the JSON says all that is needed to rebuild it.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from manyfold.mdp import Array, Ints
from manyfold.policies import bin_probs

VERSION = 1
LIMIT = 10.0  # normalised observations are clipped there, as in training
EPSILON = 1e-8


@dataclass(frozen=True)
class Spec:
    """What the tensors alone don't say."""

    env: str
    kind: str  # "softmax", or "binned_gaussian": equal bins of a Gaussian's dimension 0
    horizon: int
    n_actions: int
    n_cells: int  # an observation is a cell's index, the input its one-hot and t/T; 0: it is a vector
    n_features: int  # width of an observation vector; 0 where it is an index
    low: float  # range of the binned dimension; 0 for softmax
    high: float
    names: tuple[str, ...]  # of the K policies, for example the training step they were taken at


class NetworkPolicySet:
    """K tanh MLPs with two hidden layers of width h.

    Args:
        tensors: w1 `[K, inputs, h]`, b1 `[K, 1, h]`, w2 `[K, h, h]`, b2, w3 `[K, h, out]`, b3 `[K, 1, out]`, and for
            Gaussians log_std `[K, 1, out]` and the normalisation obs_mean, obs_var `[K, n_features]`.
        spec: what they mean.
    """

    def __init__(self, tensors: dict[str, Tensor], spec: Spec) -> None:
        self.spec = spec
        self.tensors = {name: tensors[name].contiguous() for name in _check(tensors, spec)}
        self.n_policies, self.n_actions, self.horizon = len(spec.names), spec.n_actions, spec.horizon

    @torch.no_grad()
    def outputs(self, obs: ArrayLike, t: int | Ints) -> Tensor:
        """The last layer's outputs, logits or means; `[K, N, out]`."""
        p, spec = self.tensors, self.spec
        if spec.n_cells:
            cells = np.asarray(obs)
            steps = np.broadcast_to(np.asarray(t), cells.shape)
            for name, index, size in (("obs", cells, spec.n_cells), ("t", steps, spec.horizon)):
                whole = np.issubdtype(index.dtype, np.integer)
                if index.ndim != 1 or not whole or (index.size and not 0 <= index.min() <= index.max() < size):
                    raise ValueError(f"{name}: expected whole numbers [N] from 0 to {size - 1}, found {index!s:.60}")
            time = torch.from_numpy(steps / np.float32(spec.horizon)).float()[:, None]  # [N, 1]
            x = p["w1"][:, torch.from_numpy(cells)] + time * p["w1"][:, -1:] + p["b1"]  # [K, N, h]
        else:
            vectors = np.asarray(obs, dtype=np.float64)
            if vectors.ndim != 2 or vectors.shape[1] < spec.n_features:
                raise ValueError(
                    f"obs has shape {list(vectors.shape)}, expected [N, {spec.n_features} or more]: the state first"
                )
            z = torch.from_numpy(vectors[:, : spec.n_features])  # [N, d]
            if "obs_mean" in p:
                z = (z - p["obs_mean"][:, None]) / torch.sqrt(p["obs_var"][:, None] + EPSILON)  # [K, N, d]
                z = z.clamp(-LIMIT, LIMIT)
            x = torch.baddbmm(p["b1"], z.float().expand(self.n_policies, -1, -1), p["w1"])
        x = torch.tanh(torch.baddbmm(p["b2"], torch.tanh(x), p["w2"]))
        return torch.baddbmm(p["b3"], x, p["w3"])

    def probs(self, obs: ArrayLike, t: int | Ints) -> Array:
        """Action probabilities of all K policies at N observations and their steps t; `[K, N, A]`."""
        out = self.outputs(obs, t).double()
        if self.spec.kind == "softmax":
            return torch.softmax(out, -1).numpy()
        edges = np.linspace(self.spec.low, self.spec.high, self.n_actions + 1)
        std = self.tensors["log_std"][:, :, 0].double().exp().numpy()  # [K, 1]
        return bin_probs(out[..., 0].numpy(), std, edges)

    def companion(self, k: int = 0) -> Callable[[Array, np.random.Generator], NDArray[np.float64]]:
        """Policy k's sampler of the other action dimensions: `(obs [N, d], rng) -> [N, out - 1]`."""
        one = self.pick([k])
        std = one.tensors["log_std"][0, :, 1:].double().exp().numpy()  # [1, out - 1]

        def sample(obs: Array, rng: np.random.Generator) -> NDArray[np.float64]:
            mean = one.outputs(obs, 0)[0, :, 1:].double().numpy()
            return np.asarray(mean + std * rng.standard_normal(mean.shape))

        return sample

    def pick(self, which: list[int]) -> "NetworkPolicySet":
        """Some of the policies, in that order."""
        names = tuple(self.spec.names[i] for i in which)
        tensors = {name: x[which] for name, x in self.tensors.items()}
        return NetworkPolicySet(tensors, Spec(**{**asdict(self.spec), "names": names}))

    def table(self) -> Array:
        """Probabilities at every step and cell, where observations are indices; `[K, T, S, A]`."""
        cells = np.arange(self.spec.n_cells)
        return np.stack([self.probs(cells, t) for t in range(self.horizon)], 1)

    def save(self, path: Path) -> None:
        """Writes `path`.safetensors and `path`.json."""
        about = {"format": "manyfold-policies", "version": VERSION, **asdict(self.spec)}
        data = save(self.tensors, metadata={"about": json.dumps(about)})  # so that neither can be changed alone
        about["sha256"] = hashlib.sha256(data).hexdigest()
        path.with_suffix(".safetensors").write_bytes(data)
        path.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "NetworkPolicySet":
        """Reads what `save` wrote; anything else is refused with one line."""
        about_path, data_path = path.with_suffix(".json"), path.with_suffix(".safetensors")
        try:
            about = json.loads(about_path.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise ValueError(f"{about_path}: not JSON, expected a policy set's description; was it cut off?") from None
        if not isinstance(about, dict) or about.get("format") != "manyfold-policies":
            raise ValueError(f"{about_path}: expected a manyfold policy set, found another kind of JSON")
        if about.get("version") != VERSION:
            raise ValueError(
                f"{about_path}: version {about.get('version')!r}, expected {VERSION}; train the targets again"
            )
        wanted = {field.name for field in fields(Spec)}
        if missing := sorted(wanted - about.keys()):
            raise ValueError(f"{about_path}: {', '.join(missing)} missing; was it written by another program?")
        data = data_path.read_bytes()
        if hashlib.sha256(data).hexdigest() != about.get("sha256"):
            raise ValueError(
                f"{data_path}: its content is not what {about_path.name} describes; was it cut off or replaced?"
            )
        try:
            tensors = load(data)
        except SafetensorError as error:
            raise ValueError(f"{data_path}: not a safetensors file ({error})") from None
        try:
            with safe_open(data_path, "pt") as file:
                original = json.loads((file.metadata() or {}).get("about", "null"))
            if original != {name: value for name, value in about.items() if name != "sha256"}:
                raise ValueError(f"{about_path.name} is not what was saved with it; was it edited?")
            return cls(tensors, Spec(**{name: about[name] for name in wanted} | {"names": tuple(about["names"])}))
        except ValueError as error:
            raise ValueError(f"{data_path}: {error}") from None


def _check(tensors: dict[str, Tensor], spec: Spec) -> list[str]:
    """The names of the tensors that belong to a policy set of this spec; refuses missing ones and other shapes."""
    if spec.kind not in ("softmax", "binned_gaussian"):
        raise ValueError(f"kind is {spec.kind!r}, expected softmax or binned_gaussian")
    for name, least in (("horizon", 1), ("n_actions", 1), ("n_cells", 0), ("n_features", 0)):
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} is {value!r}, expected a whole number of at least {least}")
    if spec.kind == "binned_gaussian" and not spec.low < spec.high:
        raise ValueError(f"low is {spec.low!r} and high {spec.high!r}, expected low < high: the range of the bins")
    if "w1" not in tensors or tensors["w1"].ndim != 3 or "w3" not in tensors or tensors["w3"].ndim != 3:
        raise ValueError(f"tensors are {sorted(tensors)}, expected w1 [K, inputs, h] and w3 [K, h, out] among them")
    k, h, out = len(spec.names), tensors["w1"].shape[2], tensors["w3"].shape[2]
    inputs = spec.n_cells + 1 if spec.n_cells else spec.n_features
    shapes: dict[str, tuple[int, ...]] = {"w1": (k, inputs, h), "b1": (k, 1, h), "w2": (k, h, h), "b2": (k, 1, h)}
    shapes |= {"w3": (k, h, out if spec.kind == "binned_gaussian" else spec.n_actions), "b3": (k, 1, out)}
    if spec.kind == "binned_gaussian":
        shapes["log_std"] = (k, 1, out)
    if "obs_mean" in tensors or spec.kind == "binned_gaussian":
        shapes |= {"obs_mean": (k, spec.n_features), "obs_var": (k, spec.n_features)}
    for name, shape in shapes.items():
        found: Any = list(tensors[name].shape) if name in tensors else "nothing"
        if found != list(shape):
            raise ValueError(f"{name}: expected shape {list(shape)}, found {found}")
        if not tensors[name].is_floating_point() or not torch.isfinite(tensors[name]).all():
            raise ValueError(f"{name}: expected finite numbers, found NaN or infinity; did the training diverge?")
    if "obs_var" in shapes and tensors["obs_var"].min() < 0:
        raise ValueError("obs_var: expected 0 or more, found a negative variance")
    return list(shapes)
