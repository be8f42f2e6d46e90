"""Flows: one Prefect flow per stage; they say when and where tasks run."""

import contextlib
import logging
import os
from pathlib import Path


def parent(pid: int) -> int:
    """A process's parent, or 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def below_dvc() -> int:
    """DVC's own child: this process, or the shell around it, to which DVC has given the stage's name as well."""
    pid = os.getpid()
    with contextlib.suppress(OSError):  # another user's process, which is no such shell
        while b"DVC_STAGE=" in Path(f"/proc/{parent(pid)}/environ").read_bytes():
            pid = parent(pid)
    return pid


CHILD = below_dvc()  # looked up before anything can take its time
PARENT = parent(CHILD)  # DVC, if it started this process

# Before Prefect is imported: its own log lines would drown the progress bar and the one line that says what is wrong
# (PREFECT_LOGGING_LEVEL=INFO brings them back), and nothing is sent anywhere.
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
logging.getLogger("EventsWorker").setLevel(logging.ERROR)  # a logger that does not heed the level above
