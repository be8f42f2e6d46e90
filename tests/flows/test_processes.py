"""Children end with whoever started them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.processes import child

ROOT = Path(__file__).parents[2]
STARTS = """
from flows.processes import child
with child(["sleep", "1000"]) as process:
    print(process.pid, flush=True)
    process.wait()
"""


def alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("kill $$", 143)])
def test_the_exit_code_is_the_commands_own(script, code):
    with child(["sh", "-c", script]) as process:
        assert process.wait() == code


def test_the_end_of_the_block_ends_the_group():
    with child(["sh", "-c", "sleep 1000 & sleep 1000"]) as process:
        assert alive(process.pid)
    assert wait_until(lambda: not alive(process.pid))


def test_one_that_ignores_sigterm_is_killed():
    with child(["sh", "-c", "trap '' TERM; while true; do sleep 0.1; done"]) as process:
        time.sleep(0.5)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_children_of_a_killed_process_end_too(number):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "cwd": ROOT, "text": True}
    with subprocess.Popen([sys.executable, "-c", STARTS], env={**os.environ, "PYTHONPATH": str(ROOT)}, **options) as p:
        group = int(p.stdout.readline())
        assert alive(group)
        p.send_signal(number)
        p.wait()
    assert wait_until(lambda: not alive(group))


def test_the_command_ends_when_its_guard_is_killed():
    with child(["sleep", "1000"]) as process:
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert wait_until(lambda: not alive(process.pid))


def test_a_command_that_is_not_there_says_so():
    with child(["/no/such/command"], stderr=subprocess.DEVNULL) as process:
        assert process.wait() == 1
