"""K network policies at once: softmax heads and binned Gaussians, with the frozen normalisation inside.

A policy is all of its weights AND its observation statistics: without them it is a different policy. Any number and
width of layers, one activation; all K are one batch of matrices.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr
from torch import Tensor, nn

from manyfold.arrays import Array, check_finite, check_number
from manyfold.files import save_tensors, with_ending
from manyfold.policies.base import PolicySet, check_indices, check_steps

LIMIT = 10.0  # normalised observations are clipped there, as in training
EPSILON = 1e-8
KINDS = ("softmax", "binned_gaussian")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "elu": nn.functional.elu,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
    "leaky_relu": nn.functional.leaky_relu,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True)
class Spec:
    """What the tensors alone don't say."""

    env: str  # the environment they were trained in
    kind: str  # "softmax", or "binned_gaussian": equal bins of a Gaussian's dimension 0
    horizon: int
    n_actions: int
    names: tuple[str, ...]  # of the K policies
    n_states: int = 0  # an observation is an index, the input its one-hot and t/T; 0: it is a vector
    n_features: int = 0  # numbers of an observation vector that the networks see; 0 where it is an index
    low: float = 0.0  # range of the binned dimension; 0 for softmax
    high: float = 0.0
    activation: str = "tanh"


class MlpPolicySet(PolicySet):
    """K MLPs of L layers.

    Args:
        tensors: w1 `[K, inputs, h]`, b1 `[K, 1, h]`, ..., wL `[K, h, out]`, bL `[K, 1, out]`; for Gaussians log_std
            `[K, 1, out]`; and, where observations are normalised, obs_mean and obs_var `[K, n_features]`.
        spec: what they mean.
    """

    def __init__(self, tensors: dict[str, Tensor], spec: Spec) -> None:
        self.spec = spec
        self.layers = _check(tensors, spec)
        self.tensors = {name: x.contiguous() for name, x in tensors.items()}
        self.names, self.n_actions, self.horizon = spec.names, spec.n_actions, spec.horizon
        self.n_states, self.width = spec.n_states, 1 if spec.n_states else spec.n_features

    @torch.no_grad()
    def outputs(self, obs: ArrayLike, t: int | ArrayLike) -> Tensor:
        """The last layer's outputs, logits or means; `[K, N, out]`."""
        p, spec = self.tensors, self.spec
        if spec.n_states:
            states = check_indices("obs", obs, spec.n_states)
            steps = check_steps(t, len(states), spec.horizon)
            time = torch.from_numpy(steps / np.float32(spec.horizon)).float()[:, None]  # [N, 1]
            x = p["w1"][:, torch.from_numpy(states)] + time * p["w1"][:, -1:] + p["b1"]  # [K, N, h]
        else:
            vectors = np.asarray(obs, dtype=np.float64)
            if vectors.ndim != 2 or vectors.shape[1] < spec.n_features:
                raise ValueError(
                    f"obs has shape {list(vectors.shape)}, expected [N, {spec.n_features} or more]: the state first"
                )
            check_steps(t, len(vectors), spec.horizon)
            z = torch.from_numpy(vectors[:, : spec.n_features])  # [N, d]
            if "obs_mean" in p:
                z = normalised(z, p["obs_mean"], p["obs_var"])  # [K, N, d]
            x = torch.baddbmm(p["b1"], z.float().expand(self.n_policies, -1, -1), p["w1"])
        activation = ACTIVATIONS[spec.activation]
        for i in range(2, self.layers + 1):
            x = torch.baddbmm(p[f"b{i}"], activation(x), p[f"w{i}"])
        return x

    def probs(self, obs: ArrayLike, t: int | ArrayLike) -> Array:
        out = self.outputs(obs, t).double()
        if self.spec.kind == "softmax":
            return torch.softmax(out, -1).numpy()
        edges = np.linspace(self.spec.low, self.spec.high, self.n_actions + 1)
        std = self.tensors["log_std"][:, :, 0].double().exp().numpy()  # [K, 1]
        return bin_probs(out[..., 0].numpy(), std, edges)

    def companion(self, k: int = 0, mean: bool = False) -> Callable[[Array, np.random.Generator], NDArray[np.float64]]:
        """Policy k's other action dimensions, sampled or by its mean: `(obs [N, d], rng) -> [N, out - 1]`."""
        one = self.pick([k])
        std = one.tensors["log_std"][0, :, 1:].double().exp().numpy()  # [1, out - 1]

        def act(obs: Array, rng: np.random.Generator) -> NDArray[np.float64]:
            centre = one.outputs(obs, 0)[0, :, 1:].double().numpy()
            return np.asarray(centre if mean else centre + std * rng.standard_normal(centre.shape))

        return act

    def pick(self, which: list[int]) -> "MlpPolicySet":
        """Some of the policies, in that order."""
        names = tuple(self.names[i] for i in which)
        return MlpPolicySet({name: x[which] for name, x in self.tensors.items()}, replace(self.spec, names=names))

    def module(self) -> nn.Module:
        return MlpModule(self)

    def save(self, path: Path | str) -> None:
        """Writes `path`.safetensors."""
        about = {"kind": "mlp", "spec": asdict(self.spec)}
        save_tensors(with_ending(Path(path)), self.tensors, "policies", 2, about)

    @classmethod
    def build(cls, path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> "MlpPolicySet":
        """The set that a file describes; anything else is refused with one line."""
        said, wanted = about.get("spec"), {field.name for field in fields(Spec)}
        if not isinstance(said, dict) or said.keys() != wanted or not isinstance(said["names"], list):
            raise ValueError(
                f"{path}: expected a description with {', '.join(sorted(wanted))}; is it another program's?"
            )
        try:
            return cls(tensors, Spec(**{**said, "names": tuple(said["names"])}))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def normalised(z: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Observations `[N, d]` standardised by each policy's own statistics `[K, d]` and clipped; `[K, N, d]`."""
    return ((z - mean[:, None]) / torch.sqrt(var[:, None] + EPSILON)).clamp(-LIMIT, LIMIT)


class MlpModule(nn.Module):
    """As `MlpPolicySet.probs`, in float32 and in operations that every runtime has."""

    def __init__(self, policies: MlpPolicySet) -> None:
        super().__init__()
        self.spec, self.layers = policies.spec, policies.layers
        for name, x in policies.tensors.items():
            self.register_buffer(name, x.float().clone())
        edges = torch.linspace(self.spec.low, self.spec.high, self.spec.n_actions + 1, dtype=torch.float64)
        self.register_buffer("edges", edges[1:-1].float())

    def forward(self, obs: Tensor, t: Tensor) -> Tensor:
        p, spec = dict(self.named_buffers()), self.spec
        if spec.n_states:
            time = (t.float() / spec.horizon)[:, None]
            x = p["w1"][:, obs[:, 0].long()] + time * p["w1"][:, -1:] + p["b1"]
        else:
            z = obs[:, : spec.n_features]
            z = normalised(z, p["obs_mean"], p["obs_var"]) if "obs_mean" in p else z.expand(len(spec.names), -1, -1)
            x = torch.matmul(z, p["w1"]) + p["b1"]
        for i in range(2, self.layers + 1):
            x = torch.matmul(ACTIVATIONS[spec.activation](x), p[f"w{i}"]) + p[f"b{i}"]
        if spec.kind == "softmax":
            return torch.softmax(x, -1)
        z = (p["edges"] - x[..., :1]) / p["log_std"][..., :1].exp()
        below = 0.5 * (1 + torch.erf(z / 2**0.5))  # [K, N, A - 1]
        none = torch.zeros_like(below[..., :1])
        return torch.cat([below, none + 1], -1) - torch.cat([none, below], -1)


def bin_probs(mean: ArrayLike, std: ArrayLike, edges: ArrayLike) -> Array:
    """pi(bin | s) of a Gaussian policy N(mean, std^2), the tails going to the end bins.

    `Phi(z_{i+1}) - Phi(z_i)`, and above the mean `Phi(-z_i) - Phi(-z_{i+1})`: the difference of two numbers near 1
    would round a small probability, hence an importance ratio's denominator, to 0.

    Args:
        mean, std: of any shapes that broadcast, std > 0.
        edges: increasing, `[bins + 1]`; the outer two only say which bins are the end ones.

    Returns:
        `[..., bins]`.
    """
    mu, sigma, e = np.asarray(mean, np.float64), np.asarray(std, np.float64), np.asarray(edges, np.float64)
    if e.ndim != 1 or len(e) < 2 or not (np.diff(e) > 0).all():
        raise ValueError(f"edges are {np.array2string(e, threshold=12)}, expected increasing numbers [bins + 1]")
    check_finite("mean", mu)
    check_finite("std", sigma)
    if sigma.size and sigma.min() <= 0:
        raise ValueError(f"std is {sigma.min():g}, expected more than 0; was it saved as a logarithm?")
    with np.errstate(over="ignore"):  # an infinite z is right: the edge is that far away
        z = (e[1:-1] - mu[..., None]) / sigma[..., None]  # [..., bins - 1]
    outside = np.full((*z.shape[:-1], 1), np.inf)
    lower, upper = np.concatenate([-outside, z], axis=-1), np.concatenate([z, outside], axis=-1)  # [..., bins]
    above = lower > 0
    probs = ndtr(np.where(above, -lower, upper)) - ndtr(np.where(above, -upper, lower))
    return np.maximum(probs, 0.0)  # ndtr is monotone only up to rounding


def _check(tensors: dict[str, Tensor], spec: Spec) -> int:
    """The number of layers; refuses a spec that means nothing, missing or extra tensors, other shapes and NaN."""
    if spec.kind not in KINDS:
        raise ValueError(f"kind is {spec.kind!r:.40}, expected {' or '.join(KINDS)}")
    if not isinstance(spec.activation, str) or spec.activation not in ACTIVATIONS:
        raise ValueError(f"activation is {spec.activation!r:.40}, expected one of {', '.join(ACTIVATIONS)}")
    if not spec.names or not all(isinstance(name, str) for name in (*spec.names, spec.env)):
        raise ValueError(f"names are {spec.names!r:.60}, expected one or more policies by name")
    for name, least, most in (
        ("horizon", 1, 10**6),
        ("n_actions", 1, 10**6),
        ("n_states", 0, 10**9),
        ("n_features", 0, 10**9),
    ):
        check_number(name, getattr(spec, name), least, most)
    for name in ("low", "high"):
        check_number(name, getattr(spec, name), -1e300, 1e300, whole=False)
    if spec.kind == "binned_gaussian" and not spec.low < spec.high:
        raise ValueError(f"low is {spec.low!r} and high {spec.high!r}, expected low < high: the range of the bins")
    layers = 0
    while f"w{layers + 1}" in tensors:
        layers += 1
    if not layers or any(tensors[f"w{i}"].ndim != 3 for i in range(1, layers + 1)):
        raise ValueError(f"tensors are {sorted(tensors)!s:.80}, expected w1 [K, inputs, h], w2, ... of three axes")
    k, before = len(spec.names), spec.n_states + 1 if spec.n_states else spec.n_features
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(1, layers + 1):
        out = tensors[f"w{i}"].shape[2]
        if i == layers and spec.kind == "softmax":
            out = spec.n_actions
        shapes |= {f"w{i}": (k, before, out), f"b{i}": (k, 1, out)}
        before = out
    if spec.kind == "binned_gaussian":
        shapes["log_std"] = (k, 1, before)
    if "obs_mean" in tensors or spec.kind == "binned_gaussian":
        shapes |= {"obs_mean": (k, spec.n_features), "obs_var": (k, spec.n_features)}
    if extra := sorted(tensors.keys() - shapes.keys()):
        raise ValueError(
            f"tensors {', '.join(extra)!s:.60} belong to no {spec.kind} policy, expected {', '.join(shapes)}"
        )
    for name, shape in shapes.items():
        found: Any = list(tensors[name].shape) if name in tensors else "nothing"
        if found != list(shape):
            raise ValueError(f"{name}: expected shape {list(shape)}, found {found}")
        if not tensors[name].is_floating_point() or not torch.isfinite(tensors[name]).all():
            raise ValueError(f"{name}: expected finite numbers, found NaN or infinity; did the training diverge?")
    if "obs_var" in shapes and tensors["obs_var"].min() < 0:
        raise ValueError("obs_var: expected 0 or more, found a negative variance")
    return layers
