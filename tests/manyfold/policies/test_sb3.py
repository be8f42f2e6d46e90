"""Stable-Baselines3's zips, against Stable-Baselines3."""

import base64
import io
import json
import pickle
import re
import warnings
import zipfile

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import DQN, PPO, SAC, TD3
from torch import nn

from manyfold.policies.actors import ActorSet
from manyfold.policies.heads import Gaussian, MultiCategorical
from manyfold.policies.imported import Options
from manyfold.policies.importing import load_file
from manyfold.policies.loading import load_policies
from tests import sb3_originals
from tests.originals import BOX, VECTOR, deviations, largest, observations
from tests.payloads import proof
from tests.sb3_originals import DISCRETE, PIXELS, SEVERAL, save, trained

STEPS = np.zeros(50, dtype=np.int64)


def rewritten(path, folder, change=None, weights=None, data=None):
    """The zip with changed fields of its JSON, changed weights or another text, as a new file."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    if change:
        fields = json.loads(parts["data"])
        change(fields)
        parts["data"] = json.dumps(fields).encode()
    if data is not None:
        parts["data"] = data
    if weights:
        tensors = weights(torch.load(io.BytesIO(parts["policy.pth"]), weights_only=True))
        buffer = io.BytesIO()
        torch.save(tensors, buffer)
        parts["policy.pth"] = buffer.getvalue()
    found = folder / "changed.zip"
    with zipfile.ZipFile(found, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return found


@pytest.fixture(scope="module")
def discrete(tmp_path_factory):
    model, _ = trained(PPO, VECTOR, DISCRETE, policy_kwargs={"activation_fn": nn.ReLU})
    return save(model, None, tmp_path_factory.mktemp("discrete"))


@pytest.mark.parametrize("name", sb3_originals.CASES)
def test_policies_are_stable_baselines_own(name, tmp_path):
    original = sb3_originals.make(name, tmp_path, n=200)
    assert max(deviations(original)) < 1e-6
    assert isinstance(original.policies(), ActorSet) == ("TD3" in name or "DDPG" in name)


@pytest.mark.parametrize(
    ("algorithm", "space", "options"),
    [
        (PPO, DISCRETE, {}),
        (PPO, SEVERAL, {}),
        (PPO, spaces.MultiBinary(3), {}),
        (PPO, BOX, {}),
        (PPO, BOX, {"use_sde": True, "policy_kwargs": {"squash_output": True}}),
        (SAC, BOX, {}),
        (SAC, BOX, {"use_sde": True}),
        (DQN, DISCRETE, {}),
    ],
)
def test_greedy_is_predict_with_deterministic(algorithm, space, options, tmp_path):
    model, _ = trained(algorithm, VECTOR, space, **options)
    policies = load_policies(save(model, None, tmp_path), greedy=True)
    assert policies.how == "greedy"
    obs = observations(VECTOR, 50)
    expected, _ = model.predict(obs, deterministic=True)
    if space is BOX:
        assert isinstance(policies, ActorSet)
        assert largest(policies.acts[0](obs, STEPS), expected) < 1e-6
    elif space is DISCRETE:
        np.testing.assert_array_equal(policies.probs(obs, 0)[0], np.eye(4)[expected])
    else:
        logits = policies.parameters(obs, 0)[0]
        np.testing.assert_array_equal(policies.head.greedy(logits), expected)
        np.testing.assert_allclose(policies.head.log_probs(logits[None], expected.astype(int)), 0, atol=1e-12)


def test_heads_know_the_bounds_of_the_file(tmp_path):
    ppo = load_policies(save(trained(PPO)[0], None, tmp_path))
    assert ppo.head == Gaussian(tuple(map(float, BOX.low)), tuple(map(float, BOX.high)))
    sac = load_policies(save(trained(SAC)[0], None, tmp_path))
    assert sac.head == Gaussian(tuple(map(float, BOX.low)), tuple(map(float, BOX.high)), squashed=True)
    several = load_policies(save(trained(PPO, VECTOR, SEVERAL)[0], None, tmp_path))
    assert several.head == MultiCategorical((2, 3, 4))


def test_epsilon_of_dqn_is_the_files_or_the_callers(tmp_path):
    model, _ = trained(DQN, VECTOR, DISCRETE, exploration_final_eps=0.2)
    path, obs = save(model, None, tmp_path), observations(VECTOR, 50)
    best = np.eye(4)[model.predict(obs, deterministic=True)[0]]
    for said, epsilon in ((None, model.exploration_rate), (0.5, 0.5), (0.0, 0.0)):
        policies = load_policies(path, epsilon=said)
        assert largest(policies.probs(obs, 0)[0], (1 - epsilon) * best + epsilon / 4) < 1e-7
        assert policies.how == ("greedy" if said == 0.0 else "stochastic")
    assert "epsilon 0.5, as you said" in " ".join(load_file(path, Options(epsilon=0.5)).notes)
    with pytest.raises(ValueError, match="epsilon is 2"):
        load_policies(path, epsilon=2)


@pytest.mark.parametrize(
    ("arguments", "options", "note"),
    [
        ((PPO,), {"use_sde": True}, "gSDE: noise is drawn afresh"),
        ((PPO, spaces.Discrete(6), DISCRETE), {}, "an observation is an index: give it one-hot, 6 numbers"),
        ((PPO, VECTOR, spaces.MultiBinary(3)), {}, r"MultiBinary\(3\) as that many pairs"),
        ((DQN, VECTOR, DISCRETE), {}, "epsilon .*, as the file says; .*evaluate_policy would take 0"),
        ((TD3,), {}, "have no density"),
        ((PPO,), {}, "no normaliser found beside it"),
        ((PPO,), {"normalised": True}, "observations normalised by vecnormalize.pkl, the folder's"),
    ],
)
def test_what_a_user_should_know_is_noted(arguments, options, note, tmp_path):
    found = load_file(save(*trained(*arguments, **options), tmp_path))
    assert re.search(note, "\n".join(found.notes)), found.notes


def test_shared_layers_of_old_versions_come_first(tmp_path):
    """Before version 1.8 the first layers could be shared: the same function, with the first layer named otherwise."""
    model, _ = trained(PPO, VECTOR, DISCRETE)
    path, obs = save(model, None, tmp_path), observations(VECTOR, 50)

    def shared(weights):
        moved = {"mlp_extractor.policy_net.0": "mlp_extractor.shared_net.0"}
        moved |= {"mlp_extractor.policy_net.2": "mlp_extractor.policy_net.0"}
        return {
            moved.get(n.rpartition(".")[0], n.rpartition(".")[0]) + "." + n.split(".")[-1]: x
            for n, x in weights.items()
        }

    old = rewritten(path, tmp_path, weights=shared)
    np.testing.assert_array_equal(load_policies(old).probs(obs, 0), load_policies(path).probs(obs, 0))


def test_the_activation_may_be_said(discrete):
    obs = observations(VECTOR, 50)
    as_saved, same, other = (load_policies(discrete, activation=x).probs(obs, 0) for x in (None, "ReLU", "tanh"))
    np.testing.assert_array_equal(as_saved, same)
    assert np.abs(as_saved - other).max() > 0.01
    with pytest.raises(ValueError, match="^[^\n]*activation 'swish' .* expected one of tanh, relu"):
        load_policies(discrete, activation="swish")


def test_pickles_in_the_data_are_not_run(discrete, tmp_path):
    """Stable-Baselines3 itself runs them."""
    payload, made = proof(tmp_path)
    bomb = base64.b64encode(pickle.dumps(payload)).decode()

    def plant(fields):
        for value in fields.values():
            if isinstance(value, dict) and ":serialized:" in value:
                value[":serialized:"] = bomb

    path = rewritten(discrete, tmp_path, plant)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(FileExistsError):  # by the second one
            PPO.load(path, device="cpu")
    assert made.is_dir(), "the payload is no proof"
    made.rmdir()
    obs = observations(VECTOR, 50)
    np.testing.assert_array_equal(load_policies(path).probs(obs, 0), load_policies(discrete).probs(obs, 0))
    assert not made.exists()


def test_a_pickle_in_place_of_the_weights_is_not_run(discrete, tmp_path):
    payload, made = proof(tmp_path)
    path = rewritten(discrete, tmp_path, weights=lambda weights: {**weights, "action_net.bias": payload})
    with pytest.raises(ValueError, match="^[^\n]*no weights could be read"):
        load_policies(path)
    assert not made.exists()


def field(name, **values):
    return {"change": lambda fields: fields[name].update(values)}


def weight(name, change):
    return {"weights": lambda weights: {**weights, name: change(weights.get(name))}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": b"{"}, "its data is no JSON"),
        ({"data": b"[1]"}, "its data is list, expected the fields"),
        ({"data": b"[" * 100_000}, "its data is no JSON"),
        ({"data": b"{}"}, "observation_space is nothing, expected Box"),
        (field("observation_space", **{":type:": "<class 'gymnasium.spaces.dict.Dict'>"}), "observation_space is dict"),
        (field("observation_space", _shape="[7]"), "a layer of 5 inputs after 7 outputs"),
        (field("observation_space", _shape="[99999999999]"), "99,999,999,999 numbers, expected at most"),
        (field("action_space", n="7"), "4 logits, expected 7 for discrete"),
        (field("action_space", n="lots"), "action_space has 0 numbers of actions"),
        (field("policy_class", __module__="sb3_contrib.common.maskable.policies"), "its actions depend on masks"),
        (field("policy_class", __module__="__main__"), "a policy class of __main__, expected Stable-Baselines3's own"),
        (
            field("policy_kwargs", activation_fn="<class 'mine.ReLU'>"),
            "activation .* cannot be known .* say activation=",
        ),
        (
            field("policy_kwargs", features_extractor_class="<class 'mine.Net'>"),
            "features extractor <class 'mine.Net'>",
        ),
        ({"change": lambda fields: fields.update(policy_kwargs=[1])}, r"policy_kwargs are \[1\]"),
        (weight("lstm_actor.weight_ih_l0", lambda x: torch.zeros(2)), "a recurrent policy"),
        (
            weight("extra.weight", lambda x: torch.zeros(2)),
            "weights 'extra.weight', expected those of Stable-Baselines3's MlpPolicy or CnnPolicy",
        ),
        (weight("action_net.bias", lambda x: x * np.nan), "action_net.bias has NaN or infinity"),
        (weight("action_net.bias", lambda x: x[:2]), r"action_net is \[4, 64\], expected a linear layer"),
        (weight("action_net.weight", lambda x: x[:, :9]), "its layers don.t fit together .mat1 and mat2 shapes"),
        (weight("mlp_extractor.policy_net.4.weight", lambda x: torch.zeros(2, 3)), "4 is .*expected a linear layer"),
        ({"weights": lambda weights: list(weights.values())}, "found list, expected a state_dict"),
        ({"weights": lambda weights: {}}, "action_net is nothing, expected a linear layer"),
    ],
)
def test_wrong_zips_get_one_line(changes, message, discrete, tmp_path):
    path = rewritten(discrete, tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        load_policies(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert "expected" in str(caught.value)


@pytest.mark.parametrize(("algorithm", "field"), [(DQN, "exploration_rate")])
def test_an_epsilon_that_is_no_number_is_refused(algorithm, field, tmp_path):
    path = save(trained(algorithm, VECTOR, DISCRETE)[0], None, tmp_path)
    path = rewritten(path, tmp_path, lambda fields: fields.update({field: {":type:": "float"}}))
    with pytest.raises(ValueError, match="^[^\n]*epsilon is "):
        load_policies(path)


def test_images_that_come_flat_are_taken_channels_first(tmp_path):
    """Without an environment nobody can know; `fitted` asks it (above)."""
    model, _ = trained(PPO, PIXELS, DISCRETE, policy="CnnPolicy")
    policies = load_policies(save(model, None, tmp_path))
    raw = observations(PIXELS, 10)
    first = raw.transpose(0, 3, 1, 2)
    with torch.no_grad():
        expected = model.policy.get_distribution(model.policy.obs_to_tensor(first)[0]).distribution.probs.numpy()
    assert largest(policies.probs(first.reshape(10, -1), 0)[0], expected) < 1e-6
    assert largest(policies.probs(raw.reshape(10, -1), 0)[0], expected) > 1e-4
