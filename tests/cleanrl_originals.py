"""Checkpoints of CleanRL: the networks of its scripts, as they stand there, saved as the scripts save them."""

from itertools import pairwise

import numpy as np
import torch
from gymnasium import spaces
from torch import nn
from torch.distributions import Categorical, Normal

from tests.originals import BOX, VECTOR, Original, World, normal_log_probs, observations, spread

FRAMES = spaces.Box(0, 255, (4, 84, 84), np.uint8)
DISCRETE = spaces.Discrete(4)


class PPO(nn.Module):
    """ppo.py."""

    def __init__(self, obs, actions):
        super().__init__()
        self.critic = tanh_mlp(np.array(obs.shape).prod(), 1)
        self.actor = tanh_mlp(np.array(obs.shape).prod(), actions.n)

    def probs(self, x):
        return Categorical(logits=self.actor(x)).probs


class PPOContinuous(nn.Module):
    """ppo_continuous_action.py."""

    def __init__(self, obs, actions):
        super().__init__()
        self.critic = tanh_mlp(np.array(obs.shape).prod(), 1)
        self.actor_mean = tanh_mlp(np.array(obs.shape).prod(), np.prod(actions.shape))
        self.actor_logstd = nn.Parameter(torch.zeros(1, np.prod(actions.shape)))

    def distribution(self, x):
        action_mean = self.actor_mean(x)
        action_logstd = self.actor_logstd.expand_as(action_mean)
        return Normal(action_mean, torch.exp(action_logstd))


class PPOAtari(nn.Module):
    """ppo_atari.py."""

    def __init__(self, obs, actions):
        super().__init__()
        self.network = nn.Sequential(*convolutions(), nn.Linear(64 * 7 * 7, 512), nn.ReLU())
        self.actor = nn.Linear(512, actions.n)
        self.critic = nn.Linear(512, 1)

    def probs(self, x):
        return Categorical(logits=self.actor(self.network(x / 255.0))).probs


class QNetwork(nn.Module):
    """dqn.py."""

    def __init__(self, obs, actions):
        super().__init__()
        widths = (np.array(obs.shape).prod(), 120, 84)
        layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.network = nn.Sequential(*layers, nn.Linear(84, actions.n))

    def forward(self, x):
        return self.network(x)


class AtariQNetwork(nn.Module):
    """dqn_atari.py."""

    def __init__(self, obs, actions):
        super().__init__()
        self.network = nn.Sequential(*convolutions(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, actions.n))

    def forward(self, x):
        return self.network(x / 255.0)


class SAC(nn.Module):
    """The actor of sac_continuous_action.py."""

    def __init__(self, obs, actions):
        super().__init__()
        self.fc1 = nn.Linear(np.array(obs.shape).prod(), 256)
        self.fc2 = nn.Linear(256, 256)
        self.fc_mean = nn.Linear(256, np.prod(actions.shape))
        self.fc_logstd = nn.Linear(256, np.prod(actions.shape))
        rescaling(self, actions)

    def distribution(self, x):
        x = torch.relu(self.fc1(x))
        x = torch.relu(self.fc2(x))
        log_std = torch.tanh(self.fc_logstd(x))
        log_std = -5 + 0.5 * (2 - -5) * (log_std + 1)
        return Normal(self.fc_mean(x), log_std.exp())


class TD3(nn.Module):
    """The actor of td3_continuous_action.py and ddpg_continuous_action.py."""

    def __init__(self, obs, actions):
        super().__init__()
        self.fc1 = nn.Linear(np.array(obs.shape).prod(), 256)
        self.fc2 = nn.Linear(256, 256)
        self.fc_mu = nn.Linear(256, np.prod(actions.shape))
        rescaling(self, actions)

    def forward(self, x):
        x = torch.relu(self.fc1(x))
        x = torch.relu(self.fc2(x))
        return torch.tanh(self.fc_mu(x)) * self.action_scale + self.action_bias


class Critic(nn.Module):
    """The critic of td3_continuous_action.py, which is saved beside the actor."""

    def __init__(self, obs, actions):
        super().__init__()
        self.fc1 = nn.Linear(np.array(obs.shape).prod() + np.prod(actions.shape), 256)
        self.fc2 = nn.Linear(256, 256)
        self.fc3 = nn.Linear(256, 1)


def tanh_mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def convolutions():
    layers = (nn.Conv2d(4, 32, 8, stride=4), nn.Conv2d(32, 64, 4, stride=2), nn.Conv2d(64, 64, 3, stride=1))
    return [*(part for layer in layers for part in (layer, nn.ReLU())), nn.Flatten()]


def rescaling(network, actions):
    high, low = torch.tensor(actions.high), torch.tensor(actions.low)
    network.register_buffer("action_scale", (high - low) / 2.0)
    network.register_buffer("action_bias", (high + low) / 2.0)


CASES = {
    "CleanRL ppo": (PPO, VECTOR, DISCRETE),
    "CleanRL ppo_atari": (PPOAtari, FRAMES, DISCRETE),
    "CleanRL ppo_continuous_action": (PPOContinuous, VECTOR, BOX),
    "CleanRL ppo_continuous_action, normalizer.npz": (PPOContinuous, VECTOR, BOX),
    "CleanRL dqn": (QNetwork, VECTOR, DISCRETE),
    "CleanRL dqn_atari": (AtariQNetwork, FRAMES, DISCRETE),
    "CleanRL sac_continuous_action": (SAC, VECTOR, BOX),
    "CleanRL td3_continuous_action": (TD3, VECTOR, BOX),
}


@torch.no_grad()
def make(name, folder, n=1000):
    """The checkpoint of that name in the folder, and what the network itself says at n observations."""
    kind, space, action_space = CASES[name]
    torch.manual_seed(0)
    network, path = spread(kind(space, action_space)).eval(), folder / "agent.cleanrl_model"
    n = min(n, 100) if space is FRAMES else n  # 28,224 numbers each
    raw = observations(space, n)
    obs = torch.as_tensor(raw, dtype=torch.float32)
    saved = network.state_dict()
    torch.save((saved, Critic(space, action_space).state_dict()) if kind is TD3 else saved, path)
    if name.endswith(".npz"):
        mean, var = np.linspace(-1, 5, 5), np.linspace(0.1, 9, 5)
        np.savez(folder / "agent.normalizer.npz", mean=mean, var=var, clip=1.5, epsilon=1e-8)
        obs = torch.as_tensor(np.clip((raw - mean) / np.sqrt(var + 1e-8), -1.5, 1.5)).float()

    def original(*said):
        return Original(path, lambda: World(space, action_space), raw.reshape(n, -1).astype(np.float32), *said)

    if kind in (PPO, PPOAtari):
        return original(network.probs(obs).numpy())
    if kind in (QNetwork, AtariQNetwork):  # an action of dqn.py is random with probability epsilon, 0.05 in the end
        return original(0.05 / action_space.n + 0.95 * np.eye(action_space.n)[network(obs).argmax(-1).numpy()])
    if kind is TD3:
        return original(network(obs).numpy())
    distribution = network.distribution(obs)
    actions = distribution.sample()
    sent = torch.tanh(actions) * network.action_scale + network.action_bias if kind is SAC else actions
    sent = sent.numpy() if kind is SAC else np.clip(sent.numpy(), BOX.low, BOX.high)  # ClipAction
    return original(normal_log_probs(distribution, actions), actions.numpy(), sent)
