"""Stable-Baselines3's checkpoints, as they are there and here."""

import numpy as np
import pytest
import torch

from manyfold import policies
from tasks import checkpoints

stable_baselines3 = pytest.importorskip("stable_baselines3")


def test_an_update_that_is_looked_into_is_the_same_training_and_the_same_policies(tmp_path):
    weights, model = checkpoints.train("CartPole-v1", {3, 10}, 0)
    theirs = stable_baselines3.PPO("MlpPolicy", "CartPole-v1", seed=0, device="cpu")
    theirs.learn(checkpoints.STEPS)
    for name, x in theirs.policy.state_dict().items():
        assert torch.equal(weights[10][name], x), name

    path = tmp_path / "cartpole.safetensors"
    checkpoints.policies("CartPole-v1", 500, weights).save(path)
    ours = policies.load(path)
    assert ours.names == ("step 614", "step 2,048")
    obs = np.random.default_rng(0).normal(size=(200, 4))
    for k, epoch in enumerate((3, 10)):
        model.policy.load_state_dict(weights[epoch])
        with torch.no_grad():
            said = model.policy.get_distribution(torch.tensor(obs, dtype=torch.float32)).distribution.probs
        np.testing.assert_allclose(ours.probs(obs, 0)[k], said, atol=1e-6)
