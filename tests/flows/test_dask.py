"""The same stages on a real Dask cluster: a scheduler and two workers, each a process."""

import os
import signal
import subprocess
import sys
import time

import pytest

from flows.server import free_port
from tests.flows.test_pipeline import wait_until
from tests.projects import ENV


def dask(project, *arguments):
    command = [sys.executable, "-m", "distributed.cli.dask_" + arguments[0], *arguments[1:]]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, cwd=project.folder, env=project.environment, **quiet)


@pytest.fixture
def cluster(project):
    """The scheduler's address and the workers, which run in the project's folder."""
    address = f"tcp://127.0.0.1:{free_port()}"
    alone = ("--host", "127.0.0.1", "--no-dashboard")
    scheduler = dask(project, "scheduler", *alone, "--port", address.rpartition(":")[2])
    workers = [dask(project, "worker", address, *alone, "--nthreads", "1", "--no-nanny") for _ in range(2)]
    project.set("runner: local\nscheduler: null", f"runner: dask\nscheduler: {address}")
    from distributed import Client

    with Client(address, timeout=60, set_as_default=False) as client:
        client.wait_for_workers(2, timeout=60)
    yield project, workers
    for process in (*workers, scheduler):
        process.kill()
        process.wait()


def test_a_cluster_gives_the_same_numbers(cluster, finished):
    project, _ = cluster
    done = project.repro("q", "--force", "--single-item")
    assert done.returncode == 0, done.stderr
    assert project.files("q") == finished.files("q")


@pytest.mark.slow
def test_a_cluster_gives_the_same_numbers_when_a_worker_is_killed(cluster, finished):
    project, workers = cluster
    project.set("updates_per_step: 5", "updates_per_step: 200")
    local = finished.copy(project.folder.parent / "local")
    local.set("updates_per_step: 5", "updates_per_step: 200")
    process = project.start("dvc", "repro", "--single-item", f"q@{ENV}")
    reports = lambda: len(list((project.data / ".work" / "q").rglob("progress-*.json"))) == 2  # noqa: E731
    assert wait_until(reports)
    time.sleep(2)
    os.kill(workers[0].pid, signal.SIGKILL)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert local.repro("q", "--single-item").returncode == 0
    assert project.files("q") == local.files("q")


def test_a_scheduler_that_is_not_there_is_one_line(project):
    project.set("runner: local\nscheduler: null", "runner: dask\nscheduler: tcp://127.0.0.1:9")
    done = project.python("flows.q", "--env", ENV)
    assert done.returncode == 2
    line = "q: scheduler tcp://127.0.0.1:9: no answer, expected a Dask scheduler; is it running?"
    assert done.stderr.splitlines()[-1] == line
