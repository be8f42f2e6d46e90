"""All stages of one study: `python -m flows.pipeline --study gridworld-1000`; `--all` for every study.

Walks the stages through `dvc repro`, one at a time, so that a run by hand, a deployment's and this one share one cache
and one dvc.lock. Prefect stays outside of the stages: it retries, shows and cancels; MLflow records what was found.
"""

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prefect import flow, task
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.exceptions import PrefectHTTPStatusError, TerminationSignal
from prefect.settings import PREFECT_API_URL
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flows.processes import child, environment
from flows.server import ends_without_server, joined_server, refusal
from flows.store import check_store, store_uri
from tasks import params
from tasks.params import ROOT

STAGES = ("targets", "offline", "q", "q_hat", "behavior", "evaluate", "report")
WORK = ROOT / "data" / ".work"
Tell = Callable[[float, float, str], None]  # done, of, text


class Locked(RuntimeError):
    """Another DVC command holds the repository."""


# --- one stage --------------------------------------------------------------------------------------------------------


def worth_another_try(task: object, run: object, state: State[Any]) -> bool:
    return isinstance(state.result(raise_on_failure=False), Locked)


@task(
    cache_policy=NO_CACHE,
    task_run_name="{stage} {study}",
    retries=60,
    retry_delay_seconds=10,
    retry_condition_fn=worth_another_try,
)
def repro(stage: str, study: str, show: Tell) -> float:
    """One stage by DVC; its seconds, 0 if nothing had changed. A failure's message is the stage's own last line."""
    log, status = log_file(stage, study), status_file(stage, study)
    tell, told = artifact(stage, study), time.monotonic()
    begun = early.pop((stage, study), None)
    with contextlib.nullcontext(begun) if begun else dvc_repro(stage, study) as work:
        while not work.has_ended(0.1):
            done, of, text = progress(status)
            show(done, of, text)
            if of and time.monotonic() > told + 5:
                tell(done, of, text)
                told = time.monotonic()
    text = log.read_text(errors="replace")
    code = work.process.returncode
    if code and busy(text):
        raise Locked(f"{stage}: another dvc command is at work in {ROOT}; run it again when that has ended")
    if code:
        raise RuntimeError(last_line(text) or f"{stage}: exit code {code}, see {log}")
    tell(1, 1, "done")
    table(stage, study, status)
    return 0.0 if "didn't change, skipping" in text else work.seconds


@dataclass
class Work:
    """DVC at work on one stage."""

    process: "subprocess.Popen[bytes]"
    start: float = field(default_factory=time.monotonic)
    seconds: float = 0.0  # when it has ended

    def has_ended(self, patience: float = 0) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
            self.seconds = self.seconds or time.monotonic() - self.start
        return self.process.returncode is not None


early: dict[tuple[str, str], Work] = {}  # what `main` has begun while Prefect's server starts


@contextlib.contextmanager
def dvc_repro(stage: str, study: str) -> Iterator[Work]:
    """DVC at work on one stage for as long as the block lasts."""
    log = log_file(stage, study)
    log.parent.mkdir(parents=True, exist_ok=True)
    status_file(stage, study).unlink(missing_ok=True)
    command = [sys.executable, "-m", "dvc", "repro", "--single-item", f"{stage}@{study}"]
    with log.open("w") as said, child(command, cwd=ROOT, stdout=said, stderr=said, env=environment()) as process:
        yield Work(process)


def log_file(stage: str, study: str) -> Path:
    return WORK / "pipeline" / f"{stage}-{study}.log"


def status_file(stage: str, study: str) -> Path:
    """Where tasks.executor tells what is done, and the table of a finished stage."""
    return WORK / stage / f"{study}.json"


def progress(status: Path) -> tuple[float, float, str]:
    """What a running stage tells of itself."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(status.read_text())
        return found.get("done", 1), found.get("of", 1), found.get("text", "")
    return 0, 0, ""


def key(*names: str) -> str:
    """Prefect takes small letters, digits and dashes."""
    return "-".join(names).lower().replace("_", "-").replace(".", "-")


def artifact(stage: str, study: str) -> Tell:
    """Progress on Prefect's page; one that cannot be reached stops nothing."""
    about = f"Stage `{stage}` of {study}"
    made: Any = None
    with contextlib.suppress(Exception):
        made = create_progress_artifact(0.0, key=key(stage, study), description=about)

    def tell(done: float, of: float, text: str) -> None:
        with contextlib.suppress(Exception):
            update_progress_artifact(made, 100 * done / of, f"{about}: {text}")

    return tell


def table(stage: str, study: str, status: Path) -> None:
    """What a finished stage says of its groups, on Prefect's page."""
    with contextlib.suppress(Exception):
        found = json.loads(status.read_text())
        rows = [dict(zip(found["header"], row, strict=True)) for row in found["rows"]]
        where = ROOT / "data" / stage / study
        create_table_artifact(rows, key=key(stage, study, "table"), description=f"`{stage}` of {study}: {where}")


def busy(text: str) -> bool:
    """Whether DVC said that another DVC command is at work."""
    return "Unable to acquire lock" in text or "is busy, it is being blocked by" in text


def last_line(text: str) -> str:
    """What a stage said last, without what DVC adds to it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith(tuple(f"{stage}: " for stage in STAGES))]
    others = [line for line in lines if line.startswith("ERROR: ")]
    return (own or others or [""])[-1]


# --- the flows --------------------------------------------------------------------------------------------------------


def check_study(study: str) -> str:
    """The study's title; a ValueError in one line if params.yaml has no such study, or is no YAML."""
    found = params.read().get("studies")
    if isinstance(found, dict) and isinstance(found.get(study), dict):
        return str(found[study].get("title", study))
    importlib.import_module("tasks.studies").read(study)  # says what is wrong, and imports all environments
    return study


def studies() -> list[str]:
    """All studies of params.yaml."""
    found = params.read().get("studies")
    if not isinstance(found, dict) or not found:
        raise ValueError("params.yaml: expected a section 'studies' with one or more studies, found none")
    return [str(name) for name in found]


def to_do(*names: str) -> dict[str, tuple[str, ...]]:
    """By study, the stages from the first that has changed; its new results may leave later ones as they are."""
    command = [sys.executable, "-m", "dvc", "status", "--json", "--with-deps", *(f"report@{name}" for name in names)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    try:
        changed = json.loads(done.stdout) if done.returncode == 0 else None
    except ValueError:
        changed = None
    if changed is None:
        return dict.fromkeys(names, STAGES)  # `dvc repro` will say what is wrong
    first = {n: next((i for i, s in enumerate(STAGES) if f"{s}@{n}" in changed), len(STAGES)) for n in names}
    return {name: STAGES[i:] for name, i in first.items()}


@task(cache_policy=NO_CACHE, task_run_name="track {study}")
def record(study: str, spent: dict[str, float]) -> str:
    """What was found, in MLflow."""
    try:
        return str(importlib.import_module("tasks.track").record(study, spent))
    except Exception as error:
        said = (str(error).strip() or repr(error)).splitlines()[0]
        raise RuntimeError(
            f"track: {said}; the results are there, record them by python -m tasks.track --study {study}"
        ) from None


def open_store() -> None:
    """Imports MLflow and makes its store, seconds that can pass while stages run; what is wrong, `record` will say."""
    with contextlib.suppress(Exception):
        importlib.import_module("tasks.track").client().search_experiments(max_results=1)


@flow(name="pipeline", flow_run_name="{study}", validate_parameters=False)
def pipeline(study: str = "gridworld-1000", show: bool = True) -> dict[str, float]:
    """All stages of one study; seconds spent in each, 0 where nothing had changed."""
    title = check_study(study)
    todo = known.pop(study) if study in known else to_do(study)[study]
    spent = dict.fromkeys(STAGES, 0.0)
    with ends_without_server("pipeline"):
        if todo:
            check_store(store_uri())
            threading.Thread(target=open_store, daemon=True).start()
        with bars(show) as bar:
            rows = {stage: bar.add_task(stage, total=None, start=False, text="") for stage in STAGES}
            for stage in STAGES:
                bar.start_task(rows[stage])
                if stage in todo:
                    spent[stage] = repro(stage, study, shower(bar, rows[stage]))
                said = "done" if spent[stage] else "nothing had changed"
                bar.update(rows[stage], total=1, completed=1, text=said)
                bar.stop_task(rows[stage])
        if any(spent.values()):
            record(study, spent)
        tables = ROOT / "data" / "report" / study
        texts = [(tables / f"{name}.md").read_text() for name in ("relative_variance", "episodes_to_match")]
        verdict = (tables / "verdict.txt").read_text()
        create_markdown_artifact("\n\n".join((f"# {title}", verdict, *texts)), key=key("report", study))
        decision = tables / "decision.md"
        if decision.exists():  # not where an earlier version computed the study
            about = f"# {title}, group 0: who is best\n\n{decision.read_text()}"
            create_markdown_artifact(about, key=key("decision", study))
    return spent


known: dict[str, tuple[str, ...]] = {}  # stages to do that `main` has found already: DVC takes seconds to say so


@flow(name="paper", validate_parameters=False)
def paper(names: list[str] | None = None, show: bool = True) -> dict[str, float]:
    """All studies, one after the other, and the report that joins them; seconds spent in each."""
    spent = {study: sum(pipeline(study, show).values()) for study in names or studies()}
    join_report()
    create_markdown_artifact((ROOT / "data" / "report" / "all" / "relative_variance.md").read_text(), key="report-all")
    return spent


def join_report() -> None:
    """data/report/all, by `python -m tasks.report --all`."""
    command = [sys.executable, "-m", "tasks.report", "--all"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(last_line(done.stderr) or f"report: exit code {done.returncode}")


def show_all() -> None:
    """What `join_report` has written, for a person."""
    for name in ("relative_variance", "episodes_to_match", "policies"):
        print((ROOT / "data" / "report" / "all" / f"{name}.md").read_text())


def show_one(study: str) -> None:
    """The result of a study, for a person."""
    report = importlib.import_module("tasks.report")
    report.show(importlib.import_module("tasks.studies").read(study), ROOT / "data")


def bars(show: bool) -> Progress:
    """One bar for each stage."""
    columns = (TextColumn("{task.description:9}"), BarColumn(24), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[text]}"), console=Console(stderr=True), disable=not show)


def shower(bar: Progress, row: Any) -> Tell:
    def show(done: float, of: float, text: str) -> None:
        bar.update(row, completed=done, total=of or None, text=text)

    return show


# --- the command line -------------------------------------------------------------------------------------------------


class Early:
    """Walks through the stages to do while Prefect's server starts, which takes seconds; the flow finds them begun."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.stack = stack  # whose end ends them
        self.left = [(stage, study) for study, stages in known.items() for stage in stages]
        self.last: Work | None = None

    def walk(self) -> None:
        """Begins the next stage if the one before has succeeded."""
        succeeded = self.last is None or (self.last.has_ended() and self.last.process.returncode == 0)
        if self.left and succeeded:
            name = self.left.pop(0)
            early[name] = self.last = self.stack.enter_context(dvc_repro(*name))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.pipeline",
        description="Runs all stages of one study that have changed, and prints the result; resumes where an earlier "
        "run stopped. What stages say is in data/.work/pipeline.",
    )
    parser.add_argument("--study", default="gridworld-1000", help="a name of params.yaml's section `studies`")
    parser.add_argument("--all", action="store_true", help="every study of params.yaml, and the report that joins them")
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        names = studies() if args.all else [args.study]
        for name in names:
            check_study(name)
        known.update(to_do(*names))
        spent = dict.fromkeys(names if args.all else STAGES, 0.0)
        if PREFECT_API_URL.value() or any(known.values()):
            check_store(store_uri())
            with contextlib.ExitStack() as stack:
                stack.enter_context(joined_server(Early(stack).walk))
                spent = paper(names) if args.all else pipeline(args.study)
    except (KeyboardInterrupt, TerminationSignal):
        print("pipeline: interrupted; run it again to resume", file=sys.stderr)
        return 130
    except (httpx.HTTPError, PrefectHTTPStatusError) as error:
        print(f"pipeline: {PREFECT_API_URL.value() or 'Prefect'}: {refusal(str(error))}", file=sys.stderr)
        return 2
    except (ValueError, OSError, RuntimeError) as error:
        print(f"pipeline: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    show_all() if args.all else show_one(args.study)
    ran = [f"{name} {seconds:.0f} s" for name, seconds in spent.items() if seconds]
    print(f"Spent {sum(spent.values()):.0f} s: {', '.join(ran) or 'nothing had changed'}.")
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # Prefect's threads have nothing more to say
