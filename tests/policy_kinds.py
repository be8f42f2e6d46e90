"""One policy set of every kind, for tests that hold for all of them."""

import numpy as np
import torch
from torch import nn

from manyfold.policies import CallablePolicySet, JoinedPolicySet, ModulePolicySet, TabularPolicySet
from tests.networks import mlp_policies
from tests.worlds import distributions

K, HORIZON, ACTIONS, STATES, WIDTH = 3, 5, 4, 6, 3


class Normalised(nn.Module):
    """A network with its frozen observation statistics inside, as people save them."""

    def __init__(self, seed, hidden=8, activation=nn.Tanh, limit=2.0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("mean", torch.randn(WIDTH, generator=generator))
        self.register_buffer("std", torch.rand(WIDTH, generator=generator) + 0.5)
        self.limit = limit
        self.layers = sequential(seed, hidden, activation)

    def forward(self, obs):
        return self.layers(((obs - self.mean) / self.std).clamp(-self.limit, self.limit))


def sequential(seed, hidden=8, activation=nn.Tanh):
    generator = torch.Generator().manual_seed(seed)
    network = nn.Sequential(nn.Linear(WIDTH, hidden), activation(), nn.Linear(hidden, ACTIONS))
    for x in network.parameters():
        x.data = torch.randn(x.shape, generator=generator)
    return network


def table():
    return TabularPolicySet(distributions(np.random.default_rng(0), (K, HORIZON, STATES, ACTIONS), "zeros"))


def mlp(**options):
    return mlp_policies(**{"horizon": HORIZON, "n_actions": ACTIONS, **options})


def modules(networks):
    return ModulePolicySet(networks, ACTIONS, WIDTH, HORIZON)


def of_vectors(seed):
    """Probabilities that depend on the observation and on t."""
    weights = np.random.default_rng(seed).standard_normal((WIDTH + 1, ACTIONS))

    def probs(obs, t):
        z = np.exp(np.column_stack([obs, t]) @ weights / 3)
        return z / z.sum(-1, keepdims=True)

    return probs


def of_indices(seed):
    rows = distributions(np.random.default_rng(seed), (HORIZON, STATES, ACTIONS))
    return lambda obs, t: rows[t, obs]


def callables(functions, n_states=0):
    return CallablePolicySet(functions, ACTIONS, 1 if n_states else WIDTH, HORIZON, n_states=n_states)


KINDS = {
    "table": table,
    "indices, 1 layer": lambda: mlp(n_states=STATES, hidden=()),
    "indices, 2 layers, relu": lambda: mlp(n_states=STATES, hidden=(8,), activation="relu"),
    "indices, 3 layers": lambda: mlp(n_states=STATES),
    "vectors, 1 layer": lambda: mlp(n_features=WIDTH, hidden=()),
    "vectors, 2 layers, gelu": lambda: mlp(n_features=WIDTH, hidden=(5,), activation="gelu"),
    "vectors, 3 layers, normalised": lambda: mlp(n_features=WIDTH, hidden=(7, 9), normalised=True),
    "vectors, 4 layers, normalised, elu": lambda: mlp(
        n_features=WIDTH, hidden=(4, 3, 5), normalised=True, activation="elu"
    ),
    "binned Gaussian": lambda: mlp(n_features=WIDTH, kind="binned_gaussian", out=2, scale=0.5),
    "binned Gaussian, silu": lambda: mlp(
        n_features=WIDTH, kind="binned_gaussian", hidden=(6,), out=1, scale=0.5, activation="silu"
    ),
    "modules of one shape": lambda: modules([sequential(seed) for seed in range(K)]),
    "modules with a normaliser": lambda: modules([Normalised(seed) for seed in range(K)]),
    "modules of different shapes": lambda: modules([sequential(0, 4), sequential(1, 9, nn.ReLU), Normalised(2)]),
    "callables of vectors": lambda: callables([of_vectors(seed) for seed in range(K)]),
    "callables of indices": lambda: callables([of_indices(seed) for seed in range(K)], STATES),
    "joined, of indices": lambda: JoinedPolicySet([table(), mlp(n_states=STATES, k=2)]),
    "joined, of vectors": lambda: JoinedPolicySet(
        [mlp(n_features=WIDTH, k=2, normalised=True), modules([sequential(1), sequential(2)])]
    ),
    "joined, with a callable": lambda: JoinedPolicySet([mlp(n_features=WIDTH, k=2), callables([of_vectors(1)])]),
}
SAVED = [kind for kind in KINDS if kind == "table" or kind.startswith(("indices", "vectors", "binned"))]
NOT_EXPORTED = ["callables of vectors", "callables of indices", "joined, with a callable"]


def observations(policies, n, seed=0):
    """Random observations `[n, width]`, some far away, and their steps `[n]`."""
    rng = np.random.default_rng(seed)
    t = rng.integers(policies.horizon, size=n)
    if policies.n_states:
        return rng.integers(policies.n_states, size=(n, 1)).astype(np.float32), t
    x = rng.standard_normal((n, policies.width)).astype(np.float32)
    x[: n // 5] *= 30
    return x, t
