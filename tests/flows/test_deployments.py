"""prefect.yaml, by a real server, work pool and worker on loopback."""

import time

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.objects import State, StateType
from prefect.deployments import run_deployment

from tests.flows.test_security import FOREIGN, send
from tests.projects import FEWER, ROOT, STUDY, wait_until


@pytest.fixture
def worker(project):
    """What `make worker` starts: all deployments of a project, and a worker that runs them."""
    process = project.start("flows.worker", PREFECT_WORKER_QUERY_SECONDS="1")
    assert "Deployments are there" in process.stdout.readline()
    yield project
    process.terminate()
    process.communicate()
    assert wait_until(lambda: not [c for _, c in project.processes() if "worker" in c])


def test_a_worker_without_a_server_is_one_line(project):
    done = project.python("flows.worker", PREFECT_API_URL="http://127.0.0.1:9/api")
    assert done.returncode == 2
    assert "run `make ui` in another terminal" in done.stderr.splitlines()[-1]


def finish(run, seconds=300):
    """The flow run, when it has ended."""
    with get_client(sync_client=True) as client:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = client.read_flow_run(run.id)
            if found.state.is_final():
                return found
            time.sleep(0.5)
    raise AssertionError(f"{found.state} after {seconds} s")


def planned(name):
    """Runs that the server has planned by a deployment's schedule."""
    with get_client(sync_client=True) as client:
        only = FlowRunFilterDeploymentId(any_=[client.read_deployment_by_name(name).id])
        return [
            run
            for run in client.read_flow_runs(flow_run_filter=FlowRunFilter(deployment_id=only))
            if run.auto_scheduled
        ]


def attack(url, name, file):
    """A foreign page asks the worker's deployment for a command of its own."""
    with get_client(sync_client=True) as client:
        made = client.read_deployment_by_name(name)
    body = {"job_variables": {"command": f"touch {file}"}, "state": {"type": "SCHEDULED"}}
    return send(f"{url}/deployments/{made.id}/create_flow_run", body=body, **FOREIGN)[0]


def test_a_deployment_gives_what_dvc_repro_does_and_nobody_else_can_use_it(worker, fewer, prefect_server, tmp_path):
    project = worker
    assert wait_until(lambda: planned("check/nightly"))
    project.set(*FEWER)
    assert attack(prefect_server, "pipeline/gridworld", tmp_path / "owned") == 401
    run = finish(run_deployment("pipeline/gridworld", timeout=0, as_subflow=False))
    assert run.state.is_completed(), run.state
    assert project.metrics() == fewer.metrics()
    assert (project.folder / "dvc.lock").read_text() == (fewer.folder / "dvc.lock").read_text()
    assert (project.folder / "mlflow.db").exists()
    assert not (tmp_path / "owned").exists()
    # a stage's own last line is the flow's message; the study is a parameter
    project.set("width: 700", "width: -1")
    run = finish(run_deployment("pipeline/environment", parameters={"study": STUDY}, timeout=0, as_subflow=False))
    assert run.state.is_failed()
    assert "targets: targets.width is -1, expected" in run.state.message
    # cancelling stops the children
    project.set("width: -1", "width: 400000")
    run = run_deployment("pipeline/environment", parameters={"study": STUDY}, timeout=0, as_subflow=False)
    assert wait_until(lambda: project.begun("targets"))
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, State(type=StateType.CANCELLING))
    assert wait_until(lambda: not [c for _, c in project.processes() if "targets" in c])
    assert finish(run).state.is_cancelled()


def test_there_is_a_deployment_for_each_use_and_one_has_a_schedule():
    deployments = {d["name"]: d for d in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}
    assert list(deployments) == ["gridworld", "environment", "paper", "nightly", "checkpoints"]
    assert [name for name, d in deployments.items() if d.get("schedules")] == ["nightly"]
