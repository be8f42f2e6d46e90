"""A small environment and policies for tests of the door: values are known by dynamic programming."""

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from manyfold.mdp import FiniteMDP
from manyfold.policies import ModulePolicySet

T = 6


class Walk(gymnasium.Env):
    """A walk on -4..4 from a random side: up or down as asked with 0.8; each step pays the place, 4 ends it."""

    observation_space = spaces.Box(-4, 4, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 1 if self.np_random.random() < 0.5 else -1
        return np.array([self.place], np.float32), {}

    def step(self, action):
        asked = 1 if action == 1 else -1
        self.place = int(np.clip(self.place + (asked if self.np_random.random() < 0.8 else -asked), -4, 4))
        return np.array([self.place], np.float32), float(self.place), self.place == 4, False, {}


def make():
    return Walk()


def walk():
    """The same as a finite MDP: states are places -4..4, then the end."""
    p, r = np.zeros((10, 2, 10)), np.zeros((10, 2))
    p[8:, :, 9] = 1.0
    for s in range(8):
        for a, asked in enumerate((-1, 1)):
            for move, chance in ((asked, 0.8), (-asked, 0.2)):
                after = int(np.clip(s + move, 0, 8))
                p[s, a, after] += chance
                r[s, a] += chance * (after - 4)
    start = np.zeros(10)
    start[[3, 5]] = 0.5
    return FiniteMDP(p, r, start, T)


def network(gain):
    """Upwards with probability sigmoid(gain)."""
    layer = nn.Linear(1, 2)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.copy_(torch.tensor([0.0, gain]))
    return layer


GAINS = (-1.0, 0.0, 1.0)


def policies(gains=GAINS):
    return ModulePolicySet([network(g) for g in gains], 2, 1)


def tables(gains=GAINS):
    """The same, `[K, T, S, A]`."""
    up = 1 / (1 + np.exp(-np.asarray(gains)))
    return np.broadcast_to(np.stack([1 - up, up], -1)[:, None, None], (len(gains), T, 10, 2))
