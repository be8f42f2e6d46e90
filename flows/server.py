"""The Prefect server that flows join: the one of PREFECT_API_URL, or one of their own on loopback.

Whoever may call Prefect's API may start any command here, and so could every web page that a browser on this machine
shows. A server of ours therefore answers only who knows the string in data/.work/prefect.auth, which its owner alone
can read, and no page but its own.

Prefect would start a server by itself, which outlives a flow that is killed and is given up after 20 s on a busy
machine.
"""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NoReturn
from urllib.parse import urlsplit

from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, PREFECT_HOME, temporary_settings

from flows.processes import child
from tasks.params import ROOT

AUTH = ROOT / "data" / ".work" / "prefect.auth"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PATIENCE = 120.0  # seconds for a server to start


# --- who may call it --------------------------------------------------------------------------------------------------


def auth_string(path: Path = AUTH) -> str:
    """The string that our servers ask for, made at first use."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        part = path.with_name(f".{os.getpid()}.{path.name}")
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(f"manyfold:{secrets.token_urlsafe(24)}\n")
        with contextlib.suppress(FileExistsError):  # another process was quicker: one string for all
            os.link(part, path)
        part.unlink()
    path.chmod(0o600)
    return path.read_text().strip()


def client_settings(url: str) -> dict[str, str]:
    """For whoever calls a server: our string is for servers on this machine, and not where the user has another."""
    found = {"PREFECT_API_URL": url}
    if urlsplit(url).hostname in LOOPBACK and not PREFECT_API_AUTH_STRING.value():
        found["PREFECT_API_AUTH_STRING"] = auth_string()
    return found


def server_settings(port: int) -> dict[str, str]:
    """For a server of ours: it asks for the string, and tells browsers that only its own page may call it."""
    own = f"http://127.0.0.1:{port}"
    return {
        "PREFECT_SERVER_API_AUTH_STRING": auth_string(),
        "PREFECT_API_AUTH_STRING": auth_string(),
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": f"{own},http://localhost:{port}",
        "PREFECT_API_URL": f"{own}/api",
        "PREFECT_UI_API_URL": f"{own}/api",
        "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",  # we use none
    }


def refusal(text: str) -> str:
    """What to do about an answer, or none, of a server that somebody else has started."""
    said = " ".join((text.strip().splitlines() or ["no answer"])[-1].split())[:200]
    if "401" in text:
        return "it asks for another password; set PREFECT_API_AUTH_STRING to the one it was started with"
    return f"{said}; expected Prefect's server there: run `make ui` in another terminal, or set PREFECT_API_URL"


# --- a server of our own ----------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def check_home() -> None:
    """Refuses a folder that cannot hold Prefect's database; its own server would only say that it could not start."""
    home = PREFECT_HOME.value()
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home) as probe:
            probe.write(bytes(1 << 20))
    except OSError as error:
        raise RuntimeError(
            f"{home}: {error.strerror}; Prefect keeps its database there: make room, or set PREFECT_HOME to another "
            "folder"
        ) from None


def nothing() -> None:
    """Nothing to do."""


@contextlib.contextmanager
def server(meanwhile: Callable[[], None] = nothing) -> Iterator[str]:
    """A Prefect server on loopback for as long as the block lasts; its address.

    Args:
        meanwhile: called again and again while it starts.
    """
    check_home()
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "prefect",
        "server",
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--no-ui",
    ]
    ours = {**os.environ, **server_settings(port)}
    with (
        tempfile.TemporaryFile("w+", errors="replace") as said,
        child(command, stdout=said, stderr=said, env=ours) as process,
    ):
        wait_for(f"http://127.0.0.1:{port}/api/health", process, said, meanwhile)
        yield f"http://127.0.0.1:{port}/api"


def wait_for(
    url: str, process: "subprocess.Popen[bytes]", said: IO[str], meanwhile: Callable[[], None] = nothing
) -> None:
    """Until the server answers; `said` is its log."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        meanwhile()
        if process.poll() is not None:
            raise RuntimeError(f"{url}: the server ended with exit code {process.returncode}: {reason(said)}")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.1)
    raise RuntimeError(f"{url}: no answer after {PATIENCE:.0f} s, expected a server: {reason(said)}")


def reason(said: IO[str]) -> str:
    """The last line of a log that tells of an error."""
    said.flush()
    said.seek(0)
    lines = [line.strip() for line in said if line.strip()]
    telling = [line for line in lines if "error" in line.lower()]
    return (telling or lines or ["it said nothing"])[-1][:300]


@contextlib.contextmanager
def joined_server(meanwhile: Callable[[], None] = nothing) -> Iterator[None]:
    """The server of PREFECT_API_URL, or one of our own; `meanwhile` is called again and again while it starts."""
    with contextlib.ExitStack() as stack:
        if url := PREFECT_API_URL.value():
            string = client_settings(url).get("PREFECT_API_AUTH_STRING") or PREFECT_API_AUTH_STRING.value()
        else:
            url, string = stack.enter_context(server(meanwhile)), auth_string()
        settings = {PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: string}
        stack.enter_context(temporary_settings(settings))
        try:
            yield
        finally:
            EventsWorker.drain_all(timeout=5)  # the last states of runs, before a server of ours ends


# --- a server that dies -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def ends_without_server(name: str) -> Iterator[None]:
    """Ends this process with one line, and its children with it, when the server that it has joined is gone.

    Prefect's client would try again for minutes and then show where it gave up. What stages have finished or saved is
    not the server's: the next run resumes there.
    """
    ended, url = threading.Event(), PREFECT_API_URL.value()
    if url:
        threading.Thread(target=_listen, args=(name, url, ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()


REFUSED, SILENT = 5.0, 60.0  # seconds after which a server that refuses, or does not answer, is gone


def _listen(name: str, url: str, ended: threading.Event) -> None:
    heard = time.monotonic()
    while not ended.wait(1):
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10):
                heard = time.monotonic()
        except urllib.error.HTTPError:  # an answer
            heard = time.monotonic()
        except OSError as error:
            refused = isinstance(getattr(error, "reason", error), ConnectionError)
            if time.monotonic() > heard + (REFUSED if refused else SILENT) and not ended.is_set():
                end_without_server(name, url)


def end_without_server(name: str, url: str) -> NoReturn:
    cursor = "\x1b[?25h" if os.isatty(2) else ""  # a progress bar hides it
    line = f"{name}: {url}: Prefect's server has ended; finished stages are kept, run it again to resume"
    os.write(2, f"{cursor}\n{line}\n".encode())
    os._exit(2)
