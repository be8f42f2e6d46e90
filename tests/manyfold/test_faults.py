"""Kills, signals and two at once: what `manyfold evaluate` leaves behind, and what the next call makes of it.

The environment itself says when (`HOLD_AT` in tests/checkpoints.py): at a certain step of its process it writes the
file `held` and waits for the file `go`.
"""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

from manyfold.cli import main
from tests import checkpoints

EPISODES = 240  # of three policies: shards of 100, 100 and 40
SECOND = 100 * checkpoints.T + 7  # a step of the second shard that a process runs
PATIENCE = 120  # seconds, on a busy machine


class Call:
    """The command in a process group of its own."""

    def __init__(self, zips, *arguments, hold_at=-1):
        command = [sys.executable, "-m", "manyfold.cli", "evaluate", "--env", "own:make", "--policies", str(zips)]
        self.process = subprocess.Popen(
            [*command, "--quiet", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"HOLD_AT": str(hold_at), "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )
        self.every = [psutil.Process(self.process.pid)]

    def held(self, place):
        """Waits until the environment does; the process that it runs in."""
        until = time.monotonic() + PATIENCE
        while not (place / "held").exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < until
            time.sleep(0.01)
        self.every += self.every[0].children(recursive=True)
        found = int((place / "held").read_text())
        (place / "held").unlink()
        return found

    def ends(self, code):
        """Waits for its end, and that of all its processes; stdout."""
        out, errors = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == code, errors
        assert "Traceback" not in errors
        _, alive = psutil.wait_procs(self.every, timeout=PATIENCE)
        assert alive == []
        self.errors = errors
        return out


def stored(folder):
    """All episodes, by policy and number."""
    out = {}
    for path in (folder / "episodes").glob("[!.]*.parquet"):  # the others are parts of what was being written
        for row in pq.read_table(path).to_pylist():
            key = row.pop("policy"), row.pop("number")
            assert key not in out
            out[key] = row
    return out


def assert_same(a, b):
    """Densities up to rounding, which depends on how many rows are computed at once."""
    assert a.keys() == b.keys()
    for key, row in a.items():
        np.testing.assert_allclose(row.pop("log_prob"), b[key].pop("log_prob"), atol=1e-6)
        assert row == b[key]


@pytest.fixture
def again(place, zips, capfd):
    """The next call, in this process; its stdout."""

    def again(*arguments, folder="evals"):
        capfd.readouterr()
        given = "--policies", zips, "--workers", 1, "--quiet", "--store", folder, *arguments
        assert main(["evaluate", "--env", "own:make", *map(str, given)]) == 0
        return capfd.readouterr().out

    return again


@pytest.mark.parametrize(("workers", "kill"), [(1, signal.SIGTERM), (2, signal.SIGKILL)])
def test_a_killed_call_is_finished_by_the_next_with_the_same_episodes(place, zips, again, workers, kill):
    """What had ended before the kill is there and is not run again; no process and no page is left behind."""
    files = "--report", "x.html", "--json", "x.json"
    call = Call(zips, "--episodes", EPISODES, "--workers", workers, *files, "--store", "evals", hold_at=SECOND)
    call.held(place)
    os.kill(call.process.pid, kill)
    assert call.ends(-kill) == ""
    assert not (place / "x.html").exists()
    assert not (place / "x.json").exists()
    before = stored(place / "evals")
    assert 40 <= len(before) < EPISODES
    assert f"\n{EPISODES} episodes, {EPISODES * checkpoints.T:,} steps." in again("--episodes", EPISODES)
    found = stored(place / "evals")
    assert {key: found[key] for key in before} == before
    again("--episodes", EPISODES, folder="undisturbed")
    assert_same(found, stored(place / "undisturbed"))


def test_a_worker_that_is_killed_is_replaced(place, zips, again):
    alone = again("--episodes", EPISODES, folder="undisturbed")
    call = Call(zips, "--episodes", EPISODES, "--workers", 2, "--store", "evals", hold_at=SECOND)
    worker = call.held(place)
    assert worker != call.process.pid
    os.kill(worker, signal.SIGKILL)
    (place / "go").touch()  # for its successor
    assert call.ends(0) == alone
    assert_same(stored(place / "evals"), stored(place / "undisturbed"))


@pytest.mark.parametrize(
    ("arguments", "hold_at", "code", "said"),
    [
        (("--precision", 0.01, "--workers", 1), 200, 0, "Interrupted: this is what was known by then."),
        (("--precision", 0.01, "--workers", 2), 200, 0, "Interrupted: this is what was known by then."),
        (("--episodes", EPISODES, "--workers", 1), SECOND, 0, f"Interrupted: 100 of {EPISODES} episodes had ended."),
        (("--episodes", EPISODES, "--workers", 1), 7, 130, ""),
        (("--episodes", EPISODES, "--workers", 2), 7, 130, ""),
    ],
)
def test_ctrl_c_ends_with_what_is_known(place, zips, again, arguments, hold_at, code, said):
    """It goes to all processes of the group, as a terminal sends it; the store serves the next call."""
    call = Call(zips, *arguments, "--store", "evals", "--json", "x.json", hold_at=hold_at)
    call.held(place)
    os.killpg(call.process.pid, signal.SIGINT)
    out = call.ends(code)
    assert said in out
    assert (place / "x.json").exists() == (code == 0)
    assert call.errors == ("manyfold evaluate: interrupted before anything was known\n" if code else "")
    assert len(stored(place / "evals")) < EPISODES
    assert f"\n{EPISODES} episodes, " in again("--episodes", EPISODES)


def test_two_at_once(place, zips, again):
    """One waits in the middle while the other runs from beginning to end; both count, and nothing counts twice."""
    first = Call(zips, "--episodes", 60, "--workers", 1, "--store", "evals", hold_at=7)
    first.held(place)
    assert "\n60 episodes, " in again("--episodes", 60)
    (place / "go").touch()
    assert "\n60 episodes, " in first.ends(0)
    assert len(stored(place / "evals")) == 120
    assert "; 120 stored episodes\n" in again("--episodes", 60)


def test_a_crash_in_the_middle_keeps_what_had_ended(place, zips, again):
    """The environment dies in the second shard; the next call finishes."""
    (place / "own.py").write_text(checkpoints.OWN.replace("self.t == self.crash", f"steps == {SECOND}"))
    call = Call(zips, "--episodes", EPISODES, "--workers", 1, "--store", "evals")
    assert call.ends(2) == ""
    assert call.errors.count("\n") == 1
    assert len(stored(place / "evals")) == 100
    (place / "own.py").write_text(checkpoints.OWN)
    again("--episodes", EPISODES)
    assert len(stored(place / "evals")) == EPISODES
