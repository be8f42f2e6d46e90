"""Locks: one run of a stage and study at a time, one process at a time on a group, on whichever machine."""

import contextlib
import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tasks.studies import group_name

ENDING = 10.0  # seconds that a killed run's last processes may take to end


class Taken(ValueError):
    """Another run is at work."""


def lock_file(name: str, study: str, data: Path) -> Path:
    return data / ".work" / name / f"{study}.lock"


def status_file(name: str, study: str, data: Path) -> Path:
    """Where a running stage tells what is done, and a finished one its table."""
    return data / ".work" / name / f"{study}.json"


def try_lock(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def one_run(name: str, study: str, data: Path) -> Iterator[str]:
    """One run of a stage and study at a time: two would take the same work folder apart; gives the run's own token.

    The lock is the main process's and its forked workers': it is free when all of them have ended.
    """
    path = lock_file(name, study, data)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        start = time.monotonic()
        while not try_lock(file):
            patience = 1 if holder_lives(path) else ENDING
            if time.monotonic() > start + patience:
                raise Taken(f"{path}: taken, another run of {name} {study} is at work; wait for it or stop it")
            time.sleep(0.05)
        token = uuid.uuid4().hex
        file.truncate(0)
        file.write(json.dumps({"run": token, "pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
        yield token


def holder_lives(path: Path) -> bool:
    """Whether the main process that has the lock is there; on another machine that cannot be known."""
    try:
        holder = json.loads(path.read_text())
        if holder["host"] != socket.gethostname():
            return False
        os.kill(holder["pid"], 0)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def is_over(path: Path, token: str) -> bool:
    """Whether the run with this token has ended: its lock is free, or another run's."""
    try:
        with path.open("a+") as file:
            if try_lock(file):
                return True
        return bool(json.loads(path.read_text())["run"] != token)
    except (OSError, ValueError, KeyError):  # a file that is being written, or a network's hiccup
        return False


def follow(path: Path, token: str) -> None:
    """Ends this process when the run it works for has ended, on whichever machine that was."""
    while not is_over(path, token):
        time.sleep(0.5)
    os._exit(3)


@contextlib.contextmanager
def claimed(work: Path, groups: Sequence[int]) -> Iterator[None]:
    """One process at a time for each group: a killed run's last process on another machine may need a moment."""
    folder = work / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        for group in groups:
            file = stack.enter_context((folder / group_name(group)).open("a"))
            start = time.monotonic()
            while not try_lock(file):
                if time.monotonic() > start + ENDING:
                    raise ValueError(f"{work / group_name(group)}: another process is at work on it; stop it")
                time.sleep(0.05)
        yield
