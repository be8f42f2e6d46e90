"""Copies of the project, with a Git and DVC of their own, and how their commands are run."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml

ROOT = Path(__file__).parents[1]
STUDY = "gridworld-1000"
FEWER = ("episodes: 60\n  match: 30", "episodes: 45\n  match: 30")  # a change of `evaluate` alone
PARTS = ("manyfold", "tasks", "flows", "dvc.yaml", "params.yaml", "prefect.yaml", ".dvcignore", ".gitignore")
OTHERS = ("MLFLOW_TRACKING_URI", "OMP_NUM_THREADS", "DVC_STAGE")  # of whoever runs the tests


class Project:
    """A project folder and how its commands are run."""

    def __init__(self, folder):
        self.folder, self.data = folder, folder / "data"

    @property
    def environment(self):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {name: value for name, value in os.environ.items() if name not in OTHERS}
        return {**own, "PYTHONPATH": str(self.folder), "PATH": path, "PWD": str(self.folder)}

    def run(self, *command, **more):
        options = {"cwd": self.folder, "env": {**self.environment, **more}, "capture_output": True, "text": True}
        return subprocess.run(command, check=False, **options)

    def python(self, *arguments, **more):
        return self.run(sys.executable, "-m", *arguments, **more)

    def stage(self, name, *arguments, study=STUDY, **more):
        """A stage's own command, without DVC."""
        return self.python(f"tasks.{name}", "--study", study, *arguments, **more)

    def start(self, *arguments, **more):
        """A Python command in the background, in a session of its own."""
        options = {"cwd": self.folder, "env": {**self.environment, **more}, "text": True, "start_new_session": True}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([sys.executable, "-m", *arguments], **pipes, **options)

    def repro(self, stage="report", *options, study=STUDY, **more):
        return self.python("dvc", "repro", *options, f"{stage}@{study}", **more)

    def processes(self):
        """Running processes that belong to this folder, whoever started them: (process id, command)."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("PYTHONPATH") == str(self.folder) and process.cmdline():
                    found.append((process.pid, " ".join(process.cmdline())))
        return found

    def begun(self, stage):
        """Whether a group of the stage reports."""
        return bool(list((self.data / ".work" / stage).rglob("progress-*.json")))

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

    def metrics(self, study=STUDY):
        return (self.data / "evaluate" / study / "metrics.json").read_text()

    def files(self, stage, study=STUDY):
        """What a stage has made."""
        folder = self.data / stage / study
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def copy(self, folder):
        """As it stands, cache included."""
        shutil.copytree(self.folder, folder, symlinks=True, dirs_exist_ok=True)
        return Project(folder)


def wait_until(condition, seconds=120):
    """Whether the condition has come true in time; what is given is for a busy machine."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def tiny(folder, studies=(STUDY,)):
    """A new project with three groups of three policies and next to nothing to compute."""
    folder.mkdir(exist_ok=True)
    for name in PARTS:
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    params = yaml.safe_load((folder / "params.yaml").read_text())
    params["targets"] |= {"groups": 3, "policies": 3, "start": [600, 900], "width": 700, "history": 3}
    params["offline"] |= {"episodes": 60}
    for fit in (params["q"], params["q_hat"], params["behavior"]["fit"]):
        fit |= {"updates_per_step": 5}
    params["evaluate"] |= {"runs": 2, "episodes": 60, "match": 30, "pool": 60, "truth": 60}
    params["studies"] = {name: params["studies"][name] for name in studies}
    for study in params["studies"].values():  # what a study overrides is for its full size
        study["offline"].pop("episodes", None)
        study["evaluate"] = {}
    (folder / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    project = Project(folder)
    project.run("git", "init", "-q")
    assert project.python("dvc", "init", "-q").returncode == 0
    shutil.copytree(ROOT / ".dvc" / "plots", folder / ".dvc" / "plots", dirs_exist_ok=True)
    shutil.copy(ROOT / ".dvc" / "config", folder / ".dvc" / "config")
    project.commit()
    return project
