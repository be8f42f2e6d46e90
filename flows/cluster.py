"""A Dask cluster for the stages: `python -m flows.cluster`, then `runner: dask` and its address in params.yaml.

Starts a scheduler and workers on this machine until Ctrl-C, or with --join workers for a scheduler on another one. All
of it listens on the address that --host names and on no other. Whoever reaches that address can run code here: name
loopback, or a network that you trust. All machines need this folder at the same path.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from typing import Any

from flows.processes import child, environment
from tasks.params import ROOT


def scheduler_command(host: str, port: int) -> list[str]:
    """The dashboard's address must be named as well: left out, it is every address of the machine."""
    where = ["--host", host, "--port", str(port), "--dashboard-address", f"{host}:0"]
    return [sys.executable, "-m", "distributed.cli.dask_scheduler", *where]


def worker_command(address: str, host: str, workers: int) -> list[str]:
    """One thread for each worker process: a job is one process with one thread."""
    where = ["--host", host, "--dashboard-address", f"{host}:0", "--no-dashboard"]
    size = ["--nworkers", str(workers), "--nthreads", "1"]
    return [sys.executable, "-m", "distributed.cli.dask_worker", address, *where, *size]


def wait_for_workers(address: str, workers: int, alive: Any) -> None:
    """Until so many workers have joined."""
    from distributed import Client

    connect: Any = Client
    deadline = time.monotonic() + 60
    while alive() and time.monotonic() < deadline:
        with contextlib.suppress(OSError), connect(address, timeout=2, set_as_default=False) as client:
            while alive() and time.monotonic() < deadline:
                if len(client.nthreads()) >= workers:
                    return
                time.sleep(0.2)
    raise RuntimeError(f"{address}: no answer, expected a scheduler with {workers} workers; what it said is above")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.cluster", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8786, help="of the scheduler (default 8786)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: cores)")
    parser.add_argument("--join", metavar="ADDRESS", help="start workers alone, for the scheduler at tcp://...")
    args = parser.parse_args(arguments)
    address = args.join or f"tcp://{args.host}:{args.port}"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if args.workers < 1:
            raise ValueError(f"--workers is {args.workers}, expected a whole number of at least 1")
        with contextlib.ExitStack() as stack:
            commands = [] if args.join else [scheduler_command(args.host, args.port)]
            commands += [worker_command(address, args.host, args.workers)]
            quiet = {**environment(), "DASK_LOGGING__DISTRIBUTED": "warning"}
            running = [stack.enter_context(child(c, cwd=ROOT, env=quiet)) for c in commands]
            wait_for_workers(address, args.workers, lambda: all(process.poll() is None for process in running))
            print(f"Dask at {address} with {args.workers} workers here. In params.yaml:", flush=True)
            print(f"  runner: dask\n  scheduler: {address}\nCtrl-C ends it.", flush=True)
            while all(process.poll() is None for process in running):
                time.sleep(0.5)
            raise RuntimeError(f"{address}: a process of it has ended")
    except KeyboardInterrupt:
        print()
    except (ValueError, OSError, RuntimeError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
