"""Which files are found, how they are named, and what may stand together."""

import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from stable_baselines3 import PPO, SAC, TD3

from manyfold.policies import MlpPolicySet, weights
from manyfold.policies.actors import ActorSet
from manyfold.policies.heads import Gaussian
from manyfold.policies.importing import distinct_names, find_files, load_file, load_files
from manyfold.policies.loading import load_policies
from tests.cleanrl_originals import PPO as Agent
from tests.cleanrl_originals import PPOContinuous
from tests.networks import mlp_policies
from tests.originals import BOX, VECTOR, observations, spread
from tests.sb3_originals import DISCRETE, SEVERAL, save, trained

OBS, STEPS = observations(VECTOR, 50), np.zeros(50, np.int64)


def agent(path, seed=0, obs=VECTOR, actions=DISCRETE, kind=Agent):
    path.parent.mkdir(exist_ok=True, parents=True)
    torch.save(spread(kind(obs, actions), seed).state_dict(), path)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """One zip of each continuous algorithm."""
    found = {}
    for algorithm in (PPO, SAC, TD3):
        folder = tmp_path_factory.mktemp(algorithm.__name__)
        found[algorithm.__name__] = save(trained(algorithm)[0], None, folder).rename(
            folder / f"{algorithm.__name__}.zip"
        )
    return found


def test_files_are_found_once_in_natural_order(tmp_path):
    for name in ("step_10000.pt", "step_2000.pt", ".hidden/x.pt", "sub/step_1.pth", "notes.txt", "replay_buffer.pkl"):
        agent(tmp_path / name)
    plain, below = [tmp_path / "step_2000.pt", tmp_path / "step_10000.pt"], tmp_path / "sub" / "step_1.pth"
    assert find_files(str(tmp_path / "*.pt")) == plain
    assert find_files(tmp_path) == [*plain, below]
    assert find_files(tmp_path / "*") == plain  # what lies beside policies is left aside
    assert find_files([plain[1], tmp_path / "*.pt", plain[0]]) == plain
    assert find_files([tmp_path / "notes.txt"]) == [tmp_path / "notes.txt"]  # named, it is tried
    assert load_policies(tmp_path).names == ("step_2000", "step_10000", "step_1")


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/1.zip", "a/2.zip"], ["1", "2"]),
        (["run1/best.zip", "run2/best.zip"], ["run1", "run2"]),
        (["r/s1/x/best.zip", "r/s2/x/best.zip", "r/s2/x/last.zip"], ["s1/x/best", "s2/x/best", "s2/x/last"]),
        (["a.zip", "a.pt"], ["a.zip", "a.pt"]),
    ],
)
def test_names_are_what_tells_the_paths_apart(paths, names, tmp_path):
    assert distinct_names([tmp_path.__class__(path) for path in paths]) == names


def test_policies_are_in_the_order_of_their_names(tmp_path):
    for seed in (2, 10, 1):
        agent(tmp_path / f"{seed}.pt", seed)
    policies = load_policies(tmp_path / "*.pt")
    assert policies.names == ("1", "2", "10")
    for k, seed in enumerate((1, 2, 10)):
        alone = load_policies(tmp_path / f"{seed}.pt").probs(OBS, 0)[0]
        np.testing.assert_allclose(policies.probs(OBS, 0)[k], alone, atol=1e-6)


def test_files_with_one_content_are_one_policy_and_say_so(tmp_path):
    shutil.copy(agent(tmp_path / "a.pt"), tmp_path / "b.pt")
    first, second = load_files(tmp_path)
    assert first.sha256 == second.sha256
    assert "the same policy as a, byte by byte" in second.notes
    assert not any("same policy" in note for note in first.notes)


def test_sets_of_ours_are_read_too(tmp_path):
    policies = mlp_policies(n_features=3)
    policies.save(tmp_path / "own")
    loaded = load_policies(tmp_path / "own.safetensors")
    assert isinstance(loaded, MlpPolicySet)
    assert loaded.names == policies.names
    refused("a set of manyfold's beside other files", [tmp_path / "own.safetensors", agent(tmp_path / "a.pt")])


def test_a_policy_without_density_makes_actors_of_all(models):
    together = load_policies([models["PPO"], models["TD3"]])
    assert isinstance(together, ActorSet)
    assert together.how == "some greedy, some stochastic"
    assert load_policies(models["TD3"]).how == "greedy"
    drawn, again = together.acts[0](OBS, STEPS), together.acts[0](OBS, STEPS)
    assert (drawn != again).any()
    assert (drawn >= BOX.low).all()
    assert (drawn <= BOX.high).all()
    np.testing.assert_array_equal(together.acts[1](OBS, STEPS), together.acts[1](OBS, STEPS))


def test_clipped_and_squashed_actions_have_no_ratios(models):
    """PPO's density is of the action before it is clipped, SAC's before tanh: of two different variables."""
    together = load_policies([models["PPO"], models["SAC"]])
    assert isinstance(together, ActorSet)
    assert together.how == "stochastic (some actions clipped, others squashed: no ratios of their densities)"


def test_bounds_come_from_whichever_file_says_them(models, tmp_path):
    open_ = agent(tmp_path / "0.pt", kind=PPOContinuous, actions=BOX)
    policies = load_policies([open_, models["PPO"]])
    assert policies.head == Gaussian(tuple(map(float, BOX.low)), tuple(map(float, BOX.high)))


def refused(message, *arguments, **options):
    with pytest.raises(ValueError, match=message) as caught:
        load_policies(*arguments, **options)
    assert "\n" not in str(caught.value)
    assert "expected" in str(caught.value)


def test_files_of_two_environments_are_refused(models, tmp_path):
    narrow = agent(tmp_path / "narrow.pt", obs=BOX)
    other = agent(tmp_path / "other.pt")
    refused("files of two environments: .* takes 3 numbers and gives one of 4 actions, .* 5 and", [narrow, other])
    alike = [agent(tmp_path / "alike" / f"{i}.pt") for i in range(3)]
    refused("files of two environments: .*narrow.pt 3 and one of 4 actions", [*alike, narrow])
    refused("files of two environments: .* vectors of 3 numbers from", [models["PPO"], other])
    folder = tmp_path / "several"
    folder.mkdir()
    choices = save(trained(PPO, VECTOR, SEVERAL)[0], None, folder)
    refused("files of two environments: .* 3 choices", [choices, models["PPO"]])
    wide = type(BOX)(10 * BOX.low, 10 * BOX.high)
    open_ = agent(tmp_path / "open.pt", kind=PPOContinuous, actions=BOX)
    far = save(trained(PPO, VECTOR, wide)[0], None, tmp_path)
    refused(r"files of two environments: .* to \[10.0", [open_, models["PPO"], far])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.zip", b"", "not a zip, expected a policy saved by Stable-Baselines3; was it cut off"),
        ("a.zip", b"PK\x03\x04 and no more", "not a readable zip .* was it cut off"),
        ("a.pt", b"", "no file of torch, ONNX or Stable-Baselines3"),
        ("a.pt", b"hello", "no file of torch, ONNX or Stable-Baselines3"),
        ("a.pt", b"\x80\x02 and no more", "no weights could be read"),
        ("a.onnx", b"hello", "cannot be read .*expected a whole ONNX file"),
    ],
)
def test_files_that_are_no_policies_get_one_line(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    refused(f"^{tmp_path / name}: .*{message}", tmp_path / name)


def test_every_cut_of_a_zip_gets_one_line(models, tmp_path):
    whole = models["PPO"].read_bytes()
    for end in (1, 100, len(whole) // 2, len(whole) - 30, len(whole) - 1):
        (tmp_path / "a.zip").write_bytes(whole[:end])
        refused(f"^{tmp_path / 'a.zip'}: .*was it cut off", tmp_path / "a.zip")


def test_damaged_bytes_get_one_line(models, tmp_path):
    whole = bytearray(models["PPO"].read_bytes())
    with zipfile.ZipFile(models["PPO"]) as archive:
        at = archive.getinfo("policy.pth").header_offset
    whole[at + 2000] ^= 255
    (tmp_path / "a.zip").write_bytes(whole)
    refused("policy.pth is damaged .Bad CRC-32", tmp_path / "a.zip")


def test_other_zips_get_one_line(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("thesis.txt", "hello")
    refused("a zip of thesis.txt, expected a policy", path)
    with zipfile.ZipFile(path, "w"):
        pass
    refused("a zip of nothing, expected a policy", path)


def test_zips_that_unpack_to_more_than_fits_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(weights, "LARGEST", 10_000)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("policy.pth", b"0" * 10_001)
    refused("10,001 bytes once unpacked, expected at most 10,000; is it a zip bomb", tmp_path / "a.zip")


def test_what_matches_nothing_gets_one_line(tmp_path):
    refused("no files match, expected policies .* the current folder is", tmp_path / "*.zip")
    refused("no files match", tmp_path)
    refused("no files are named", [])
    refused("no files match", tmp_path / "missing.zip")


def test_one_file_needs_no_options(tmp_path):
    found = load_file(agent(tmp_path / "a.pt"))
    assert (found.name, found.kind, found.width, found.actions) == ("a", "cleanrl ppo", 5, 4)


def test_names_can_be_printed(tmp_path):
    """A line end would break a table, an escape sequence colours a terminal, and some bytes are no text."""
    files = [b"a\nb.pt", b"\x1b[31m.pt", b"\xff.pt", "ü.pt".encode()]
    for file in files:
        agent(Path(os.fsdecode(bytes(tmp_path) + b"/" + file)))
    names = {one.name for one in load_files(tmp_path)}
    assert names == {r"a\nb", r"\x1b[31m", r"\udcff", "ü"}
