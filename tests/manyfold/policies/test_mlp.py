"""MLP policies against each network alone, a layer after the other, and their files."""

import dataclasses
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from manyfold.policies import load
from manyfold.policies.mlp import ACTIVATIONS, MlpPolicySet, Spec, bin_probs
from tests.crafted import craft, edit, read
from tests.networks import mlp_policies

K, H = 3, 8


def softmax_set():
    rng = torch.Generator().manual_seed(0)
    shapes = {"w1": (K, 10, H), "b1": (K, 1, H), "w2": (K, H, H), "b2": (K, 1, H), "w3": (K, H, 4), "b3": (K, 1, 4)}
    tensors = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    return MlpPolicySet(tensors, Spec("gridworld-27", "softmax", 3, 4, ("a", "b", "c"), n_states=9))


def gaussian_set(width=5, out=3):
    rng = torch.Generator().manual_seed(1)
    shapes = {"w1": (K, width, H), "b1": (K, 1, H), "w2": (K, H, H), "b2": (K, 1, H), "w3": (K, H, out)}
    shapes |= {"b3": (K, 1, out), "log_std": (K, 1, out), "obs_mean": (K, width), "obs_var": (K, width)}
    tensors = {name: 0.4 * torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    tensors["obs_var"] = tensors["obs_var"].abs() + 0.1
    return MlpPolicySet(tensors, Spec("hopper", "binned_gaussian", 100, 10, ("a", "b", "c"), 0, width, -1.0, 1.0))


def by_hand(policies, k, obs, t=0):
    """One policy at one observation, a layer after the other."""
    p = {name: x[k].double().numpy() for name, x in policies.tensors.items()}
    if policies.spec.n_states:
        x = np.zeros(policies.spec.n_states + 1)
        x[obs], x[-1] = 1.0, t / policies.spec.horizon
    else:
        x = np.clip((obs - p["obs_mean"]) / np.sqrt(p["obs_var"] + 1e-8), -10, 10)
    for layer in "12":
        x = np.tanh(x @ p[f"w{layer}"] + p[f"b{layer}"][0])
    return x @ p["w3"] + p["b3"][0]


def test_softmax_probs_equal_each_policy_alone():
    policies = softmax_set()
    states, steps = np.array([0, 8, 4, 4]), np.array([0, 2, 1, 0])
    probs = policies.probs(states, steps)
    assert probs.shape == (K, 4, 4)
    for k in range(K):
        for n, (state, t) in enumerate(zip(states, steps, strict=True)):
            z = by_hand(policies, k, state, t)
            np.testing.assert_allclose(probs[k, n], np.exp(z) / np.exp(z).sum(), rtol=1e-5)
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-12)
    table = policies.table()
    assert table.shape == (K, 3, 9, 4)
    np.testing.assert_allclose(table[:, steps, states], probs, rtol=1e-6)


MODULES = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "leaky_relu": nn.LeakyReLU,
    "sigmoid": nn.Sigmoid,
}


@pytest.mark.parametrize("hidden", [(), (6,), (6, 4), (3, 7, 5)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("normalised", [False, True])
def test_any_depth_and_activation_equals_torchs_own_modules(hidden, activation, normalised):
    """Every policy as nn.Sequential in double precision, on its own normalised and clipped observations."""
    policies = mlp_policies(2, n_features=5, hidden=hidden, activation=activation, normalised=normalised)
    obs = np.random.default_rng(0).normal(0, 4, (9, 5))
    probs = policies.probs(obs, 1)
    for k in range(3):
        p = {name: x[k].double() for name, x in policies.tensors.items()}
        layers = []
        for i in range(1, len(hidden) + 2):
            layer = nn.Linear(*p[f"w{i}"].shape, dtype=torch.float64)
            layer.weight.data, layer.bias.data = p[f"w{i}"].T, p[f"b{i}"][0]
            layers += [layer, MODULES[activation]()]
        x = torch.from_numpy(obs)
        if normalised:
            x = ((x - p["obs_mean"]) / torch.sqrt(p["obs_var"] + 1e-8)).clamp(-10, 10)
        expected = torch.softmax(nn.Sequential(*layers[:-1])(x), -1).detach().numpy()
        np.testing.assert_allclose(probs[k], expected, atol=1e-5)


def test_a_normaliser_makes_another_policy():
    """What was exported without it, once: far from the policy."""
    policies = mlp_policies(2, n_features=5, normalised=True)
    without = {name: x for name, x in policies.tensors.items() if not name.startswith("obs_")}
    obs = np.random.default_rng(0).normal(0, 4, (50, 5))
    assert np.abs(policies.probs(obs, 0) - MlpPolicySet(without, policies.spec).probs(obs, 0)).max() > 0.3


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
    acted = policies.companion(1, mean=True)(obs[:3], np.random.default_rng(1))
    np.testing.assert_allclose(acted, np.tile(mean, (3, 1)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [softmax_set, gaussian_set])
def test_a_saved_set_is_the_same_in_another_process(make, tmp_path):
    policies = make()
    policies.save(tmp_path / "set")
    obs = [0, 3] if policies.spec.n_states else [[0.5] * 5, [-1.0] * 5]
    code = (
        "import sys, numpy as np; from pathlib import Path; from manyfold import policies;"
        f"print(policies.load(Path(sys.argv[1])).probs(np.array({obs}), 1).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "set"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == policies.probs(np.array(obs), 1).tolist()


def test_some_policies_can_be_picked():
    policies = gaussian_set()
    two = policies.pick([2, 0])
    assert two.spec.names == ("c", "a")
    obs = np.zeros((1, 5))
    np.testing.assert_allclose(two.probs(obs, 0), policies.probs(obs, 0)[[2, 0]], rtol=1e-6)


def set_spec(path, **changes):
    """A file whose description was changed by somebody who knows the checksum."""
    craft(path, lambda about: about["spec"].update(changes))


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


EDITED = "its content does not match its checksum; was it damaged or edited?"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: edit(p, version=3), "version 3, expected 2; run the stage again"),
        (lambda p: edit(p, format="other"), "expected manyfold-policies, found 'other'"),
        (lambda p: edit(p, format=None), "expected manyfold-policies, found None"),
        (lambda p: edit(p, kind="tabular"), EDITED),
        (lambda p: edit(p, spec={**crafted_spec(p), "n_states": 16}), EDITED),
        (lambda p: edit(p, spec={**crafted_spec(p), "horizon": 99}), EDITED),
        (lambda p: edit(p, spec={**crafted_spec(p), "names": None}), EDITED),
        (lambda p: edit(p, sha256=None), EDITED),
        (lambda p: flip(p, -9), EDITED),
        (lambda p: p.write_bytes(p.read_bytes()[:-9]), "not a valid safetensors file"),
        (lambda p: p.write_bytes(b""), "not a valid safetensors file"),
        (lambda p: p.write_text('{"format": "many'), "not a valid safetensors file"),
        (lambda p: p.unlink(), "no such file, expected manyfold-policies"),
        (lambda p: craft(p, lambda about: about.update(kind="forest")), "kind is 'forest', expected one of mlp, tabu"),
        (lambda p: craft(p, lambda about: about.update(kind=["mlp"])), "kind is ['mlp'], expected one of mlp, tabu"),
        (lambda p: craft(p, lambda about: about.update(spec=[1])), "expected a description with activation, env, hig"),
        (lambda p: craft(p, lambda about: about["spec"].pop("horizon")), "expected a description with activation, env"),
        (lambda p: set_spec(p, n_cells=9), "expected a description with activation, env, high, horizon"),
        (lambda p: set_spec(p, names="abc"), "expected a description with activation, env, high, horizon"),
        (lambda p: set_spec(p, names=["a", "b", 3]), "names are ('a', 'b', 3), expected one or more policies by name"),
        (lambda p: set_spec(p, names=[]), "names are (), expected one or more policies by name"),
        (lambda p: set_spec(p, n_actions=4.0), "n_actions is 4.0, expected a whole number from 1 to 1e+06"),
        (lambda p: set_spec(p, horizon=True), "horizon is True, expected a whole number from 1 to 1e+06"),
        (lambda p: set_spec(p, horizon=10**9), "horizon is 1000000000, expected a whole number from 1 to 1e+06"),
        (lambda p: set_spec(p, n_states=10**12), "n_states is 1000000000000, expected a whole number from 0 to 1e+09"),
        (lambda p: set_spec(p, n_states=10**9), "w1: expected shape [3, 1000000001, 8], found [3, 10, 8]"),
        (lambda p: set_spec(p, low="x"), "low is 'x', expected a number from"),
        (lambda p: set_spec(p, kind={}), "kind is {}, expected softmax or binned_gaussian"),
        (lambda p: set_spec(p, activation="sine"), "activation is 'sine', expected one of tanh, relu"),
        (lambda p: set_spec(p, activation=[]), "activation is [], expected one of tanh, relu"),
        (lambda p: craft(p, tensors={"w9": torch.ones(1)}), "tensors w9 belong to no softmax policy, expected w1, b1"),
        (lambda p: craft(p, tensors={"log_std": torch.ones(3, 1, 4)}), "tensors log_std belong to no softmax policy"),
        (lambda p: craft(p, tensors={"b2": None}), "b2: expected shape [3, 1, 8], found nothing"),
        (lambda p: craft(p, tensors={"w1": None}), "expected w1 [K, inputs, h], w2, ... of three axes"),
        (lambda p: craft(p, tensors={"w2": torch.ones(2)}), "expected w1 [K, inputs, h], w2, ... of three axes"),
        (lambda p: craft(p, tensors={"b1": torch.ones(3, 1, 8).int()}), "b1: expected finite numbers"),
        (
            lambda p: craft(p, tensors={"b1": torch.full((3, 1, 8), torch.nan)}),
            "b1 has NaN or infinity, expected finite numbers; did a fit diverge?",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_one_line(spoil, message, tmp_path):
    softmax_set().save(tmp_path / "set")
    spoil(tmp_path / "set.safetensors")
    with pytest.raises(ValueError) as error:  # noqa: PT011 - matched below, with its path
        load(tmp_path / "set")
    assert str(error.value).startswith(f"{tmp_path / 'set.safetensors'}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < len(str(tmp_path)) + 250


def crafted_spec(path):
    return read(path)[1]["spec"]


def test_sets_whose_names_hold_a_dot_do_not_overwrite_each_other(tmp_path):
    first, second = softmax_set(), softmax_set().pick([1])
    first.save(tmp_path / "gamma-0.95")
    second.save(tmp_path / "gamma-0.99")
    assert load(tmp_path / "gamma-0.95").n_policies == 3
    assert load(tmp_path / "gamma-0.99").names == ("b",)
    assert load(tmp_path / "gamma-0.99.safetensors").names == ("b",)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (softmax_set, {"n_states": 16}, r"w1: expected shape \[3, 17, 8\], found \[3, 10, 8\]"),
        (softmax_set, {"n_actions": 5}, r"w3: expected shape \[3, 8, 5\], found \[3, 8, 4\]"),
        (softmax_set, {"names": ("a",)}, r"w1: expected shape \[1, 10, 8\]"),
        (softmax_set, {"kind": "linear"}, "kind is 'linear', expected softmax or binned_gaussian"),
        (softmax_set, {"horizon": 0}, "horizon is 0, expected a whole number from 1 to 1e.06"),
        (softmax_set, {"n_states": "9"}, "n_states is '9', expected a whole number from 0 to"),
        (gaussian_set, {"low": 5.0}, "low is 5.0 and high 1.0, expected low < high"),
        (gaussian_set, {"n_features": 6}, r"w1: expected shape \[3, 6, 8\], found \[3, 5, 8\]"),
    ],
)
def test_tensors_and_description_must_fit(make, changes, message):
    policies = make()
    with pytest.raises(ValueError, match=message):
        MlpPolicySet(policies.tensors, dataclasses.replace(policies.spec, **changes))


def test_a_feature_that_never_varied_is_no_division_by_zero():
    policies = gaussian_set()
    policies.tensors["obs_var"][:, 2] = 0.0
    probs = policies.probs(np.full((1, 5), 3.0), 0)
    np.testing.assert_allclose(probs.sum(-1), 1)
    policies.tensors["obs_var"][0, 2] = -1.0
    with pytest.raises(ValueError, match="obs_var: expected 0 or more"):
        MlpPolicySet(policies.tensors, policies.spec)


def test_diverged_weights_are_refused():
    policies = softmax_set()
    policies.tensors["w2"][1, 2, 3] = torch.nan
    with pytest.raises(ValueError, match="w2: expected finite numbers, found NaN or infinity"):
        MlpPolicySet(policies.tensors, policies.spec)


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


# --- bin_probs -----------------------------------------------------------------------------------------------------

EDGES = np.linspace(-1, 1, 11)


def test_bin_probs_by_hand():
    # One and two standard deviations hold 0.6827 and 0.9545; what lies beyond the outer edges is in the end bins.
    np.testing.assert_allclose(
        bin_probs(0.0, 0.5, [-1, -0.5, 0, 0.5, 1]), [0.158655, 0.341345, 0.341345, 0.158655], 1e-5
    )
    np.testing.assert_allclose(bin_probs(0.0, 0.5, [-2, -1, 1, 2]), [0.02275, 0.9545, 0.02275], 1e-5)
    assert bin_probs(0.3, 0.5, [-1, 1]) == [1.0]


def test_bin_probs_equal_scipys_and_broadcast():
    rng = np.random.default_rng(0)
    mean, std = rng.normal(size=(6, 1)), rng.uniform(0.05, 2, size=7)
    probs = bin_probs(mean, std, EDGES)
    assert probs.shape == (6, 7, 10)
    cdf = stats.norm(mean[..., None], std[:, None]).cdf(EDGES[1:-1])
    expected = np.diff(cdf, axis=-1, prepend=0.0, append=1.0)
    np.testing.assert_allclose(probs, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("sign", [-1, 1])
def test_far_tails_keep_their_relative_precision(sign):
    z = (EDGES[1:-1] + 0.9) / 0.03  # 1 - Phi(z) is lost to rounding from z = 8.3, the second of these nine, onwards
    survival = stats.norm.sf(z)
    expected = np.r_[stats.norm.cdf(z[0]), survival[:-1] - survival[1:], survival[-1]]
    probs = bin_probs(-0.9 * sign, 0.03, EDGES)[::sign]
    np.testing.assert_allclose(probs[:7], expected[:7], rtol=1e-10)
    assert 0 < probs[6] < 1e-290


@pytest.mark.parametrize("std", [1e-300, 1e-8, 1e-3, 1.0, 1e8, 1e300])
@pytest.mark.parametrize("mean", [-1e300, -50.0, -1.0, -0.2, 0.0, 1e-9, 0.2, 0.77, 1.0, 50.0, 1e300])
def test_rows_are_distributions_whatever_the_gaussian(mean, std):
    probs = bin_probs(mean, std, EDGES)
    assert (probs >= 0).all()
    assert abs(probs.sum() - 1) < 1e-14


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 0.0, EDGES), "std is 0, expected more than 0"),
        ((0.0, [1.0, -2.0], EDGES), "std is -2, expected more than 0; was it saved as a logarithm?"),
        (([0.0, np.nan], 1.0, EDGES), "mean[1] is nan, expected a finite number"),
        ((0.0, 1.0, [0, 1, 1]), "edges are [0. 1. 1.], expected increasing numbers [bins + 1]"),
        ((0.0, 1.0, [0.0]), "edges are [0.], expected increasing numbers [bins + 1]"),
    ],
)
def test_a_bad_gaussian_is_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        bin_probs(*arguments)
