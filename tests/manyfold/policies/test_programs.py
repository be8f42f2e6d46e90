"""Programs: ONNX, torch.export and TorchScript, against the networks they were made of."""

import copy
import pickle
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

from manyfold.policies.heads import Gaussian, MultiCategorical
from manyfold.policies.imported import Options
from manyfold.policies.importing import load_file
from manyfold.policies.loading import load_policies
from tests import program_originals
from tests.originals import BOX, VECTOR, deviations, largest, observations, spread
from tests.payloads import proof
from tests.program_originals import D, Network, to_export, to_onnx, to_script

OBS = observations(VECTOR, 50)
WIDTH = VECTOR.shape[0]


@pytest.mark.parametrize("name", program_originals.CASES)
def test_policies_are_what_the_programs_say(name, tmp_path):
    original = program_originals.make(name, tmp_path, n=200)
    assert max(deviations(original)) < 1e-6
    assert max(deviations(original, copies=2)) < 1e-6


class Outputs(nn.Module):
    """Any outputs of a linear layer's numbers."""

    def __init__(self, function, outputs=2 * D):
        super().__init__()
        self.layer, self.function = spread(nn.Linear(WIDTH, outputs)), function

    def forward(self, obs):
        return self.function(self.layer(obs))


def onnx(folder, network, names=("mean", "log_std"), batch=None):
    path = folder / "policy.onnx"
    to_onnx(network.eval(), path, list(names), batch)
    return path


@torch.no_grad()
def test_onnx_is_the_torch_network_up_to_rounding(tmp_path):
    network = spread(Network("mean, log_std"))
    found = load_policies(onnx(tmp_path, network)).parameters(OBS, 0)[0]
    assert largest(found, torch.cat(network(torch.as_tensor(OBS)), -1)) < 1e-5


def test_weights_in_a_file_beside_an_onnx_graph_belong_to_it(tmp_path):
    path, data = onnx(tmp_path, Network("logits"), ["out"]), tmp_path / "policy.onnx.data"
    found = load_file(path)
    assert len(found.sha256) == 1 + data.is_file()
    if data.is_file():
        data.unlink()
        with pytest.raises(ValueError, match="^[^\n]*cannot be read .* its .data left behind"):
            load_policies(path)


def test_a_squashed_head_may_be_said(tmp_path):
    head = Gaussian(tuple(map(float, BOX.low)), tuple(map(float, BOX.high)), squashed=True)
    assert load_policies(onnx(tmp_path, Network("mean, log_std")), head=head).head == head
    path = onnx(tmp_path, Network("logits"), ["out"])
    for wrong in (MultiCategorical((2, 2)), Gaussian((-1.0,), (1.0,))):
        with pytest.raises(ValueError, match="^[^\n]*1 outputs of 6 numbers together, expected"):
            load_policies(path, head=wrong)


@torch.no_grad()
def test_greedy_takes_the_mean(tmp_path):
    network = spread(Network("mean, log_std"))
    path = tmp_path / "policy.pt2"
    to_export(network, path, [])
    actors = load_policies(path, greedy=True, trust=True)
    mean, _ = network(torch.as_tensor(OBS))
    assert largest(actors.acts[0](OBS, np.zeros(50, np.int64)), mean) < 1e-6


def test_several_programs_are_called_one_by_one(tmp_path):
    """Programs of the same shapes that compute different functions are not taken for one batch."""
    names = ("policy.onnx", "policy.pt2", "policy.pt")
    for write, name in zip((to_onnx, to_export, to_script), names, strict=True):
        expected = []
        for i, function in enumerate((torch.tanh, torch.relu)):
            (tmp_path / str(i)).mkdir(exist_ok=True)
            path = tmp_path / str(i) / name
            write(Outputs(function).eval(), path, ["out"])
            expected.append(load_policies(path, trust=True).probs(OBS, 0)[0])
        together = load_policies([tmp_path / str(i) / name for i in range(2)], trust=True)
        np.testing.assert_array_equal(together.probs(OBS, 0), expected)
        assert together.names == ("0", "1")
        assert largest(*expected) > 0.01


def test_an_onnx_program_can_be_copied(tmp_path):
    module = load_file(onnx(tmp_path, Network("logits"), ["out"])).module
    x = torch.as_tensor(OBS)
    np.testing.assert_array_equal(copy.deepcopy(module)(x), module(x))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(module))(x), module(x))


@pytest.mark.parametrize(("write", "name"), [(to_export, "policy.pt2"), (to_script, "policy.pt")])
def test_programs_that_bring_code_must_be_trusted(write, name, tmp_path):
    path = tmp_path / name
    write(Network("logits"), path, [])
    with pytest.raises(ValueError, match="^[^\n]*expected trust=True if you know where it comes from, or ONNX"):
        load_policies(path)
    assert load_policies(path, trust=True).n_actions == 2 * D


@pytest.mark.parametrize("name", ["constants.pkl", "serialized_exported_program.json"])
def test_payloads_in_programs_are_not_run_untrusted(name, tmp_path):
    payload, made = proof(tmp_path)
    path = tmp_path / "policy.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for part in (name, "data.pkl", "archive_format", "data/weights/model.pt"):
            archive.writestr(f"policy/{part}", pickle.dumps(payload))
    with pytest.raises(ValueError, match="^[^\n]*expected trust=True"):
        load_policies(path)
    assert not made.exists()


@pytest.mark.parametrize(
    ("function", "names", "message"),
    [
        (lambda y: (y[:, :3], y[:, 3:].exp()), ("a", "b"), "its second output 'b' is positive, so that it may be"),
        (lambda y: (y[:, :3], -y[:, 3:].exp()), ("mean", "std"), "output std is 0 or less, expected deviations"),
        (lambda y: (y[:, :3], y[:, 3:]), ("mean", "values"), "its second output is values, expected log_std or std"),
        (lambda y: (y[:, :3], y[:, 3:5]), ("a", "b"), r"outputs \[\[16, 3\], \[16, 2\]\] for 16 observations"),
        (lambda y: y.argmax(-1), ("action",), r"outputs \[\[16\]\] for 16 observations, .* does it give actions"),
        (lambda y: (y, y, y), ("a", "b", "c"), r"outputs \[\[16, 6\], \[16, 6\], \[16, 6\]\]"),
        (lambda y: torch.log(y - 1e9), ("out",), "it gives NaN or infinity at ordinary observations"),
    ],
)
def test_outputs_that_say_no_distribution_get_one_line(function, names, message, tmp_path):
    path = onnx(tmp_path, Outputs(function), names)
    with pytest.raises(ValueError, match=f"^{path}: {message}[^\n]*$"):
        load_policies(path)


def test_unnamed_outputs_are_told_apart_by_their_sign(tmp_path):
    """Of torch programs that give tuples nothing says std or log_std."""
    path = tmp_path / "policy.pt2"
    to_export(Network("mean, log_std"), path, [])
    assert "negative somewhere, so it is taken as log_std" in " ".join(load_file(path, Options(trust=True)).notes)
    to_export(Network("mean, std"), path, [])
    with pytest.raises(ValueError, match="^[^\n]*second output is positive, so that it may be a deviation"):
        load_policies(path, trust=True)


def test_a_program_takes_no_normaliser_of_its_folder(tmp_path):
    """A zip's, most likely, while a program has its own inside; one under the program's name is meant for it."""
    path = onnx(tmp_path, Network("logits"), ["out"])
    plain = load_policies(path).probs(OBS, 0)
    mean, var = np.linspace(-1, 5, 5), np.linspace(0.1, 9, 5)
    (tmp_path / "vecnormalize.pkl").write_bytes(b"whatever")
    np.testing.assert_array_equal(load_policies(path).probs(OBS, 0), plain)
    assert "vecnormalize.pkl is not used for a program; say normaliser=" in " ".join(load_file(path).notes)
    np.savez(tmp_path / "policy.normalizer.npz", mean=mean, var=var)
    inside = ((OBS - mean) / np.sqrt(var + 1e-8)).astype(np.float32)
    expected = load_policies(path, normaliser="none").probs(inside, 0)
    np.testing.assert_array_equal(load_policies(path).probs(OBS, 0), expected)


def test_what_is_assumed_is_noted(tmp_path):
    def notes(network, names, batch=None):
        return " ".join(load_file(onnx(tmp_path, network, names, batch)).notes)

    assert "taken as logits; if they are values of actions, this is another policy" in notes(Network("logits"), ["q"])
    assert "outputs are probabilities" in notes(Network("probabilities"), ["p"])
    assert "no action bounds" in notes(Network("mean, std"), ["mean", "std"])
    assert "exported for batches of 3: slow" in notes(Network("logits"), ["out"], batch=3)


def test_files_that_are_no_programs_get_one_line(tmp_path):
    path = onnx(tmp_path, Network("logits"), ["out"])
    whole = path.read_bytes()
    for content in (b"", b"nothing", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"^{path}: cannot be read [^\n]*expected a whole ONNX file[^\n]*$"):
            load_policies(path)
    for write, name in ((to_export, "policy.pt2"), (to_script, "policy.pt")):
        program = tmp_path / name
        write(Network("logits"), program, [])
        program.write_bytes(program.read_bytes()[:-200])
        with pytest.raises(ValueError, match=f"^{program}: (not a readable zip|no weights could be read) [^\n]*$"):
            load_policies(program, trust=True)


class TwoInputs(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor):
        return a + b


def test_programs_of_several_inputs_are_refused(tmp_path):
    path = tmp_path / "policy.pt2"
    torch.export.save(torch.export.export(TwoInputs(), (torch.zeros(2, 5), torch.zeros(2, 5))), path)
    with pytest.raises(ValueError, match="^[^\n]*2 inputs, expected one: the observations"):
        load_policies(path, trust=True)
