"""The same stages on a real Dask cluster: a scheduler and two workers, each a process."""

import os
import signal

import psutil
import pytest

from flows.server import free_port
from tests.flows.conftest import LONGER
from tests.projects import STUDY, wait_until


@pytest.fixture(scope="module")
def cluster(new_project, tmp_path_factory):
    """What `python -m flows.cluster` starts; the scheduler's address, and a project whose processes they are."""
    project, port = new_project.copy(tmp_path_factory.mktemp("cluster")), free_port()
    process = project.start("flows.cluster", "--port", str(port), "--workers", "2")
    assert f"tcp://127.0.0.1:{port} with 2 workers" in process.stdout.readline()
    yield f"tcp://127.0.0.1:{port}", project
    process.terminate()
    process.communicate()
    assert wait_until(lambda: not project.processes()), project.processes()


@pytest.fixture
def project(cluster, project):
    """Its stages run on the cluster."""
    project.set("runner: local\nscheduler: null", f"runner: dask\nscheduler: {cluster[0]}")
    return project


def test_nothing_of_it_listens_but_where_it_was_told_and_workers_have_one_thread(cluster):
    from distributed import Client

    address, project = cluster
    sockets = [c for pid, _ in project.processes() for c in psutil.Process(pid).net_connections("inet")]
    listening = [c.laddr for c in sockets if c.status == psutil.CONN_LISTEN]
    assert {found.ip for found in listening} == {"127.0.0.1"}
    assert len(listening) >= 4  # the scheduler, its page, and two workers
    with Client(address, timeout=60, set_as_default=False) as client:
        assert list(client.nthreads().values()) == [1, 1]


def workers(cluster):
    return [pid for pid, command in cluster[1].processes() if "spawn_main" in command]


def test_a_killed_worker_of_the_cluster_is_tried_again_and_gives_the_same_numbers(cluster, project, longer):
    project.set(*LONGER)
    process = project.start("dvc", "repro", "--single-item", f"q@{STUDY}")
    assert wait_until(lambda: len(list((project.data / ".work" / "q").rglob("progress-*.json"))) == 2)
    os.kill(workers(cluster)[0], signal.SIGKILL)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert project.files("q") == longer.files("q")
    assert wait_until(lambda: len(workers(cluster)) == 2)  # its nanny has started another


def test_kill_9_of_the_stage_ends_its_jobs_on_the_cluster_and_the_next_run_resumes(cluster, project, longer):
    project.set(*LONGER)
    process = project.start("tasks.q", "--study", STUDY)
    assert wait_until(lambda: len(list((project.data / ".work" / "q").rglob("progress-*.json"))) == 2)
    process.kill()
    process.communicate()
    done = project.stage("q")  # at once, while the killed run's jobs may still be at work
    assert done.returncode == 0, done.stderr
    assert project.files("q") == longer.files("q")
    assert wait_until(lambda: not project.processes()), project.processes()


def test_a_refused_input_is_one_line_on_a_cluster_too(project):
    path = project.data / "offline" / STUDY / "group-01" / "transitions.parquet"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-100])
    done = project.stage("q")
    assert done.returncode == 2
    assert str(path) in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_scheduler_that_is_not_there_is_one_line(project, cluster):
    project.set(cluster[0], "tcp://127.0.0.1:9")
    done = project.stage("q")
    assert done.returncode == 2
    line = "q: scheduler tcp://127.0.0.1:9: no answer, expected a Dask scheduler; is it running?"
    assert done.stderr.splitlines()[-1] == line
