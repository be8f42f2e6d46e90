"""Layers of imported policies: small torch modules, with the frozen normaliser in front.

Equal architectures give equal structures, so that K of them run as one batch: numbers that differ from file to file
(statistics, epsilon, bounds) are buffers, never attributes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from manyfold.arrays import Array

NEVER = -1e4  # a logit whose softmax is exactly 0, and finite: infinity would be taken for a failure
SDE_EPSILON = 1e-6  # added to gSDE's variance by Stable-Baselines3
WIDEST = 2**24  # numbers of an observation
ACTIVATIONS: dict[str, type[nn.Module]] = {
    kind.__name__.lower(): kind
    for kind in (
        *(nn.Tanh, nn.ReLU, nn.ELU, nn.GELU, nn.SiLU, nn.LeakyReLU, nn.Sigmoid, nn.Mish, nn.SELU, nn.CELU, nn.Softplus),
        *(nn.ReLU6, nn.Hardswish, nn.Softsign, nn.Hardtanh, nn.Identity),
    )
}


class Statistics(NamedTuple):
    """Of observations, as a normaliser froze them."""

    mean: Array  # flattened
    var: Array
    clip: float
    epsilon: float


class Normaliser(nn.Module):
    """`clip((x - mean) / sqrt(var + epsilon), -clip, clip)` in float64, as numpy does it; identity without statistics.

    float32 would cancel where a mean is large beside its deviation. The identity is there for one structure of all.
    """

    mean: Tensor
    std: Tensor
    clip: Tensor

    def __init__(self, width: int, statistics: Statistics | None = None) -> None:
        super().__init__()
        if statistics is not None and len(statistics.mean) != width:
            raise ValueError(
                f"a normaliser of {len(statistics.mean)} numbers beside a policy of {width}, expected them equal; "
                "does it belong to another policy?"
            )
        mean, var, clip, epsilon = statistics or (np.zeros(width), np.ones(width), np.inf, 0.0)
        self.register_buffer("mean", torch.as_tensor(mean, dtype=torch.float64))
        self.register_buffer("std", torch.as_tensor(np.sqrt(np.asarray(var) + epsilon), dtype=torch.float64))
        self.register_buffer("clip", torch.tensor(float(clip), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        z = (x.double() - self.mean) / self.std
        return torch.minimum(torch.maximum(z, -self.clip), self.clip).float()


class Image(nn.Module):
    """Flat observations back to images with the channels first, divided by 255 if told.

    `channels_last` says that they were flattened with the channels last: which, only the environment knows.
    """

    def __init__(self, shape: Sequence[int], scaled: bool) -> None:
        super().__init__()
        self.shape, self.channels_last, self.scale = tuple(shape), False, 255.0 if scaled else 1.0

    def forward(self, x: Tensor) -> Tensor:
        channels, height, width = self.shape
        if self.channels_last:
            return x.view(-1, height, width, channels).permute(0, 3, 1, 2) / self.scale
        return x.view(-1, channels, height, width) / self.scale


def normal(mean: Tensor, std: Tensor) -> Tensor:
    """Means and logarithms of deviations, `[N, d]` each -> `[N, 2d]`.

    The deviations are those of the original library, rounded to float32; in double nothing more is lost.
    """
    return torch.cat([mean.double(), std.double().log().expand_as(mean)], -1)


class FixedStd(nn.Module):
    """A Gaussian whose deviation does not depend on the observation: mean and log_std `[N, 2d]`."""

    def __init__(self, mean: nn.Module, log_std: Tensor) -> None:
        super().__init__()
        self.mean, self.log_std = mean, nn.Parameter(log_std.flatten().float())

    def forward(self, x: Tensor) -> Tensor:
        return normal(self.mean(x), self.log_std.exp())


class LearnedStd(nn.Module):
    """A Gaussian whose deviation is an output; log_std is clamped to a range (SB3) or squeezed into it (CleanRL)."""

    low: Tensor
    high: Tensor

    def __init__(
        self, body: nn.Module, mean: nn.Module, log_std: nn.Module, low: float, high: float, squeezed: bool
    ) -> None:
        super().__init__()
        self.body, self.mean, self.log_std, self.squeezed = body, mean, log_std, squeezed
        self.register_buffer("low", torch.tensor(low))
        self.register_buffer("high", torch.tensor(high))

    def forward(self, x: Tensor) -> Tensor:
        latent = self.body(x)
        log_std = self.log_std(latent)
        if self.squeezed:
            log_std = self.low + 0.5 * (self.high - self.low) * (torch.tanh(log_std) + 1)
        else:
            log_std = torch.minimum(torch.maximum(log_std, self.low), self.high)
        return normal(self.mean(latent), log_std.exp())


class StateDependentNoise(nn.Module):
    """gSDE's marginal: `var = latent^2 std^2 + 1e-6`, std of the exploration matrix `[latent, d]` or `[latent, 1]`."""

    def __init__(self, body: nn.Module, mean: nn.Module, log_std: Tensor, expln: bool) -> None:
        super().__init__()
        self.body, self.mean = body, mean
        grown = torch.where(log_std > 0, torch.log1p(log_std.clamp(min=0) + SDE_EPSILON) + 1, log_std.exp())
        self.std = nn.Parameter((grown if expln else log_std.exp()).float())

    def forward(self, x: Tensor) -> Tensor:
        latent = self.body(x)
        mean = self.mean(latent)
        variance = (latent**2) @ (self.std**2)
        return normal(mean, torch.sqrt(variance + SDE_EPSILON))


class EpsilonGreedy(nn.Module):
    """The largest output with probability `1 - epsilon + epsilon / A`, any other with epsilon / A; as logits."""

    epsilon: Tensor

    def __init__(self, values: nn.Module, epsilon: float) -> None:
        super().__init__()
        self.values = values
        self.register_buffer("epsilon", torch.tensor(float(epsilon), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        q = self.values(x)
        best = torch.arange(q.shape[-1], device=q.device) == q.argmax(-1, keepdim=True)
        probs = best.double() * (1 - self.epsilon) + self.epsilon / q.shape[-1]
        return torch.log(probs).clamp(min=NEVER).float()


class Parts(nn.Module):
    """Greedy in each part of a multicategorical."""

    def __init__(self, logits: nn.Module, nvec: Sequence[int]) -> None:
        super().__init__()
        self.logits, self.nvec = logits, tuple(nvec)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.logits(x).split(self.nvec, -1)
        best = [torch.arange(p.shape[-1], device=p.device) == p.argmax(-1, keepdim=True) for p in parts]
        return torch.where(torch.cat(best, -1), 0.0, NEVER)


class Switches(nn.Module):
    """d Bernoullis as d parts of two actions, off and on: the logits (0, l) side by side."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.zeros_like(x), x], -1).flatten(-2)


def linear(path: Path, weights: dict[str, Tensor], name: str) -> nn.Linear:
    """The linear layer of that name; its weights are shared with the dictionary."""
    weight, bias = weights.get(f"{name}.weight"), weights.get(f"{name}.bias")
    if weight is None or weight.ndim != 2 or bias is None or bias.shape != weight.shape[:1]:
        found = "nothing" if weight is None else f"{list(weight.shape)}"
        raise ValueError(f"{path}: {name} is {found}, expected a linear layer: weight [out, in] and bias [out]")
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight, layer.bias = nn.Parameter(weight.contiguous()), nn.Parameter(bias.contiguous())
    return layer


def conv(path: Path, weights: dict[str, Tensor], name: str, stride: int) -> nn.Conv2d:
    """The convolution of that name, without padding."""
    weight, bias = weights.get(f"{name}.weight"), weights.get(f"{name}.bias")
    if weight is None or weight.ndim != 4 or weight.shape[2] != weight.shape[3] or bias is None:
        raise ValueError(f"{path}: {name} is no convolution with a bias, expected NatureCNN's three")
    with torch.device("meta"):
        layer = nn.Conv2d(weight.shape[1], weight.shape[0], weight.shape[2], stride)
    layer.weight, layer.bias = nn.Parameter(weight.contiguous()), nn.Parameter(bias.contiguous())
    return layer
