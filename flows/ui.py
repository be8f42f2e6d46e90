"""MLflow's and Prefect's pages on loopback until Ctrl-C: `python -m flows.ui`, or `make ui`."""

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

from flows.processes import child, environment
from flows.server import AUTH, auth_string, check_home, server_settings, wait_for
from flows.store import store_uri
from tasks.params import ROOT


def mlflow_command(port: int) -> list[str]:
    """MLflow's page of the store that `tasks.track` writes; MLflow itself refuses what other pages send."""
    where = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    own = f"127.0.0.1:{port},localhost:{port}"
    return [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        *where,
        "--backend-store-uri",
        store_uri(),
        "--allowed-hosts",
        own,
    ]


def prefect_command(port: int) -> list[str]:
    return [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]


def explain(mlflow: int, prefect: int) -> str:
    """What a person needs: where the pages are, and how a terminal may call Prefect's server."""
    return (
        f"MLflow: http://127.0.0.1:{mlflow}   Prefect: http://127.0.0.1:{prefect}\n"
        f"Prefect's page asks for a password: the line in {AUTH}. To start deployments from a terminal:\n"
        f"  export PREFECT_API_URL=http://127.0.0.1:{prefect}/api\n"
        f'  export PREFECT_API_AUTH_STRING="$(cat {AUTH})"\n'
        "  prefect deployment run pipeline/gridworld\n"
        f"{pages()}Ctrl-C ends both."
    )


def pages(data: Path = ROOT / "data") -> str:
    """Where the pages of the studies are that have been computed, and of folders that are watched, a line each."""
    reports, watched = (sorted(data.glob(f"{stage}/*/page.html")) for stage in ("report", "watch"))
    said = [(path.parent.name, path) for path in reports] + [(f"{path.parent.name}, watched", path) for path in watched]
    return "".join(f"{name}: {path.resolve().as_uri()}\n" for name, path in said)


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
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logs = ROOT / "data" / ".work" / "ui"
    try:
        serve(args.mlflow, args.prefect, logs)
    except KeyboardInterrupt:
        print()
    except (OSError, RuntimeError) as error:
        print(f"ui: {error} (what it said is in {logs})", file=sys.stderr)
        return 2
    return 0


def serve(mlflow: int, prefect: int, logs: Path) -> None:
    """Both servers until one of them ends."""
    logs.mkdir(parents=True, exist_ok=True)
    check_home()
    auth_string()
    with contextlib.ExitStack() as stack:
        running = []
        for name, command, url, more in (
            ("mlflow", mlflow_command(mlflow), f"http://127.0.0.1:{mlflow}/health", {}),
            ("prefect", prefect_command(prefect), f"http://127.0.0.1:{prefect}/api/health", server_settings(prefect)),
        ):
            said = stack.enter_context((logs / f"{name}.log").open("w+"))
            process = stack.enter_context(child(command, stdout=said, stderr=said, env={**environment(), **more}))
            running.append((name, process, url, said))
        for _, process, url, said in running:
            wait_for(url, process, said)
        print(explain(mlflow, prefect), flush=True)
        while all(process.poll() is None for _, process, _, _ in running):
            time.sleep(0.5)
        raise RuntimeError(f"{next(name for name, process, _, _ in running if process.poll() is not None)} has ended")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
