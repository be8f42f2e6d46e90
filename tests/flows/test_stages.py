"""The stages through their real doors: `dvc repro`, which runs the Prefect flows."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from flows.shards import shards

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project with tiny parameters and a Git and DVC of its own."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("manyfold", "tasks", "flows", "dvc.yaml", "params.yaml", ".dvcignore"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    params = yaml.safe_load((folder / "params.yaml").read_text())
    params["targets"] = {"groups": 3, "policies": 3, "start": [600, 900], "width": 700, "history": 3}
    params["offline"]["episodes"] = 60
    params["q"] = params["q_hat"] = params["behavior"]["fit"] = {**params["q"], "updates_per_step": 5}
    params["evaluate"] = {"runs": 2, "episodes": 60, "match": 30}
    (folder / "params.yaml").write_text(yaml.safe_dump(params))
    run(folder, "git", "init", "-q")
    run(folder, sys.executable, "-m", "dvc", "init", "-q")
    run(folder, sys.executable, "-m", "dvc", "config", "core.analytics", "false")
    return folder


def run(folder, *command):
    binaries = Path(sys.executable).parent
    environment = {**os.environ, "PYTHONPATH": str(folder), "PATH": f"{binaries}:{os.environ['PATH']}"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def repro(folder, stage):
    return run(folder, sys.executable, "-m", "dvc", "repro", stage)


def test_dvc_repro_runs_the_chain_and_a_second_call_does_nothing(project):
    done = repro(project, "report@gridworld-1000")
    assert done.returncode == 0, done.stderr
    for stage, file in (
        ("targets", "targets.safetensors"),
        ("offline", "transitions.parquet"),
        ("q", "q.safetensors"),
        ("q_hat", "q_hat.safetensors"),
        ("behavior", "mu.onnx"),
    ):
        out = project / "data" / stage / "gridworld-1000"
        assert sorted(f.name for f in out.iterdir()) == ["group-00", "group-01", "group-02"]
        assert (out / "group-02" / file).exists()
    assert done.stdout.count("group-02") == 5  # the table at the end of each of these stages
    runs = project / "data" / "evaluate" / "gridworld-1000" / "runs"
    assert sorted(f.name for f in runs.iterdir()) == ["group-00", "group-01", "group-02"]
    metrics = (runs.parent / "metrics.json").read_text()
    assert (project / "data" / "report" / "gridworld-1000" / "relative_error.svg").exists()
    assert not list((project / "data" / ".work").rglob("*.safetensors"))
    again = repro(project, "report@gridworld-1000")
    assert again.stdout.count("didn't change, skipping") == 7
    # fewer episodes change evaluate and report alone, and back again the numbers are the same
    params = (project / "params.yaml").read_text()
    (project / "params.yaml").write_text(params.replace("episodes: 60\n  match: 30", "episodes: 45\n  match: 30"))
    assert repro(project, "report@gridworld-1000").stdout.count("didn't change, skipping") == 5
    assert (runs.parent / "metrics.json").read_text() != metrics
    (project / "params.yaml").write_text(params)
    assert repro(project, "report@gridworld-1000").returncode == 0
    assert (runs.parent / "metrics.json").read_text() == metrics


def test_the_flow_refuses_bad_input_with_one_line_and_exit_code_2(project):
    done = run(project, sys.executable, "-m", "flows.targets", "--env", "walkr")
    assert done.returncode == 2
    assert done.stderr.startswith("targets: unknown environment 'walkr'; did you mean 'walker'?")
    assert done.stderr.count("\n") == 1
    params = (project / "params.yaml").read_text()
    (project / "params.yaml").write_text(params.replace("width: 700", "width: -1"))
    done = run(project, sys.executable, "-m", "flows.targets", "--env", "gridworld-1000")
    (project / "params.yaml").write_text(params)
    assert done.returncode == 2
    assert done.stderr == "targets: targets.width is -1, expected more than 0 training steps\n"


def test_ctrl_c_ends_at_once_and_a_rerun_goes_on(project):
    """SIGINT to the whole process group, as a terminal sends it, while shards are training."""
    params = (project / "params.yaml").read_text()
    (project / "params.yaml").write_text(params.replace("width: 700", "width: 9000"))
    command = [sys.executable, "-m", "flows.targets", "--env", "gridworld-27000"]
    environment = {**os.environ, "PYTHONPATH": str(project)}
    process = subprocess.Popen(
        command, cwd=project, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while not list((project / "data" / ".work").rglob("progress-*.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    start = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    (project / "params.yaml").write_text(params)
    assert time.monotonic() - start < 10
    assert process.returncode == 130
    assert error.splitlines()[-1] == "targets: interrupted; run it again to go on from the last save"
    assert "Traceback" not in error


def test_help_teaches():
    done = run(ROOT, sys.executable, "-m", "flows.targets", "--help")
    assert "goes on where it was last saved" in " ".join(done.stdout.split())


@pytest.mark.parametrize(("groups", "workers"), [(30, 2), (5, 4), (2, 8), (1, 1)])
def test_shards_hold_every_group_once(groups, workers):
    parts = shards(groups, workers)
    assert [g for part in parts for g in part] == list(range(groups))
    assert len(parts) == min(groups, workers)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
