"""A folder of Stable-Baselines3 checkpoints as they appear, with a real store of episodes and a real MLflow."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from mlflow.tracking import MlflowClient

from tasks import watch, watched
from tasks.locks import one_run
from tests import checkpoints
from tests.manyfold.conftest import place  # noqa: F401
from tests.manyfold.test_faults import stored
from tests.projects import wait_until

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own

WATCH = ("--study", "mine", "--env", "own:make", "--policies", "new", "--precision", "0.6", "--settle", "0")
SERIES = "mine, watched"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Checkpoints by gain: the larger, the better."""
    folder = tmp_path_factory.mktemp("trained")
    for name, gain in (("ppo_1", 0.3), ("ppo_2", 0.6), ("ppo_3", 0.7)):
        checkpoints.save(folder / f"{name}.zip", gain)
    return folder


@pytest.fixture
def folder(place, trained, monkeypatch):  # noqa: F811
    """The current folder: an environment, and `new` with one checkpoint; MLflow's store is its own."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{place / 'server.db'}")
    (place / "new").mkdir()
    shutil.copy(trained / "ppo_1.zip", place / "new")
    return place


@pytest.fixture
def look(folder, capfd):
    """Looks once: what it says at last."""

    def once(*more, code=0):
        found = watch.main([*WATCH, "--data", str(folder / "data"), *more])
        out, errors = capfd.readouterr()
        assert found == code, errors
        assert "Traceback" not in errors
        return (errors if code else out).strip().splitlines()[-1]

    return once


def evaluation(folder, number):
    return json.loads((folder / "data" / "watch" / "mine" / f"{number:04d}.json").read_text())


def numbers(folder):
    return sorted(path.name for path in (folder / "data" / "watch" / "mine").glob("0*.json"))


def runs(folder):
    """MLflow's client; the series; its children by evaluation."""
    client = MlflowClient(f"sqlite:///{folder / 'server.db'}")
    every = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    (series,) = (run for run in every if "series" in run.data.tags)
    children = {run.data.tags["evaluation"]: run for run in every if run is not series}
    assert len(children) == len(every) - 1
    assert {run.data.tags["mlflow.parentRunId"] for run in children.values()} <= {series.info.run_id}
    return client, series, children


# --- what is new ------------------------------------------------------------------------------------------------------


def test_a_ranking_over_time_from_old_episodes_first(folder, look, trained):
    assert look().startswith("Evaluation 1 of mine: 1 policies; 0 episodes were there, ")
    first = evaluation(folder, 1)
    assert first["policies"][0]["half_width"] <= 0.6
    shutil.copy(trained / "ppo_2.zip", folder / "new")
    shutil.copy(trained / "ppo_3.zip", folder / "new")
    said = look()
    second = evaluation(folder, 2)
    assert said == (
        f"Evaluation 2 of mine: 3 policies; {first['episodes.run']} episodes were there, "
        f"{second['episodes.run']} were run. {second['verdict']}"
    )
    assert [policy["name"] for policy in second["policies"]][-1] == "ppo_1"
    assert max(policy["half_width"] for policy in second["policies"]) <= 0.6
    assert second["episodes.run"] < first["episodes.run"]  # of two new policies, less than of the one before
    assert second["episodes"] == first["episodes.run"] + second["episodes.run"]

    client, series, children = runs(folder)
    assert list(children) == ["2", "1"]

    def points(key):
        return [(p.step, p.value) for p in client.get_metric_history(series.info.run_id, key)]

    def of(found, name):
        return next(policy for policy in found["policies"] if policy["name"] == name)

    assert points("policies") == [(1, 1), (2, 3)]
    assert points("episodes.run") == [(1, first["episodes.run"]), (2, second["episodes.run"])]
    assert points("rank.ppo_1") == [(1, 1), (2, 3)]
    for key, field in (("value", "value"), ("half_width", "half_width"), ("p_best", "p_best")):
        assert points(f"{key}.ppo_1") == [(1, of(first, "ppo_1")[field]), (2, of(second, "ppo_1")[field])]
        assert points(f"{key}.ppo_3") == [(2, of(second, "ppo_3")[field])]
    for number, found in (("1", first), ("2", second)):
        run = children[number]
        assert run.info.run_id == found["mlflow_run"]
        assert (run.info.status, run.info.run_name) == ("FINISHED", f"evaluation {number}")
        assert run.data.metrics["value"] == found["policies"][0]["value"]
        assert run.data.metrics["episodes.run"] == found["episodes.run"]
        assert run.data.params["leads"] == found["policies"][0]["name"]
        assert run.data.params["precision"] == "0.6"
        assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["page.html"]
    assert [file.path for file in client.list_artifacts(series.info.run_id)] == ["page.html"]
    assert "ppo_3" in (folder / "data" / "watch" / "mine" / "page.html").read_text()


def test_nothing_new_does_nothing_and_is_cheap(folder, look):
    """Neither torch nor MLflow is imported."""
    look()
    before = stored(folder / "data" / "watch" / "mine" / "store")
    code = "import sys; from tasks import watch; watch.main(sys.argv[1:]); print({'torch', 'mlflow'} & {*sys.modules})"
    command = [sys.executable, "-c", code, *WATCH, "--data", "data"]
    there = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=there)
    assert done.stdout == "Nothing new in new since evaluation 1\nset()\n"
    assert numbers(folder) == ["0001.json"]
    assert stored(folder / "data" / "watch" / "mine" / "store") == before
    _, _, children = runs(folder)
    assert list(children) == ["1"]


def test_other_files_the_same_policies_and_fewer_are_nothing_new(folder, look, trained):
    shutil.copy(trained / "ppo_2.zip", folder / "new")
    look()
    (folder / "new" / "events.log").write_text("12 steps")
    assert look() == "Nothing new in new: the same 2 policies"
    assert look() == "Nothing new in new since evaluation 1"
    (folder / "new" / "ppo_2.zip").unlink()
    assert look() == "Nothing new in new since evaluation 1"
    os.utime(folder / "new" / "ppo_1.zip")
    assert look() == "Nothing new in new: the same 1 policies"
    assert numbers(folder) == ["0001.json"]
    assert look("--precision", "0.5").startswith("Evaluation 2 of mine: 1 policies")  # something else is asked for


def test_another_content_under_the_same_name_is_new(folder, look, trained):
    look()
    shutil.copy(trained / "ppo_3.zip", folder / "new" / "ppo_1.zip")
    look()
    assert evaluation(folder, 2)["policies"][0]["value"] > evaluation(folder, 1)["policies"][0]["value"]


# --- files that are being written -------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_half_written_waits_until_it_is_whole(folder, look, trained):
    whole = (trained / "ppo_2.zip").read_bytes()
    (folder / "new" / "ppo_2.zip").write_bytes(whole[: len(whole) // 2])
    said = look()
    assert said.startswith("Evaluation 1 of mine: 1 policies; ")
    assert "(1 left out: new/ppo_2.zip: " in said
    assert "ppo_2" in json.dumps(evaluation(folder, 1)["left_out"])
    assert look() == "Nothing new in new since evaluation 1"
    (folder / "new" / "ppo_2.zip").write_bytes(whole)
    assert look().startswith("Evaluation 2 of mine: 2 policies; ")
    assert evaluation(folder, 2)["left_out"] == {}


def test_what_was_written_a_moment_ago_waits(folder, look, trained):
    """Not by the clock of this test: one file is from an hour ago, the other from the future."""
    hour = time.time() - 3600, time.time() + 3600
    shutil.copy(trained / "ppo_2.zip", folder / "new")
    os.utime(folder / "new" / "ppo_1.zip", (hour[0], hour[0]))
    os.utime(folder / "new" / "ppo_2.zip", (hour[1], hour[1]))
    assert look("--settle", "60").startswith("Evaluation 1 of mine: 1 policies; ")
    said = "Nothing new in new since evaluation 1; 1 file was written in the last 60 s: the next time"
    assert look("--settle", "60") == said
    os.utime(folder / "new" / "ppo_2.zip", (hour[0], hour[0]))
    assert look("--settle", "60").startswith("Evaluation 2 of mine: 2 policies; ")


def test_a_checkpoint_waits_for_its_normaliser(folder, look):
    """Otherwise it would be read without it for a moment: another policy."""
    beside = folder / "new" / "ppo_1.normalizer.npz"
    np.savez(beside, mean=np.zeros(4), var=np.ones(4), clip=10.0, epsilon=1e-8)
    hour = time.time() - 3600, time.time() + 3600
    os.utime(folder / "new" / "ppo_1.zip", (hour[0], hour[0]))
    os.utime(beside, (hour[1], hour[1]))
    assert look("--settle", "60") == "No checkpoint in new can be read yet"
    os.utime(beside, (hour[0], hour[0]))
    assert look("--settle", "60").startswith("Evaluation 1 of mine: 1 policies; ")


def test_one_that_is_overwritten_while_it_is_read_waits(folder, look, trained, monkeypatch):
    def load(paths, **options):
        found = watched_load(paths, **options)
        shutil.copy(trained / "ppo_2.zip", folder / "new" / "ppo_1.zip")
        return found

    watched_load = watched.load_policies
    monkeypatch.setattr(watched, "load_policies", load)
    assert look() == "Checkpoints in new changed while they were read: the next time"
    assert numbers(folder) == []
    monkeypatch.undo()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'server.db'}")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    assert look().startswith("Evaluation 1 of mine: 1 policies; ")


def test_a_folder_without_checkpoints_is_no_error(folder, look):
    (folder / "new" / "ppo_1.zip").unlink()
    assert look() == "No checkpoint in new can be read yet"
    assert look("--policies", "new/*/*.zip") == "Nothing new in new/*/*.zip"


# --- two at once, and kills -------------------------------------------------------------------------------------------


def test_the_second_of_two_at_once_does_nothing(folder, look):
    with one_run("watch", "mine", folder / "data"):
        assert look() == "Another evaluation of mine is at work: nothing done"
    assert look().startswith("Evaluation 1 of mine: ")


def test_a_killed_one_resumes_and_counts_nothing_twice(folder, look):
    there = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HOLD_AT": str(7 * checkpoints.T)}
    command = [sys.executable, "-m", "tasks.watch", *WATCH, "--data", "data"]
    killed = subprocess.Popen(command, env=there, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert wait_until(lambda: (folder / "held").exists() or killed.poll() is not None)
    assert killed.poll() is None, killed.stderr.read()
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    plans = list((folder / "data" / "watch" / "mine" / "store" / "plans").glob("*.json"))
    assert plans
    assert numbers(folder) == []
    assert look().startswith("Evaluation 1 of mine: 1 policies; ")
    episodes = stored(folder / "data" / "watch" / "mine" / "store")  # refuses one that is there twice
    assert len(episodes) == evaluation(folder, 1)["episodes"]
    assert sorted(number for _, number in episodes) == list(range(len(episodes)))
    assert not list((folder / "data" / "watch" / "mine" / "store" / "plans").glob("*.json"))
    _, _, children = runs(folder)
    assert list(children) == ["1"]


def test_what_was_evaluated_but_not_noted_is_recorded_again_once(folder, look):
    """As a kill between MLflow and the note leaves it."""
    look()
    first = evaluation(folder, 1)
    (folder / "data" / "watch" / "mine" / "0001.json").unlink()
    (folder / "data" / "watch" / "mine" / "seen.json").unlink()
    look()
    again = evaluation(folder, 1)
    assert again["episodes.run"] == 0
    assert again["policies"][0]["value"] == pytest.approx(first["policies"][0]["value"])
    client, _, children = runs(folder)
    assert [run.info.run_id for run in children.values()] == [again["mlflow_run"]]
    assert client.get_run(first["mlflow_run"]).info.lifecycle_stage == "deleted"


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--study", "x", "--env", "own:make", "--policies", "new"), "nothing says when to stop, expected --precision"),
        (("--study", "x", "--precision", "1"), "unknown study 'x'"),
        (("--study", "x", "--precision", "1", "--env", "own:make"), "--env is without --policies, expected a folder"),
        (("--study", "../x", "--precision", "1"), "--study '../x', expected a name of letters, digits"),
        (
            ("--study", "gridworld-1000", "--precision", "1"),
            "gridworld-1000 has its policies from manyfold/train/ppo.py, expected --policies: a folder to watch",
        ),
        (("--study", "ant", "--greedy", "--stop", "best"), "--greedy is for --env, expected it in params.yaml, where"),
        ((*WATCH, "--policies", "old"), "old: no such file or folder, expected checkpoints"),
        ((*WATCH, "--store", "new/store"), "is inside of new, expected results elsewhere than checkpoints"),
        ((*WATCH, "--env", "own:nothing"), "environment 'own:nothing': own has no function nothing"),
        ((*WATCH, "--budget", "1"), "budget is 1, expected"),
        ((*WATCH, "--precision", "-1"), "precision is -1.0, expected half the width of an interval, above 0"),
        (
            (*WATCH, "--env", "CartPole-v1", "--policies", "wide"),
            "observations of 5 numbers, those of CartPole-v1 have 4",
        ),
    ],
)
def test_bad_input_is_one_line(folder, capfd, arguments, said):
    (folder / "new" / "store").mkdir()
    (folder / "new" / "store" / "x.zip").write_bytes(b"")
    if "wide" in arguments:
        (folder / "wide").mkdir()
        checkpoints.save(folder / "wide" / "five.zip", 1.0, width=5)
    assert watch.main([*arguments, "--data", "data"]) == 2
    errors = capfd.readouterr().err
    lines = [line for line in errors.splitlines() if "left out" not in line]
    assert len(lines) == 1, errors
    assert lines[0].startswith("watch: ")
    assert said in lines[0]
    assert not (folder / "data" / "watch" / "mine" / "0001.json").exists()


def test_a_dead_mlflow_is_one_line_before_an_episode_is_run(folder, look, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://x")
    assert look(code=2).startswith("watch: MLflow at nonsense://x, experiment 'mine': ")
    assert not (folder / "data" / "watch" / "mine" / "store").exists()
