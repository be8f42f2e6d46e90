"""K networks side by side give what each gives alone."""

import numpy as np
import pytest
import torch
from torch import nn

from manyfold.policies.batching import side_by_side
from manyfold.policies.layers import FixedStd, Normaliser, Statistics


def gaussian(seed):
    """As a zip of Stable-Baselines3 with its statistics is read."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    normaliser = Normaliser(4, Statistics(rng.normal(size=4), rng.uniform(0.1, 2, 4), 1.0 + seed, 1e-8))
    body = nn.Sequential(normaliser, nn.Linear(4, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8, bias=False), nn.SELU()))
    return FixedStd(nn.Sequential(body, nn.Linear(8, 3)), torch.from_numpy(rng.normal(size=3)))


@pytest.mark.parametrize("n", [1, 2, 7])
def test_side_by_side_gives_what_each_gives_alone(n):
    modules = [gaussian(seed) for seed in range(5)]
    batched = side_by_side(modules)
    x = torch.from_numpy(np.random.default_rng(9).normal(0, 3, (n, 4)).astype(np.float32))
    with torch.no_grad():
        found, alone = batched(x), torch.stack([module(x) for module in modules])
    assert found.shape == (5, n, 6)
    torch.testing.assert_close(found, alone, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(found[0], found[1])  # they differ, so a mixed-up order would be seen


def test_a_missing_observation_is_passed_on():
    """NaN must not be clipped to a number: what the policies say would look fine."""
    x = torch.tensor([[float("nan"), 0.0, 0.0, 0.0]])
    with torch.no_grad():
        assert torch.isnan(side_by_side([gaussian(0), gaussian(1)])(x)[:, :, :3]).all()


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("layer", [lambda: Doubled(4, 2), lambda: nn.LayerNorm(4)])
def test_other_layers_are_left_to_others(layer):
    assert side_by_side([nn.Sequential(nn.Linear(4, 4), layer()) for _ in range(2)]) is None
