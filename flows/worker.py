"""Registers the deployments of prefect.yaml and runs what is asked for until Ctrl-C: `make worker`.

The server is the one of `make ui`, or of PREFECT_API_URL. One run at a time: they share one DVC repository.
"""

import argparse
import os
import signal
import subprocess
import sys

from flows.processes import child
from flows.server import environment
from tasks.params import ROOT

POOL = "manyfold"
SERVER = "http://127.0.0.1:4200/api"


def main(arguments: list[str] | None = None) -> int:
    argparse.ArgumentParser(prog="python -m flows.worker", description=__doc__).parse_args(arguments)
    ours = {"PREFECT_API_URL": os.environ.get("PREFECT_API_URL") or SERVER, "PWD": str(ROOT)}
    options = {"cwd": ROOT, "env": environment() | ours | {"PREFECT_LOGGING_LEVEL": "INFO"}}
    prefect = [sys.executable, "-m", "prefect", "--no-prompt"]
    for command in (["work-pool", "create", "--type", "process", "--overwrite", POOL], ["deploy", "--all"]):
        done = subprocess.run([*prefect, *command], capture_output=True, text=True, check=False, **options)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines() or [""]
            print(
                f"worker: {ours['PREFECT_API_URL']}: {said[-1]}; expected Prefect's server there: run `make ui` in "
                "another terminal, or set PREFECT_API_URL",
                file=sys.stderr,
            )
            return 2
    print("Deployments are there; start one with: prefect deployment run pipeline/gridworld", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with child([*prefect, "worker", "start", "--pool", POOL, "--limit", "1"], **options) as process:
            return process.wait()
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
