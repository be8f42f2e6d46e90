"""Killed, full, read-only, corrupt: one clear line, nothing lost, nothing half-written taken as whole."""

import os
import random
import signal
import subprocess
import time

import pytest

from tests.flows.test_pipeline import begun, processes_of, wait_until
from tests.projects import ENV

STAGES = ("targets", "offline", "q", "q_hat", "behavior", "evaluate", "report")


def kill_in_each_stage(project, rng):
    """Each stage is killed once by kill -9 at a random moment of its work, or of its start, and run again."""
    for stage in STAGES:
        process = project.start("dvc", "repro", "--single-item", f"{stage}@{ENV}", PREFECT_API_URL="")
        if stage != "report" and rng.random() < 0.7:
            at_work = begun(project, stage)
            wait_until(lambda process=process, at_work=at_work: at_work() or process.poll() is not None)
            time.sleep(rng.uniform(0, 2))
        else:
            time.sleep(rng.uniform(0.5, 8))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert wait_until(lambda: not processes_of(project.folder), 20), processes_of(project.folder)
        done = project.repro(stage, "--single-item")
        assert done.returncode == 0, (stage, done.stderr)


@pytest.mark.slow
def test_dvc_repro_killed_in_every_stage_gives_the_same_results(new_project, finished, tmp_path):
    project = new_project.copy(tmp_path / "project")
    kill_in_each_stage(project, random.Random(0))
    for stage in ("targets", "offline", "q", "q_hat", "evaluate"):  # everything was computed anew, to the same bytes
        assert project.files(stage) == finished.files(stage)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_dvc_repro_killed_at_many_moments_gives_the_same_results(new_project, finished, tmp_path, seed):
    project = new_project.copy(tmp_path / "project")
    kill_in_each_stage(project, random.Random(seed))
    assert project.metrics() == finished.metrics()


@pytest.mark.parametrize("shell", ["/bin/bash", "/bin/sh"])  # one is replaced by the stage, one may stay around it
def test_groups_that_are_finished_are_not_computed_again(project, shell):
    project.set("updates_per_step: 5", "updates_per_step: 450")  # long enough to be killed before the last group
    process = project.start("dvc", "repro", "--single-item", f"q@{ENV}", SHELL=shell)
    work = project.data / ".work" / "q"
    assert wait_until(lambda: list(work.glob("*/group-*/q.json")))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert wait_until(lambda: not [c for _, c in processes_of(project.folder) if "q" in c], 15)
    whole = {path.parent.name: path.stat().st_mtime_ns for path in work.glob("*/group-*/q.json")}
    assert 1 <= len(whole) < 3
    assert project.repro("q", "--single-item").returncode == 0
    now = {path.parent.name: path.stat().st_mtime_ns for path in (project.data / "q" / ENV).glob("*/q.json")}
    assert len(now) == 3
    assert {name: now[name] for name in whole} == whole


def test_a_killed_shard_is_tried_again_and_goes_on(project, finished):
    process = project.start("flows.targets", "--env", ENV)
    assert wait_until(begun(project, "targets"))
    running = [pid for pid, c in processes_of(project.folder) if "-m tasks.targets" in c and "processes.py" not in c]
    os.kill(running[0], signal.SIGKILL)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert project.files("targets") == finished.files("targets")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB; `remount(options)` changes it."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(*options):
        return subprocess.run(["mount", *options], capture_output=True, check=False).returncode

    if mount("-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)):
        pytest.skip("mounting a tmpfs needs root")
    yield folder, lambda options: mount("-o", f"remount,{options}", str(folder))
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_one_line_and_a_rerun_with_room_succeeds(project, finished, small_disk):
    folder, remount = small_disk
    for stage in ("targets", "offline"):
        project.run("cp", "-r", str(project.data / stage), str(folder))
    room = os.statvfs(folder)
    (folder / "ballast").write_bytes(bytes(room.f_bavail * room.f_frsize - 20_000))
    done = project.python("flows.q", "--env", ENV, "--data", str(folder))
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert line.startswith("q: ")
    assert "No space left on device" in line
    assert not (folder / "q").exists()
    remount("size=30m")
    done = project.python("flows.q", "--env", ENV, "--data", str(folder))
    assert done.returncode == 0, done.stderr
    found = {str(p.relative_to(folder / "q" / ENV)): p.read_bytes() for p in (folder / "q").rglob("*.safetensors")}
    assert found == {name: x for name, x in finished.files("q").items() if name.endswith("safetensors")}


def test_a_read_only_data_folder_is_one_line(project, small_disk):
    folder, remount = small_disk
    for stage in ("targets", "offline"):
        project.run("cp", "-r", str(project.data / stage), str(folder))
    remount("ro")
    done = project.python("flows.q", "--env", ENV, "--data", str(folder))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("q: ")
    assert "Read-only file system" in done.stderr.splitlines()[-1]
    remount("rw,size=30m")
    assert project.python("flows.q", "--env", ENV, "--data", str(folder)).returncode == 0


def test_a_corrupt_cached_parquet_file_is_one_line_and_a_rerun_repairs_it(project, finished):
    """In the work tree and in DVC's cache alike."""
    path = project.data / "offline" / ENV / "group-01" / "transitions.parquet"
    good = path.read_bytes()
    bad = good[:200] + bytes(b ^ 0xFF for b in good[200:300]) + good[300:]
    cached = next(f for f in (project.folder / ".dvc" / "cache").rglob("*") if f.is_file() and f.read_bytes() == good)
    for file in (path, cached):
        file.chmod(0o644)
        file.write_bytes(bad)
    done = project.python("flows.q", "--env", ENV)
    assert done.returncode == 2
    assert str(path) in done.stderr.splitlines()[-1]
    done = project.repro("offline", "--force", "--single-item")
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == good
    assert project.python("flows.q", "--env", ENV).returncode == 0
    assert project.files("q") == finished.files("q")
