"""What all stages' flows share: run the shards of a stage in processes of their own, watch them, collect the result.

Where shards run is params.yaml's `runner`: on this machine's cores, or on the workers of a Dask cluster.
"""

import argparse
import contextlib
import fcntl
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

from prefect import Flow, task
from prefect.artifacts import create_progress_artifact, create_table_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.futures import PrefectWrappedFuture
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from flows import CHILD, PARENT, parent
from flows.processes import child
from flows.server import joined_server
from manyfold import environments
from tasks.params import ROOT, runner
from tasks.shards import forget_progress, progress

Futures = list[PrefectWrappedFuture[Any, Any]]


class Stage(Protocol):
    """A task module."""

    HEADER: tuple[str, ...]

    def prepare(self, env: str, data: Path) -> tuple[int, Path]:
        """The number of groups and the work folder, or a ValueError that says what is wrong with the parameters."""

    def collect(self, env: str, groups: int, work: Path, data: Path) -> Path: ...
    def describe(self, out: Path) -> list[tuple[str, ...]]: ...


class Killed(RuntimeError):
    """A shard's process was ended by a signal: out of memory, or somebody's kill."""


def worth_another_try(task: object, run: object, state: State[Any]) -> bool:
    """A shard that was killed goes on from its last save; one that refused its input would only refuse it again."""
    return isinstance(state.result(raise_on_failure=False), Killed)


@task(
    cache_policy=NO_CACHE,
    task_run_name="{stage} {env} groups {first}-{last}",
    retries=2,
    retry_delay_seconds=1,
    retry_condition_fn=worth_another_try,
)
def run_shard(stage: str, env: str, first: int, last: int, data: str, token: str, ticket: str) -> None:
    """One shard in a process of its own, with one thread: two threads on small matrices are slower than one.

    It goes on while the file `ticket` holds the run's token: on another machine nothing else says that the flow has
    ended, or that a new one has begun.
    """
    command = [sys.executable, "-m", f"tasks.{stage}", "--env", env, "--groups", f"{first}-{last}", "--data", data]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile() as said:
        with child(command, cwd=ROOT, env=quiet, stdout=said, stderr=said) as process:
            while process.poll() is None:
                if not has_ticket(ticket, token):
                    raise RuntimeError(f"groups {first}-{last}: their run has ended")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1)
            code = process.returncode
        said.seek(0)
        text = said.read().decode(errors="replace").strip()
    if code < 0 or code > 128:
        raise Killed(f"groups {first}-{last}: killed (exit code {code}); run it again to go on from the last save")
    if code:
        raise RuntimeError((text or f"exit code {code}").splitlines()[-1])


def has_ticket(path: str, token: str) -> bool:
    """Whether the run with this token is the one that is going on; a network's file system may be away for a moment."""
    for _ in range(5):
        with contextlib.suppress(OSError):
            return Path(path).read_text() == token
        time.sleep(0.2)
    return False


def run_stage(name: str, stage: Stage, unit: str, env: str, data: Path, workers: int) -> Path:
    """All shards of a stage; called inside its flow."""
    ticket = data / ".work" / name / f"{env}.run"
    for number in (signal.SIGINT, signal.SIGTERM):  # here, as Prefect's flow sets its own first
        signal.signal(number, interrupted(name, ticket))
    with alone(name, env, data):
        groups, work = stage.prepare(env, data)
        forget_progress(work)
        token = uuid.uuid4().hex
        if ticket.exists() and runner()[0] == "dask":
            ticket.unlink()
            time.sleep(3)  # a killed run's shards on other machines notice
        ticket.write_text(token)
        parts = shards(groups, workers)
        end_without_dvc()
        shard = partial(run_shard.submit, name, env, data=str(data), token=token, ticket=str(ticket))
        futures: Any = [shard(first=part[0], last=part[-1]) for part in parts]
        watch(futures, work, name, env, unit)
        ticket.unlink(missing_ok=True)
        for future in futures:
            future.result()
        out = stage.collect(env, groups, work, data)
    rows = [dict(zip(stage.HEADER, row, strict=True)) for row in stage.describe(out)]
    with contextlib.suppress(Exception):  # what only Prefect's page would show stops nothing
        create_table_artifact(rows, key=f"{artifact_key(name, env)}-table", description=f"`{name}` of {env}: {out}")
    return out


def end_without_dvc() -> None:
    """Ends if DVC started this stage and is gone: whoever starts it again starts the stage again."""
    if "DVC_STAGE" in os.environ and parent(CHILD) != PARENT:
        os._exit(3)


def artifact_key(name: str, env: str) -> str:
    """Prefect takes small letters, digits and dashes."""
    return f"{name}-{env}".replace("_", "-")


@contextlib.contextmanager
def alone(name: str, env: str, data: Path) -> Iterator[None]:
    """One run of a stage at a time: two would take the same work folder apart."""
    path = data / ".work" / name / f"{env}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for _ in range(100):  # a killed run's last processes may need a moment
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        else:
            raise RuntimeError(f"{path}: taken, another run of {name} {env} is going on; wait for it or stop it")
        yield


def cores() -> int:
    return len(os.sched_getaffinity(0))


def task_runner(workers: int | None) -> tuple[TaskRunner[Any], int]:
    """Where shards run, and how many at once."""
    kind, scheduler = runner()
    if kind == "local":
        return ThreadPoolTaskRunner(max_workers=workers or cores()), workers or cores()
    from distributed import Client  # seconds that nobody else should wait for
    from prefect_dask import DaskTaskRunner

    try:
        with Client(scheduler, timeout=10, set_as_default=False) as client:
            threads = sum(client.nthreads().values())
    except (OSError, ValueError):
        raise ValueError(f"scheduler {scheduler}: no answer, expected a Dask scheduler; is it running?") from None
    if not threads:
        raise ValueError(f"scheduler {scheduler}: no workers; start some with `dask worker {scheduler}`")
    return DaskTaskRunner(address=scheduler), workers or threads


def shards(groups: int, workers: int) -> list[range]:
    """Groups in as many runs as there are workers; a group's numbers don't depend on its shard."""
    count = min(groups, workers)
    bounds = [round(i * groups / count) for i in range(count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]


def watch(futures: Futures, work: Path, name: str, env: str, unit: str) -> None:
    """A bar with what is done, the rate, and the shards' own text, until every shard has ended; also for Prefect."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
    tell, told = teller(name, env), time.monotonic()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        row = bar.add_task(name, total=None, text="")
        start, before, (done, of, text) = time.monotonic(), None, (0, 0, "")
        while not all(future.wrapped_future.done() for future in futures):
            end_without_dvc()
            with contextlib.suppress(OSError, ValueError):  # a file that is being replaced, or a network's hiccup
                done, of, text = progress(work)
            before = done if before is None and of else before
            rate = (done - (before or 0)) / (time.monotonic() - start)
            line = f"{done:,} of {of:,} {unit}, {rate:,.0f} {unit}/s, {text}"
            bar.update(row, completed=done, total=of or None, text=line)
            if of and time.monotonic() > told + 5:
                tell(100 * done / of, line)
                told = time.monotonic()
            time.sleep(0.2)
    if all(future.state.is_completed() for future in futures):
        tell(100.0, "done")


def teller(name: str, env: str) -> Callable[[float, str], None]:
    """Progress on Prefect's page; one that cannot be reached stops nothing."""
    artifact = None
    with contextlib.suppress(Exception):
        artifact = create_progress_artifact(0.0, key=artifact_key(name, env), description=f"Stage `{name}` of {env}")

    def tell(percent: float, line: str) -> None:
        with contextlib.suppress(Exception):
            update_progress_artifact(artifact, percent, f"Stage `{name}` of {env}: {line}")

    return tell


def stage_main(name: str, flow: Flow[..., Path], stage: Stage, about: str, arguments: list[str] | None = None) -> int:
    """The command line of a stage: runs its flow, prints its table; bad input is one line and exit code 2."""
    parser = argparse.ArgumentParser(prog=f"python -m flows.{name}", description=about)
    parser.add_argument("--env", required=True, help=f"one of {', '.join(environments.ENVS)}")
    parser.add_argument("--workers", type=int, help="shards at once (default: cores, or the Dask cluster's threads)")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of all data (default data)")
    args = parser.parse_args(arguments)
    try:
        environments.check_env(args.env)
        stage.prepare(args.env, args.data)
        if args.workers is not None and args.workers < 1:
            raise ValueError(f"--workers is {args.workers}, expected a whole number of at least 1")
        where, workers = task_runner(args.workers)
        with joined_server():
            out = flow.with_options(task_runner=where)(args.env, args.data.resolve(), workers)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"{name}: {str(error).removeprefix(f'{name}: ')}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGINT, signal.default_int_handler)
    table = Table(title=str(out))
    for column in stage.HEADER:
        table.add_column(column)
    for row in stage.describe(out):
        table.add_row(*row)
    Console().print(table)
    return 0


def interrupted(name: str, ticket: Path) -> Callable[[int, FrameType | None], NoReturn]:
    """Ends at once, and the shards with it: Prefect would wait for a server that the same Ctrl-C has ended."""

    def handler(number: int, frame: FrameType | None) -> NoReturn:
        ticket.unlink(missing_ok=True)
        print(f"\n{name}: interrupted; run it again to go on from the last save", file=sys.stderr, flush=True)
        os._exit(128 + number)

    return handler
