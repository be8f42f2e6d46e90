"""The stages through their real doors: `dvc repro`, which runs the Prefect flows."""

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import yaml

from flows.pipeline import STAGES, last_line, server
from flows.shards import shards

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def prefect_server():
    """One real server on loopback for all tests here: without it every flow starts its own."""
    with server() as url:
        os.environ["PREFECT_API_URL"] = url
        yield
        del os.environ["PREFECT_API_URL"]


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


def test_the_pipeline_walks_the_same_stages_and_prints_the_table(project):
    repro(project, "report@gridworld-1000")
    done = run(project, sys.executable, "-m", "flows.pipeline", "--env", "gridworld-1000")
    assert done.returncode == 0, done.stderr
    assert "Spent 0 s: nothing had changed." in done.stdout
    assert "MPE + q baseline" in done.stdout
    assert tuple(yaml.safe_load((project / "dvc.yaml").read_text())["stages"]) == STAGES


def test_a_failed_stage_fails_the_pipeline_with_its_own_last_line(project):
    params = (project / "params.yaml").read_text()
    (project / "params.yaml").write_text(params.replace("width: 700", "width: -1"))
    done = run(project, sys.executable, "-m", "flows.pipeline", "--env", "gridworld-1000")
    (project / "params.yaml").write_text(params)
    assert done.returncode == 2
    line = "pipeline: targets: targets.width is -1, expected more than 0 training steps"
    assert done.stderr.splitlines()[-1] == line


def test_the_last_line_is_the_stages_own_not_dvcs():
    text = "Running stage\nq: no data\nERROR: failed to reproduce 'q@ant'\n"
    assert last_line("q", text) == "q: no data"
    assert last_line("q", "ERROR: failed to lock\n\n") == "ERROR: failed to lock"
    assert last_line("q", "") == ""


def test_a_server_of_ours_is_on_loopback_alone_and_ends_with_its_block():
    with server() as url:
        host, port = url.removeprefix("http://").removesuffix("/api").split(":")
        assert host == "127.0.0.1"
        listening = subprocess.run(["ss", "-ltnH"], capture_output=True, text=True, check=False).stdout
        mine = [line.split()[3] for line in listening.splitlines() if line.split()[3].endswith(f":{port}")]
        assert mine in ([f"127.0.0.1:{port}"], [])  # [] where there is no ss
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{url}/health", timeout=5)


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
