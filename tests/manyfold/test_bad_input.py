"""What goes wrong while episodes run is one line: policies that return NaN, environments that crash or never end."""

import re

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from manyfold.cli import main
from manyfold.door import evaluate
from manyfold.envs import GymnasiumEnvironment
from manyfold.policies import CallablePolicySet, ModulePolicySet
from manyfold.policies.actors import ActorSet
from manyfold.policies.heads import Gaussian
from manyfold.policies.layers import FixedStd
from tests import checkpoints

BOX = Gaussian((-2.0,), (2.0,))


class NaNFar(nn.Module):
    """NaN once the cart has moved far enough."""

    def forward(self, x):
        return torch.where(x[:, :1].abs() > 0.06, torch.nan, torch.zeros(len(x), 2))


def late(obs, t):
    probs = np.full((len(obs), 2), 0.5)
    probs[t > 5] = np.nan
    return probs


@pytest.mark.parametrize(
    ("env", "policies", "line"),
    [
        ("CartPole-v1", ModulePolicySet([nn.Linear(4, 2), NaNFar()], 2, 4), "policy 1 gave NaN or infinity, expected"),
        ("CartPole-v1", CallablePolicySet([late], 2, 4), r"policy 0\[0, 0\] is nan, expected a finite number"),
        ("CartPole-v1", ActorSet([lambda obs, t: np.full(len(obs), np.nan)]), "an actor returned .*, expected whole"),
        ("Pendulum-v1", ActorSet([lambda obs, t: obs[:, :1] * np.nan]), "an actor returned .*, expected finite"),
        (
            "Pendulum-v1",
            ModulePolicySet([FixedStd(nn.Linear(3, 1), torch.tensor([99.0]))], BOX, 3),
            "policy 0 gave NaN or infinity, expected finite parameters",
        ),
        (
            "Pendulum-v1",
            CallablePolicySet([lambda obs, t: np.full((len(obs), 2), np.inf)], BOX, 3),
            r"policy 0\[0, 0\] is inf, expected a finite number",
        ),
    ],
)
def test_a_policy_that_returns_nan(env, policies, line):
    with pytest.raises(ValueError, match=f"^{line}[^\n]*$"):
        evaluate(env, policies, 20, horizon=30)


class Simulator(gymnasium.Env):
    """Never ends by itself; crashes at the step it is told to."""

    observation_space, action_space = spaces.Box(-9, 9, (4,)), spaces.Discrete(2)

    def __init__(self, crash=0):
        self.crash, self.steps = crash, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.standard_normal(4).clip(-9, 9), {}

    def step(self, action):
        self.steps += 1
        if self.steps == self.crash:
            raise RuntimeError("the contact solver\ndiverged")
        return self.np_random.standard_normal(4).clip(-9, 9), 1.0, False, False, {}


COIN = CallablePolicySet([lambda obs, t: np.full((len(obs), 2), 0.5)] * 2, 2, 4)


@pytest.mark.parametrize("policies", [COIN, ActorSet([lambda obs, t: np.zeros(len(obs), dtype=np.int64)] * 2)])
def test_an_environment_that_crashes_in_the_middle(policies):
    world = GymnasiumEnvironment(lambda: Simulator(4), 5, "simulator")
    line = r"step 4 of an episode failed inside of the environment \(RuntimeError: the contact solver diverged\)"
    with pytest.raises(ValueError, match=f"^simulator: {line}, expected it to run$"):
        evaluate(world, policies, 20)


def test_episodes_that_never_end_need_a_horizon_and_are_cut_there():
    with pytest.raises(ValueError, match=r"^Simulator has no TimeLimit, expected a horizon: [^\n]*$"):
        evaluate(Simulator, COIN, 20)
    found = evaluate(Simulator, COIN, 20, horizon=7)
    assert found.mean == pytest.approx([7, 7])
    assert found.steps == 20 * 7


def test_a_driver_that_exits_is_bad_input_of_a_gate(zips, place, capfd):
    """Its exit code 0 would have said that the candidate is better."""
    (place / "own.py").write_text(f"{checkpoints.OWN}\n\ndef give_up():\n    raise SystemExit(0)\n")
    files = "--baseline", str(zips / "a.zip"), "--candidate", str(zips / "b.zip")
    assert main(["gate", "--env", "own:give_up", *files, "--workers", "1"]) == 2
    assert capfd.readouterr().err.startswith("manyfold gate: own:give_up: making it failed")


STRANGE = """

class Strange(Sums):
    def __init__(self):
        self.observation_space = spaces.Box(-1, 1, (4,))
        self.observation_space._shape = property  # as a wrapper's mistake
"""


def test_what_nobody_thought_of_is_no_verdict_either(zips, place, capfd):
    """Python's own exit code for an exception, 1, would have said that the candidate is worse."""
    (place / "own.py").write_text(checkpoints.OWN + STRANGE)
    files = "--baseline", str(zips / "a.zip"), "--candidate", str(zips / "b.zip")
    assert main(["gate", "--env", "own:Strange", "--horizon", "5", *files, "--workers", "1"]) == 2
    line = r"manyfold gate: TypeError: [^\n]* \(.*\.py:\d+\), expected none; [^\n]* report it\n"
    assert re.fullmatch(line, capfd.readouterr().err)
