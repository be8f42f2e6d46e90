"""What all stages' flows share: run the shards of a stage in processes of their own, watch them, collect the result."""

import argparse
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

from prefect import Flow, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture
from prefect.task_runners import ThreadPoolTaskRunner
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from manyfold import environments
from tasks.params import ROOT
from tasks.shards import forget_progress, progress


class Stage(Protocol):
    """A task module."""

    HEADER: tuple[str, ...]

    def prepare(self, env: str, data: Path) -> tuple[int, Path]:
        """The number of groups and the work folder, or a ValueError that says what is wrong with the parameters."""

    def collect(self, env: str, groups: int, work: Path, data: Path) -> Path: ...
    def describe(self, out: Path) -> list[tuple[str, ...]]: ...


@task(cache_policy=NO_CACHE, task_run_name="{stage} {env} groups {first}-{last}")
def run_shard(stage: str, env: str, first: int, last: int, data: str) -> None:
    """One shard in a process of its own, with one thread: two threads on small matrices are slower than one."""
    command = [sys.executable, "-m", f"tasks.{stage}", "--env", env, "--groups", f"{first}-{last}", "--data", data]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])


def run_stage(name: str, stage: Stage, unit: str, env: str, data: Path, workers: int | None) -> Path:
    """All shards of a stage; called inside its flow."""
    groups, work = stage.prepare(env, data)
    forget_progress(work)
    parts = shards(groups, workers or cores())
    futures = [run_shard.submit(name, env, part[0], part[-1], str(data)) for part in parts]
    watch(futures, work, name, unit)
    for future in futures:
        future.result()
    return stage.collect(env, groups, work, data)


def cores() -> int:
    return len(os.sched_getaffinity(0))


def shards(groups: int, workers: int) -> list[range]:
    """Groups in as many runs as there are workers; a group's numbers don't depend on its shard."""
    count = min(groups, workers)
    bounds = [round(i * groups / count) for i in range(count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]


def watch(futures: list[PrefectFuture[None]], work: Path, name: str, unit: str) -> None:
    """A bar with what is done, the rate, and the shards' own text, until every shard has ended."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        row = bar.add_task(name, total=None, text="")
        start, before = time.monotonic(), None
        while not all(future.state.is_final() for future in futures):
            done, of, text = progress(work) if work.exists() else (0, 0, "")
            before = done if before is None and of else before
            rate = (done - (before or 0)) / (time.monotonic() - start)
            line = f"{done:,} of {of:,} {unit}, {rate:,.0f} {unit}/s, {text}"
            bar.update(row, completed=done, total=of or None, text=line)
            time.sleep(0.5)


def stage_main(name: str, flow: Flow[..., Path], stage: Stage, about: str, arguments: list[str] | None = None) -> int:
    """The command line of a stage: runs its flow, prints its table; bad input is one line and exit code 2."""
    parser = argparse.ArgumentParser(prog=f"python -m flows.{name}", description=about)
    parser.add_argument("--env", required=True, help=f"one of {', '.join(environments.ENVS)}")
    parser.add_argument("--workers", type=int, help="processes (default: cores)")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of all data (default data)")
    args = parser.parse_args(arguments)
    try:
        environments.check_env(args.env)
        stage.prepare(args.env, args.data)
        if args.workers is not None and args.workers < 1:
            raise ValueError(f"--workers is {args.workers}, expected a whole number of at least 1")
        signal.signal(signal.SIGINT, interrupted(name))
        runner: Any = ThreadPoolTaskRunner(max_workers=args.workers or cores())
        out = flow.with_options(task_runner=runner)(args.env, args.data, args.workers)
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


def interrupted(name: str) -> Callable[[int, FrameType | None], NoReturn]:
    """Ends at once: Prefect would wait for a server that the same Ctrl-C has ended. The shards notice and end too."""

    def handler(number: int, frame: FrameType | None) -> NoReturn:
        print(f"\n{name}: interrupted; run it again to go on from the last save", file=sys.stderr, flush=True)
        os._exit(130)

    return handler
