"""A real Prefect server for the session, and copies of the project with tiny parameters."""

import contextlib
import os
import signal
import subprocess

import pytest
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from flows.server import auth_string, server
from tests.projects import FEWER, tiny

LONGER = ("updates_per_step: 5\n", "updates_per_step: 400\n")  # fits of seconds, which can be killed in the middle


@pytest.fixture(scope="session", autouse=True)
def prefect_server(tmp_path_factory):
    """Without it every flow starts its own."""
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:2]))  # two workers, also where there are more cores
    os.environ["PREFECT_HOME"] = str(tmp_path_factory.mktemp("prefect"))
    with server() as url, temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: auth_string()}):
        os.environ |= {"PREFECT_API_URL": url, "PREFECT_API_AUTH_STRING": auth_string()}  # for other processes
        yield url
    del os.environ["PREFECT_API_URL"], os.environ["PREFECT_API_AUTH_STRING"]


@pytest.fixture(scope="session")
def new_project(tmp_path_factory):
    """Nothing has run."""
    return tiny(tmp_path_factory.mktemp("new"))


@pytest.fixture(scope="session")
def finished(new_project, tmp_path_factory):
    """The whole chain by `dvc repro`, undisturbed. Not to be changed: copy it."""
    project = new_project.copy(tmp_path_factory.mktemp("finished"))
    done = project.repro()
    assert done.returncode == 0, done.stderr
    project.said = done.stdout
    project.commit()
    return project


@pytest.fixture(scope="session")
def fewer(finished, tmp_path_factory):
    """By `dvc repro` with fewer episodes, to compare other doors with."""
    project = finished.copy(tmp_path_factory.mktemp("fewer"))
    project.set(*FEWER)
    done = project.repro()
    assert done.returncode == 0, done.stderr
    project.said = done.stdout
    return project


@pytest.fixture(scope="session")
def longer(finished, tmp_path_factory):
    """The stage `q` with longer fits, undisturbed, to compare disturbed ones with."""
    project = finished.copy(tmp_path_factory.mktemp("longer"))
    project.set(*LONGER)
    done = project.stage("q")
    assert done.returncode == 0, done.stderr
    return project


@pytest.fixture
def project(finished, tmp_path):
    """A copy of the finished one; what a failed test has left running is ended."""
    copied = finished.copy(tmp_path / "project")
    yield copied
    for pid, _ in copied.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB, and a function that mounts it with other options."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(*options):
        return subprocess.run(["mount", *options], capture_output=True, check=False).returncode

    if mount("-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)):
        pytest.skip("mounting a tmpfs needs root")
    yield folder, lambda options: mount("-o", f"remount,{options}", str(folder))
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
