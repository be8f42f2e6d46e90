"""The whole chain of one environment: `python -m flows.pipeline --env gridworld-1000`; `--all` for the whole paper.

Walks the stages through `dvc repro`, one at a time, so that a run by hand, a deployment's and this one share one cache
and one dvc.lock. All stages join one Prefect server: the one of PREFECT_API_URL, or one started here on loopback.
"""

import argparse
import contextlib
import importlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.settings import PREFECT_API_URL
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flows.processes import child
from flows.server import environment, joined_server
from manyfold import environments
from tasks import report
from tasks.params import ROOT
from tasks.shards import progress

STAGES = ("targets", "offline", "q", "q_hat", "behavior", "evaluate", "report")
LOGS = ROOT / "data" / ".work" / "pipeline"


class Locked(RuntimeError):
    """Another DVC command holds the repository."""


def worth_another_try(task: object, run: object, state: State[Any]) -> bool:
    return isinstance(state.result(raise_on_failure=False), Locked)


@task(
    cache_policy=NO_CACHE,
    task_run_name="{stage} {env}",
    retries=60,
    retry_delay_seconds=10,
    retry_condition_fn=worth_another_try,
)
def repro(stage: str, env: str, tick: Callable[[], None]) -> bool:
    """One stage by DVC; False if nothing had changed. A failure's message is the stage's own last line."""
    log = LOGS / f"{stage}-{env}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "dvc", "repro", "--single-item", f"{stage}@{env}"]
    with log.open("w") as said, child(command, cwd=ROOT, stdout=said, stderr=said, env=environment()) as process:
        while process.poll() is None:
            tick()
            time.sleep(0.1)
    text = log.read_text()
    if process.returncode and busy(text):
        raise Locked(f"{stage}: another dvc command is at work in {ROOT}; run it again when that has ended")
    if process.returncode:
        raise RuntimeError(last_line(text) or f"{stage}: exit code {process.returncode}, see {log}")
    return "didn't change, skipping" not in text


def busy(text: str) -> bool:
    """Whether DVC said that another DVC command is at work."""
    return "Unable to acquire lock" in text or "is busy, it is being blocked by" in text


@task(cache_policy=NO_CACHE, task_run_name="track {env}", retries=2, retry_delay_seconds=5)
def record(env: str, spent: dict[str, float]) -> str:
    """What was found, in MLflow; a server that is away for a moment is asked again."""
    try:
        return str(importlib.import_module("tasks.track").record(env, spent))
    except Exception as error:
        said = (str(error).strip() or repr(error)).splitlines()[0]
        raise RuntimeError(
            f"track: {said}; the results are there, record them by python -m tasks.track --env {env}"
        ) from None


def last_line(text: str) -> str:
    """What a stage said last, without what DVC adds to it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith(tuple(f"{stage}: " for stage in STAGES))]
    others = [line for line in lines if line.startswith("ERROR: ")]
    return (own or others or [""])[-1]


def to_do(env: str) -> tuple[str, ...]:
    """The stages from the first that has changed; an earlier stage's new results may leave later ones as they are."""
    command = [sys.executable, "-m", "dvc", "status", "--json", "--with-deps", f"report@{env}"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        return STAGES  # `dvc repro` will say what is wrong
    changed = json.loads(done.stdout)
    first = next((i for i, stage in enumerate(STAGES) if f"{stage}@{env}" in changed), len(STAGES))
    return STAGES[first:]


@flow(name="pipeline", flow_run_name="{env}", validate_parameters=False)
def pipeline(env: str = "gridworld-1000", show: bool = True) -> dict[str, float]:
    """All stages of one environment; seconds spent in each, 0 where nothing had changed."""
    environments.check_env(env)
    spent = dict.fromkeys(STAGES, 0.0)
    todo = to_do(env)
    if todo:  # MLflow takes seconds to import: meanwhile, and not where nothing will be recorded
        threading.Thread(target=importlib.import_module, args=("tasks.track",), daemon=True).start()
    with bars(show) as bar:
        rows = {stage: bar.add_task(stage, total=None, start=False, text="") for stage in STAGES}
        for stage in STAGES:
            start, ran = time.monotonic(), False
            bar.start_task(rows[stage])
            if stage in todo:
                ran = repro(stage, env, ticker(bar, rows[stage], stage, env))
            spent[stage] = time.monotonic() - start if ran else 0.0
            bar.update(rows[stage], total=1, completed=1, text="done" if ran else "nothing had changed")
            bar.stop_task(rows[stage])
    if any(spent.values()):
        record(env, spent)
    tables = ROOT / "data" / "report" / env
    text = "\n\n".join((tables / f"{name}.md").read_text() for name in ("relative_variance", "episodes_to_match"))
    create_markdown_artifact(
        f"# {report.title(env)}\n\n{(tables / 'verdict.txt').read_text()}\n\n{text}", key=f"report-{env}"
    )
    return spent


@flow(name="paper", validate_parameters=False)
def paper(envs: tuple[str, ...] = environments.ENVS, show: bool = True) -> dict[str, float]:
    """All environments, one after the other, and the report that joins them; seconds spent in each."""
    spent = {env: sum(pipeline(env, show).values()) for env in envs}
    out = report.build_all(ROOT / "data")
    create_markdown_artifact((out / "relative_variance.md").read_text(), key="report-all")
    return spent


def bars(show: bool) -> Progress:
    """One bar for each stage."""
    columns = (TextColumn("{task.description:9}"), BarColumn(24), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[text]}"), console=Console(stderr=True), disable=not show)


def ticker(bar: Progress, row: Any, stage: str, env: str) -> Callable[[], None]:
    """Shows what the stage's shards have reported since it started."""
    since = time.time()

    def tick() -> None:
        for work in (ROOT / "data" / ".work" / stage).glob(f"{env}-*"):
            with contextlib.suppress(OSError, ValueError):  # a file that is being replaced
                if any(path.stat().st_mtime >= since for path in work.glob("progress-*.json")):
                    done, of, text = progress(work)
                    bar.update(row, completed=done, total=of or None, text=text)

    return tick


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.pipeline",
        description="Runs all stages of one environment that have changed, and prints the result; goes on where an "
        "earlier run stopped.",
    )
    parser.add_argument("--env", default="gridworld-1000", help=f"one of {', '.join(environments.ENVS)}")
    parser.add_argument("--all", action="store_true", help="all environments: the whole paper")
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        environments.check_env(args.env)
        if args.all:
            with joined_server():
                paper()
            report.main(["--all"])
            return 0
        spent = dict.fromkeys(STAGES, 0.0)
        if PREFECT_API_URL.value() or to_do(args.env):
            with joined_server():
                spent = pipeline(args.env)
    except (KeyboardInterrupt, TerminationSignal):
        print("pipeline: interrupted; run it again to go on", file=sys.stderr)
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        print(f"pipeline: {error}", file=sys.stderr)
        return 2
    report.show(args.env, ROOT / "data")
    ran = [f"{stage} {seconds:.0f} s" for stage, seconds in spent.items() if seconds]
    print(f"Spent {sum(spent.values()):.0f} s: {', '.join(ran) or 'nothing had changed'}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
