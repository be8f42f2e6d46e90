"""A real Prefect server for the session, and copies of the project with tiny parameters."""

import os

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.server import server
from tests.projects import FEWER, tiny


@pytest.fixture(scope="session", autouse=True)
def prefect_server(tmp_path_factory):
    """Without it every flow starts its own."""
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:2]))  # two shards, also where there are more cores
    os.environ["PREFECT_HOME"] = str(tmp_path_factory.mktemp("prefect"))
    with server() as url, temporary_settings({PREFECT_API_URL: url}):  # for clients of this process,
        os.environ["PREFECT_API_URL"] = url  # and of others
        yield url
    del os.environ["PREFECT_API_URL"]


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
    project.said = project.repro().stdout
    return project


@pytest.fixture
def project(finished, tmp_path):
    """A copy of the finished one."""
    return finished.copy(tmp_path / "project")
