"""Child processes that never outlive whoever started them, not even when that is killed by kill -9.

A child runs under a guard, which is this file as a script. The guard's stdin is a pipe from the parent that nobody
writes to: when it closes, because the parent's block has ended or the parent itself has, the guard ends its whole
process group. (The kernel's own signal at a parent's death would reach the child alone, not what it has started.)
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GRACE = 5.0  # seconds between SIGTERM and SIGKILL


def environment(root: Path = ROOT) -> dict[str, str]:
    """For the processes of stages: this Python, the code in `root`, and one thread for each process."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    return {**os.environ, "PYTHONPATH": str(root), "PATH": path, "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def child(command: list[str], **options: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """A process group for as long as the block lasts. A child that a signal ended returns 128 + its number."""
    theirs, ours = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-S", __file__, *command], stdin=theirs, start_new_session=True, **options
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    try:
        yield process
    finally:
        os.close(ours)
        process.wait()
        with contextlib.suppress(ProcessLookupError):  # if the guard itself was killed
            os.killpg(process.pid, signal.SIGKILL)


def guard(command: list[str]) -> int:
    """Runs the command until it ends, or until stdin does."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # meant for the others of the group, which get it too
    process, closed = subprocess.Popen(command, stdin=subprocess.DEVNULL), threading.Event()
    threading.Thread(target=end_with_stdin, args=(closed,), daemon=True).start()
    code = process.wait()
    if closed.is_set():
        os.killpg(0, signal.SIGKILL)  # whatever the command has started
    return code if code >= 0 else 128 - code


def end_with_stdin(closed: threading.Event) -> None:
    """Ends the group, this process included: gently, then not."""
    os.read(0, 1)
    closed.set()
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(guard(sys.argv[1:]))
