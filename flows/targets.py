"""Stage `targets` of one environment: `python -m flows.targets --env gridworld-1000`."""

import argparse
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture
from prefect.task_runners import ThreadPoolTaskRunner
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from manyfold import environments
from manyfold.targets import Rule, draw
from tasks import targets as stage
from tasks.params import ROOT, section


@task(cache_policy=NO_CACHE, task_run_name="train {env} groups {first}-{last}")
def train(env: str, first: int, last: int, data: str) -> None:
    """One shard in a process of its own, with one thread: two threads on small matrices are slower than one."""
    command = [sys.executable, "-m", "tasks.targets", "--env", env, "--groups", f"{first}-{last}", "--data", data]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])


@flow(name="targets", validate_parameters=False)
def targets(env: str, data: Path = ROOT / "data", workers: int | None = None) -> Path:
    """Draws the targets, trains all groups in shards, and puts the result in place."""
    groups, rule = checked(env)
    work = stage.work_folder(env, rule, data)
    stage.forget_progress(work)
    futures = [train.submit(env, shard[0], shard[-1], str(data)) for shard in shards(groups, workers or cores())]
    watch(futures, work)
    for future in futures:
        future.result()
    return stage.collect(env, groups, work, data)


def checked(env: str) -> tuple[int, Rule]:
    """The number of groups and the rule; one that cannot be met is refused before anything is trained."""
    groups, rule = stage.read_rule(section("targets"))
    for group in range(groups):
        draw(rule, env, group)
    return groups, rule


def cores() -> int:
    return len(os.sched_getaffinity(0))


def shards(groups: int, workers: int) -> list[range]:
    """Groups in as many runs as there are workers; a group's numbers don't depend on its shard."""
    count = min(groups, workers)
    bounds = [round(i * groups / count) for i in range(count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]


def watch(futures: list[PrefectFuture[None]], work: Path) -> None:
    """A bar with steps, steps per second and mean return until every shard has ended."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        row = bar.add_task("train", total=None, text="")
        start, before = time.monotonic(), None
        while not all(future.state.is_final() for future in futures):
            steps, of, mean_return = stage.progress(work) if work.exists() else (0, 0, float("nan"))
            before = steps if before is None and steps else before
            rate = (steps - (before or 0)) / (time.monotonic() - start)
            text = f"{steps:,} of {of:,} steps, {rate:,.0f} steps/s, mean return {mean_return:.2f}"
            bar.update(row, completed=steps, total=of or None, text=text)
            time.sleep(0.5)


def summary(out: Path) -> Table:
    """Where each group's interval lies, as a table."""
    table = Table(title=str(out))
    for column in ("group", "interval (training steps)", "checkpoints"):
        table.add_column(column)
    for group, interval, names in stage.describe(out):
        table.add_row(group, interval, names)
    return table


def interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """Ends at once: Prefect would wait for a server that the same Ctrl-C has ended. The shards notice and end too."""
    print("\ntargets: interrupted; run it again to go on from the last save", file=sys.stderr, flush=True)
    os._exit(130)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.targets",
        description="Trains the PPO target policies of one environment: all groups of params.yaml's section `targets`, "
        "batched, in as many processes as there are cores. An interrupted run goes on where it was last saved.",
    )
    parser.add_argument("--env", required=True, help=f"one of {', '.join(environments.ENVS)}")
    parser.add_argument("--workers", type=int, help="processes (default: cores)")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of all data (default data)")
    args = parser.parse_args(arguments)
    try:
        environments.check_env(args.env)
        checked(args.env)
        if args.workers is not None and args.workers < 1:
            raise ValueError(f"--workers is {args.workers}, expected a whole number of at least 1")
        signal.signal(signal.SIGINT, interrupted)
        out = targets.with_options(task_runner=ThreadPoolTaskRunner(max_workers=args.workers or cores()))(
            args.env, args.data, args.workers
        )
    except (ValueError, OSError, RuntimeError) as error:
        print(f"targets: {str(error).removeprefix('targets: ')}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Console().print(summary(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
