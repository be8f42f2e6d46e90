"""The Prefect server that flows join: the one of PREFECT_API_URL, or one of their own on loopback.

Prefect would start one by itself, which outlives a flow that is killed and is given up after 20 s on a busy machine.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.processes import child
from tasks.params import ROOT


def environment(root: Path = ROOT) -> dict[str, str]:
    """For the processes of stages."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    found = {**os.environ, "PYTHONPATH": str(root), "PATH": path}
    return found | ({"PREFECT_API_URL": url} if (url := PREFECT_API_URL.value()) else {})


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A Prefect server on loopback for as long as the block lasts; its address."""
    port = str(free_port())
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", port, "--no-ui"]
    with child(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for(f"http://127.0.0.1:{port}/api/health", process)
        yield f"http://127.0.0.1:{port}/api"


def wait_for(url: str, process: "subprocess.Popen[bytes]", seconds: float = 120) -> None:
    """Until the server answers."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{url}: the server ended with exit code {process.returncode}; is the port taken?")
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.2)
    raise RuntimeError(f"{url}: no answer after {seconds:.0f} s, expected a server")


@contextlib.contextmanager
def joined_server() -> Iterator[None]:
    """The server of PREFECT_API_URL, or one of our own."""
    if PREFECT_API_URL.value():
        yield
        return
    with server() as url, temporary_settings({PREFECT_API_URL: url}):
        yield
