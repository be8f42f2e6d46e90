import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from manyfold.networks import NetworkPolicySet
from manyfold.targets import Rule
from tasks import shards, targets
from tasks.params import check_names, section

ROOT = Path(__file__).parents[2]
RULE = Rule(policies=3, start=(600, 900), width=700, history=3)
PARAMS = {"groups": 2, "policies": 3, "start": [600, 900], "width": 700, "history": 3}


def trained(work, groups=(0, 1)):
    targets.train_shard("gridworld-1000", list(groups), RULE, work)
    return {folder.name: NetworkPolicySet.load(folder / "targets").table() for folder in sorted(work.glob("group-*"))}


def test_a_shard_writes_a_folder_for_each_group_that_loads(tmp_path):
    found = trained(tmp_path)
    assert list(found) == ["group-00", "group-01"]
    folder = tmp_path / "group-00"
    assert sorted(f.name for f in folder.iterdir()) == [
        *("companion.json", "companion.safetensors", "history.json", "history.safetensors"),
        *("plan.json", "targets.json", "targets.safetensors"),
    ]
    plan = json.loads((folder / "plan.json").read_text())
    names = NetworkPolicySet.load(folder / "targets").spec.names
    assert [f"step {target['step']:g}" for target in plan["targets"]] == list(names)
    assert plan["interval"][0] <= plan["targets"][0]["step"]
    assert not list(tmp_path.glob("state-*"))


def test_one_shard_or_two_give_the_same_policies(tmp_path):
    together = trained(tmp_path / "one")
    trained(tmp_path / "two", [0])
    apart = trained(tmp_path / "two", [1])
    for name, table in together.items():
        np.testing.assert_array_equal(table, apart[name])


def test_a_finished_shard_is_not_trained_again(tmp_path):
    trained(tmp_path)
    before = (tmp_path / "group-00" / "targets.safetensors").stat().st_mtime_ns
    trained(tmp_path)
    assert (tmp_path / "group-00" / "targets.safetensors").stat().st_mtime_ns == before


def test_progress_counts_the_steps_of_all_shards(tmp_path):
    trained(tmp_path, [0])
    trained(tmp_path, [1])
    steps, of, text = shards.progress(tmp_path)
    assert steps == of
    assert of % 512 == 0
    assert np.isfinite(float(text.removeprefix("mean return ")))
    assert shards.progress(tmp_path / "nothing") == (0, 0, "")


def test_collecting_puts_whole_results_in_place(tmp_path):
    work = targets.work_folder("gridworld-1000", RULE, tmp_path)
    trained(work)
    old = tmp_path / "targets" / "gridworld-1000" / "group-07"
    old.mkdir(parents=True)
    out = targets.collect("gridworld-1000", 2, work, tmp_path)
    assert sorted(f.name for f in out.iterdir()) == ["group-00", "group-01"]
    assert not work.exists()
    assert [row[0] for row in targets.describe(out)] == ["group-00", "group-01"]


def test_collecting_too_few_groups_is_refused_and_leaves_the_old_result(tmp_path):
    work = targets.work_folder("gridworld-1000", RULE, tmp_path)
    trained(work, [0])
    (work / "group-01").mkdir()  # an empty folder is no group
    old = tmp_path / "targets" / "gridworld-1000" / "group-00"
    old.mkdir(parents=True)
    with pytest.raises(ValueError, match="group-01 missing, expected 2 groups; run the stage again"):
        targets.collect("gridworld-1000", 2, work, tmp_path)
    assert old.exists()


def test_leftovers_of_a_killed_run_are_no_obstacle(tmp_path):
    work = targets.work_folder("gridworld-1000", RULE, tmp_path)
    trained(work)
    (work / ".4242.state-00-01.safetensors").write_text("half")
    (work / "progress-00-00.json").write_text("{}")
    (work / ".group-01").mkdir()
    shards.forget_progress(work)
    out = targets.collect("gridworld-1000", 2, work, tmp_path)
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
    assert line.endswith("starting anew")


def test_a_damaged_group_is_trained_again(tmp_path):
    expected = trained(tmp_path, [0])["group-00"]
    (tmp_path / "group-00" / "targets.safetensors").write_bytes(b"half")
    assert not targets.is_whole(tmp_path / "group-00")
    np.testing.assert_array_equal(trained(tmp_path, [0])["group-00"], expected)


def test_another_rule_works_in_another_folder(tmp_path):
    other = Rule(policies=3, start=(600, 900), width=701, history=3)
    assert targets.work_folder("ant", RULE, tmp_path) != targets.work_folder("ant", other, tmp_path)
    assert targets.work_folder("ant", RULE, tmp_path) != targets.work_folder("hopper", RULE, tmp_path)


def test_a_killed_shard_goes_on_from_its_last_save_with_the_same_numbers(tmp_path):
    """kill -9 after the first save; the second run starts from there and ends as an undisturbed one."""
    command = [sys.executable, "-m", "tasks.targets", "--env", "gridworld-1000", "--groups", "0-1", "--data"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*command, str(tmp_path / "killed")], cwd=ROOT, env=environment)
    deadline = time.monotonic() + 120
    while not (saved := list((tmp_path / "killed").rglob("state-*.safetensors"))) and time.monotonic() < deadline:
        assert process.poll() is None, "ended before it could be killed"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert saved
    assert not list((tmp_path / "killed").rglob("group-*"))
    tables = []
    for data in ("killed", "whole"):
        subprocess.run([*command, str(tmp_path / data)], cwd=ROOT, env=environment, check=True, capture_output=True)
        (folder,) = (tmp_path / data).rglob("group-01")
        tables.append(NetworkPolicySet.load(folder / "targets").table())
    np.testing.assert_array_equal(*tables)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--env", "gridwrld-1000", "--groups", "0-1"],
            "targets: unknown environment 'gridwrld-1000'; did you mean 'gridworld-1000'? (valid: gridworld-1000, "
            "gridworld-27000, ant, hopper, inverted-double-pendulum, inverted-pendulum, walker)\n",
        ),
        (["--env", "ant", "--groups", "3"], "targets: --groups is '3', expected first-last, for example 0-14\n"),
        (["--env", "ant", "--groups", "3-1"], "targets: --groups is '3-1', expected first-last, for example 0-14\n"),
    ],
)
def test_bad_arguments_get_one_line_and_exit_code_2(arguments, line, capsys, tmp_path):
    assert targets.main([*arguments, "--data", str(tmp_path / "data")]) == 2
    assert capsys.readouterr().err == line
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": 0}, "targets.groups is 0, expected a whole number of at least 1"),
        ({"start": 3}, r"targets.start is 3, expected \[low, high\]"),
        ({"widht": 3, 1: 2}, "targets.1 is unknown"),
        ({"widht": 3}, "targets.widht is unknown, expected groups, history, policies, start, width"),
        ({"width": "wide"}, "expected .low, high. and a number"),
    ],
)
def test_bad_parameters_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        targets.read_rule({**PARAMS, **change})


def test_missing_parameters_and_sections_are_named(tmp_path):
    with pytest.raises(ValueError, match="targets.width is missing"):
        check_names("targets", {"groups": 1}, {"groups", "width"})
    path = tmp_path / "params.yaml"
    path.write_text("other: {}")
    with pytest.raises(ValueError, match="params.yaml: expected a section 'targets', found none"):
        section("targets", path)
    path.write_text("a: [1")
    with pytest.raises(ValueError, match="params.yaml: not YAML"):
        section("targets", path)
