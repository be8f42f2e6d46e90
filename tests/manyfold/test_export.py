"""Exported behavior policies, loaded in an interpreter in which manyfold cannot be imported."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from manyfold.behavior import Behavior
from manyfold.export import Exporter, sha256
from manyfold.networks import NetworkPolicySet, Spec
from manyfold.values import Shape, ValueNets, size

K, HORIZON, HIDDEN = 3, 7, 6
READ = """
import json, sys
sys.modules["manyfold"] = None  # an import of it would fail
import numpy as np
import onnxruntime
import torch
x = np.load("inputs.npz")
session = onnxruntime.InferenceSession("mu.onnx")
onnx = session.run(["mu", "targets"], {"observation": x["observation"], "t": x["t"]})
program = torch.export.load("mu.pt2").module()
pt2 = [y.detach().numpy() for y in program(torch.from_numpy(x["observation"]), torch.from_numpy(x["t"]))]
np.savez("outputs.npz", onnx_mu=onnx[0], onnx_targets=onnx[1], pt2_mu=pt2[0], pt2_targets=pt2[1])
"""


def behavior(kind, seed, alpha=0.0):
    """Random policies and fits; `kind` as in Spec."""
    generator = torch.Generator().manual_seed(seed)
    cells, features, extra = (9, 0, 0) if kind == "softmax" else (0, 4, 2)
    actions, out = (4, 4) if kind == "softmax" else (10, 3)
    inputs = cells + 1 if cells else features
    shapes = {
        "w1": (K, inputs, 8),
        "b1": (K, 1, 8),
        "w2": (K, 8, 8),
        "b2": (K, 1, 8),
        "w3": (K, 8, out),
        "b3": (K, 1, out),
    }
    if kind != "softmax":
        shapes |= {"log_std": (K, 1, out), "obs_mean": (K, features), "obs_var": (K, features)}
    tensors = {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}
    if "obs_var" in tensors:
        tensors["obs_var"] = tensors["obs_var"].abs().double() + 0.1
        tensors["obs_mean"] = tensors["obs_mean"].double()
    spec = Spec("test", kind, HORIZON, actions, cells, features, -1.0, 1.0, tuple("abc"))
    policies = NetworkPolicySet(tensors, spec)
    width = 1 if cells else features + extra
    shape = Shape(HORIZON, actions, K, HIDDEN, cells, width)

    def nets():
        flat = torch.randn(size(shape), generator=generator)
        spread = torch.rand(width, generator=generator) + 0.5
        return ValueNets(
            shape, flat, torch.randn(width, generator=generator), spread, torch.rand(K, generator=generator) + 1
        )

    return Behavior(policies, nets(), nets(), alpha)


@pytest.mark.parametrize(("kind", "alpha"), [("softmax", 0.0), ("binned_gaussian", 0.1)])
def test_another_machine_computes_the_same(kind, alpha, tmp_path):
    """The second of two that share one trace, so that no number of the first may be left in it."""
    exporter = Exporter(behavior(kind, 0, alpha))
    second = behavior(kind, 1, alpha)
    exporter.save(second, tmp_path, "0" * 64)
    rng = np.random.default_rng(0)
    n = 50
    if kind == "softmax":
        observation = rng.integers(9, size=(n, 1)).astype(np.float32)
    else:
        observation = rng.standard_normal((n, 6)).astype(np.float32)
        observation[:5] *= 1e4  # clipped
    t = rng.integers(HORIZON, size=n)
    np.savez(tmp_path / "inputs.npz", observation=observation, t=t)
    done = subprocess.run([sys.executable, "-c", READ], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "outputs.npz")
    for form in ("onnx", "pt2"):
        np.testing.assert_allclose(found[f"{form}_mu"], second.mu(observation, t), atol=1e-6)
        np.testing.assert_allclose(found[f"{form}_targets"], second.fitted(observation, t).policies, atol=1e-6)
    assert (
        np.abs(
            found["onnx_mu"] - exporter.module(torch.zeros(n, observation.shape[1]), torch.zeros(n).long())[0].numpy()
        ).max()
        > 1e-3
    )
    about = json.loads((tmp_path / "mu.json").read_text())
    assert about["policies"] == ["a", "b", "c"]
    assert (about["env"], about["horizon"], about["actions"], about["alpha"]) == (
        "test",
        HORIZON,
        second.policies.n_actions,
        alpha,
    )
    assert about["offline_data_sha256"] == "0" * 64
    assert about["sha256"]["mu.onnx"] == sha256(tmp_path / "mu.onnx")


def test_floors_are_inside(tmp_path):
    """A q_hat far below 0 and q = 0: without the floor nothing would be left to normalise."""
    broken = behavior("softmax", 2)
    for nets, value in ((broken.q, 0.0), (broken.q_hat, -5.0)):
        nets.flat.zero_()
        nets.parameters["b2"].fill_(value)
    mu, _ = Exporter(broken).module(torch.zeros(1, 1), torch.zeros(1).long())
    np.testing.assert_allclose(mu.numpy(), broken.mu(np.zeros((1, 1)), 0), atol=1e-6)
    assert mu.sum().item() == pytest.approx(1)


def test_another_shape_is_refused(tmp_path):
    with pytest.raises(ValueError, match="as traced"):
        Exporter(behavior("softmax", 0)).save(behavior("binned_gaussian", 0), tmp_path, "")
