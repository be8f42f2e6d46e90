"""Registers the deployments of prefect.yaml and runs what is asked for until Ctrl-C: `make worker`.

The server is the one of `make ui`, or of PREFECT_API_URL. One run at a time: they share one DVC repository.
"""

import argparse
import os
import signal
import subprocess
import sys

from flows.processes import child, environment
from flows.server import client_settings, refusal
from tasks.params import ROOT

POOL = "manyfold"
SERVER = "http://127.0.0.1:4200/api"
PREFECT = [sys.executable, "-m", "prefect", "--no-prompt"]


def prefect_environment(url: str) -> dict[str, str]:
    """For Prefect's own commands, and what they start."""
    return {**environment(), **client_settings(url), "PWD": str(ROOT), "PREFECT_LOGGING_LEVEL": "INFO"}


def register(deploy: list[str]) -> str:
    """Makes the work pool, and deployments by a command of Prefect's; the server's address, or a RuntimeError."""
    url = os.environ.get("PREFECT_API_URL") or SERVER
    for command in (["work-pool", "create", "--type", "process", "--overwrite", POOL], deploy):
        done = subprocess.run(
            [*PREFECT, *command], cwd=ROOT, env=prefect_environment(url), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{url}: {refusal(done.stderr or done.stdout)}")
    return url


def main(arguments: list[str] | None = None) -> int:
    argparse.ArgumentParser(prog="python -m flows.worker", description=__doc__).parse_args(arguments)
    try:
        url = register(["deploy", "--all"])
    except (OSError, RuntimeError) as error:
        print(f"worker: {error}", file=sys.stderr)
        return 2
    print("Deployments are there; start one with: prefect deployment run pipeline/gridworld", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    start = [*PREFECT, "worker", "start", "--pool", POOL, "--limit", "1"]
    try:
        with child(start, cwd=ROOT, env=prefect_environment(url)) as process:
            return process.wait()
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
