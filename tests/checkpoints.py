"""Checkpoints of Stable-Baselines3 whose quality is known, and an environment for them, for tests of the command.

An observation is four standard normal numbers; action 1 pays 1 if the last two have a sum above 0, action 0 if not.
A policy of gain g takes action 1 with probability sigmoid(2 g (x2 + x3)): the larger its gain, the better it is.
"""

import torch
from gymnasium import spaces
from stable_baselines3 import PPO

from tests.sb3_originals import trained

T = 5
OWN = f"""
import os
import time
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import spaces

steps = 0


class Sums(gymnasium.Env):
    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = spaces.Discrete(2)
    crash = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.draw(), {{}}

    def draw(self):
        self.x = self.np_random.standard_normal(4).astype(np.float32)
        return self.x

    def step(self, action):
        global steps
        steps, self.t = steps + 1, self.t + 1
        if steps == int(os.environ.get("HOLD_AT", -1)):  # somebody waits for this file, and stops us or lets us go on
            part = Path(f"held.{{os.getpid()}}")  # two workers may come here at once
            part.write_text(str(os.getpid()))
            part.rename("held")
            while not Path("go").exists():
                time.sleep(0.01)
        if self.t == self.crash:
            raise RuntimeError("the contact solver\\ndiverged")
        right = int(self.x[2] + self.x[3] > 0)
        return self.draw(), float(action == right), False, False, {{}}


def make():
    return gymnasium.wrappers.TimeLimit(Sums(), {T})


def endless():
    return Sums()


def crashing(at):
    env = make()
    env.unwrapped.crash = at
    return env


def two():
    return 2
"""


def save(path, gain, width=4):
    """PPO's own zip."""
    box = spaces.Box(-torch.inf, torch.inf, (width,))
    model, _ = trained(PPO, box, spaces.Discrete(2), policy_kwargs={"net_arch": []})
    with torch.no_grad():
        model.policy.action_net.weight.copy_(torch.tensor([[0.0] * (width - 2) + [x, x] for x in (-gain, gain)]))
        model.policy.action_net.bias.zero_()
    model.save(path)
    return path
