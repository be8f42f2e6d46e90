"""All stages by one command, with everything real: Prefect's server, DVC, MLflow."""

import json
import os
import signal
import sqlite3
import urllib.request

import mlflow
import psutil
import pytest
from mlflow.tracking import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from flows.pipeline import busy, last_line
from flows.server import server
from flows.store import check_store
from tests.flows.conftest import LONGER
from tests.projects import FEWER, STUDY, wait_until


def listening_on(port):
    return {
        c.laddr.ip for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port
    }


def artifacts(key):
    with get_client(sync_client=True) as client:
        return client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))


def test_nothing_to_do_runs_nothing_and_needs_no_server(project):
    done = project.python("flows.pipeline", "--study", STUDY, PREFECT_API_URL="", PREFECT_HOME="/proc/nowhere")
    assert done.returncode == 0, done.stderr
    assert "Spent 0 s: nothing had changed." in done.stdout
    assert "MPE + q baseline" in done.stdout
    assert not (project.folder / "mlflow.db").exists()


@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_the_pipeline_does_what_has_changed_and_mlflow_leads_back_to_it(project, fewer):
    """By a server of its own, as a new user runs it."""
    project.set(*FEWER)
    done = project.python("flows.pipeline", "--study", STUDY, PREFECT_API_URL="", PREFECT_API_AUTH_STRING="")
    assert done.returncode == 0, done.stderr
    assert "evaluate" in done.stdout.splitlines()[-1]
    assert "q_hat" not in done.stdout.splitlines()[-1]
    uri = f"sqlite:///{project.folder / 'mlflow.db'}"
    store = MlflowClient(uri, uri)
    runs = store.search_runs([store.get_experiment_by_name(STUDY).experiment_id])
    parent = next(run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    assert parent.data.params["evaluate.episodes"] == "45"
    assert parent.data.tags["git_commit"] == project.run("git", "rev-parse", "HEAD").stdout.strip()
    assert parent.data.metrics["seconds.evaluate"] > 0
    assert parent.data.metrics["seconds.q"] == 0
    assert parent.data.tags[f"dvc.q.{STUDY}"] in (project.folder / "dvc.lock").read_text()
    assert parent.data.metrics["may_be_best"] >= 1
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(children) == 8
    page = (project.data / "report" / STUDY / "decision.md").read_text()
    shown = artifacts(f"decision-{STUDY}")  # the servers share one database, which is asked in no order
    assert {artifact.type for artifact in shown} == {"markdown"}
    assert any(artifact.data.endswith(f", group 0: who is best\n\n{page}") for artifact in shown)
    assert page.splitlines()[-1] in done.stdout
    assert fewer.metrics() == project.metrics()  # two doors, one result
    assert (fewer.folder / "dvc.lock").read_text() == (project.folder / "dvc.lock").read_text()
    mlflow.set_tracking_uri(None)
    assert not project.processes()


def test_a_failed_stage_fails_the_pipeline_with_its_own_last_line(project):
    """And leaves what Prefect shows of the stages before it."""
    project.set("q_hat:\n  hidden: 64", "q_hat:\n  hidden: 65")
    project.set("alpha: 0.0", "alpha: 2.0")
    done = project.python("flows.pipeline", "--study", STUDY)
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert line.startswith("pipeline: behavior: behavior.alpha is 2.0, expected")
    assert "Traceback" not in done.stderr
    assert {artifact.type for artifact in artifacts(f"q-hat-{STUDY}")} == {"progress"}
    assert 100.0 in [artifact.data for artifact in artifacts(f"q-hat-{STUDY}")]
    table = artifacts(f"q-hat-{STUDY}-table")
    assert [row["group"] for row in json.loads(table[0].data)] == ["group-00", "group-01", "group-02"]


def test_bad_input_is_one_line_before_anything_is_started(project):
    done = project.python("flows.pipeline", "--study", "gridworld-1001")
    assert done.returncode == 2
    assert done.stderr.startswith(f"pipeline: unknown study 'gridworld-1001'; did you mean '{STUDY}'?")
    project.set("runner: local", "runner: {local")
    done = project.python("flows.pipeline", "--study", STUDY)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("pipeline: params.yaml, line 2, column")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_stopped_pipeline_leaves_no_process_behind(project, number):
    """Its own server, DVC, the stage and its workers end with it, and a rerun has the right to start at once."""
    project.set("width: 700", "width: 400000")
    process = project.start("flows.pipeline", "--study", STUDY, PREFECT_API_URL="")
    assert wait_until(lambda: project.begun("targets"))
    names = " ".join(command for _, command in project.processes())
    assert all(part in names for part in ("prefect server", "dvc repro", "tasks.targets"))
    os.kill(process.pid, number)
    process.communicate()
    assert wait_until(lambda: not project.processes()), project.processes()


def test_a_server_that_dies_ends_the_pipeline_with_one_line_and_keeps_what_is_finished(project):
    project.set(*LONGER)
    project.set("width: 700", "width: 710")  # the stages before `q` are new ones
    process = project.start("flows.pipeline", "--study", STUDY, PREFECT_API_URL="")
    assert wait_until(lambda: project.begun("q"))
    servers = [pid for pid, command in project.processes() if "prefect server start" in command]
    assert servers
    for pid in servers:
        os.kill(pid, signal.SIGKILL)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "Prefect's server has ended; finished stages are kept, run it again to resume" in error.splitlines()[-1]
    assert "Traceback" not in error
    assert wait_until(lambda: not project.processes()), project.processes()
    assert project.repro("offline").stdout.count("didn't change, skipping") == 2


def test_a_dead_store_is_one_line_before_the_first_stage(project):
    project.set(*FEWER)
    (project.folder / "mlflow.db").mkdir()  # no store can be there
    for uri, line in (
        ("", f"{project.folder / 'mlflow.db'}: unable to open database file; MLflow's store, expected"),
        ("http://127.0.0.1:9", "http://127.0.0.1:9: [Errno 111] Connection refused; expected MLflow's server there"),
    ):
        done = project.python("flows.pipeline", "--study", STUDY, MLFLOW_TRACKING_URI=uri)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith(f"pipeline: {line}")
        assert "Traceback" not in done.stderr
    assert not (project.data / ".work" / "pipeline").exists()


def test_a_store_that_cannot_be_written_is_refused(tmp_path, small_disk):
    folder, remount = small_disk
    check_store(f"sqlite:///{tmp_path / 'new.db'}")
    assert not (tmp_path / "new.db").exists()
    database = folder / "mlflow.db"
    with sqlite3.connect(database) as store:
        store.execute("CREATE TABLE x (y)")
    store.close()
    with pytest.raises(RuntimeError, match="no space left on its disk"):
        check_store(f"sqlite:///{database}")
    remount("size=30m")
    check_store(f"sqlite:///{database}")
    held = sqlite3.connect(database)
    held.execute("BEGIN EXCLUSIVE")
    with pytest.raises(RuntimeError, match="database is locked; MLflow's store, expected"):
        check_store(f"sqlite:///{database}", seconds=0.1)
    held.close()
    remount("ro,size=30m")
    with pytest.raises(RuntimeError, match=f"{database}: its folder is not writable"):
        check_store(f"sqlite:///{database}")


def test_an_unwritable_home_or_a_full_disk_is_named(project, small_disk):
    folder, remount = small_disk
    project.set(*FEWER)
    (folder / "ballast").write_bytes(bytes(os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize - 100_000))
    for options, said in (("rw", "No space left on device"), ("ro", "Read-only file system")):
        remount(options)
        done = project.python("flows.pipeline", "--study", STUDY, PREFECT_API_URL="", PREFECT_HOME=str(folder))
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith(f"pipeline: {folder}: {said}; Prefect keeps its database there")


def test_the_last_line_is_the_stages_own_not_dvcs():
    assert last_line("Running stage\nq: no data\nERROR: failed to reproduce 'q@ant'\n") == "q: no data"
    assert last_line("ERROR: failed to lock\n\n") == "ERROR: failed to lock"
    assert last_line("") == ""


def test_dvc_that_is_busy_is_told_from_a_failure():
    assert busy("ERROR: Unable to acquire lock. Most likely another DVC process is running")
    assert busy("ERROR: failed to reproduce 'q@ant': 'data/q/ant' is busy, it is being blocked by:\n(PID 7): dvc")
    assert not busy("q: no data\nERROR: failed to reproduce 'q@ant'")


def test_a_server_of_ours_is_on_loopback_alone_and_ends_with_its_block():
    with server() as url:
        host, port = url.removeprefix("http://").removesuffix("/api").split(":")
        assert host == "127.0.0.1"
        assert listening_on(int(port)) == {"127.0.0.1"}
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{url}/health", timeout=60)
