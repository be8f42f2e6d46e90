"""`manyfold study new`: a section of params.yaml, the files it needs, and nothing else."""

import shutil
from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import torch
import yaml
from stable_baselines3 import DQN, PPO

from manyfold import cli, policies
from manyfold.data.transitions import Transitions
from manyfold.policies import TabularPolicySet
from tasks import behavior, offline, params, q, q_hat, studies, study, targets, track
from tasks.sections import with_study
from tests.program_originals import to_onnx
from tests.projects import ROOT
from tests.tasks.conftest import ROBOT_FIT, run

TEXT = (ROOT / "params.yaml").read_text()


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """A DQN and two PPO checkpoints of CartPole."""
    folder = tmp_path_factory.mktemp("training")
    for name, model in (
        ("ppo_1_steps", PPO("MlpPolicy", "CartPole-v1", seed=0, device="cpu")),
        ("ppo_2_steps", PPO("MlpPolicy", "CartPole-v1", seed=1, device="cpu")),
        ("dqn", DQN("MlpPolicy", "CartPole-v1", seed=0, buffer_size=10, device="cpu")),
    ):
        model.save(folder / f"{name}.zip")
    return folder


@pytest.fixture
def clone(tmp_path):
    """What of a clone the command reads and writes."""
    root = tmp_path / "clone"
    root.mkdir()
    (root / "params.yaml").write_text(TEXT)
    return root


def new(root, *given, env="CartPole-v1", horizon="10", name="mine"):
    arguments = ["new", name, "--env", env, *(["--horizon", horizon] if horizon else []), *map(str, given)]
    return study.new(study.parser().parse_args(arguments), root)


def read(root, name="mine"):
    return studies.read(name, root / "params.yaml")


def test_checkpoints_from_elsewhere_are_copied_and_nothing_else_changes(clone, training):
    said = new(clone, "--policies", training / "ppo_*.zip")
    found = read(clone)
    assert found.environment == {"gymnasium": {"id": "CartPole-v1", "horizon": 10}}
    assert found.source("targets") == clone / "studies" / "mine" / "policies"
    copied = sorted(found.source("targets").iterdir())
    assert [path.name for path in copied] == ["ppo_1_steps.zip", "ppo_2_steps.zip"]
    assert copied[0].read_bytes() == (training / "ppo_1_steps.zip").read_bytes()
    text = (clone / "params.yaml").read_text()
    assert text.startswith(TEXT)
    assert len(text.removeprefix(TEXT).splitlines()) == 9
    assert "2 policies, CartPole-v1, up to 10 steps" in said
    assert "Next: dvc repro report@mine" in said


def test_a_folder_inside_the_clone_is_referred_to(clone, training):
    shutil.copytree(training, clone / "checkpoints")
    new(clone, "--policies", clone / "checkpoints", "--epsilon", "0.2", "--title", "Mine: a robot")
    assert read(clone).own["targets"] == {"source": "checkpoints", "epsilon": 0.2}
    assert read(clone).title == "Mine: a robot"
    assert not (clone / "studies").exists()


def test_normalisers_come_along(clone, training, tmp_path):
    for name in ("ppo_1_steps", "ppo_2_steps"):
        (tmp_path / name).mkdir()
        shutil.copy(training / f"{name}.zip", tmp_path / name / "model.zip")
        np.savez(tmp_path / name / "model.normalizer.npz", mean=np.ones(4), var=np.ones(4), clip=10.0, epsilon=1e-8)
    new(clone, "--policies", *(tmp_path / name for name in ("ppo_1_steps", "ppo_2_steps")))
    out = run(targets.STAGE, read(clone), clone / "data")
    found = policies.load(out / "group-00" / "targets")
    assert found.names == ("ppo_1_steps", "ppo_2_steps")
    expected = PPO.load(training / "ppo_1_steps.zip", device="cpu").policy
    with torch.no_grad():
        probs = expected.get_distribution(torch.tensor([[0.0, 1.0, 2.0, -1.0]])).distribution.probs.numpy()
    np.testing.assert_allclose(found.probs([[1.0, 2.0, 3.0, 0.0]], 0)[0], probs, atol=1e-6)


def test_numbers_of_episodes_fit_the_policies(clone, training):
    new(clone, "--policies", training)
    k, given = 3, read(clone).params["evaluate"]
    defaults = params.parse(TEXT, "params.yaml")["evaluate"]
    for name, least in {**defaults, "pool": 3 * defaults["match"]}.items():
        if name != "runs":
            assert given[name] % (5 * k) == 0
            assert least <= given[name] < least + 5 * k
    new(clone, "--policies", training, name="long", horizon="500")
    assert read(clone, "long").params["offline"]["episodes"] == 2000  # a million steps
    new(clone, "--policies", training, "--episodes", "7", name="few")
    assert read(clone, "few").params["offline"]["episodes"] == 7


def test_data_of_other_programs_are_converted_once(clone, training, tmp_path):
    rng = np.random.default_rng(0)
    rows, length = 60, 6
    states = rng.standard_normal((rows, 4)).astype(np.float32)
    ends = np.arange(rows) % length == length - 1
    arrays = {"observations": states, "actions": rng.integers(2, size=rows), "rewards": np.arange(rows, dtype=float)}
    np.savez(tmp_path / "logs.npz", **arrays, terminals=ends, next_observations=np.roll(states, -1, 0))
    new(clone, "--policies", training, "--data", tmp_path / "logs.npz")
    found = read(clone)
    assert found.source("offline") == clone / "studies" / "mine" / "data"
    run(targets.STAGE, found, clone / "data")
    logged = Transitions(run(offline.STAGE, found, clone / "data") / "group-00")
    (batch,) = logged.batches(rows, rng)
    order = np.argsort(batch.reward)
    np.testing.assert_array_equal(batch.state[order], states)
    np.testing.assert_array_equal(batch.t[order], np.arange(rows) % length)
    np.testing.assert_array_equal(batch.terminated[order], ends)
    # ours are taken as they are
    new(clone, "--policies", training, "--data", clone / "studies" / "mine" / "data", name="again")
    assert read(clone, "again").own["offline"] == {"source": "studies/mine/data"}


def test_counted_states_make_a_table(clone, tmp_path):
    model = PPO("MlpPolicy", "FrozenLake-v1", seed=0, device="cpu")
    model.save(tmp_path / "lake.zip")
    new(clone, "--policies", tmp_path / "lake.zip", env="FrozenLake-v1")
    out = run(targets.STAGE, read(clone), clone / "data")
    found = policies.load(out / "group-00" / "targets")
    assert isinstance(found, TabularPolicySet)
    with torch.no_grad():
        tensor, _ = model.policy.obs_to_tensor(np.arange(16))
        expected = model.policy.get_distribution(tensor).distribution.probs.numpy()
    np.testing.assert_allclose(found.probs(np.arange(16), 9)[0], expected, atol=1e-6)


class Actor(torch.nn.Module):
    """The logits of a checkpoint, as its trainer would export them."""

    def __init__(self, path):
        super().__init__()
        policy = PPO.load(path, device="cpu").policy
        self.layers = torch.nn.Sequential(*policy.mlp_extractor.policy_net, policy.action_net)

    def forward(self, obs):
        return self.layers(obs)


SMALL = {"hidden": 8, "most_updates": 40, "updates_per_step": 4}


@pytest.mark.parametrize("kind", ["DQN", "ONNX"])
def test_a_plan_is_made_for_any_kind_of_checkpoint(kind, clone, training, tmp_path):
    """mu is exported with epsilon-greedy policies inside it; ONNX graphs can't be part of another program."""
    if kind == "ONNX":
        to_onnx(Actor(training / "ppo_1_steps.zip").eval(), tmp_path / "a.onnx", ["logits"], width=4)
    else:
        shutil.copy(training / "dqn.zip", tmp_path / "a.zip")
    shutil.copy(training / "ppo_2_steps.zip", tmp_path / "b.zip")
    new(clone, "--policies", tmp_path / "[ab].*", "--episodes", "12", "--epsilon", "0.3")
    found = read(clone)
    small = {"q": {**ROBOT_FIT, **SMALL}, "q_hat": {**ROBOT_FIT, **SMALL}, "behavior": {"alpha": 0.0}}
    small["behavior"]["fit"] = small["q"]
    found = replace(found, params={**found.params, **small})
    for stage in (targets, offline, q, q_hat, behavior):
        out = run(stage.STAGE, found, clone / "data")
    names = {path.name for path in (out / "group-00").iterdir()}
    assert names == {"behavior.json"} | ({"mu.json", "mu.onnx", "mu.pt2"} if kind == "DQN" else set())
    if kind == "ONNX":
        assert track.register("mine", clone / "data", "no run") is None
        return
    session = onnxruntime.InferenceSession(out / "group-00" / "mu.onnx", providers=["CPUExecutionProvider"])
    obs = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    _, given = session.run(None, {"observation": obs, "t": np.zeros(5, np.int64)})
    expected = policies.load(clone / "data" / "targets" / "mine" / "group-00" / "targets").probs(obs, 0)
    np.testing.assert_allclose(given, expected, atol=1e-6)


def test_what_does_not_fit_is_one_line_and_leaves_nothing(clone, training, tmp_path):
    PPO("MlpPolicy", "Pendulum-v1", device="cpu").save(tmp_path / "vector.zip")
    (tmp_path / "bad.npz").write_bytes(b"no data")
    with_data = ("--policies", training, "--data", tmp_path / "bad.npz")
    for given, more, message in (
        (("--policies", training), {"env": "Pendulum-v1"}, "`manyfold evaluate` compares policies over vectors"),
        (("--policies", tmp_path / "vector.zip"), {}, "the policies take observations of 3 numbers"),
        (("--policies", training), {"env": "Acrobot-v1"}, "the policies take observations of 4 numbers"),
        (("--policies", training), {"env": "NoSuch-v1"}, "NoSuch"),
        (("--policies", tmp_path / "none.zip"), {}, "no files match"),
        (("--policies", training), {"name": "hopper"}, "has a study 'hopper' already"),
        (("--policies", training), {"name": "../x"}, "expected a name of letters, digits"),
        (("--policies", training, "--env-kwargs", "3"), {}, "--env-kwargs is '3', expected JSON"),
        (with_data, {}, "bad.npz"),
    ):
        with pytest.raises(ValueError, match=message):
            new(clone, *given, **more)
        assert [path.name for path in clone.rglob("*") if path.is_file()] == ["params.yaml"]
    assert (clone / "params.yaml").read_text() == TEXT


def test_the_docs_show_what_the_command_writes(clone, training):
    new(clone, "--policies", training, horizon="100", name="cartpole")
    written = (clone / "params.yaml").read_text().removeprefix(TEXT)
    assert f"```yaml\nstudies:\n{written}```" in (ROOT / "docs" / "pipeline.md").read_text()


def test_outside_of_a_clone_the_command_says_where_to_run_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["study", "new", "mine"]) == 2
    assert "is no clone of manyfold's repository, expected one" in capsys.readouterr().err


# --- the text of params.yaml ------------------------------------------------------------------------------------------

SECTION = {"title": "a: b # c", "environment": {"gymnasium": {"id": "X-v0", "kwargs": {"text": "1e5 "}}}, "q": {}}
STUDIES = "studies:\n  # first\n  a:\n    title: A   # its title\n    q: {}\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"x: 1\n{STUDIES}", ""),
        (f"x: 1\n{STUDIES}".removesuffix("\n"), ""),
        (STUDIES, "\n# the other\ny: [1,\n  2]  # two\n"),
        (STUDIES.replace("  ", "      "), ""),
        (STUDIES.replace("q: {}", "q: |\n      some\n      text"), "y: 2\n"),
        (STUDIES.replace("q: {}", "q:"), "\n\ny: 2\n"),
        (STUDIES.replace("q: {}", "q:\n    - 1\n    - {b: [2,\n      3]} # end"), "# last\n"),
        (STUDIES.replace("\n", "\r\n"), "y: 2\r\n"),
    ],
)
def test_a_section_is_added_and_every_other_line_stays(before, after, tmp_path):
    made = with_study(before + after, "new", SECTION, tmp_path / "params.yaml")
    found, known = yaml.safe_load(made), yaml.safe_load(before + after)
    assert found["studies"].pop("new") == SECTION
    assert found == known
    left = iter(made.splitlines())
    assert all(line in left for line in (before + after).splitlines())  # in their order
    assert len(made.splitlines()) == len((before + after).splitlines()) + 1 + len(SECTION)
    assert ("\r\n" in made) == ("\r\n" in before)
    assert made.count("\r\n") in (0, made.count("\n"))


@pytest.mark.parametrize("text", ["studies: {a: {q: {}}}\n", "studies: {}\n", "x: 1\n", "studies: [1]\n"])
def test_a_text_without_studies_on_lines_of_their_own_is_refused(text, tmp_path):
    with pytest.raises(ValueError, match="expected a section 'studies' with a study on lines of its own"):
        with_study(text, "new", SECTION, tmp_path / "params.yaml")
