"""Copies of the project, with a Git and DVC of their own, and how their commands are run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
ENV = "gridworld-1000"
FEWER = ("episodes: 60\n  match: 30", "episodes: 45\n  match: 30")  # a change of `evaluate` alone
PARTS = ("manyfold", "tasks", "flows", "dvc.yaml", "params.yaml", "prefect.yaml", ".dvcignore", ".gitignore")


class Project:
    """A project folder and how its commands are run."""

    def __init__(self, folder):
        self.folder, self.data = folder, folder / "data"

    @property
    def environment(self):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
        return {**own, "PYTHONPATH": str(self.folder), "PATH": path, "PWD": str(self.folder)}

    def run(self, *command, **more):
        options = {"cwd": self.folder, "env": {**self.environment, **more}, "capture_output": True, "text": True}
        return subprocess.run(command, check=False, **options)

    def python(self, *arguments, **more):
        return self.run(sys.executable, "-m", *arguments, **more)

    def start(self, *arguments, **more):
        """The same in the background, in a session of its own."""
        options = {"cwd": self.folder, "env": {**self.environment, **more}, "text": True, "start_new_session": True}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([sys.executable, "-m", *arguments], **pipes, **options)

    def repro(self, stage="report", *options, env=ENV):
        return self.python("dvc", "repro", *options, f"{stage}@{env}")

    def set(self, old, new):
        """Changes params.yaml; what was there before."""
        params = self.folder / "params.yaml"
        before = params.read_text()
        assert old in before
        params.write_text(before.replace(old, new))
        return before

    def commit(self):
        self.run("git", "add", ".")
        done = self.run("git", "-c", "user.name=test", "-c", "user.email=test@test", "commit", "-qm", "as it stands")
        assert done.returncode == 0, done.stdout

    def metrics(self, env=ENV):
        return (self.data / "evaluate" / env / "metrics.json").read_text()

    def files(self, stage, env=ENV):
        """What a stage has made."""
        folder = self.data / stage / env
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def copy(self, folder):
        """As it stands, cache included."""
        shutil.copytree(self.folder, folder, symlinks=True, dirs_exist_ok=True)
        return Project(folder)


def tiny(folder):
    """A new project with three groups of three policies and next to nothing to compute."""
    folder.mkdir(exist_ok=True)
    for name in PARTS:
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    params = yaml.safe_load((folder / "params.yaml").read_text())
    params["targets"] = {"groups": 3, "policies": 3, "start": [600, 900], "width": 700, "history": 3}
    params["offline"] |= {"episodes": 60, "fewer": {}}
    params["q"] = params["q_hat"] = params["behavior"]["fit"] = {**params["q"], "updates_per_step": 5}
    params["evaluate"] = {
        **params["evaluate"],
        "runs": 2,
        "episodes": 60,
        "match": 30,
        "pool": 60,
        "truth": 60,
        "more": {},
    }
    (folder / "params.yaml").write_text(yaml.safe_dump(params))
    project = Project(folder)
    project.run("git", "init", "-q")
    assert project.python("dvc", "init", "-q").returncode == 0
    shutil.copytree(ROOT / ".dvc" / "plots", folder / ".dvc" / "plots")
    shutil.copy(ROOT / ".dvc" / "config", folder / ".dvc" / "config")
    project.commit()
    return project
