"""Value nets against one row computed by hand, and their files."""

import dataclasses

import numpy as np
import pytest
import torch

from manyfold.fqe import nets
from manyfold.fqe.nets import Check, Shape, ValueNets
from tests.crafted import craft, edit
from tests.networks import mlp_policies, nets_from_table, value_nets, value_row

CURVES = [Check(10, 0.5, 0.6), Check(20, 0.25, float("inf"))]


def vectors(seed=0):
    return value_nets(mlp_policies(k=3, horizon=5, n_actions=2, n_features=4), seed)


def indices(seed=0):
    return value_nets(mlp_policies(k=3, horizon=5, n_actions=2, n_states=7), seed)


def two_layers(seed=0):
    shape = dataclasses.replace(vectors().shape, layers=2, cosines=3)
    rng = np.random.default_rng(seed)
    flat = torch.from_numpy(rng.normal(0, 0.5, nets.size(shape)).astype(np.float32))
    return ValueNets(shape, flat, torch.zeros(4), torch.ones(4), torch.ones(3))


def test_predictions_of_two_layers_and_of_cosines_are_the_definitions():
    found = two_layers()
    p, h = {name: x.double().numpy() for name, x in found.parameters.items()}, found.shape.hidden
    state = np.random.default_rng(0).normal(size=4)
    predicted = found.predict(state[None], 2)[:, 0]
    moment = [1, 0, -1]  # cos(0), cos(pi / 2), cos(pi): the third of five steps
    for k in range(3):
        columns = slice(k * h, (k + 1) * h)
        first = np.maximum(state @ p["w1"][:, columns] + moment @ p["w1_time"][:, columns], 0)
        second = np.maximum(first @ p["w_mid"][k] + p["b_mid"][k, 0], 0)
        np.testing.assert_allclose(predicted[k], p["w2"][:, columns] @ second + p["b2"][k, 0], rtol=1e-4, atol=1e-5)


def test_predictions_of_vectors_are_the_definitions():
    found = vectors()
    states, t = np.random.default_rng(0).normal(0, 20, (6, 4)), np.array([0, 1, 2, 3, 4, 4])
    predicted = found.predict(states, t)
    assert predicted.shape == (3, 6, 2)
    for i in range(6):
        for k in range(3):
            np.testing.assert_allclose(predicted[k, i], value_row(found, k, states[i], t[i]), rtol=1e-4, atol=1e-5)


def test_predictions_of_indices_are_the_definitions():
    found = indices()
    p, h = {name: x.double().numpy() for name, x in found.parameters.items()}, found.shape.hidden
    table = found.table()
    assert table.shape == (3, 5, 7, 2)
    for k, t, s in ((0, 0, 0), (2, 4, 6), (1, 3, 2)):
        columns = slice(k * h, (k + 1) * h)
        hidden = np.maximum(p["w1"][s, columns] + p["w1_time"][t, columns], 0)
        expected = float(found.scale[k]) * (p["w2"][:, columns] @ hidden + p["b2"][k, 0])
        np.testing.assert_allclose(table[k, t, s], expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.predict([[s]], t)[k, 0], expected, rtol=1e-4, atol=1e-5)


def test_nets_can_be_a_table():
    table = np.random.default_rng(0).standard_normal((2, 3, 4, 2))
    np.testing.assert_allclose(nets_from_table(table).table(), table, rtol=1e-6)


def test_a_state_far_outside_of_the_data_is_clipped():
    shape = Shape(1, 1, 1, 2, 0, 1)
    ones = torch.ones(1)
    found = ValueNets(shape, torch.ones(nets.size(shape)), torch.zeros(1), ones, ones)
    assert found.predict([[1e6]], 0) == found.predict([[nets.LIMIT]], 0) == 2 * (nets.LIMIT + 1) + 1


@pytest.mark.parametrize("make", [vectors, indices, two_layers])
def test_the_module_for_export_computes_the_same(make):
    found = make()
    rng = np.random.default_rng(0)
    n_states, width = found.shape.n_states, found.shape.width
    x = rng.integers(n_states, size=(20, 1)) if n_states else rng.normal(0, 9, (20, width))
    x, t = x.astype(np.float32), rng.integers(5, size=20)
    module = found.module()
    np.testing.assert_allclose(
        module(torch.from_numpy(x), torch.from_numpy(t)).numpy(), found.predict(x, t), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("states", "t", "message"),
    [
        (np.zeros((2, 3)), 0, r"states has shape \[2, 3\], expected \[N, 4\]"),
        (np.zeros(4), 0, r"states has shape \[4\], expected \[N, 4\]"),
        (np.zeros((2, 4)), 5, r"t: expected whole numbers \[N\] from 0 to 4, found"),
        (np.zeros((2, 4)), [0, -1], r"t: expected whole numbers \[N\] from 0 to 4, found"),
        (np.zeros((2, 4)), [0, 1, 2], r"t: expected one step for each of 2 observations or one for all, found 3"),
    ],
)
def test_other_states_and_steps_are_refused(states, t, message):
    with pytest.raises(ValueError, match=message):
        vectors().predict(states, t)


@pytest.mark.parametrize("make", [vectors, indices, two_layers])
def test_saved_nets_and_curves_are_the_same(make, tmp_path):
    first = make()
    first.save(tmp_path / "q.safetensors", CURVES)
    again, curves = ValueNets.load(tmp_path / "q.safetensors")
    assert curves == CURVES
    assert again.shape == first.shape
    for name in ("flat", "centre", "spread", "scale"):
        assert torch.equal(getattr(again, name), getattr(first, name))
    make().save(tmp_path / "twin.safetensors", CURVES)
    assert (tmp_path / "twin.safetensors").read_bytes() == (tmp_path / "q.safetensors").read_bytes()


def set_shape(path, **changes):
    craft(path, lambda about: about["shape"].update(changes))


def overflow(path):
    """Sizes whose product is 2^64 + 64: as a 64-bit number it would be the 64 numbers that are there."""
    ones = {"flat": torch.ones(64), "scale": torch.ones(64), "centre": torch.ones(1), "spread": torch.ones(1)}
    shape = {"n_policies": 64, "hidden": 2**29, "n_states": 2**29 - 2, "horizon": 1, "n_actions": 1, "width": 1}
    craft(path, lambda about: about["shape"].update(shape), ones)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-50]), "not a valid safetensors file"),
        (lambda p: edit(p, curves=[]), "its content does not match its checksum; was it damaged or edited?"),
        (lambda p: edit(p, format="manyfold-policies"), "expected manyfold-values, found 'manyfold-policies'"),
        (lambda p: edit(p, version=3), f"version 3, expected {nets.VERSION}; run the stage again"),
        (
            lambda p: craft(p, lambda about: about.update(shape=None)),
            "expected a shape with hidden, horizon, n_actions",
        ),
        (lambda p: craft(p, lambda about: about["shape"].pop("width")), "expected a shape with hidden, horizon"),
        (lambda p: set_shape(p, more=1), "expected a shape with hidden, horizon"),
        (lambda p: set_shape(p, hidden="6"), "hidden is '6', expected a whole number from 1 to 1e+09"),
        (lambda p: set_shape(p, hidden=6.0), "hidden is 6.0, expected a whole number from 1 to 1e+09"),
        (lambda p: set_shape(p, width=True), "width is True, expected a whole number from 1 to 1e+09"),
        (lambda p: set_shape(p, hidden=10**30), "hidden is 1000000000000000000000000000000, expected a whole number"),
        (lambda p: set_shape(p, hidden=10**9), "flat does not have shape"),
        (lambda p: set_shape(p, n_states=10**9), "flat does not have shape"),
        (lambda p: set_shape(p, layers=2), "flat does not have shape"),
        (lambda p: set_shape(p, cosines=-1), "cosines is -1, expected a whole number from 0 to 1e+09"),
        (lambda p: set_shape(p, layers=3), "layers is 3, expected a whole number from 1 to 2"),
        (lambda p: set_shape(p, width=5), "flat does not have shape"),
        (overflow, "flat does not have shape"),
        (lambda p: craft(p, tensors={"scale": torch.ones(2)}), "scale does not have shape [3]"),
        (lambda p: craft(p, tensors={"centre": None}), "centre does not have shape [4]"),
        (lambda p: craft(p, tensors={"spread": torch.ones(4).int()}), "spread is torch.int32, expected float32"),
        (lambda p: craft(p, tensors={"more": torch.ones(1)}), "more belongs to no value nets, expected flat, centre"),
        (lambda p: craft(p, tensors={"scale": torch.tensor([1.0, torch.nan, 1.0])}), "scale has NaN or infinity"),
        (lambda p: craft(p, lambda about: about.update(curves={})), "curves is {}, expected another type"),
        (lambda p: craft(p, lambda about: about.update(curves=[1])), "curves are not [update, train"),
        (
            lambda p: craft(p, lambda about: about.update(curves=[[1, 2]])),
            "curves are not [update, train",
        ),
        (
            lambda p: craft(p, lambda about: about.update(curves=[[1, "x", 2]])),
            "curves are not [update, train",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_one_line(spoil, message, tmp_path):
    path = tmp_path / "q.safetensors"
    vectors().save(path, CURVES)
    spoil(path)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - matched below, with its path
        ValueNets.load(path)
    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < len(str(path)) + 250
