"""CleanRL's files, against the networks of its scripts."""

import numpy as np
import pytest
import torch
from torch import nn

from manyfold.policies.actors import ActorSet
from manyfold.policies.heads import Gaussian, MultiCategorical
from manyfold.policies.importing import load_file
from manyfold.policies.loading import load_policies
from tests import cleanrl_originals
from tests.cleanrl_originals import PPO, SAC, TD3, AtariQNetwork, PPOContinuous, QNetwork
from tests.originals import BOX, VECTOR, deviations, largest, observations, spread
from tests.sb3_originals import DISCRETE

OBS = observations(VECTOR, 50)
X = torch.as_tensor(OBS)


@pytest.mark.parametrize("name", cleanrl_originals.CASES)
def test_policies_are_cleanrls_own(name, tmp_path):
    original = cleanrl_originals.make(name, tmp_path, n=200)
    assert max(deviations(original)) < 1e-6
    assert isinstance(original.policies(), ActorSet) == ("td3" in name)


def saved(content, folder):
    path = folder / "agent.pt"
    torch.save(content, path)
    return path


@torch.no_grad()
def test_greedy_is_the_most_likely_action(tmp_path):
    discrete, continuous, sac = (
        spread(kind(VECTOR, a)) for kind, a in ((PPO, DISCRETE), (PPOContinuous, BOX), (SAC, BOX))
    )
    found = load_policies(saved(discrete.state_dict(), tmp_path), greedy=True)
    np.testing.assert_array_equal(found.probs(OBS, 0)[0], np.eye(4)[discrete.probs(X).argmax(-1)])
    steps = np.zeros(50, np.int64)
    found = load_policies(saved(continuous.state_dict(), tmp_path), greedy=True)
    assert largest(found.acts[0](OBS, steps), continuous.actor_mean(X)) < 1e-6
    found = load_policies(saved(sac.state_dict(), tmp_path), greedy=True)
    expected = torch.tanh(sac.distribution(X).mean) * sac.action_scale + sac.action_bias
    assert largest(found.acts[0](OBS, steps), expected) < 1e-6


@torch.no_grad()
def test_epsilon_is_the_scripts_or_the_callers(tmp_path):
    network = spread(QNetwork(VECTOR, DISCRETE))
    path, best = saved(network.state_dict(), tmp_path), np.eye(4)[network(X).argmax(-1)]
    for said, epsilon in ((None, 0.05), (0.3, 0.3)):
        assert largest(load_policies(path, epsilon=said).probs(OBS, 0)[0], (1 - epsilon) * best + epsilon / 4) < 1e-7
    assert "epsilon 0.05, as dqn.py ends with" in " ".join(load_file(path).notes)
    assert load_policies(path, greedy=True).how == "greedy"


@torch.no_grad()
def test_the_activation_and_the_choices_may_be_said(tmp_path):
    network = spread(nn.ModuleDict({"actor": nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 5))}))
    path, logits = saved(network.state_dict(), tmp_path), network["actor"](X)
    found = load_policies(path, activation="relu", head=MultiCategorical((2, 3)))
    np.testing.assert_array_equal(found.parameters(OBS, 0)[0], logits)
    assert largest(load_policies(path).probs(OBS, 0)[0], logits.softmax(-1)) > 0.01  # tanh
    for head in (MultiCategorical((2, 2)), Gaussian((-1.0,) * 5, (1.0,) * 5)):
        with pytest.raises(ValueError, match="^[^\n]*5 logits, expected those of"):
            load_policies(path, head=head)


def test_bounds_may_be_said(tmp_path):
    path = saved(PPOContinuous(VECTOR, BOX).state_dict(), tmp_path)
    head = Gaussian((-1.0, -2.0, 0.0), (1.0, 3.0, 0.5))
    assert load_policies(path, head=head).head == head
    assert not np.isfinite(load_policies(path).head.low).any()
    assert "the file has no action bounds" in " ".join(load_file(path).notes)
    assert "statistics it doesn't save" in " ".join(load_file(path).notes)
    with pytest.raises(ValueError, match="^[^\n]*3 means, expected those of vectors of 1 numbers"):
        load_policies(path, head=Gaussian((-1.0,), (1.0,)))


def test_weights_beside_other_things_are_found(tmp_path):
    weights = spread(PPO(VECTOR, DISCRETE)).state_dict()
    alone = load_policies(saved(weights, tmp_path)).probs(OBS, 0)
    for content in ({"model_weights": weights, "args": {"seed": 1}}, (weights, {"fc1.weight": torch.zeros(1, 1)})):
        np.testing.assert_array_equal(load_policies(saved(content, tmp_path)).probs(OBS, 0), alone)


def changed(network, **tensors):
    return {**network.state_dict(), **{name.replace("__", "."): x for name, x in tensors.items()}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"encoder.weight": torch.zeros(2, 2)}, "0 known networks, found encoder.weight; expected CleanRL's names"),
        ({}, "0 known networks, found dict"),
        ([1, 2], "0 known networks, found list"),
        ([PPO(VECTOR, DISCRETE).state_dict()] * 2, "2 known networks"),
        (PPO(VECTOR, DISCRETE), "a whole module or other objects were pickled"),
        (
            changed(PPO(VECTOR, DISCRETE), lstm__weight_ih_l0=torch.zeros(4, 4)),
            "'lstm.weight_ih_l0' belongs to no network",
        ),
        (changed(QNetwork(VECTOR, DISCRETE), atoms=torch.zeros(51)), "'atoms' belongs to no network of CleanRL's dqn"),
        (changed(TD3(VECTOR, BOX), fc3__weight=torch.zeros(4, 4)), "'fc3.weight' belongs to no network"),
        (changed(PPO(VECTOR, DISCRETE), actor__1__weight=torch.zeros(64)), r"actor has layers \[0, 1, 2, 4\]"),
        (changed(PPO(VECTOR, DISCRETE), actor__4__bias=torch.full((4,), np.inf)), "actor.4.bias has NaN or infinity"),
        (changed(PPO(VECTOR, DISCRETE), actor__2__weight=torch.zeros(64, 9)), "its layers don't fit together"),
        (changed(PPOContinuous(VECTOR, BOX), actor_logstd=torch.zeros(1, 2)), "3 means and 2 deviations"),
        (changed(TD3(VECTOR, BOX), action_scale=torch.ones(2)), "bounds of 2 actions, expected 3"),
        (
            {k: v for k, v in SAC(VECTOR, BOX).state_dict().items() if "action" not in k},
            "no action_scale and action_bias",
        ),
        (
            changed(AtariQNetwork(VECTOR, DISCRETE), network__7__weight=torch.zeros(512, 99)),
            "99 numbers after the conv",
        ),
    ],
)
def test_other_files_get_one_line(content, message, tmp_path):
    path = saved(content, tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        load_policies(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert "expected" in str(caught.value) or "pass a torch module" in str(caught.value)


def test_an_unknown_activation_is_refused(tmp_path):
    with pytest.raises(ValueError, match="^[^\n]*activation 'swish', expected one of tanh"):
        load_policies(saved(PPO(VECTOR, DISCRETE).state_dict(), tmp_path), activation="swish")
