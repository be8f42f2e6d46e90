"""The whole chain of one environment: `python -m flows.pipeline --env gridworld-1000`.

Walks the stages through `dvc repro`, one at a time, so that a run by hand, a deployment's and this one share one cache
and one dvc.lock. All stages join one Prefect server: the one of PREFECT_API_URL, or one started here on loopback.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from manyfold import environments
from tasks import report, track
from tasks.params import ROOT
from tasks.shards import progress

STAGES = ("targets", "offline", "q", "q_hat", "behavior", "evaluate", "report")


@task(cache_policy=NO_CACHE, task_run_name="{stage} {env}")
def repro(stage: str, env: str) -> bool:
    """One stage by DVC; False if nothing had changed. A failure's message is the stage's own last line."""
    log = ROOT / "data" / ".work" / "pipeline" / f"{stage}-{env}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "dvc", "repro", "--single-item", f"{stage}@{env}"]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        )
        try:
            code = process.wait()
        except BaseException:  # cancelled, or Ctrl-C: the children go too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            raise
    text = log.read_text()
    if code:
        raise RuntimeError(last_line(stage, text) or f"{stage}: exit code {code}, see {log}")
    return "didn't change, skipping" not in text


@task(cache_policy=NO_CACHE, task_run_name="track {env}")
def record(env: str, spent: dict[str, float]) -> str:
    """What was found, in MLflow."""
    return track.record(env, spent)


def last_line(stage: str, text: str) -> str:
    """What the stage said last, without what DVC adds to it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith(f"{stage}: ")]
    others = [line for line in lines if line.startswith("ERROR: ")]
    return (own or others or [""])[-1]


def environment() -> dict[str, str]:
    """For the stages' processes."""
    binaries = str(Path(sys.executable).parent)
    return {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{binaries}:{os.environ.get('PATH', '')}"}


@flow(name="pipeline", flow_run_name="{env}", validate_parameters=False)
def pipeline(env: str = "gridworld-1000", show: bool = True) -> dict[str, float]:
    """All stages of one environment; seconds spent in each, 0 where nothing had changed."""
    environments.check_env(env)
    spent = {}
    with bars(show) as bar:
        rows = {stage: bar.add_task(stage, total=None, start=False, text="") for stage in STAGES}
        for stage in STAGES:
            start = time.monotonic()
            bar.start_task(rows[stage])
            future = repro.submit(stage, env)
            while not future.state.is_final():
                update(bar, rows[stage], stage, env)
                time.sleep(0.2)
            ran = future.result()
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


def bars(show: bool) -> Progress:
    """One bar for each stage."""
    columns = (TextColumn("{task.description:9}"), BarColumn(24), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[text]}"), console=Console(stderr=True), disable=not show)


def update(bar: Progress, row: TaskID, stage: str, env: str) -> None:
    """What the stage's shards have reported."""
    for work in (ROOT / "data" / ".work" / stage).glob(f"{env}-*"):
        with contextlib.suppress(OSError, ValueError):  # a file that is being replaced
            done, of, text = progress(work)
            bar.update(row, completed=done, total=of or None, text=text)


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A Prefect server on loopback for as long as the block lasts; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "prefect",
        "server",
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--no-ui",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{port}/api/health", process)
        yield f"http://127.0.0.1:{port}/api"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    """Until the server answers."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.2)
    raise RuntimeError(f"{url}: no answer after {seconds:.0f} s, expected Prefect's server; is the port taken?")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.pipeline",
        description="Runs all stages of one environment that have changed, and prints the result; goes on where an "
        "earlier run stopped.",
    )
    parser.add_argument("--env", default="gridworld-1000", help=f"one of {', '.join(environments.ENVS)}")
    args = parser.parse_args(arguments)
    try:
        environments.check_env(args.env)
        if args.env in environments.ROBOTS:
            raise ValueError(f"{args.env}: the robots' evaluation is not there yet, expected a Gridworld")
        if not os.environ.get(
            "PREFECT_API_URL"
        ):  # Prefect reads it when it is imported, so a new process does the work
            command = [sys.executable, "-m", "flows.pipeline", "--env", args.env]
            with server() as url:
                return subprocess.run(command, env=environment() | {"PREFECT_API_URL": url}, check=False).returncode
        spent = pipeline(args.env)
    except KeyboardInterrupt:
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
