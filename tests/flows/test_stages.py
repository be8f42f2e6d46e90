"""The stages through their real doors: `dvc repro`, which runs the Prefect flows."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from flows.shards import shards
from tasks.params import runner
from tests.projects import ENV, ROOT, Project

STAGES = ("targets", "offline", "q", "q_hat", "behavior", "evaluate", "report")


def test_dvc_repro_runs_the_chain(finished):
    for stage, file in (
        ("targets", "targets.safetensors"),
        ("offline", "transitions.parquet"),
        ("q", "q.safetensors"),
        ("q_hat", "q_hat.safetensors"),
        ("behavior", "mu.onnx"),
    ):
        out = finished.data / stage / ENV
        assert sorted(f.name for f in out.iterdir()) == ["group-00", "group-01", "group-02"]
        assert (out / "group-02" / file).exists()
    assert finished.said.count("group-02") == 5  # the table at the end of each of these stages
    runs = finished.data / "evaluate" / ENV / "runs"
    assert sorted(f.name for f in runs.iterdir()) == ["group-00", "group-01", "group-02"]
    assert (finished.data / "report" / ENV / "relative_error.svg").exists()
    assert not list((finished.data / ".work").rglob("*.safetensors"))


def test_a_second_call_does_nothing(project):
    start = time.monotonic()
    assert project.repro().stdout.count("didn't change, skipping") == 7
    assert time.monotonic() - start < 15


def test_fewer_episodes_change_evaluate_and_report_alone(fewer, finished):
    assert fewer.said.count("didn't change, skipping") == 5
    assert fewer.metrics() != finished.metrics()
    diff = json.loads(fewer.python("dvc", "metrics", "diff", "--json").stdout)
    assert diff[f"data/evaluate/{ENV}/metrics.json"]["max_episodes"] == {"old": 60, "new": 45, "diff": -15}


def test_plots_show_draws_every_estimator_once(project):
    done = project.python("dvc", "plots", "show", f"data/evaluate/{ENV}/curves.csv")
    assert done.returncode == 0, done.stderr
    page = (project.folder / "dvc_plots" / "index.html").read_text()
    assert "datum.policy == 'all'" in page  # our template
    assert page.count('"mpe_baseline"') > 0


@pytest.mark.slow
def test_an_experiment_changes_one_parameter_and_leaves_the_rest(project):
    done = project.python("dvc", "exp", "run", "-S", "evaluate.runs=3", f"report@{ENV}")
    assert done.returncode == 0, done.stderr
    assert json.loads(project.metrics())["runs"] == 3
    assert done.stdout.count("didn't change, skipping") == 5


def test_a_local_remote_gives_the_data_back(project, tmp_path):
    assert (
        project.python("dvc", "remote", "add", "--local", "--default", "store", str(tmp_path / "store")).returncode == 0
    )
    assert project.python("dvc", "push").returncode == 0
    before = (project.data / "q" / ENV / "group-01" / "q.safetensors").read_bytes()
    for folder in (project.folder / ".dvc" / "cache", project.data / "q"):
        project.run("rm", "-r", str(folder))
    done = project.python("dvc", "pull", f"q@{ENV}")
    assert done.returncode == 0, done.stderr
    assert (project.data / "q" / ENV / "group-01" / "q.safetensors").read_bytes() == before


@pytest.mark.parametrize(("stage", "workers"), [("targets", "1"), ("q", "3")])
def test_one_shard_or_three_give_the_same_files(finished, project, stage, workers):
    """Two made those of `finished`."""
    project.run("rm", "-r", str(project.data / stage / ENV))
    done = project.python(f"flows.{stage}", "--env", ENV, "--workers", workers)
    assert done.returncode == 0, done.stderr
    assert project.files(stage) == finished.files(stage)


def artifacts(key):
    with get_client(sync_client=True) as client:
        return client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))


def test_prefect_shows_progress_and_the_table_of_a_stage(finished):
    progress = artifacts(f"q-hat-{ENV}")  # in any order; runs that other tests have killed are among them
    assert {artifact.type for artifact in progress} == {"progress"}
    assert 100.0 in [artifact.data for artifact in progress]
    table = artifacts(f"q-hat-{ENV}-table")
    assert [row["group"] for row in json.loads(table[0].data)] == ["group-00", "group-01", "group-02"]


def test_the_flow_refuses_bad_input_with_one_line_and_exit_code_2(project):
    done = project.python("flows.targets", "--env", "walkr")
    assert done.returncode == 2
    assert done.stderr.startswith("targets: unknown environment 'walkr'; did you mean 'walker'?")
    assert done.stderr.count("\n") == 1
    project.set("width: 700", "width: -1")
    done = project.python("flows.targets", "--env", ENV)
    assert done.returncode == 2
    assert done.stderr == "targets: targets.width is -1, expected more than 0 training steps\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("runner: cloud", "params.yaml: runner is 'cloud', expected local or dask"),
        ("{}", "params.yaml: runner is None, expected local or dask"),
        ("[]", "params.yaml: expected sections, found none"),
        ("runner: dask", "params.yaml: scheduler is '', expected its address such as tcp://10.0.0.1:8786"),
    ],
)
def test_a_runner_that_is_not_there_is_refused(tmp_path, text, line):
    (tmp_path / "params.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(line)):
        runner(tmp_path / "params.yaml")


def test_ctrl_c_ends_at_once_and_a_rerun_goes_on(project):
    """SIGINT to the whole process group, as a terminal sends it, while shards are training."""
    project.set("width: 700", "width: 400000")
    process = project.start("flows.targets", "--env", "gridworld-27000")
    deadline = time.monotonic() + 120
    while not list((project.data / ".work" / "targets").rglob("progress-*.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    again = project.python("flows.targets", "--env", "gridworld-27000")  # a second one beside it
    start = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert time.monotonic() - start < 10
    assert process.returncode == 130
    assert error.splitlines()[-1] == "targets: interrupted; run it again to go on from the last save"
    assert "Traceback" not in error
    assert again.returncode == 2
    assert "another run of targets gridworld-27000 is going on" in again.stderr.splitlines()[-1]


def test_help_teaches():
    done = Project(ROOT).python("flows.targets", "--help")
    assert "goes on where it was last saved" in " ".join(done.stdout.split())


@pytest.mark.parametrize(("groups", "workers"), [(30, 2), (5, 4), (2, 8), (1, 1)])
def test_shards_hold_every_group_once(groups, workers):
    parts = shards(groups, workers)
    assert [g for part in parts for g in part] == list(range(groups))
    assert len(parts) == min(groups, workers)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_stages_of_dvc_are_the_pipelines():
    import yaml

    from flows.pipeline import STAGES as walked

    assert tuple(yaml.safe_load((Path(ROOT) / "dvc.yaml").read_text())["stages"]) == walked == STAGES
