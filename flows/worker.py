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


def main(arguments: list[str] | None = None) -> int:
    argparse.ArgumentParser(prog="python -m flows.worker", description=__doc__).parse_args(arguments)
    url = os.environ.get("PREFECT_API_URL") or SERVER
    try:
        ours = {**client_settings(url), "PWD": str(ROOT), "PREFECT_LOGGING_LEVEL": "INFO"}
    except OSError as error:
        print(f"worker: {error}", file=sys.stderr)
        return 2
    prefect, env = [sys.executable, "-m", "prefect", "--no-prompt"], {**environment(), **ours}
    for command in (["work-pool", "create", "--type", "process", "--overwrite", POOL], ["deploy", "--all"]):
        done = subprocess.run([*prefect, *command], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"worker: {url}: {refusal(done.stderr or done.stdout)}", file=sys.stderr)
            return 2
    print("Deployments are there; start one with: prefect deployment run pipeline/gridworld", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with child([*prefect, "worker", "start", "--pool", POOL, "--limit", "1"], cwd=ROOT, env=env) as process:
            return process.wait()
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
