"""Runs a stage: spreads its groups over this machine's processes or a Dask cluster, and puts the result in place.

Where groups run is params.yaml's `runner`. Every process ends with the one that started it, so a killed stage leaves
nothing behind; groups that are finished stay in the work folder, and the next run resumes from there.
"""

import argparse
import contextlib
import errno
import glob
import importlib
import itertools
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from manyfold.files import write_json
from tasks import commands
from tasks.locks import claimed, follow, lock_file, one_run, status_file
from tasks.params import ROOT, runner
from tasks.processes import PARENT_VARIABLE, begin_worker, end_with_dvc, interrupted
from tasks.stages import Stage, forget_progress, progress
from tasks.studies import Study, read

RETRIES = 2  # of a job whose process was killed: out of memory, or somebody's kill


class Refused(ValueError):
    """A job's input or its disk is not as expected."""


class Failed(RuntimeError):
    """A job's own fault; the traceback was printed where it happened."""


@dataclass(frozen=True)
class Failure:
    """Why a job failed, in one line."""

    line: str
    expected: bool  # bad input or a bad disk, not a fault of the program


@dataclass(frozen=True)
class Job:
    """What every job of a stage has in common."""

    stage: Stage
    study: Study
    data: Path
    work: Path
    groups: int = 0  # that are not finished yet


# --- jobs -------------------------------------------------------------------------------------------------------------


def work_on(job: Job, groups: Sequence[int]) -> Failure | None:
    """Some groups of a stage, in this process; exceptions stay here, as not all of them can be sent."""
    try:
        with claimed(job.work, groups):
            job.stage.run(job.study, list(groups), job.work, job.data)
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # an environment may exit; signals don't come here
        return failure(error, job.work)
    return None


def failure(error: BaseException, work: Path) -> Failure:
    """One line; a full disk is named with the folder even where the error does not know it."""
    line = " ".join(str(error).split()) or type(error).__name__
    if os.strerror(errno.ENOSPC) in line:
        return Failure(line if str(work) in line else f"{work}: {os.strerror(errno.ENOSPC)}", True)
    if isinstance(error, ValueError | OSError):
        return Failure(line, True)
    traceback.print_exception(error)
    return Failure(f"{type(error).__name__}: {line}", False)


JOB: Job | None = None  # of a worker process, which inherits it when it is forked


def work_here(groups: Sequence[int]) -> Failure | None:
    """A job in a forked worker process."""
    assert JOB is not None
    return work_on(JOB, groups)


def work_remotely(root: str, name: str, study: str, data: str, token: str, groups: range) -> Failure | None:
    """A job on a Dask worker, in a process of its own that can be ended, by the code and parameters in `root`."""
    part = ["--study", study, "--groups", f"{groups[0]}-{groups[-1]}", "--data", data, "--run", token]
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": root, PARENT_VARIABLE: str(os.getpid())}
    command = [sys.executable, "-m", f"tasks.{name}", *part]
    done = subprocess.run(command, cwd=root, env=os.environ | ours, capture_output=True, text=True, check=False)
    if done.returncode < 0:
        raise ChildProcessError(f"groups {groups[0]}-{groups[-1]}: killed by signal {-done.returncode}")
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return Failure(said[-1].removeprefix(f"{name}: "), done.returncode == 2)
    return None


def split(groups: int, parts: int) -> list[range]:
    """Consecutive groups in at most `parts` parts of nearly the same size; no group's numbers depend on its part."""
    count = min(groups, parts)
    bounds = [round(i * groups / count) for i in range(count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]


Watch = Callable[[dict["Future[Failure | None]", range]], list[range]]


def run_here(job: Job, parts: list[range], workers: int, watch: Watch) -> None:
    """All parts in worker processes, forked: what the stage has imported is there at once, and nothing is sent.

    Forking is safe here because this process has one thread at that moment: the bar's and the pool's have ended.
    A worker that is killed takes the pool down; what is not finished is tried again.
    """
    global JOB
    JOB = job
    others = set(multiprocessing.active_children())
    for _ in range(RETRIES + 1):
        fork = multiprocessing.get_context("fork")
        pool = ProcessPoolExecutor(min(workers, len(parts)), fork, begin_worker, (os.getpid(),))
        try:
            parts = watch(submitted(pool, work_here, parts))
        finally:
            for worker in set(multiprocessing.active_children()) - others:
                worker.kill()  # those at work on groups of a stage that has failed; the others are idle
            pool.shutdown(cancel_futures=True)
        if not parts:
            return
    named = ", ".join(f"{part[0]}-{part[-1]}" for part in parts)
    raise ValueError(
        f"groups {named}: a worker process was killed {RETRIES + 1} times, expected enough memory for "
        f"{workers} at once; run it again with fewer --workers to resume from the last save"
    )


def submitted(pool: Executor, run: Callable[..., Any], parts: list[range]) -> dict["Future[Failure | None]", range]:
    """A future for each part; a pool that breaks meanwhile gives futures that say so."""
    futures: dict[Future[Failure | None], range] = {}
    for part in parts:
        try:
            future = pool.submit(run, part)
        except BrokenProcessPool as error:
            future = Future()
            future.set_exception(error)
        futures[future] = part
    return futures


def run_on_dask(client: Any, address: str, job: Job, parts: list[range], token: str, watch: Watch) -> None:
    """All parts on a cluster's workers; Dask itself tries again what a worker that is gone had begun."""
    run = partial(work_remotely, str(ROOT), job.stage.name, job.study.name, str(job.data), token)
    try:
        watch(submitted(client.get_executor(retries=RETRIES), run, parts))
    except (Refused, Failed):
        raise
    except Exception as error:  # of Dask: KilledWorker, a lost connection, a worker that cannot import this module
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(f"scheduler {address}: {said}; run it again to resume from the last save") from None


def dask_client(address: str) -> tuple[Any, int]:
    """The cluster's client and the number of jobs that it can run at once."""
    from distributed import Client  # seconds that nobody else should wait for

    connect: Any = Client  # which has no types
    try:
        client = connect(address, timeout=5, set_as_default=False)
    except (OSError, ValueError):
        raise ValueError(f"scheduler {address}: no answer, expected a Dask scheduler; is it running?") from None
    if slots := sum(client.nthreads().values()):
        return client, slots
    client.close()
    raise ValueError(f"scheduler {address}: no workers; start some with `python -m flows.cluster --join {address}`")


# --- the stage --------------------------------------------------------------------------------------------------------


def run_stage(stage: Stage, study: Study, data: Path, workers: int | None = None) -> Path:
    """All groups of a stage, and its result in place: data/<stage>/<study>.

    Args:
        workers: processes at once; None for one on each core, or for all of the Dask cluster's threads.
    """
    kind, address = runner()
    with one_run(stage.name, study.name, data) as token, contextlib.ExitStack() as stack:
        groups, work = stage.prepare(study, data)
        work.mkdir(parents=True, exist_ok=True)
        forget_progress(work)
        job = Job(stage, study, data, work, groups - len(list(work.glob("group-*"))))
        watch = partial(watched, job=job)
        if kind == "dask":
            client, slots = dask_client(address)
            stack.callback(client.close)
            run_on_dask(client, address, job, split(groups, workers or slots), token, watch)
        else:
            workers = workers or len(os.sched_getaffinity(0))
            parts = split(groups, workers if stage.batched else groups)
            run_here(job, parts, workers, watch)
        out = stage.collect(study, groups, work, data)
        forget_abandoned(stage.name, study.name, data)
        rows = [list(row) for row in stage.describe(out)]
        write_json(status_file(stage.name, study.name, data), {"header": list(stage.header), "rows": rows})
    return out


def forget_abandoned(name: str, study: str, data: Path) -> None:
    """Removes work folders that other parameters or other code began: the stage has its result."""
    for folder in (data / ".work" / name).glob(f"{glob.escape(study)}-*"):
        if re.fullmatch(re.escape(study) + "-[0-9a-f]{12}", folder.name):
            shutil.rmtree(folder, ignore_errors=True)


def watched(futures: dict["Future[Failure | None]", range], job: Job) -> list[range]:
    """A bar until every job has ended; the parts whose process was killed. A job's failure ends the stage."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
    name, unit = job.stage.name, job.stage.unit
    status, told = status_file(name, job.study.name, job.data), 0.0
    start, before, killed = time.monotonic(), None, []
    done, of, text = 0, 0, ""
    with Progress(*columns, console=Console(stderr=True)) as bar:
        row = bar.add_task(name, total=None, text="")
        waiting = set(futures)
        while waiting:
            ended, waiting = wait(waiting, timeout=0.2)
            for future in ended:
                try:
                    found = future.result()
                except BrokenProcessPool:
                    killed.append(futures[future])
                    continue
                if found:
                    raise (Refused if found.expected else Failed)(found.line)
            with contextlib.suppress(OSError, ValueError):  # a file that is being replaced, or a network's hiccup
                done, of, text = progress(job.work, job.groups)
            before = done if before is None and of else before
            rate = (done - (before or 0)) / max(time.monotonic() - start, 1e-9)
            line = f"{done:,} of {of:,} {unit}, {rate:,.0f} {unit}/s{', ' if text else ''}{text}"
            bar.update(row, completed=done, total=of or None, text=line)
            if time.monotonic() > told + 1:
                told = time.monotonic()
                write_json(status, {"done": done, "of": of, "text": line})
    return sorted(killed, key=lambda part: part[0])


# --- the command line -------------------------------------------------------------------------------------------------


def stage_main(name: str, arguments: list[str] | None = None) -> int:
    """The command line of a stage: runs it and prints its table; bad input is one line and exit code 2."""
    if arguments is None:
        end_with_dvc()
    module = importlib.import_module(f"tasks.{name}")
    args = parse(name, " ".join((module.__doc__ or "").split()), arguments)
    stage: Stage = module.STAGE
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupted(name))
        if args.workers is not None and args.workers < 1:
            raise ValueError(f"--workers is {args.workers}, expected a whole number of at least 1")
        study, data = read(args.study), args.data.resolve()
        if args.groups:
            return run_part(stage, study, parse_groups(args.groups), data, args.run)
        out = run_stage(stage, study, data, args.workers)
    except (ValueError, OSError, Failed) as error:
        line = " ".join(str(error).split()).removeprefix(f"{name}: ")
        print(f"{name}: {line}", file=sys.stderr)
        return 1 if isinstance(error, Failed) else 2
    commands.show(f"{name} of {study.name}", [stage.header, *stage.describe(out)])
    print(f"In {out}")
    return 0


def parse(name: str, about: str, arguments: list[str] | None) -> argparse.Namespace:
    parser = commands.parser(name, about)
    parser.epilog = (
        f"Parameters are params.yaml's sections `{name}` and `studies`; the result is in data/{name}/<study>. "
        "Groups are spread over this machine's cores, or over a Dask cluster if params.yaml's `runner` says so. "
        "Interrupted or killed, it resumes from the last save when it is run again. "
        f"`dvc repro {name}@<study>` runs it only if something has changed."
    )
    parser.add_argument("--workers", type=int, help="processes at once (default: cores, or the Dask cluster's threads)")
    parser.add_argument("--groups", help="first and last group, for example 0-14: these alone, left in the work folder")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # the run that a Dask worker works for
    return parser.parse_args(arguments)


def parse_groups(text: str) -> range:
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise ValueError(f"--groups is {text!r}, expected first-last, for example 0-14")
    return range(int(first), int(last) + 1)


def run_part(stage: Stage, study: Study, part: range, data: Path, token: str | None) -> int:
    """Some groups alone, in this process; `token` is the run's for which a Dask worker does it."""
    if token:
        path = lock_file(stage.name, study.name, data)
        threading.Thread(target=follow, args=(path, token), daemon=True).start()
    groups, work = stage.prepare(study, data)
    if part[-1] >= groups:
        raise ValueError(f"--groups is {part[0]}-{part[-1]}, expected groups from 0 to {groups - 1}")
    if found := work_on(Job(stage, study, data, work), part):
        raise (Refused if found.expected else Failed)(found.line)
    print(f"groups {part[0]}-{part[-1]} of {study.name}: {work}")
    return 0
