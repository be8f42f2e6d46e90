"""The server that worker processes are forked from, started early: it imports torch while the caller does so, too."""

import multiprocessing
import multiprocessing.forkserver
import os
import signal
from multiprocessing import resource_tracker
from typing import Any


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def context() -> Any:
    """How workers are started; where they are forked from a server, it runs from now on."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["manyfold.estimate.workers"])  # torch is imported once, not once a worker
    # Ctrl-C goes to a whole group of processes, but is for the caller alone: the server inherits that it is blocked.
    resource_tracker.ensure_running()  # first, as it unblocks the signal when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return found
