"""Killed, full, read-only, corrupt: one clear line, nothing lost, nothing half-written taken as complete."""

import os
import random
import signal
import time

import psutil
import pytest

from flows.pipeline import STAGES
from tests.flows.conftest import LONGER
from tests.projects import STUDY, wait_until


def kill_in_each_stage(project, rng):
    """Each stage is killed once by kill -9 at a random moment of its work, or of its start, and run again."""
    for stage in STAGES:
        process = project.start("dvc", "repro", "--single-item", f"{stage}@{STUDY}")
        if stage != "report" and rng.random() < 0.7:
            wait_until(lambda process=process, stage=stage: project.begun(stage) or process.poll() is not None)
            time.sleep(rng.uniform(0, 1))
        else:
            time.sleep(rng.uniform(0.5, 4))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert wait_until(lambda: not project.processes()), project.processes()
        done = project.repro(stage, "--single-item")
        assert done.returncode == 0, (stage, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_dvc_repro_killed_at_many_moments_gives_the_same_results(new_project, finished, tmp_path, seed):
    project = new_project.copy(tmp_path / "project")
    kill_in_each_stage(project, random.Random(seed))
    for stage in ("targets", "offline", "q", "q_hat", "behavior", "evaluate"):  # recomputed, to the same bytes
        assert project.files(stage) == finished.files(stage)


@pytest.mark.parametrize("shell", ["/bin/bash", ""])  # without one DVC takes /bin/sh
def test_kill_9_of_dvc_leaves_nothing_and_finished_groups_are_not_computed_again(project, longer, shell):
    project.set(*LONGER)
    process = project.start("dvc", "repro", "--single-item", f"q@{STUDY}", SHELL=shell)
    work = project.data / ".work" / "q"
    assert wait_until(lambda: list(work.glob("*/group-*/q.json")))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert wait_until(lambda: not project.processes()), project.processes()
    before = {path.parent.name: path.stat().st_mtime_ns for path in work.glob("*/group-*/q.json")}
    assert 1 <= len(before) < 3
    assert project.repro("q", "--single-item").returncode == 0
    now = {path.parent.name: path.stat().st_mtime_ns for path in (project.data / "q" / STUDY).glob("*/q.json")}
    assert {name: now[name] for name in before} == before
    assert project.files("q") == longer.files("q")


def test_a_killed_worker_is_tried_again_and_gives_the_same_numbers(project, longer):
    project.set(*LONGER)
    process = project.start("tasks.q", "--study", STUDY, "--workers", "2", OMP_NUM_THREADS="1")
    assert wait_until(lambda: project.begun("q"))
    psutil.Process(process.pid).children()[0].kill()
    _, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert project.files("q") == longer.files("q")


def test_a_full_disk_is_one_line_and_a_rerun_with_room_succeeds(project, finished, small_disk):
    folder, remount = small_disk
    for stage in ("targets", "offline"):
        project.run("cp", "-r", str(project.data / stage), str(folder))
    room = os.statvfs(folder)
    (folder / "ballast").write_bytes(bytes(room.f_bavail * room.f_frsize - 40_000))
    done = project.stage("q", "--data", str(folder))
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert line.startswith("q: ")
    assert "No space left on device" in line
    assert str(folder) in line
    assert not (folder / "q").exists()
    remount("size=30m")
    done = project.stage("q", "--data", str(folder))
    assert done.returncode == 0, done.stderr
    found = {str(p.relative_to(folder / "q" / STUDY)): p.read_bytes() for p in (folder / "q").rglob("*.safetensors")}
    assert found == {name: x for name, x in finished.files("q").items() if name.endswith("safetensors")}


def test_a_read_only_data_folder_is_one_line(project, small_disk):
    folder, remount = small_disk
    for stage in ("targets", "offline"):
        project.run("cp", "-r", str(project.data / stage), str(folder))
    remount("ro")
    done = project.stage("q", "--data", str(folder))
    assert done.returncode == 2
    assert "Read-only file system" in done.stderr
    assert str(folder) in done.stderr
    assert done.stderr.startswith("q: ")
    assert done.stderr.count("\n") == 1


def test_a_corrupt_cached_parquet_file_is_one_line_and_a_rerun_repairs_it(project, finished):
    """In the work tree and in DVC's cache alike."""
    path = project.data / "offline" / STUDY / "group-01" / "transitions.parquet"
    good = path.read_bytes()
    bad = good[:200] + bytes(b ^ 0xFF for b in good[200:300]) + good[300:]
    cached = next(f for f in (project.folder / ".dvc" / "cache").rglob("*") if f.is_file() and f.read_bytes() == good)
    for file in (path, cached):
        file.chmod(0o644)
        file.write_bytes(bad)
    done = project.stage("q")
    assert done.returncode == 2
    assert str(path) in done.stderr.splitlines()[-1]
    done = project.repro("offline", "--force", "--single-item")
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == good
    assert project.stage("q").returncode == 0
    assert project.files("q") == finished.files("q")
