"""prefect.yaml, by a real server, work pool and worker on loopback."""

import time

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.deployments import run_deployment

from tests.flows.test_pipeline import begun, processes_of, wait_until
from tests.projects import ENV, FEWER, ROOT


@pytest.fixture
def worker(project):
    """What `make worker` starts: all deployments of a project, and a worker that runs them."""
    process = project.start("flows.worker", PREFECT_WORKER_QUERY_SECONDS="1")
    assert "Deployments are there" in process.stdout.readline()
    yield project
    process.terminate()
    process.communicate()
    assert wait_until(lambda: not [c for _, c in processes_of(project.folder) if "worker" in c], 15)


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


def test_a_deployment_runs_to_completed_and_its_results_are_those_of_dvc_repro(worker, fewer):
    project = worker
    project.set(*FEWER)
    run = finish(run_deployment("pipeline/gridworld", timeout=0, as_subflow=False))
    assert run.state.is_completed(), run.state
    assert project.metrics() == fewer.metrics()
    assert (project.folder / "dvc.lock").read_text() == (fewer.folder / "dvc.lock").read_text()
    assert (project.folder / "mlflow.db").exists()
    # a stage's own last line is the flow's message; the environment is a parameter
    project.set("width: 700", "width: -1")
    run = finish(run_deployment("pipeline/environment", {"env": "gridworld-27000"}, timeout=0, as_subflow=False))
    assert run.state.is_failed()
    assert "targets: targets.width is -1, expected more than 0 training steps" in run.state.message
    # cancelling stops the children
    project.set("width: -1", "width: 400000")
    run = run_deployment("pipeline/environment", {"env": "gridworld-27000"}, timeout=0, as_subflow=False)
    assert wait_until(begun(project, "targets"))
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, State(type=StateType.CANCELLING))
    assert wait_until(lambda: not [c for _, c in processes_of(project.folder) if "targets" in c], 60)
    assert finish(run).state.is_cancelled()


@pytest.mark.slow
def test_the_nightly_check_passes_when_the_committed_results_are_right(project):
    done = project.python("flows.check", "--env", ENV)
    assert done.returncode == 0, done.stderr
    assert "numbers of metrics.json are the committed ones." in done.stdout


@pytest.mark.slow
def test_the_nightly_check_finds_a_committed_number_that_is_not_computed(project):
    metrics = project.data / "evaluate" / ENV / "metrics.json"
    found = yaml.safe_load(metrics.read_text())["relative_variance"]["mpe"]
    metrics.write_text(metrics.read_text().replace(str(found), "0.001", 1))
    project.commit()
    done = project.python("flows.check", "--env", ENV)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"check: {ENV}: relative_variance.mpe is {found}, expected the committed 0.001"
    )


def test_there_is_a_deployment_for_each_use_and_one_has_a_schedule():
    deployments = {d["name"]: d for d in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}
    assert list(deployments) == ["gridworld", "environment", "paper", "nightly"]
    assert [name for name, d in deployments.items() if d.get("schedules")] == ["nightly"]
