"""Checkpoints of one training by Stable-Baselines3's PPO, with its defaults, as files for the stage `targets`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyfold.policies.mlp import MlpPolicySet, Spec

EPOCHS, STEPS = 10, 2048  # of an update: Stable-Baselines3's defaults
LAYERS = ("mlp_extractor.policy_net.0", "mlp_extractor.policy_net.2", "action_net")  # of its MlpPolicy


def step_of(epoch: int) -> float:
    """Training steps after so many epochs: an update's steps are shared out among its epochs."""
    return epoch * STEPS / EPOCHS


def train(env: str, epochs: set[int], seed: int) -> tuple[dict[int, dict[str, Tensor]], Any]:
    """The policy's weights after each of these epochs, and Stable-Baselines3's model as it is at the end."""
    try:
        from stable_baselines3 import PPO
    except ImportError:
        raise ValueError("expected Stable-Baselines3; pip install stable-baselines3") from None
    found: dict[int, dict[str, Tensor]] = {}

    class Stepwise(PPO):  # type: ignore[misc, unused-ignore]
        """One epoch at a time: the same training, but an update can be looked into."""

        seen = 0

        def train(self) -> None:
            self.n_epochs = 1
            for _ in range(EPOCHS):
                super().train()
                self.seen += 1
                if self.seen in epochs:
                    found[self.seen] = {name: x.clone() for name, x in self.policy.state_dict().items()}

    model = Stepwise("MlpPolicy", env, n_steps=STEPS, seed=seed, device="cpu")
    model.learn(-(-max(epochs) // EPOCHS) * STEPS)
    return found, model


def policies(env: str, horizon: int, weights: dict[int, dict[str, Tensor]]) -> MlpPolicySet:
    """The checkpoints as one policy set, in the order of training."""
    tensors = {}
    for i, layer in enumerate(LAYERS, 1):
        tensors[f"w{i}"] = torch.stack([weights[epoch][f"{layer}.weight"].T for epoch in sorted(weights)])
        tensors[f"b{i}"] = torch.stack([weights[epoch][f"{layer}.bias"][None] for epoch in sorted(weights)])
    names = tuple(f"step {step_of(epoch):,.0f}" for epoch in sorted(weights))
    features, actions = tensors["w1"].shape[1], tensors[f"w{len(LAYERS)}"].shape[2]
    return MlpPolicySet(tensors, Spec(env, "softmax", horizon, actions, names, n_features=features))


def save(env: str, horizon: int, sets: dict[Path, list[int]], seed: int = 0) -> None:
    """Writes each set of epochs to its file; one training for all of them, none if all are there."""
    if all(path.exists() for path in sets):
        return
    torch.set_num_threads(1)
    weights, _ = train(env, {epoch for epochs in sets.values() for epoch in epochs}, seed)
    for path, epochs in sets.items():
        policies(env, horizon, {epoch: weights[epoch] for epoch in epochs}).save(path)
