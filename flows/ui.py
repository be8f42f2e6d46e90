"""MLflow's and Prefect's pages on loopback until Ctrl-C: `python -m flows.ui`, or `make ui`."""

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

from flows.processes import child
from flows.server import environment, wait_for
from tasks.params import ROOT


def mlflow_command(port: int, root: Path = ROOT) -> list[str]:
    """MLflow's page of the store that `tasks.track` writes."""
    store = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root.resolve() / 'mlflow.db'}"
    where = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    return [sys.executable, "-m", "mlflow", "server", *where, "--backend-store-uri", store]


def prefect_command(port: int) -> list[str]:
    return [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.ui", description=__doc__)
    parser.add_argument("--mlflow", type=int, default=5000, help="port of MLflow's page (default 5000)")
    parser.add_argument("--prefect", type=int, default=4200, help="port of Prefect's page (default 4200)")
    args = parser.parse_args(arguments)
    for name, port in (("mlflow", args.mlflow), ("prefect", args.prefect)):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                print(
                    f"ui: port {port} is taken; is `make ui` running already? (--{name} names another)", file=sys.stderr
                )
                return 2
    logs = ROOT / "data" / ".work" / "ui"
    logs.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with contextlib.ExitStack() as stack:
            running = []
            for name, command, url in (
                ("mlflow", mlflow_command(args.mlflow), f"http://127.0.0.1:{args.mlflow}/health"),
                ("prefect", prefect_command(args.prefect), f"http://127.0.0.1:{args.prefect}/api/health"),
            ):
                said = stack.enter_context((logs / f"{name}.log").open("w"))
                process = stack.enter_context(child(command, stdout=said, stderr=said, env=environment()))
                wait_for(url, process)
                running.append((name, process))
            print(f"MLflow: http://127.0.0.1:{args.mlflow}   Prefect: http://127.0.0.1:{args.prefect}", flush=True)
            print("Ctrl-C ends both.", flush=True)
            while all(process.poll() is None for _, process in running):
                time.sleep(0.5)
            ended = next(name for name, process in running if process.poll() is not None)
            raise RuntimeError(f"{ended}'s server has ended")
    except KeyboardInterrupt:
        print()
    except (OSError, RuntimeError) as error:
        print(f"ui: {error} (what it said is in {logs})", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
