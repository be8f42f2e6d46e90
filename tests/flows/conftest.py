"""A real Prefect server for the session, and copies of the project with tiny parameters."""

import os
import shutil

import pytest
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.pipeline import server
from tests.projects import FEWER, PARTS, ROOT, Project


@pytest.fixture(scope="session", autouse=True)
def prefect_server(tmp_path_factory):
    """Without it every flow starts its own."""
    os.environ["PREFECT_HOME"] = str(tmp_path_factory.mktemp("prefect"))
    with server() as url, temporary_settings({PREFECT_API_URL: url}):  # for clients of this process,
        os.environ["PREFECT_API_URL"] = url  # and of others
        yield url
    del os.environ["PREFECT_API_URL"]


@pytest.fixture(scope="session")
def new_project(tmp_path_factory):
    """Three groups of three policies; nothing has run."""
    folder = tmp_path_factory.mktemp("new")
    for name in PARTS:
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    shutil.copytree(ROOT / ".dvc" / "plots", folder / ".dvc" / "plots")
    params = yaml.safe_load((folder / "params.yaml").read_text())
    params["targets"] = {"groups": 3, "policies": 3, "start": [600, 900], "width": 700, "history": 3}
    params["offline"]["episodes"] = 60
    params["q"] = params["q_hat"] = params["behavior"]["fit"] = {**params["q"], "updates_per_step": 5}
    params["evaluate"] = {**params["evaluate"], "runs": 2, "episodes": 60, "match": 30}
    (folder / "params.yaml").write_text(yaml.safe_dump(params))
    project = Project(folder)
    project.run("git", "init", "-q")
    shutil.copytree(folder / ".dvc" / "plots", folder / "plots")  # `dvc init` wants no .dvc
    shutil.rmtree(folder / ".dvc")
    assert project.python("dvc", "init", "-q").returncode == 0
    shutil.move(folder / "plots", folder / ".dvc" / "plots")
    shutil.copy(ROOT / ".dvc" / "config", folder / ".dvc" / "config")
    project.commit()
    return project


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
