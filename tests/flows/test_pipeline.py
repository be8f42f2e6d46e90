"""The whole chain by one command, with everything real: Prefect's server, DVC, MLflow."""

import os
import signal
import time
import urllib.request
from pathlib import Path

import mlflow
import psutil
import pytest
from mlflow.tracking import MlflowClient

from flows.pipeline import busy, last_line
from flows.server import free_port, server
from tests.projects import ENV, FEWER


def processes_of(folder):
    """Running processes whose command or folder is in a project."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(folder) in (entry / "environ").read_text(errors="replace"):
                command = (entry / "cmdline").read_text().replace("\0", " ")
                found += [(int(entry.name), command)] if command else []
        except OSError:
            continue
    return found


def wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def begun(project, stage):
    """Whether some shard of the stage reports."""
    return lambda: list((project.data / ".work" / stage).rglob("progress-*.json"))


def test_nothing_to_do_takes_seconds_and_needs_no_server(project):
    start = time.monotonic()
    done = project.python("flows.pipeline", "--env", ENV, PREFECT_API_URL="")
    assert done.returncode == 0, done.stderr
    assert "Spent 0 s: nothing had changed." in done.stdout
    assert "MPE + q baseline" in done.stdout
    assert time.monotonic() - start < 15  # 4 s on a machine that does nothing else
    assert not (project.folder / "mlflow.db").exists()


@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_the_pipeline_does_what_has_changed_and_mlflow_leads_back_to_it(project, fewer):
    """By a server of its own, as a new user runs it."""
    project.set(*FEWER)
    done = project.python("flows.pipeline", "--env", ENV, PREFECT_API_URL="")
    assert done.returncode == 0, done.stderr
    assert "evaluate" in done.stdout.splitlines()[-1]
    assert "q_hat" not in done.stdout.splitlines()[-1]
    uri = f"sqlite:///{project.folder / 'mlflow.db'}"
    store = MlflowClient(uri, uri)
    runs = store.search_runs([store.get_experiment_by_name(ENV).experiment_id])
    parent = next(run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    assert parent.data.params["evaluate.episodes"] == "45"
    assert parent.data.tags["git_commit"] == project.run("git", "rev-parse", "HEAD").stdout.strip()
    assert parent.data.metrics["seconds.evaluate"] > 0
    assert parent.data.metrics["seconds.q"] == 0
    assert parent.data.tags["dvc.q.gridworld-1000"] in (project.folder / "dvc.lock").read_text()
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(children) == 7
    assert fewer.metrics() == project.metrics()  # two doors, one result
    assert (fewer.folder / "dvc.lock").read_text() == (project.folder / "dvc.lock").read_text()
    mlflow.set_tracking_uri(None)
    # `make ui`
    ports = [free_port(), free_port()]
    pages = project.start("flows.ui", "--mlflow", str(ports[0]), "--prefect", str(ports[1]))
    assert pages.stdout.readline().startswith("MLflow: http://127.0.0.1:")
    for port, part in zip(ports, ("MLflow", "Prefect"), strict=True):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as page:
            assert part in page.read().decode()
        assert listening_on(port) == {"127.0.0.1"}
    again = project.python("flows.ui", "--mlflow", str(ports[0]), "--prefect", str(ports[1]))
    assert again.returncode == 2
    assert again.stderr == f"ui: port {ports[0]} is taken; is `make ui` running already? (--mlflow names another)\n"
    pages.send_signal(signal.SIGTERM)
    pages.communicate()
    assert wait_until(lambda: not processes_of(project.folder), 15), processes_of(project.folder)


def test_a_failed_stage_fails_the_pipeline_with_its_own_last_line(project):
    project.set("width: 700", "width: -1")
    done = project.python("flows.pipeline", "--env", ENV)
    assert done.returncode == 2
    line = "pipeline: targets: targets.width is -1, expected more than 0 training steps"
    assert done.stderr.splitlines()[-1] == line


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_stopped_pipeline_leaves_no_process_behind(project, number):
    """Its own server, DVC, the stage's flow and the shards end with it, and a rerun has the right to start at once."""
    project.set("width: 700", "width: 400000")
    process = project.start("flows.pipeline", "--env", ENV, PREFECT_API_URL="")
    assert wait_until(begun(project, "targets"))
    names = " ".join(command for _, command in processes_of(project.folder))
    assert all(part in names for part in ("prefect server", "dvc repro", "flows.targets", "tasks.targets"))
    os.kill(process.pid, number)
    process.communicate()
    assert wait_until(lambda: not processes_of(project.folder), 15), processes_of(project.folder)


def test_the_last_line_is_the_stages_own_not_dvcs():
    assert last_line("Running stage\nq: no data\nERROR: failed to reproduce 'q@ant'\n") == "q: no data"
    assert last_line("ERROR: failed to lock\n\n") == "ERROR: failed to lock"
    assert last_line("") == ""


def listening_on(port):
    return {
        c.laddr.ip for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port
    }


def test_dvc_that_is_busy_is_told_from_a_failure():
    assert busy("ERROR: Unable to acquire lock. Most likely another DVC process is running")
    assert busy("ERROR: failed to reproduce 'q@ant': 'data/q/ant' is busy, it is being blocked by:\n(PID 7): dvc")
    assert not busy("q: no data\nERROR: failed to reproduce 'q@ant'")


@pytest.mark.slow
def test_a_recording_that_fails_is_one_line_and_can_be_made_up(project):
    project.set(*FEWER)
    (project.folder / "mlflow.db").mkdir()  # no store can be there
    done = project.python("flows.pipeline", "--env", ENV)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("pipeline: track: ")
    assert f"python -m tasks.track --env {ENV}" in line
    (project.folder / "mlflow.db").rmdir()
    assert project.python("tasks.track", "--env", ENV).returncode == 0
    assert (project.folder / "mlflow.db").is_file()


def test_a_server_of_ours_is_on_loopback_alone_and_ends_with_its_block():
    with server() as url:
        host, port = url.removeprefix("http://").removesuffix("/api").split(":")
        assert host == "127.0.0.1"
        assert listening_on(int(port)) == {"127.0.0.1"}
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{url}/health", timeout=5)
