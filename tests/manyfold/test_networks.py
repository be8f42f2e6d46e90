import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import stats

from manyfold.networks import NetworkPolicySet, Spec

K, H = 3, 8


def softmax_set():
    rng = torch.Generator().manual_seed(0)
    shapes = {"w1": (K, 10, H), "b1": (K, 1, H), "w2": (K, H, H), "b2": (K, 1, H), "w3": (K, H, 4), "b3": (K, 1, 4)}
    tensors = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    return NetworkPolicySet(tensors, Spec("gridworld-27", "softmax", 3, 4, 9, 0, 0.0, 0.0, ("a", "b", "c")))


def gaussian_set(width=5, out=3):
    rng = torch.Generator().manual_seed(1)
    shapes = {"w1": (K, width, H), "b1": (K, 1, H), "w2": (K, H, H), "b2": (K, 1, H), "w3": (K, H, out)}
    shapes |= {"b3": (K, 1, out), "log_std": (K, 1, out), "obs_mean": (K, width), "obs_var": (K, width)}
    tensors = {name: 0.4 * torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    tensors["obs_var"] = tensors["obs_var"].abs() + 0.1
    return NetworkPolicySet(tensors, Spec("hopper", "binned_gaussian", 100, 10, 0, width, -1.0, 1.0, ("a", "b", "c")))


def by_hand(policies, k, obs, t=0):
    """One policy at one observation, a layer after the other."""
    p = {name: x[k].double().numpy() for name, x in policies.tensors.items()}
    if policies.spec.n_cells:
        x = np.zeros(policies.spec.n_cells + 1)
        x[obs], x[-1] = 1.0, t / policies.spec.horizon
    else:
        x = np.clip((obs - p["obs_mean"]) / np.sqrt(p["obs_var"] + 1e-8), -10, 10)
    for layer in "12":
        x = np.tanh(x @ p[f"w{layer}"] + p[f"b{layer}"][0])
    return x @ p["w3"] + p["b3"][0]


def test_softmax_probs_equal_each_policy_alone():
    policies = softmax_set()
    cells, steps = np.array([0, 8, 4, 4]), np.array([0, 2, 1, 0])
    probs = policies.probs(cells, steps)
    assert probs.shape == (K, 4, 4)
    for k in range(K):
        for n, (cell, t) in enumerate(zip(cells, steps, strict=True)):
            z = by_hand(policies, k, cell, t)
            np.testing.assert_allclose(probs[k, n], np.exp(z) / np.exp(z).sum(), rtol=1e-5)
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-12)
    table = policies.table()
    assert table.shape == (K, 3, 9, 4)
    np.testing.assert_allclose(table[:, steps, cells], probs, rtol=1e-6)


def test_binned_gaussian_probs_equal_the_cdf_of_each_policy_alone():
    policies = gaussian_set()
    rng = np.random.default_rng(0)
    obs = rng.normal(0, 30, (6, 7))  # wider than the state: what follows it is not the policy's
    probs = policies.probs(obs, 0)
    edges = np.linspace(-1, 1, 11)[1:-1]
    for k in range(K):
        std = np.exp(policies.tensors["log_std"][k, 0, 0].item())
        for n in range(6):
            mean = by_hand(policies, k, obs[n, :5])[0]
            cdf = stats.norm(mean, std).cdf(edges)
            np.testing.assert_allclose(probs[k, n], np.diff(cdf, prepend=0, append=1), rtol=1e-4, atol=1e-7)


def test_the_companion_samples_the_other_dimensions():
    policies = gaussian_set()
    obs = np.tile(np.random.default_rng(0).normal(size=(1, 5)), (40_000, 1))
    rest = policies.companion(1)(obs, np.random.default_rng(1))
    assert rest.shape == (40_000, 2)
    mean, std = by_hand(policies, 1, obs[0])[1:], np.exp(policies.tensors["log_std"][1, 0, 1:].numpy())
    assert (np.abs(rest.mean(0) - mean) < 4 * std / 200).all()
    assert (np.abs(rest.std(0) - std) < 4 * std / np.sqrt(80_000)).all()


@pytest.mark.parametrize("make", [softmax_set, gaussian_set])
def test_a_saved_set_is_the_same_in_another_process(make, tmp_path):
    policies = make()
    policies.save(tmp_path / "set")
    obs = [0, 3] if policies.spec.n_cells else [[0.5] * 5, [-1.0] * 5]
    code = (
        "import sys, numpy as np; from pathlib import Path; from manyfold.networks import NetworkPolicySet;"
        f"print(NetworkPolicySet.load(Path(sys.argv[1])).probs(np.array({obs}), 1).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "set"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == policies.probs(np.array(obs), 1).tolist()


def test_some_policies_can_be_picked():
    policies = gaussian_set()
    two = policies.pick([2, 0])
    assert two.spec.names == ("c", "a")
    obs = np.zeros((1, 5))
    np.testing.assert_allclose(two.probs(obs, 0), policies.probs(obs, 0)[[2, 0]], rtol=1e-6)


def change(path, **values):
    about = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps({**about, **values}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: change(p, version=2), "set.json: version 2, expected 1; train the targets again"),
        (lambda p: change(p, format="other"), "set.json: expected a manyfold policy set"),
        (lambda p: change(p, n_cells=16), "set.json is not what was saved with it; was it edited?"),
        (lambda p: change(p, horizon=99), "set.json is not what was saved with it; was it edited?"),
        (lambda p: change(p, names=None), "set.json is not what was saved with it; was it edited?"),
        (lambda p: p.with_suffix(".json").write_text('{"format": "many'), "set.json: not JSON"),
        (lambda p: p.with_suffix(".json").write_text("[]"), "set.json: expected a manyfold policy set"),
        (
            lambda p: p.with_suffix(".safetensors").write_bytes(p.with_suffix(".safetensors").read_bytes()[:-9]),
            "set.safetensors: its content is not what set.json describes",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_one_line(spoil, message, tmp_path):
    softmax_set().save(tmp_path / "set")
    spoil(tmp_path / "set")
    with pytest.raises(ValueError) as error:  # noqa: PT011 - matched below, with its path
        NetworkPolicySet.load(tmp_path / "set")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (softmax_set, {"n_cells": 16}, r"w1: expected shape \[3, 17, 8\], found \[3, 10, 8\]"),
        (softmax_set, {"n_actions": 5}, r"w3: expected shape \[3, 8, 5\], found \[3, 8, 4\]"),
        (softmax_set, {"names": ("a",)}, r"w1: expected shape \[1, 10, 8\]"),
        (softmax_set, {"kind": "linear"}, "kind is 'linear', expected softmax or binned_gaussian"),
        (softmax_set, {"horizon": 0}, "horizon is 0, expected a whole number of at least 1"),
        (softmax_set, {"n_cells": "9"}, "n_cells is '9', expected a whole number of at least 0"),
        (gaussian_set, {"low": 5.0}, "low is 5.0 and high 1.0, expected low < high"),
        (gaussian_set, {"n_features": 6}, r"w1: expected shape \[3, 6, 8\], found \[3, 5, 8\]"),
    ],
)
def test_tensors_and_description_must_fit(make, changes, message):
    policies = make()
    with pytest.raises(ValueError, match=message):
        NetworkPolicySet(policies.tensors, dataclasses.replace(policies.spec, **changes))


def test_a_feature_that_never_varied_is_no_division_by_zero():
    policies = gaussian_set()
    policies.tensors["obs_var"][:, 2] = 0.0
    probs = policies.probs(np.full((1, 5), 3.0), 0)
    np.testing.assert_allclose(probs.sum(-1), 1)
    policies.tensors["obs_var"][0, 2] = -1.0
    with pytest.raises(ValueError, match="obs_var: expected 0 or more"):
        NetworkPolicySet(policies.tensors, policies.spec)


def test_a_missing_field_is_named(tmp_path):
    softmax_set().save(tmp_path / "set")
    about = json.loads((tmp_path / "set.json").read_text())
    del about["horizon"]
    (tmp_path / "set.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"set.json: horizon missing"):
        NetworkPolicySet.load(tmp_path / "set")


def test_diverged_weights_are_refused():
    policies = softmax_set()
    policies.tensors["w2"][1, 2, 3] = torch.nan
    with pytest.raises(ValueError, match="w2: expected finite numbers, found NaN or infinity"):
        NetworkPolicySet(policies.tensors, policies.spec)


@pytest.mark.parametrize(
    ("obs", "t", "message"),
    [
        ([9], 0, r"obs: expected whole numbers \[N\] from 0 to 8"),
        ([0.5], 0, "obs: expected whole numbers"),
        ([0], 3, r"t: expected whole numbers \[N\] from 0 to 2"),
    ],
)
def test_observations_out_of_range_are_refused(obs, t, message):
    with pytest.raises(ValueError, match=message):
        softmax_set().probs(np.array(obs), t)


def test_observations_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"obs has shape \[2, 4\], expected \[N, 5 or more\]"):
        gaussian_set().probs(np.zeros((2, 4)), 0)
