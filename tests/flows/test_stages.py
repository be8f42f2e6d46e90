"""The stages through their real doors: `dvc repro` and their own commands."""

import json
from pathlib import Path

import pytest
import yaml

from flows.pipeline import STAGES
from tests.projects import ROOT, STUDY


def test_dvc_repro_runs_the_chain(finished):
    for stage, file in (
        ("targets", "targets.safetensors"),
        ("offline", "transitions.parquet"),
        ("q", "q.safetensors"),
        ("q_hat", "q_hat.safetensors"),
        ("behavior", "behavior.json"),
    ):
        out = finished.data / stage / STUDY
        assert {"group-00", "group-01", "group-02"} <= {f.name for f in out.iterdir()}
        assert (out / "group-02" / file).exists()
    assert finished.said.count("group-02") == 5  # the table at the end of each of these stages
    runs = finished.data / "evaluate" / STUDY / "runs"
    assert sorted(f.name for f in runs.iterdir()) == ["group-00", "group-01", "group-02"]
    assert (finished.data / "report" / STUDY / "relative_error.svg").exists()
    assert not list((finished.data / ".work").rglob("*.safetensors"))


def test_a_second_call_does_nothing(finished):
    assert finished.repro().stdout.count("didn't change, skipping") == 7


def test_fewer_episodes_change_evaluate_and_report_alone(fewer, finished):
    assert fewer.said.count("didn't change, skipping") == 5
    assert fewer.metrics() != finished.metrics()
    diff = json.loads(fewer.python("dvc", "metrics", "diff", "--json").stdout)
    assert diff[f"data/evaluate/{STUDY}/metrics.json"]["max_episodes"] == {"old": 60, "new": 45, "diff": -15}


def test_plots_show_draws_every_estimator_once(project):
    done = project.python("dvc", "plots", "show", f"data/evaluate/{STUDY}/curves.csv")
    assert done.returncode == 0, done.stderr
    page = (project.folder / "dvc_plots" / "index.html").read_text()
    assert "datum.policy == 'all'" in page  # our template
    assert page.count('"mpe_baseline"') > 0


@pytest.mark.slow
def test_an_experiment_changes_one_parameter_and_leaves_the_rest(project):
    done = project.python("dvc", "exp", "run", "-S", "evaluate.runs=3", f"report@{STUDY}")
    assert done.returncode == 0, done.stderr
    assert json.loads(project.metrics())["runs"] == 3
    assert done.stdout.count("didn't change, skipping") == 5


def test_a_local_remote_gives_the_data_back(project, tmp_path):
    added = project.python("dvc", "remote", "add", "--local", "--default", "store", str(tmp_path / "store"))
    assert added.returncode == 0
    assert project.python("dvc", "push").returncode == 0
    before = project.files("q")
    for folder in (project.folder / ".dvc" / "cache", project.data / "q"):
        project.run("rm", "-r", str(folder))
    done = project.python("dvc", "pull", f"q@{STUDY}")
    assert done.returncode == 0, done.stderr
    assert project.files("q") == before


@pytest.mark.parametrize(("stage", "workers"), [("targets", "1"), ("q", "3")])
def test_one_worker_or_three_give_the_same_files(finished, project, stage, workers):
    """Two made those of `finished`."""
    project.run("rm", "-r", str(project.data / stage / STUDY))
    done = project.stage(stage, "--workers", workers)
    assert done.returncode == 0, done.stderr
    assert project.files(stage) == finished.files(stage)


def test_bad_input_is_one_line_and_exit_code_2(project):
    done = project.stage("targets", study="gridworld-1001")
    assert done.returncode == 2
    assert done.stderr.startswith(f"targets: unknown study 'gridworld-1001'; did you mean '{STUDY}'?")
    assert done.stderr.count("\n") == 1
    project.set("width: 700", "width: -1")
    done = project.stage("targets")
    assert done.returncode == 2
    assert done.stderr == "targets: targets.width is -1, expected a number from 1 to 1e+09\n"


def test_the_stages_of_dvc_are_the_pipelines_and_end_with_dvc():
    """Some shells stay around a command unless it says `exec`; a stage would end with the shell, not with DVC."""
    stages = yaml.safe_load((Path(ROOT) / "dvc.yaml").read_text())["stages"]
    assert tuple(stages) == STAGES
    for name, stage in stages.items():
        assert stage["do"]["cmd"] == f"exec python -m tasks.{name} --study ${{key}}"
