"""K networks of one structure as one: their layers side by side in batched products.

`torch.vmap` does it for any module, and takes a third of a rollout for it: it swaps all parameters at every call. The
layers of MLPs are few, so these are batched here, once, and vmap is left for the rest.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyfold.policies.layers import ACTIVATIONS, FixedStd, Normaliser, normal

FEWEST = 32  # rows; smaller products than 400 multiplications are rounded otherwise by torch

Batched = Callable[[Tensor], Tensor]  # [N, inputs] or [K, N, inputs] -> [K, N, outputs], or as it came if elementwise


def networks(modules: Sequence[Any]) -> Batched | None:
    """`side_by_side`, where what a row gives does not depend on how many others there are, to the last bit."""
    every = side_by_side(modules)
    if every is None:
        return None

    def call(x: Tensor) -> Tensor:
        n = len(x)
        return every(x) if n >= FEWEST else every(nn.functional.pad(x, (0, 0, 0, FEWEST - n)))[:, :n]

    return call


def side_by_side(modules: Sequence[Any]) -> Batched | None:
    """K modules of one structure; None where a layer is of another kind than an MLP's."""
    kind = type(modules[0])
    if kind is nn.Sequential:
        parts = [side_by_side(layers) for layers in zip(*modules, strict=True)]
        known = [part for part in parts if part is not None]
        return _chain(known) if len(known) == len(parts) else None
    if kind is nn.Linear:
        return _linear(modules)
    if kind is Normaliser:
        return _normaliser(modules)
    if kind is FixedStd:
        mean = side_by_side([module.mean for module in modules])
        return mean and _fixed_std(mean, _stack([module.log_std for module in modules]))
    if kind is nn.Tanh:
        return lambda x: torch.from_numpy(np.tanh(x.numpy()))  # torch's takes ten times as long
    return modules[0] if kind in ACTIVATIONS.values() else None


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """One for each policy, for all observations: `[K, 1, d]`."""
    return torch.stack([x.detach() for x in tensors])[:, None]


def _chain(parts: Sequence[Batched]) -> Batched:
    def call(x: Tensor) -> Tensor:
        for part in parts:
            x = part(x)
        return x

    return call


def _linear(modules: Sequence[nn.Linear]) -> Batched:
    weight = torch.stack([module.weight.detach().T for module in modules]).contiguous()  # [K, inputs, outputs]
    bias = None if modules[0].bias is None else _stack([module.bias for module in modules])

    def call(x: Tensor) -> Tensor:
        each = x.expand(len(weight), *x.shape[-2:])
        return torch.bmm(each, weight) if bias is None else torch.baddbmm(bias, each, weight)

    return call


def _normaliser(modules: Sequence[Normaliser]) -> Batched:
    mean, std = (_stack([getattr(module, name) for module in modules]) for name in ("mean", "std"))  # [K, 1, width]
    clip = _stack([module.clip for module in modules])[..., None]
    if not mean.any() and (std == 1).all() and clip.isinf().all():
        return lambda x: x

    def call(x: Tensor) -> Tensor:
        return torch.clamp((x.double() - mean) / std, -clip, clip).float()

    return call


def _fixed_std(mean: Batched, log_std: Tensor) -> Batched:
    def call(x: Tensor) -> Tensor:
        found = mean(x)
        return normal(found, log_std.exp().expand_as(found))

    return call
