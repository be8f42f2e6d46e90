"""Other people's files as inert data: statistics out of pickles, and payloads that must not run."""

import json
import pickle

import numpy as np
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from manyfold.policies.layers import Normaliser
from manyfold.policies.loading import load_policies
from manyfold.policies.weights import find_statistics, read_numbers, read_statistics
from tests.cleanrl_originals import PPO as Agent
from tests.originals import VECTOR, World, observations
from tests.payloads import proof
from tests.sb3_originals import DISCRETE, save, trained

MEAN, VAR = np.linspace(-1, 5, 5), np.linspace(0.1, 9, 5)


@pytest.fixture
def vecnormalize():
    envs = VecNormalize(DummyVecEnv([lambda: World(VECTOR, DISCRETE)]), clip_obs=2.0, epsilon=1e-3)
    envs.reset()
    envs.obs_rms.mean, envs.obs_rms.var = MEAN.copy(), VAR.copy()
    return envs


@pytest.mark.parametrize("protocol", [3, 4, 5])  # what Python 3 has written by default, and the newest
def test_statistics_come_out_of_a_pickle(protocol, vecnormalize, tmp_path):
    path, obs = tmp_path / "vecnormalize.pkl", observations(VECTOR, 50)
    path.write_bytes(pickle.dumps(vecnormalize, protocol))
    found = read_statistics(path)
    np.testing.assert_array_equal(Normaliser(5, found)(torch.as_tensor(obs)), vecnormalize.normalize_obs(obs))
    np.testing.assert_array_equal(found.mean, MEAN)
    assert (found.clip, found.epsilon) == (2.0, 1e-3)


@pytest.mark.parametrize("dtype", [np.float32, ">f8", np.int64])
def test_arrays_of_other_types_are_read(dtype, vecnormalize, tmp_path):
    vecnormalize.obs_rms.mean = np.arange(5).astype(dtype)
    vecnormalize.clip_obs = np.float32(3.0)
    vecnormalize.save(str(tmp_path / "v.pkl"))
    found = read_statistics(tmp_path / "v.pkl")
    np.testing.assert_array_equal(found.mean, np.arange(5.0))
    assert found.clip == 3.0


def test_statistics_may_be_plain_files(tmp_path):
    np.savez(tmp_path / "a.npz", mean=MEAN, var=VAR, clip=10, epsilon=1e-8)
    (tmp_path / "a.json").write_text(json.dumps({"mean": MEAN.tolist(), "var": VAR.tolist()}))
    for name, clip in (("a.npz", 10.0), ("a.json", np.inf)):
        found = read_statistics(tmp_path / name)
        np.testing.assert_array_equal(found.var, VAR)
        assert (found.clip, found.epsilon) == (clip, 1e-8)


def test_a_normaliser_that_is_off_is_none(vecnormalize, tmp_path):
    vecnormalize.norm_obs = False
    vecnormalize.save(str(tmp_path / "v.pkl"))
    assert read_statistics(tmp_path / "v.pkl") is None


def test_payloads_in_a_vecnormalize_are_not_run(vecnormalize, tmp_path):
    payload, made = proof(tmp_path)
    vecnormalize.clip_reward = payload  # beside good statistics: these are read
    vecnormalize.save(str(tmp_path / "v.pkl"))
    np.testing.assert_array_equal(read_statistics(tmp_path / "v.pkl").mean, MEAN)
    for name, content in (("clip_obs", payload), ("obs_rms", payload)):
        setattr(vecnormalize, name, content)
        vecnormalize.save(str(tmp_path / "v.pkl"))
        with pytest.raises(ValueError, match="^[^\n]*no statistics could be read"):
            read_statistics(tmp_path / "v.pkl")
    (tmp_path / "v.pkl").write_bytes(pickle.dumps(payload))
    with pytest.raises(ValueError, match="^[^\n]*no statistics .*np.savez.*obs_rms.mean"):
        read_statistics(tmp_path / "v.pkl")
    np.savez(tmp_path / "v.npz", mean=np.array([payload], dtype=object), var=VAR)
    with pytest.raises(ValueError, match="^[^\n]*no statistics could be read"):
        read_statistics(tmp_path / "v.npz")
    assert not made.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_payloads_in_a_torch_file_are_not_run(zipped, tmp_path):
    payload, made = proof(tmp_path)
    path = tmp_path / "agent.pt"
    weights = {**Agent(VECTOR, DISCRETE).state_dict(), "args": payload}
    torch.save(weights, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match="^[^\n]*no weights could be read .*expected torch.save"):
        load_policies(path)
    path.write_bytes(pickle.dumps(payload))
    with pytest.raises(ValueError, match="^[^\n]*expected"):
        load_policies(path)
    assert not made.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no statistics could be read"),
        (b"\x80\x04", "no statistics could be read"),
        (pickle.dumps({"mean": 1}), "found no obs_rms"),
        (pickle.dumps(VECTOR), "found no obs_rms"),
    ],
)
def test_other_pickles_are_refused(content, message, tmp_path):
    (tmp_path / "v.pkl").write_bytes(content)
    with pytest.raises(ValueError, match=f"^[^\n]*{message}"):
        read_statistics(tmp_path / "v.pkl")


def test_every_cut_of_a_pickle_is_refused(vecnormalize, tmp_path):
    whole = pickle.dumps(vecnormalize)
    for end in range(0, len(whole), 37):
        (tmp_path / "v.pkl").write_bytes(whole[:end])
        with pytest.raises(ValueError, match="^[^\n]*no statistics could be read"):
            read_statistics(tmp_path / "v.pkl")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"mean": [0.0], "var": [1.0, 1.0]}, "mean has 1 numbers and var 2"),
        ({"mean": [0.0], "var": [-1.0]}, "negative variance"),
        ({"mean": [0.0], "var": [1.0], "clip": 0}, "a clip of 0"),
        ({"mean": [float("nan")], "var": [1.0]}, "NaN"),
        ({"mean": [0.0], "var": [0.0], "epsilon": 0}, "a variance is 0 and so is epsilon"),
        ({"mean": [0.0]}, "no 'var'"),
        ([1], "no statistics could be read"),
    ],
)
def test_statistics_that_mean_nothing_are_refused(said, message, tmp_path):
    (tmp_path / "n.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=f"^[^\n]*{message}"):
        read_statistics(tmp_path / "n.json")


@pytest.mark.parametrize(
    ("policy", "beside", "own"),
    [
        ("a.zip", "a.normalizer.npz", True),
        ("a.zip", "a_vecnormalize.pkl", True),
        ("a.zip", "vec_normalize_a.pkl", True),
        ("ppo_500_steps.zip", "ppo_vecnormalize_500_steps.pkl", True),
        ("a.zip", "vecnormalize.pkl", False),
        ("CartPole-v1.zip", "CartPole-v1/vecnormalize.pkl", False),
    ],
)
def test_the_normaliser_beside_a_policy_is_found(policy, beside, own, tmp_path):
    (tmp_path / beside).parent.mkdir(exist_ok=True)
    for name in (beside, "ppo_vecnormalize_1000_steps.pkl", "b_vecnormalize.pkl"):
        (tmp_path / name).touch()
    assert find_statistics(tmp_path / policy) == (tmp_path / beside, not own)


def test_several_normalisers_are_not_guessed_among(tmp_path):
    for name in ("vecnormalize.pkl", "vec_normalize.pkl"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match="^[^\n]*2 normalisers beside it .* say normaliser="):
        find_statistics(tmp_path / "a.zip")


def test_the_normaliser_may_be_named_or_left_out(vecnormalize, tmp_path):
    model, _ = trained(PPO, VECTOR, DISCRETE)
    path, obs = save(model, vecnormalize, tmp_path), observations(VECTOR, 50)
    other = tmp_path / "other.npz"
    np.savez(other, mean=MEAN, var=VAR, clip=2.0, epsilon=1e-3)
    beside, named, none = (load_policies(path, normaliser=x).probs(obs, 0) for x in ("beside", other, "none"))
    np.testing.assert_array_equal(beside, named)
    assert np.abs(beside - none).max() > 0.01
    np.savez(other, mean=MEAN[:3], var=VAR[:3])
    with pytest.raises(ValueError, match="^[^\n]*a normaliser of 3 numbers beside a policy of 5"):
        load_policies(path, normaliser=other)
    with pytest.raises(ValueError, match="^[^\n]*missing.npz: cannot be read"):
        load_policies(path, normaliser=tmp_path / "missing.npz")


def test_numbers_are_read_as_numpy_prints_them():
    for array in (VECTOR.low, np.float32([-4.8, 3.4028235e38]), np.array([[1, 2], [3, 4]]), np.array([1e-12, 0.5])):
        np.testing.assert_allclose(read_numbers(str(array)), array.ravel(), rtol=1e-7)
    assert len(read_numbers(str(np.zeros(2000)))) == 0
    assert len(read_numbers(None)) == 0
