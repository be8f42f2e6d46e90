"""Exported behavior policies of every kind, read in an interpreter in which manyfold cannot be imported."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from manyfold.design.behavior import Behavior
from manyfold.design.export import Exported, export
from manyfold.files import sha256
from tests.networks import value_nets
from tests.policy_kinds import HORIZON, KINDS, NOT_EXPORTED, observations

READ = """
import sys
from pathlib import Path
sys.modules["manyfold"] = None  # an import of it would fail
import numpy as np
import onnxruntime
import torch
for folder in map(Path, sys.argv[1:]):
    x = np.load(folder / "inputs.npz")
    session = onnxruntime.InferenceSession(folder / "mu.onnx")
    onnx = session.run(["mu", "targets"], {"observation": x["observation"], "t": x["t"]})
    program = torch.export.load(folder / "mu.pt2").module()
    pt2 = [y.detach().numpy() for y in program(torch.from_numpy(x["observation"]), torch.from_numpy(x["t"]))]
    np.savez(folder / "outputs.npz", onnx_mu=onnx[0], onnx_targets=onnx[1], pt2_mu=pt2[0], pt2_targets=pt2[1])
"""
EXPORTED = [kind for kind in KINDS if kind not in NOT_EXPORTED]


def behavior(kind, alpha=0.0):
    """Policies of this kind with random fits; the binned Gaussians' fits see more of the state than they do."""
    policies = KINDS[kind]()
    width = policies.width + 2 if kind.startswith("binned") else None
    return Behavior(policies, value_nets(policies, 1, width=width), value_nets(policies, 2, width=width), alpha)


def name(kind):
    return re.sub(r"\W+", "-", kind)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Every kind in a folder of its own, and what another interpreter computes from it."""
    folder = tmp_path_factory.mktemp("exported")
    designs = {kind: behavior(kind, 0.1 if i % 2 else 0.0) for i, kind in enumerate(EXPORTED)}
    for kind, design in designs.items():
        (folder / name(kind)).mkdir()
        export(design, folder / name(kind), "my-env", "0" * 64)
        observation, t = observations(design.policies, 50)
        if not design.policies.n_states:
            more = np.random.default_rng(1).standard_normal((50, design.q.shape.width)).astype(np.float32)
            more[:, : observation.shape[1]] = observation
            observation = more
            observation[:5] *= 1e3  # clipped
        np.savez(folder / name(kind) / "inputs.npz", observation=observation, t=t)
    folders = [folder / name(kind) for kind in EXPORTED]
    done = subprocess.run([sys.executable, "-c", READ, *folders], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {kind: (designs[kind], folder / name(kind)) for kind in EXPORTED}


@pytest.mark.parametrize("kind", EXPORTED)
def test_another_machine_computes_the_same(kind, exported):
    design, folder = exported[kind]
    x, found = np.load(folder / "inputs.npz"), np.load(folder / "outputs.npz")
    fitted = design.fitted(x["observation"], x["t"])
    for form in ("onnx", "pt2"):
        np.testing.assert_allclose(found[f"{form}_mu"], design.design(fitted), atol=1e-5)
        np.testing.assert_allclose(found[f"{form}_targets"], fitted.policies, atol=1e-5)
    np.testing.assert_allclose(fitted.policies, design.policies.probs(x["observation"], x["t"]), atol=1e-12)
    assert fitted.policies.std(1).max() > 0.01  # they do depend on what they see


@pytest.mark.parametrize("kind", EXPORTED)
def test_a_description_says_what_the_files_are_for(kind, exported):
    design, folder = exported[kind]
    about, policies = json.loads((folder / "mu.json").read_text()), design.policies
    assert about["format"] == "manyfold-behavior"
    assert (about["env"], about["horizon"], about["actions"]) == ("my-env", HORIZON, policies.n_actions)
    assert about["policies"] == list(policies.names)
    assert about["alpha"] == design.alpha
    assert about["inputs"] == {"observation": ["N", design.q.shape.width], "t": ["N"]}
    assert about["outputs"] == {"mu": ["N", 4], "targets": [policies.n_policies, "N", 4]}
    assert about["observation"] == ("index of the state" if policies.n_states else "vector of the state")
    assert about["action_range"] == ([-1.0, 1.0] if kind.startswith("binned") else None)
    assert about["offline_data_sha256"] == "0" * 64
    assert about["sha256"] == {file: sha256(folder / file) for file in ("mu.pt2", "mu.onnx")}


@pytest.mark.parametrize("kind", ["indices, 3 layers", "binned Gaussian"])
def test_the_same_behavior_gives_the_same_bytes_whatever_was_exported_before(kind, exported, tmp_path):
    first = exported[kind][1]
    export(exported[kind][0], tmp_path, "my-env", "0" * 64)
    for file in ("mu.pt2", "mu.onnx", "mu.json"):
        assert (tmp_path / file).read_bytes() == (first / file).read_bytes(), file
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mu.json", "mu.onnx", "mu.pt2"]


def test_another_process_and_installation_give_the_same_bytes(exported, tmp_path):
    """No path, line, time or address is inside: from a copy of the code in another folder, below a comment more."""
    root, copy = Path(__file__).parents[3], tmp_path / "elsewhere"
    for package in ("manyfold", "tests"):
        shutil.copytree(root / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("manyfold/policies/tabular.py", "manyfold/fqe/nets.py", "manyfold/design/export.py"):
        (copy / file).write_text("# a line more\n" + (copy / file).read_text())
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path;"
        "import manyfold.design.export as module;"
        "from tests.manyfold.design.test_export import behavior; assert module.__file__.startswith(sys.argv[2]);"
        "module.export(behavior('table'), Path(sys.argv[1]), 'my-env', '0' * 64)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path, copy], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for file in ("mu.pt2", "mu.onnx", "mu.json"):
        content = (tmp_path / file).read_bytes()
        assert content == (exported["table"][1] / file).read_bytes(), file
        assert not any(path in content for path in (str(tmp_path).encode(), b"site-packages", b"export.py"))


@pytest.mark.parametrize("kind", NOT_EXPORTED)
def test_callables_are_refused_in_one_line_before_anything_is_written(kind, tmp_path):
    with pytest.raises(ValueError, match="^CallablePolicySet cannot be exported, expected a table, MLPs or torch mod"):
        export(behavior(kind), tmp_path, "my-env")
    assert list(tmp_path.iterdir()) == []


def test_floors_are_inside():
    """A q_hat far below 0 and q = 0: without the floor nothing would be left to normalise."""
    broken = behavior("indices, 3 layers")
    for nets, value in ((broken.q, 0.0), (broken.q_hat, -5.0)):
        nets.flat.zero_()
        nets.parameters["b2"].fill_(value)
    mu, _ = Exported(broken)(torch.zeros(1, 1), torch.zeros(1).long())
    np.testing.assert_allclose(mu.numpy(), broken.mu(np.zeros((1, 1)), 0), atol=1e-6)
    assert mu.sum().item() == pytest.approx(1)


def test_without_onnx_one_line_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ValueError, match=r"^export needs onnx and onnxscript; install the extra `onnx`: pip "):
        export(behavior("table"), tmp_path, "my-env")
