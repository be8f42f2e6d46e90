"""A real Chromium, by the DevTools protocol over pipes: what it draws, complains of and asks the network for.

Without a browser the tests that need one skip and say so; where CI is true they fail.
"""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    "--remote-debugging-pipe",
)
QUIET = ("Network.requestWillBeSent", "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")


def required():
    """The browser's path; the test skips without one."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None and os.environ.get("CI") == "true":
        pytest.fail(f"no browser on the PATH, expected one of {', '.join(NAMES)}; `make .venv/browser` installs it")
    if found is None:
        pytest.skip(f"no browser on the PATH (one of {', '.join(NAMES)}); `make .venv/browser` installs it")
    return found


class Browser:
    """One Chromium with one page; `complaints` are console messages and exceptions, `requests` addresses."""

    def __init__(self, path):
        self.profile = tempfile.mkdtemp(prefix="manyfold-browser-")
        ask, self.write = os.pipe()
        self.read, answer = os.pipe()

        def pipes():  # it reads from 3 and writes to 4
            free = [
                fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (ask, answer)
            ]  # they may be 3 and 4 the wrong way round
            os.dup2(free[0], 3)
            os.dup2(free[1], 4)

        self.process = subprocess.Popen(
            [path, *FLAGS, f"--user-data-dir={self.profile}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=pipes,
            close_fds=False,
        )
        os.close(ask)
        os.close(answer)
        self.number, self.rest, self.events, self.session = 0, b"", [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self):
        self.process.terminate()
        self.process.wait()
        os.close(self.write)
        os.close(self.read)
        shutil.rmtree(self.profile, ignore_errors=True)

    def call(self, method, **params):
        """A command's result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while (found := self._next()).get("id") != self.number:
            self.events.append(found)
        assert "error" not in found, found["error"]
        return found["result"]

    def _next(self):
        while b"\0" not in self.rest:
            more = os.read(self.read, 1 << 20)
            assert more, "the browser has gone"
            self.rest += more
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def open(self, path, width=1100, height=900, dark=False, scale=1):
        """Loads a file at a size in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events = []
        self.call("Page.navigate", url=Path(path).absolute().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def ask(self, expression):
        """A value of the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self, path):
        """All of the page, as PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        Path(path).write_bytes(base64.b64decode(found["data"]))

    def paper(self, path):
        """As it is printed, a PDF."""
        Path(path).write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"]))

    def _of(self, *methods):
        return [event for event in self.events if event.get("method") in methods]

    @property
    def complaints(self):
        return [event["params"] for event in self._of(*QUIET[1:])]

    @property
    def requests(self):
        found = [event["params"]["request"]["url"] for event in self._of(QUIET[0])]
        return [url for url in found if not url.startswith("data:")]
