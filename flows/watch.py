"""A folder of checkpoints on a schedule: `python -m flows.watch --study cartpole --precision 25 --every 60`.

makes the deployment `watch/cartpole`, which a worker (`make worker`) runs every 60 seconds: what is new in the folder
is estimated from old episodes first, only missing ones are run, and MLflow shows the ranking over time. `tasks.watch`
does the work, in a process of its own; here it is started, shown on Prefect's page, and ended.
"""

import contextlib
import json
import sys
import time
from typing import Any

from prefect import flow, runtime, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterState,
    FlowRunFilterStateName,
)
from prefect.client.schemas.objects import State, StateType
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from flows.pipeline import WORK, key
from flows.processes import child, environment
from flows.server import client_settings, ends_without_server
from flows.worker import POOL, register
from tasks import watch as watching
from tasks.params import ROOT

ABOUT = """\
Makes the deployment watch/NAME with a schedule, which a worker (`make worker`) follows. All options but --every are
those of `python -m tasks.watch`, which looks once, without Prefect. The same name again changes the deployment;
`prefect deployment delete watch/NAME` removes it.
"""
PATIENCE = 60.0  # seconds until the server has planned the first runs; mostly 5
OWN = ("every", "data")  # options that are not the flow's parameters


@flow(name="watch", flow_run_name="{study}", validate_parameters=False)
def watch(
    study: str,
    precision: float | None = None,
    stop: str | None = None,
    budget: int | None = None,
    alpha: float | None = None,
    policies: list[str] | str | None = None,
    env: str | None = None,
    horizon: int | None = None,
    greedy: bool = False,
    store: str | None = None,
    settle: float | None = None,
    workers: int | None = None,
) -> "State[str]":
    """Evaluates what is new in a study's folder of checkpoints, or in another one: `python -m tasks.watch --help`."""
    asked = arguments(locals())
    before = watching.last(folder(study))
    with ends_without_server("watch"):
        said = evaluate(study, asked)
        found = watching.last(folder(study))
        if found and found != before:
            show(found)
        cancel_late()
    return State(type=StateType.COMPLETED, message=said)


def folder(study: str) -> Any:
    return ROOT / "data" / "watch" / study


def arguments(parameters: dict[str, Any]) -> list[str]:
    """Of `python -m tasks.watch`; what is left out has its default there."""
    out: list[str] = []
    for name, value in parameters.items():
        if value is not None and value is not False:
            given = [] if value is True else value if isinstance(value, list) else [value]
            out += [f"--{name}", *map(str, given)]
    return out


@task(cache_policy=NO_CACHE, task_run_name="evaluate {study}")
def evaluate(study: str, asked: list[str]) -> str:
    """What `tasks.watch` says at last, which is what a failure is called, too."""
    log = WORK / "watch" / f"{study}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tasks.watch", *asked]
    with log.open("w") as said, child(command, cwd=ROOT, stdout=said, stderr=said, env=environment()) as process:
        code = process.wait()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if code:
        raise RuntimeError(lines[-1] if lines else f"watch: exit code {code}, see {log}")
    return lines[-1]


def show(found: dict[str, Any]) -> None:
    """The ranked policies, on Prefect's page; one that cannot be reached stops nothing."""
    shown = ("name", "value", "low", "high", "rank_low", "rank_high", "p_best")
    rows = [{name: policy[name] for name in shown} for policy in found["policies"]]
    about = (
        f"Evaluation {found['number']} of {found['study']}: {found['verdict']} {folder(found['study']) / 'page.html'}"
    )
    with contextlib.suppress(Exception):
        create_table_artifact(rows, key=key("watch", found["study"]), description=about)


def cancel_late() -> None:
    """Runs of this deployment that are late by now would find nothing new: a worker may have been away for a night."""
    with contextlib.suppress(Exception), get_client(sync_client=True) as client:
        if deployment := runtime.deployment.id:
            late = FlowRunFilter(
                deployment_id=FlowRunFilterDeploymentId(any_=[deployment]),
                state=FlowRunFilterState(name=FlowRunFilterStateName(any_=["Late"])),
            )
            for run in client.read_flow_runs(flow_run_filter=late):
                if run.auto_scheduled:
                    said = "a later run has seen what this one would"
                    client.set_flow_run_state(run.id, State(type=StateType.CANCELLED, message=said))


def wait_until_planned(study: str, url: str) -> None:
    """Until the server has planned runs; a RuntimeError where it never does, which its page would not tell."""
    string = client_settings(url).get("PREFECT_API_AUTH_STRING") or PREFECT_API_AUTH_STRING.value()
    settings = {PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: string}
    deadline = time.monotonic() + PATIENCE
    with temporary_settings(settings), get_client(sync_client=True) as client:
        only = FlowRunFilterDeploymentId(any_=[client.read_deployment_by_name(f"watch/{study}").id])
        planned = FlowRunFilter(deployment_id=only)
        while not any(run.auto_scheduled for run in client.read_flow_runs(flow_run_filter=planned)):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{url}: it plans no run of watch/{study}; Prefect 3.8 needs SQLAlchemy before 2.1")
            time.sleep(0.5)


# --- the command line -------------------------------------------------------------------------------------------------


def main(given: list[str] | None = None) -> int:
    parser = watching.parser("python -m flows.watch", ABOUT)
    parser.add_argument("--every", type=int, required=True, metavar="SECONDS", help="how often to look")
    args = parser.parse_args(given)
    defaults = watching.parser().parse_args(["--study", args.study])
    parameters = {k: x for k, x in vars(args).items() if k not in OWN and x != getattr(defaults, k)}
    parameters = {"study": args.study, **{k: str(x) if k == "store" else x for k, x in parameters.items()}}
    try:
        if args.every < 1:
            raise ValueError(f"--every is {args.every}, expected a number of seconds of at least 1")
        watching.news(watching.asked_of(args))  # refuses what would fail each time
        deploy = ["deploy", "flows/watch.py:watch", "--name", args.study, "--pool", POOL, "--interval", str(args.every)]
        variables = json.dumps({"env": {"PYTHONPATH": str(ROOT)}})
        url = register([*deploy, "--params", json.dumps(parameters), "--job-variable", variables])
        wait_until_planned(args.study, url)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"watch: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"Deployment watch/{args.study} at {url}: every {args.every} s, as long as a worker runs (`make worker`).")
    print(f"At once: prefect deployment run watch/{args.study}. Results: {folder(args.study)}, and `make ui`.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
