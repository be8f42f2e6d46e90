"""Random policy networks and value nets, and value nets that are a table."""

from itertools import pairwise

import numpy as np
import torch

from manyfold.fqe.nets import Shape, ValueNets, size
from manyfold.policies.mlp import MlpPolicySet, Spec


def mlp_policies(
    seed=0,
    *,
    k=3,
    kind="softmax",
    horizon=4,
    n_actions=4,
    n_states=0,
    n_features=0,
    hidden=(8, 8),
    out=3,
    normalised=False,
    activation="tanh",
    scale=1.0,
    spread=None,
    env="test",
):
    """K random MLPs; with `spread` they are that far apart, around common weights of `scale`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        if spread is None:
            return scale * torch.randn(k, *shape, generator=generator)
        common = torch.randn(1, *shape, generator=generator)
        return scale * common + spread * torch.randn(k, *shape, generator=generator)

    outputs = n_actions if kind == "softmax" else out
    widths = [n_states + 1 if n_states else n_features, *hidden, outputs]
    tensors = {}
    for i, (before, after) in enumerate(pairwise(widths), 1):
        tensors |= {f"w{i}": draw(before, after), f"b{i}": draw(1, after)}
    low, high = 0.0, 0.0
    if kind == "binned_gaussian":
        tensors["log_std"], low, high = draw(1, outputs), -1.0, 1.0
    if normalised or kind == "binned_gaussian":
        tensors["obs_mean"] = torch.randn(k, n_features, generator=generator)
        tensors["obs_var"] = torch.rand(k, n_features, generator=generator) + 0.1
    names = tuple(f"policy {i}" for i in range(k))
    spec = Spec(env, kind, horizon, n_actions, names, n_states, n_features, low, high, activation)
    return MlpPolicySet(tensors, spec)


def value_nets(policies, seed=0, *, width=None, hidden=6, scale=None):
    """Random value nets that fit these policies; `width` where states are wider than what the policies see."""
    generator = torch.Generator().manual_seed(seed)
    k, width = policies.n_policies, width or policies.width
    shape = Shape(policies.horizon, policies.n_actions, k, hidden, policies.n_states, width)
    flat = torch.randn(size(shape), generator=generator)
    centre, spread = torch.randn(width, generator=generator), torch.rand(width, generator=generator) + 0.5
    units = torch.rand(k, generator=generator) + 1 if scale is None else torch.as_tensor(scale).float().expand(k)
    return ValueNets(shape, flat, centre, spread, units.clone())


def constant_nets(value, shape, scale=1.0):
    """Nets that give `value` (a number, or `[K, A]`) at every state, up to their scale."""
    k, actions = shape.n_policies, shape.n_actions
    nets = ValueNets(
        shape, torch.zeros(size(shape)), torch.zeros(shape.width), torch.ones(shape.width), torch.full((k,), scale)
    )
    nets.parameters["b2"][:, 0] = torch.as_tensor(np.broadcast_to(value, (k, actions)) / scale, dtype=torch.float32)
    return nets


def nets_from_table(table):
    """Nets that are a table `[K, T, S, A]`: one hidden unit for each (t, s), which is on only there."""
    k, horizon, states, actions = table.shape
    shape = Shape(horizon, actions, k, horizon * states, states, 1)
    nets = ValueNets(shape, torch.zeros(size(shape)), torch.zeros(1), torch.ones(1), torch.ones(k))
    p = {name: nets.apart(nets.parameters[name]) for name in ("w1", "w1_time", "w2")}  # [K, rows, h]
    for t in range(horizon):
        for s in range(states):
            unit = t * states + s
            p["w1"][:, s, unit] = 1.0
            p["w1_time"][:, :, unit] = -1.0
            p["w1_time"][:, t, unit] = 0.0
            p["w2"][:, :, unit] = torch.as_tensor(table[:, t, s], dtype=torch.float32)
    return nets


def value_row(nets, k, state, t):
    """f_k(t, s, .) of one vector, from its definition: one hidden layer of ReLUs, policy k's columns."""
    p, hidden = nets.parameters, nets.shape.hidden
    columns = slice(k * hidden, (k + 1) * hidden)
    z = np.clip((state - nets.centre.double().numpy()) / nets.spread.double().numpy(), -10, 10)
    h = np.maximum(z @ p["w1"][:, columns].double().numpy() + p["w1_time"][t, columns].double().numpy(), 0)
    out = p["w2"][:, columns].double().numpy() @ h + p["b2"][k, 0].double().numpy()
    return float(nets.scale[k]) * out
