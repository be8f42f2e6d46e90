import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from manyfold import policies
from manyfold.policies.mlp import MlpPolicySet, Spec
from tasks import stages, targets
from tests.tasks.conftest import SMALL, changed, run

ROOT = Path(__file__).parents[2]
STAGE = targets.STAGE


def trained(work, groups=(0, 1)):
    STAGE.run(SMALL, list(groups), work, work.parent)
    return {folder.name: policies.load(folder / "targets").table() for folder in sorted(work.glob("group-*"))}


def test_a_part_writes_a_folder_for_each_group_that_loads(tmp_path):
    found = trained(tmp_path)
    assert list(found) == ["group-00", "group-01"]
    folder = tmp_path / "group-00"
    expected = ["companion.safetensors", "history.safetensors", "plan.json", "targets.safetensors"]
    assert sorted(f.name for f in folder.iterdir()) == expected
    plan = json.loads((folder / "plan.json").read_text())
    names = policies.load(folder / "targets").names
    assert [f"step {target['step']:g}" for target in plan["targets"]] == list(names)
    assert plan["interval"][0] <= plan["targets"][0]["step"]
    assert not list(tmp_path.glob("state-*"))


def test_one_part_or_two_give_the_same_bytes(tmp_path):
    trained(tmp_path / "one")
    trained(tmp_path / "two", [0])
    trained(tmp_path / "two", [1])
    for path in (tmp_path / "one").glob("group-*/*"):
        assert path.read_bytes() == (tmp_path / "two" / path.relative_to(tmp_path / "one")).read_bytes()


def test_a_finished_part_is_not_trained_again(tmp_path):
    trained(tmp_path)
    before = (tmp_path / "group-00" / "targets.safetensors").stat().st_mtime_ns
    trained(tmp_path)
    assert (tmp_path / "group-00" / "targets.safetensors").stat().st_mtime_ns == before


def test_progress_counts_the_steps_of_all_groups(tmp_path):
    trained(tmp_path, [0])
    steps, of, text = stages.progress(tmp_path)
    assert steps == of
    assert of % 512 == 0
    assert np.isfinite(float(text.removeprefix("mean return ")))
    assert stages.progress(tmp_path, 2) == (steps, 2 * of, text)  # the other group will have as much to do
    assert stages.progress(tmp_path / "nothing") == (0, 0, "")


def test_collecting_puts_whole_results_in_place(tmp_path):
    old = tmp_path / "targets" / SMALL.name / "group-07"
    old.mkdir(parents=True)
    _, work = STAGE.prepare(SMALL, tmp_path)
    out = run(STAGE, SMALL, tmp_path)
    assert sorted(f.name for f in out.iterdir()) == ["group-00", "group-01"]
    assert not work.exists()
    assert [row[0] for row in STAGE.describe(out)] == ["group-00", "group-01"]


def test_collecting_too_few_groups_is_refused_and_leaves_the_old_result(tmp_path):
    _, work = STAGE.prepare(SMALL, tmp_path)
    trained(work, [0])
    (work / "group-01").mkdir()  # an empty folder is no group
    old = tmp_path / "targets" / SMALL.name / "group-00"
    old.mkdir(parents=True)
    with pytest.raises(ValueError, match="group-01 missing, expected 2 groups; run the stage again"):
        STAGE.collect(SMALL, 2, work, tmp_path)
    assert old.exists()


def test_leftovers_of_a_killed_run_are_no_obstacle(tmp_path):
    _, work = STAGE.prepare(SMALL, tmp_path)
    trained(work)
    (work / ".4242.state-00-01.safetensors").write_text("half")
    (work / "progress-00-00.json").write_text("{}")
    (work / ".group-01").mkdir()
    stages.forget_progress(work)
    out = STAGE.collect(SMALL, 2, work, tmp_path)
    assert sorted(f.name for f in out.iterdir()) == ["group-00", "group-01"]
    assert not work.exists()


def test_a_state_that_cannot_be_read_is_dropped_with_one_line(tmp_path, capsys):
    expected = trained(tmp_path / "clean", [0])["group-00"]
    (tmp_path / "spoiled").mkdir()
    (tmp_path / "spoiled" / "state-00-00.safetensors").write_text("garbage")
    found = trained(tmp_path / "spoiled", [0])["group-00"]
    np.testing.assert_array_equal(found, expected)
    (line,) = capsys.readouterr().err.splitlines()
    assert "state-00-00.safetensors cannot be read" in line
    assert line.endswith("starting over")


def test_a_damaged_group_is_trained_again(tmp_path):
    expected = trained(tmp_path, [0])["group-00"]
    (tmp_path / "group-00" / "targets.safetensors").write_bytes(b"half")
    assert not STAGE.is_whole(tmp_path / "group-00")
    np.testing.assert_array_equal(trained(tmp_path, [0])["group-00"], expected)


def test_other_parameters_studies_and_code_work_in_another_folder(tmp_path, monkeypatch):
    def work(study):
        return stages.work_folder("targets", study, study.params["targets"], tmp_path)

    assert work(SMALL) == work(SMALL)
    assert work(SMALL) != work(changed(SMALL, "targets", width=701))
    # a file in a sub-folder of the library counts as code as well
    package = tmp_path / "library"
    (package / "envs").mkdir(parents=True)
    monkeypatch.setattr(stages.manyfold, "__file__", str(package / "__init__.py"))
    before = work(SMALL)
    (package / "envs" / "new.py").write_text("x = 1")
    assert work(SMALL) != before


def test_a_killed_run_resumes_from_its_last_save_with_the_same_numbers(tmp_path):
    """kill -9 after the first save; the second run starts from there and ends as an undisturbed one."""
    code = (
        "import sys; from pathlib import Path; from tasks import targets;"
        "from tests.tasks.conftest import SMALL, changed;"
        "targets.STAGE.run(changed(SMALL, 'targets', width=12000), [0, 1], Path(sys.argv[1]), Path(sys.argv[1]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    process = subprocess.Popen([*command, str(tmp_path / "killed")], cwd=ROOT, env=environment)
    deadline = time.monotonic() + 120
    while not (saved := list((tmp_path / "killed").rglob("state-*.safetensors"))) and time.monotonic() < deadline:
        assert process.poll() is None, "ended before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert saved
    assert not list((tmp_path / "killed").rglob("group-*"))
    for folder in ("killed", "whole"):
        subprocess.run([*command, str(tmp_path / folder)], cwd=ROOT, env=environment, check=True, capture_output=True)
    for path in (tmp_path / "whole").glob("group-*/*"):
        assert path.read_bytes() == (tmp_path / "killed" / path.relative_to(tmp_path / "whole")).read_bytes()


def own_policies(n_actions=2, width=4, horizon=20):
    generator = torch.Generator().manual_seed(0)
    shapes = {"w1": (3, width, 8), "b1": (3, 1, 8), "w2": (3, 8, n_actions), "b2": (3, 1, n_actions)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return MlpPolicySet(tensors, Spec("mine", "softmax", horizon, n_actions, ("a", "b", "c"), 0, width))


@pytest.fixture
def own_study(tmp_path):
    """CartPole with policies from a file."""
    study = changed(SMALL, "targets", source="mine.safetensors")
    return type(study)(
        "cartpole", "CartPole", {"gymnasium": {"id": "CartPole-v1", "horizon": 20}}, study.params, root=tmp_path
    )


def test_the_users_own_policies_are_imported(own_study, tmp_path):
    given = own_policies()
    given.save(tmp_path / "mine")
    out = run(STAGE, own_study, tmp_path / "data")
    assert sorted(f.name for f in (out / "group-00").iterdir()) == ["plan.json", "targets.safetensors"]
    obs = np.random.default_rng(0).standard_normal((5, 4))
    found = policies.load(out / "group-00" / "targets")
    np.testing.assert_array_equal(found.probs(obs, 3), given.probs(obs, 3))
    assert STAGE.describe(out) == [("group-00", "mine.safetensors", "a, b, c")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n_actions": 3}, "mine.safetensors: its n_actions is 3, expected 2 as CartPole-v1 has"),
        ({"width": 5}, "mine.safetensors: its width is 5, expected 4 as CartPole-v1 has"),
        ({"horizon": 10}, "mine.safetensors: its horizon is 10, expected 20 as CartPole-v1 has"),
    ],
)
def test_policies_of_another_environment_are_refused(own_study, tmp_path, given, message):
    own_policies(**given).save(tmp_path / "mine")
    with pytest.raises(ValueError, match=message):
        STAGE.prepare(own_study, tmp_path)


def test_policies_that_are_not_there_are_one_line(own_study, tmp_path):
    with pytest.raises(ValueError, match="mine.safetensors: no such file or folder, expected policies"):
        STAGE.prepare(own_study, tmp_path)


def test_ppo_for_an_environment_that_it_cannot_train_says_what_to_do(own_study, tmp_path):
    with pytest.raises(
        ValueError, match="CartPole-v1: PPO here trains Gridworlds and robots; give its policies as files"
    ):
        run(STAGE, changed(own_study, "targets", source="manyfold/train/ppo.py"), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": 0}, "targets.groups is 0, expected a whole number from 1 to 10,000"),
        ({"groups": 10**9}, "targets.groups is 1000000000, expected a whole number from 1 to 10,000"),
        ({"start": 3}, r"targets.start is 3, expected \[low, high\]"),
        ({"wide": 3, "1": 2}, "targets.1 is unknown"),
        ({"widht": 3}, "targets.widht is unknown, expected groups, history, policies, start, width"),
        ({"width": "wide"}, "targets.width is 'wide', expected a number from 1 to 1e"),
        ({"width": -1}, "targets.width is -1, expected a number from 1 to 1e"),
        ({"start": [5, 3]}, "targets.start is 3, expected a number from 5 to 1e"),
    ],
)
def test_bad_parameters_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        targets.read_rule(changed(SMALL, "targets", **change))
