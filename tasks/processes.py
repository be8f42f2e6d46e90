"""Processes that end with the one that started them, even when that is killed by kill -9 (Linux's PDEATHSIG)."""

import ctypes
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import tasks

SET_PDEATHSIG = 1  # prctl's number for it
PARENT_VARIABLE = "MANYFOLD_PARENT"  # process id of the Dask worker that started this process


def end_with(parent: int) -> None:
    """Has the kernel kill this process when `parent` ends, and ends at once if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(3)


def end_with_dvc() -> None:
    """The same for a stage that DVC, or a Dask worker, has started; a stage started by hand may outlive its shell."""
    if found := os.environ.get(PARENT_VARIABLE):
        end_with(int(found))
    elif "DVC_STAGE" in os.environ:
        end_with(tasks.PARENT)


def begin_worker(parent: int) -> None:
    """At the start of each worker process: Ctrl-C is for the stage's main process, which ends its workers."""
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def interrupted(name: str) -> Callable[[int, FrameType | None], NoReturn]:
    """A signal handler that ends at once, and all workers with it."""

    def handler(number: int, frame: FrameType | None) -> NoReturn:
        cursor = "\x1b[?25h" if os.isatty(2) else ""  # a progress bar hides it
        os.write(2, f"{cursor}\n{name}: interrupted; run it again to resume from the last save\n".encode())
        os._exit(128 + number)

    return handler
