"""Imported policies as one file of ours: the same numbers again, whatever library wrote them."""

import json

import numpy as np
import pytest
from torch import nn

from manyfold import policies
from manyfold.files import load_tensors, save_tensors
from manyfold.policies.loading import load_policies
from manyfold.policies.modules import ModulePolicySet
from manyfold.policies.saved import save
from tests import cleanrl_originals, program_originals, sb3_originals
from tests.policy_kinds import Normalised

CASES = [
    (sb3_originals, "SB3 PPO, Discrete"),
    (sb3_originals, "SB3 PPO, Discrete, ReLU, 32-16"),
    (sb3_originals, "SB3 PPO, CnnPolicy, Discrete"),
    (sb3_originals, "SB3 DQN"),
    (program_originals, "ONNX, logits"),
    (program_originals, "ONNX, probabilities"),
    *((cleanrl_originals, f"CleanRL {script}") for script in ("ppo", "ppo_atari", "dqn")),
]


@pytest.mark.parametrize(("library", "name"), CASES, ids=[name for _, name in CASES])
def test_what_was_saved_gives_the_same_numbers(library, name, tmp_path):
    original = library.make(name, tmp_path, n=20)
    given = load_policies(original.path)
    save(given, tmp_path / "own")
    original.path.unlink()  # nothing is read from it any more
    found = policies.load(tmp_path / "own")
    np.testing.assert_array_equal(found.probs(original.obs, 3), given.probs(original.obs, 3))
    assert (found.names, found.how, found.width) == (given.names, given.how, given.width)
    before = (tmp_path / "own.safetensors").read_bytes()
    save(found, tmp_path / "again")
    assert (tmp_path / "again.safetensors").read_bytes() == before


def test_a_normaliser_is_kept(tmp_path):
    model, normaliser = sb3_originals.trained(
        sb3_originals.PPO, sb3_originals.VECTOR, sb3_originals.DISCRETE, normalised=True
    )
    given = load_policies(sb3_originals.save(model, normaliser, tmp_path))
    save(given, tmp_path / "own")
    obs = 9 * np.random.default_rng(0).standard_normal((20, 5)).astype(np.float32)  # some are clipped
    found = policies.load(tmp_path / "own")
    np.testing.assert_array_equal(found.probs(obs, 0), given.probs(obs, 0))
    raw = load_policies(tmp_path / "model.zip", normaliser="none")
    assert np.abs(found.probs(obs, 0) - raw.probs(obs, 0)).max() > 0.01


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            Normalised(0),
            r"Normalised\(.*can't be written into a file, expected layers of .*Linear.*; export the policy",
        ),
        (nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(0.5)), r"LeakyReLU\(negative_slope=0.5\) can't be written"),
    ],
)
def test_layers_that_a_file_cannot_hold_are_refused(module, message, tmp_path):
    with pytest.raises(ValueError, match=r"(?s)" + message):
        save(ModulePolicySet([module], 4, 3), tmp_path / "own")
    assert not list(tmp_path.iterdir())


def test_policies_over_vectors_are_refused(tmp_path):
    with pytest.raises(ValueError, match="policies over vectors, expected counted actions"):
        save(load_policies(sb3_originals.make("SB3 PPO, Box", tmp_path, n=2).path), tmp_path / "own")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about, x: about["modules"][0].update(kind="System"), "'System'"),
        (lambda about, x: about["modules"][0]["parts"][0].update(inputs=10**9), "expected .1, 1000000000."),
        (lambda about, x: about["modules"][0]["parts"].pop(), "belongs to no layer"),
        (lambda about, x: x.pop("0.0.weight"), "0.0.weight"),
        (lambda about, x: about["modules"].pop(), "."),
        (lambda about, x: about.update(width=-3), "width is -3"),
    ],
)
def test_files_that_say_something_else_get_one_line(change, message, tmp_path):
    path = tmp_path / "own.safetensors"
    save(ModulePolicySet([nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 4))], 4, 3), path)
    tensors, about = load_tensors(path, "policies", 2)
    about = json.loads(json.dumps(about))
    change(about, tensors)
    save_tensors(path, tensors, "policies", 2, about)
    with pytest.raises(ValueError, match=message) as error:
        policies.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)
