"""A stage's groups over processes: killed, interrupted, refused, two at once. The stage is a toy, the rest is real."""

import contextlib
import errno
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tasks import executor, locks, studies
from tasks.executor import failure, parse_groups, run_stage, split
from tasks.locks import claimed, is_over, one_run

ROOT = Path(executor.__file__).parents[1]
STUDY = studies.names()[0]
TOY = '''"""Stage `toy`: writes a number for each group."""
import os, sys, time
from pathlib import Path
from tasks import stages
from tasks.executor import stage_main

class Toy:
    name, unit, header, batched = "toy", "steps", ("group", "number"), False

    def prepare(self, study, data):
        return int(os.environ.get("GROUPS", 4)), data / ".work" / "toy" / f"{study.name}-0123456789ab"

    def run(self, study, groups, work, data):
        report = stages.reporter(work, groups, len(groups))
        for i, group in enumerate(groups):
            folder = work / stages.group_name(group)
            if not folder.exists():
                self.compute(group, data)
                folder.mkdir()
                (folder / "number").write_text(str(group))
            report(i + 1, "")

    def compute(self, group, data):
        with (data / "computed").open("a") as file:
            file.write(f"{group} {os.getpid()}\\n")
        fault = os.environ.get(f"GROUP_{group}", "")
        if fault == "wrong":
            raise ValueError("group 1 is wrong, expected right")
        if fault == "bug":
            raise KeyError("unheard of")
        if fault == "killed" or (fault == "killed once" and not (data / "once").exists()):
            (data / "once").touch()
            os.kill(os.getpid(), 9)
        if fault == "long":
            time.sleep(1000)

    def collect(self, study, groups, work, data):
        return stages.collect(data / "toy" / study.name, groups, work, lambda folder: (folder / "number").exists())

    def describe(self, out):
        return [(folder.name, (folder / "number").read_text()) for folder in sorted(out.iterdir())]

STAGE = Toy()
if __name__ == "__main__":
    sys.exit(stage_main("toy"))
'''
RUN = "import runpy, sys, tasks; tasks.__path__.append(sys.argv.pop(1)); " + (
    "runpy.run_module('tasks.toy', run_name='__main__', alter_sys=True)"
)


class Toy:
    """The toy stage as a command, in a folder of its own."""

    def __init__(self, folder):
        self.folder, self.data = folder, folder / "data"
        self.data.mkdir()
        (folder / "toy.py").write_text(TOY)
        self.work = self.data / ".work" / "toy" / f"{STUDY}-0123456789ab"

    @property
    def command(self):
        return [sys.executable, "-c", RUN, str(self.folder), "--study", STUDY, "--data", str(self.data)]

    def environment(self, faults):
        named = {name.upper(): value for name, value in faults.items()}
        return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **named}

    def run(self, *arguments, **faults):
        options = {"env": self.environment(faults), "capture_output": True, "text": True, "check": False}
        return subprocess.run([*self.command, *arguments], **options)

    def start(self, *arguments, **faults):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        return subprocess.Popen([*self.command, *arguments], env=self.environment(faults), **pipes)

    def computed(self):
        """Groups that were computed, by process."""
        path = self.data / "computed"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def processes(self):
        """Of this toy, whoever started them."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(self.folder) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


@pytest.fixture
def toy(tmp_path):
    made = Toy(tmp_path)
    yield made
    for process in made.processes():
        process.kill()


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def last_line(text):
    return text.splitlines()[-1]


def test_every_group_is_computed_once_and_the_result_is_in_place(toy):
    abandoned = toy.work.with_name(f"{STUDY}-ffffffffffff")
    other = toy.work.with_name(f"{STUDY}-more-ffffffffffff")  # another study's
    abandoned.mkdir(parents=True)
    other.mkdir()
    done = toy.run(groups="5")
    assert done.returncode == 0, done.stderr
    assert sorted(group for group, _ in toy.computed()) == list("01234")
    assert len({pid for _, pid in toy.computed()}) <= len(os.sched_getaffinity(0))
    out = toy.data / "toy" / STUDY
    assert [(folder / "number").read_text() for folder in sorted(out.iterdir())] == list("01234")
    assert "group-04" in done.stdout
    status = json.loads((toy.data / ".work" / "toy" / f"{STUDY}.json").read_text())
    assert status == {"header": ["group", "number"], "rows": [[f"group-0{i}", str(i)] for i in range(5)]}
    assert not abandoned.exists()
    assert not toy.work.exists()
    assert other.exists()


def test_a_killed_worker_is_tried_again_without_what_is_finished(toy):
    done = toy.run("--workers", "1", groups="3", group_1="killed once")
    assert done.returncode == 0, done.stderr
    assert [group for group, _ in toy.computed()] == list("0112")


def test_a_worker_that_is_always_killed_is_one_line_and_what_is_finished_stays(toy):
    done = toy.run("--workers", "1", groups="2", group_1="killed")
    assert done.returncode == 2
    assert last_line(done.stderr).startswith("toy: groups 1-1: a worker process was killed 3 times")
    assert toy.run("--workers", "1", groups="2").returncode == 0
    assert [group for group, _ in toy.computed()] == list("01111")


def test_a_refused_input_ends_the_stage_at_once_with_its_line(toy):
    done = toy.run("--workers", "2", groups="3", group_0="long", group_1="wrong")
    assert done.returncode == 2
    assert last_line(done.stderr) == "toy: group 1 is wrong, expected right"
    assert "Traceback" not in done.stderr
    assert not toy.processes()


def test_a_fault_of_the_program_shows_where_it_is(toy):
    done = toy.run(groups="1", group_0="bug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert last_line(done.stderr) == "toy: KeyError: 'unheard of'"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_at_once_and_a_second_run_beside_it_is_refused(toy, number, code):
    process = toy.start("--workers", "2", groups="2", group_0="long", group_1="long")
    assert wait_until(lambda: len(toy.computed()) == 2)
    beside = toy.run()
    assert beside.returncode == 2
    assert f"taken, another run of toy {STUDY} is at work" in last_line(beside.stderr)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    _, error = process.communicate(timeout=120)
    assert process.returncode == code
    assert last_line(error) == "toy: interrupted; run it again to resume from the last save"
    assert "Traceback" not in error
    assert wait_until(lambda: not toy.processes())


def test_kill_9_of_the_stage_leaves_no_worker_and_the_next_run_resumes(toy):
    process = toy.start("--workers", "1", groups="3", group_1="long")
    assert wait_until(lambda: len(toy.computed()) == 2)
    process.kill()
    process.communicate()
    done = toy.run(groups="3")  # at once: it waits for the lock
    assert done.returncode == 0, done.stderr
    assert sorted(group for group, _ in toy.computed()) == list("0112")
    assert not toy.processes()


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
def test_kill_9_of_dvc_ends_the_stage(toy, shell):
    """DVC puts a shell around the command, which `exec` replaces."""
    around = [shell, "-c", f"exec {shlex.join(toy.command)}"]
    dvc = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess; subprocess.run({around})"],
        env={**toy.environment({"group_0": "long"}), "DVC_STAGE": "toy@x"},
    )
    assert wait_until(toy.computed)
    dvc.kill()
    dvc.wait()
    assert wait_until(lambda: not toy.processes()), toy.processes()


def test_dvc_that_is_killed_while_the_stage_imports_ends_it_too(toy):
    """tasks.PARENT was noted before."""
    (toy.folder / "toy.py").write_text(f"import time; open({str(toy.folder / 'begun')!r}, 'w'); time.sleep(1)\n{TOY}")
    dvc = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess; subprocess.run({toy.command})"],
        env={**toy.environment({"group_0": "long"}), "DVC_STAGE": "toy@x"},
    )
    assert wait_until((toy.folder / "begun").exists)
    dvc.kill()
    dvc.wait()
    assert wait_until(lambda: not toy.processes()), toy.processes()
    assert not toy.computed()


def test_it_is_started_again_with_one_thread(toy):
    (toy.folder / "toy.py").write_text(TOY.replace("str(group)", 'os.environ["OMP_NUM_THREADS"]'))
    options = {"env": toy.environment({"omp_num_threads": "4"}), "capture_output": True, "text": True, "check": False}
    assert subprocess.run(toy.command, **options).returncode == 0
    assert (toy.data / "toy" / STUDY / "group-00" / "number").read_text() == "1"


def test_a_part_of_the_groups_stays_in_the_work_folder(toy):
    done = toy.run("--groups", "1-2")
    assert done.returncode == 0, done.stderr
    assert sorted(folder.name for folder in toy.work.glob("group-*")) == ["group-01", "group-02"]
    done = toy.run("--groups", "3-4")
    assert last_line(done.stderr) == "toy: --groups is 3-4, expected groups from 0 to 3"
    assert toy.run().returncode == 0
    assert sorted(group for group, _ in toy.computed()) == list("0123")


def test_a_part_ends_with_the_run_that_it_is_for(toy):
    """As on another machine, where nothing else says that the run has ended."""
    with one_run("toy", STUDY, toy.data) as token:
        process = toy.start("--groups", "0-0", "--run", token, group_0="long")
        assert wait_until(toy.computed)
        assert process.poll() is None
    process.communicate(timeout=120)
    assert process.returncode == 3
    with one_run("toy", STUDY, toy.data):  # another run's lock is not its own
        process = toy.start("--groups", "0-0", "--run", token, group_0="long")
        process.communicate(timeout=120)
    assert process.returncode == 3


def test_a_group_has_one_process_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "ENDING", 0.1)
    with claimed(tmp_path, [0, 1]):
        with pytest.raises(ValueError, match="group-01: another process is at work on it"), claimed(tmp_path, [1, 2]):
            pass
        with claimed(tmp_path, [2]):
            pass


def test_a_killed_runs_lock_is_waited_for(tmp_path, monkeypatch):
    path = tmp_path / ".work" / "q" / "x.lock"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"run": "a", "pid": 2**22 + 1, "host": "elsewhere"}))
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        monkeypatch.setattr(locks, "ENDING", 0.2)
        with (
            pytest.raises(ValueError, match=r"x\.lock: taken, another run of q x is at work"),
            one_run("q", "x", tmp_path),
        ):
            pass
        assert not is_over(path, "a")
    assert is_over(path, "a")
    with one_run("q", "x", tmp_path) as token:
        assert is_over(path, "a")
        assert not is_over(path, token)


@pytest.mark.parametrize(("groups", "parts"), [(30, 2), (5, 4), (2, 8), (1, 1)])
def test_parts_hold_every_group_once(groups, parts):
    found = split(groups, parts)
    assert [group for part in found for group in part] == list(range(groups))
    assert len(found) == min(groups, parts)
    assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize(("batched", "expected"), [(True, [[0, 1], [2, 3, 4]]), (False, [[0], [1], [2], [3], [4]])])
def test_batched_stages_get_a_part_for_each_worker(tmp_path, batched, expected):
    def run(study, groups, work, data):
        (data / f"{groups[0]}").write_text(json.dumps(groups))

    stage = SimpleNamespace(name="s", unit="x", header=("a",), batched=batched, run=run)
    stage.prepare = lambda study, data: (5, data / "work")
    stage.collect = lambda study, groups, work, data: data
    stage.describe = lambda out: []
    assert run_stage(stage, SimpleNamespace(name="x"), tmp_path, 2) == tmp_path
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir()) if path.name.isdigit()]
    assert sorted(found) == expected


def test_a_full_disk_is_named_with_its_folder(tmp_path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert failure(full, tmp_path).line == f"{tmp_path}: No space left on device"
    named = failure(OSError(errno.EROFS, os.strerror(errno.EROFS), "/x/y"), tmp_path)
    assert named.line == "[Errno 30] Read-only file system: '/x/y'"
    assert failure(RuntimeError("I/O error: No space left on device (os error 28)"), tmp_path).expected


@pytest.mark.parametrize("text", ["", "3", "2-1", "a-b", "-1-2"])
def test_groups_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="expected first-last, for example 0-14"):
        parse_groups(text)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--workers", "0"], "toy: --workers is 0, expected a whole number of at least 1"),
        (["--data", "/proc/nowhere"], "toy: [Errno 2] No such file or directory: '/proc/nowhere'"),
    ],
)
def test_bad_arguments_are_one_line(toy, arguments, line):
    done = toy.run(*arguments)
    assert (done.returncode, done.stderr) == (2, f"{line}\n")


def test_help_teaches(toy):
    text = " ".join(toy.run("--help").stdout.split())
    assert "Stage `toy`: writes a number for each group." in text
    assert "it resumes from the last save when it is run again" in text


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt()])
def test_an_environment_that_exits_does_not_end_a_stage_well(tmp_path, error):
    def run(*arguments):
        raise error

    job = executor.Job(types.SimpleNamespace(run=run), None, tmp_path, tmp_path)
    found = executor.work_on(job, [0])
    assert (found.expected, found.line.startswith(type(error).__name__)) == (False, True)
