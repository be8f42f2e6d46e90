"""Torch modules, callables and joined sets."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from manyfold.policies import CallablePolicySet, JoinedPolicySet, ModulePolicySet
from tests.policy_kinds import ACTIONS, HORIZON, STATES, WIDTH, Normalised, callables, modules, sequential, table

OBS = np.random.default_rng(0).normal(0, 3, (20, WIDTH)).astype(np.float32)


def alone(networks):
    """Each module by itself."""
    with torch.no_grad():
        return np.stack([torch.softmax(m(torch.from_numpy(OBS)).double(), -1).numpy() for m in networks])


@pytest.mark.parametrize(
    ("networks", "batched"),
    [
        ([sequential(seed) for seed in range(4)], True),
        ([Normalised(seed) for seed in range(4)], True),
        ([sequential(0)], False),
        ([sequential(0, 4), sequential(1, 5)], False),
        ([sequential(0), sequential(1, activation=nn.ReLU)], False),
        ([sequential(0), Normalised(1)], False),
    ],
)
def test_batched_and_looped_give_each_module_alone(networks, batched):
    policies = modules(networks)
    assert (policies._batched is not None) == batched
    np.testing.assert_allclose(policies.probs(OBS, 0), alone(networks), atol=1e-6)
    policies._batched = None
    np.testing.assert_allclose(policies.probs(OBS, 0), alone(networks), atol=1e-12)


@pytest.mark.parametrize("hidden", [8, 64])
@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_a_row_of_batched_networks_is_the_same_to_the_last_bit_whatever_rows_are_beside_it(hidden, rows):
    """Otherwise an evaluation's last digits would depend on how many workers share its episodes."""
    policies = modules([sequential(seed, hidden) for seed in range(4)])
    parts = [policies.probs(OBS[i : i + rows], 0) for i in range(0, len(OBS), rows)]
    np.testing.assert_array_equal(np.concatenate(parts, 1), policies.probs(OBS, 0))


def test_modules_that_differ_in_what_is_no_tensor_are_not_taken_for_one():
    """The same class and weights, another clip: they agree on [-1, 1] and not far away."""
    networks = [Normalised(0, limit=3.5), Normalised(0, limit=20.0)]
    np.testing.assert_allclose(modules(networks).probs(OBS, 0), alone(networks), atol=1e-6)
    assert np.abs(alone(networks)[0] - alone(networks)[1]).max() > 0.1


class Shifted(nn.Module):
    """Keeps a tensor that is neither a parameter nor a buffer, and a function."""

    def __init__(self, shift, function=torch.tanh):
        super().__init__()
        self.layers, self.shift, self.function = sequential(0), shift, function

    def forward(self, obs):
        return self.layers(self.function(obs)) + self.shift


@pytest.mark.parametrize(
    "networks",
    [
        [Shifted(torch.zeros(ACTIONS)), Shifted(torch.arange(float(ACTIONS)))],
        [Shifted(np.float32(0)), Shifted(0.0, torch.relu)],
        [Shifted(0.0, lambda x: x), Shifted(0.0, lambda x: x.clamp(-1, 1))],
    ],
)
def test_attributes_belong_to_their_own_module(networks):
    np.testing.assert_allclose(modules(networks).probs(OBS, 0), alone(networks), atol=1e-6)


def test_modules_are_put_into_evaluation_mode():
    network = nn.Sequential(nn.Linear(WIDTH, 50), nn.Dropout(0.9), nn.BatchNorm1d(50), nn.Linear(50, ACTIONS))
    twin = copy.deepcopy(network)
    policies = modules([network, twin])
    assert not network.training
    first = policies.probs(OBS, 0)
    assert np.array_equal(first, policies.probs(OBS, 0))
    np.testing.assert_allclose(first, alone([twin.eval(), twin]), atol=1e-6)


def test_names_and_numbers_are_checked():
    networks = [sequential(0), sequential(1)]
    assert modules(networks).names == ("policy 0", "policy 1")
    assert ModulePolicySet(networks, ACTIONS, WIDTH, HORIZON, ["a", "b"]).names == ("a", "b")
    with pytest.raises(ValueError, match="1 names for 2 policies, expected one for each"):
        ModulePolicySet(networks, ACTIONS, WIDTH, HORIZON, ["a"])
    with pytest.raises(ValueError, match="policies is 0, expected a whole number from 1 to"):
        modules([])
    with pytest.raises(ValueError, match="horizon is 0, expected a whole number from 1 to"):
        ModulePolicySet(networks, ACTIONS, WIDTH, 0)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (
            nn.Linear(WIDTH, ACTIONS + 1),
            r"the modules gave \[1, 20, 5\], expected logits .* = \[1, 20, 4\]",
        ),
        (nn.Sequential(nn.Linear(WIDTH, ACTIONS), nn.Threshold(1e9, float("nan"))), "expected finite logits"),
    ],
)
def test_wrong_logits_are_refused(network, message):
    with pytest.raises(ValueError, match=f"^[^\n]*{message}"):
        modules([network]).probs(OBS, 0)


def test_callables_get_observations_and_steps():
    seen = []

    def watch(obs, t):
        seen.append((obs, t))
        return np.full((len(obs), ACTIONS), 1 / ACTIONS)

    callables([watch]).probs(OBS, 3)
    np.testing.assert_array_equal(seen[0][0], OBS)
    assert seen[0][1].tolist() == [3] * 20
    callables([watch], STATES).probs([[2.0], [5.0]], [0, 4])
    assert seen[1][0].tolist() == [2, 5]
    assert seen[1][1].tolist() == [0, 4]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda obs, t: np.full((len(obs), ACTIONS), 0.2), "sums? to 0.8, expected 1; were they saved before softmax?"),
        (lambda obs, t: np.full((len(obs), 3), 1 / 3), r"policy 0 has shape \[20, 3\], expected \[20, 4\] = \[N, A\]"),
        (
            lambda obs, t: np.tile([1.2, -0.2, 0, 0], (len(obs), 1)),
            "probability -0.2 at observation=0, a=1",
        ),
        (lambda obs, t: np.full((len(obs), ACTIONS), np.nan), r"policy 0\[0, 0\] is nan, expected a finite number"),
    ],
)
def test_a_callable_that_gives_no_distributions_is_refused(function, message):
    with pytest.raises(ValueError, match=f"^[^\n]*{message}"):
        callables([function]).probs(OBS, 0)


def test_joined_sets_are_their_parts_one_after_the_other():
    first, second = modules([sequential(0), sequential(1)]), modules([Normalised(2)])
    joined = JoinedPolicySet([first, second])
    assert joined.names == (*first.names, *second.names)
    expected = np.concatenate([first.probs(OBS, 1), second.probs(OBS, 1)])
    assert np.array_equal(joined.probs(OBS, 1), expected)


def test_sets_that_do_not_fit_are_not_joined():
    vectors = modules([sequential(0)])
    for other, name in (
        (table(), "n_states"),
        (ModulePolicySet([sequential(0)], ACTIONS, WIDTH, HORIZON + 1), "horizon"),
        (CallablePolicySet([lambda obs, t: obs], ACTIONS + 1, WIDTH, HORIZON), "n_actions"),
        (CallablePolicySet([lambda obs, t: obs], ACTIONS, WIDTH + 1, HORIZON), "width"),
    ):
        with pytest.raises(ValueError, match=f"^{name} is .* in one set and .* in another$"):
            JoinedPolicySet([vectors, other])
    with pytest.raises(ValueError, match="expected"):
        JoinedPolicySet([])
