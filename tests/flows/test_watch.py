"""A folder into which PPO writes checkpoints while it trains, watched by a deployment on a schedule: all of it real."""

import json

import pytest
from mlflow.tracking import MlflowClient
from prefect.client.orchestration import get_client
from prefect.deployments import run_deployment

from flows.ui import pages
from tests.flows.test_deployments import finish
from tests.flows.test_pipeline import artifacts
from tests.projects import wait_until

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own

NAME, CHECKPOINTS, PRECISION = "my-training", 4, 4.0
WHAT = ("--env", "CartPole-v1", "--horizon", "50", "--policies", "checkpoints", "--precision", str(PRECISION))
# After the first and the second checkpoint it waits until they are evaluated: there are at least three evaluations.
TRAINING = f"""
import time
from pathlib import Path

from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import CheckpointCallback


class Waiting(CheckpointCallback):
    def _on_step(self):
        going_on = super()._on_step()
        number = self.n_calls // self.save_freq
        if self.n_calls % self.save_freq == 0 and number <= 2:
            while not Path(f"data/watch/{NAME}/{{number:04d}}.json").exists():
                time.sleep(0.1)
        return going_on


model = PPO("MlpPolicy", "CartPole-v1", n_steps=256, batch_size=64, n_epochs=2, seed=0, device="cpu")
model.learn({CHECKPOINTS} * 256, callback=Waiting(256, "checkpoints", name_prefix="ppo"))
"""


@pytest.fixture
def project(new_project, tmp_path):
    """A project with a worker; its deployments end with the test."""
    copied = new_project.copy(tmp_path / "project")
    (copied.folder / "checkpoints").mkdir()
    (copied.folder / "training.py").write_text(TRAINING)
    worker = copied.start("flows.worker", PREFECT_WORKER_QUERY_SECONDS="1")
    try:
        assert "Deployments are there" in worker.stdout.readline()
        yield copied
    finally:
        with get_client(sync_client=True) as client:
            for made in client.read_deployments():
                if made.name == NAME:
                    client.delete_deployment(made.id)
        worker.terminate()
        worker.communicate()
        assert wait_until(lambda: not copied.processes(), 30), copied.processes()


def evaluations(project):
    folder = project.data / "watch" / NAME
    return [json.loads(path.read_text()) for path in sorted(folder.glob("0*.json"))]


def test_a_deployment_with_a_schedule_follows_a_training(project):
    made = project.python("flows.watch", "--study", NAME, *WHAT, "--settle", "1", "--every", "5")
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith(f"Deployment watch/{NAME} at http://127.0.0.1:")
    training = project.start("training")
    wanted = [f"ppo_{256 * (i + 1)}_steps" for i in range(CHECKPOINTS)]

    def all_evaluated():
        found = evaluations(project)
        return training.poll() or (found and {x["name"] for x in found[-1]["policies"]} == set(wanted))

    assert wait_until(all_evaluated, 600), evaluations(project)
    _, errors = training.communicate()
    assert training.returncode == 0, errors

    # every evaluation began with the episodes of those before, and ended with what was asked for
    found = evaluations(project)
    assert len(found) >= 3
    assert [x["number"] for x in found] == list(range(1, len(found) + 1))
    total = 0
    for one in found:
        assert one["episodes.known"] == total
        total += one["episodes.run"]
        assert one["episodes"] == total
        assert max(policy["half_width"] for policy in one["policies"]) <= PRECISION
        assert one["left_out"] == {}
    assert sum(x["episodes.run"] for x in found[1:]) < (CHECKPOINTS - 1) * found[0]["episodes.run"]

    # MLflow has the ranking over time
    client = MlflowClient(f"sqlite:///{project.folder / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name(NAME).experiment_id])
    (series,) = (run for run in runs if "series" in run.data.tags)
    children = {run.data.tags["evaluation"]: run for run in runs if run is not series}
    assert {x: run.info.run_id for x, run in children.items()} == {str(x["number"]): x["mlflow_run"] for x in found}
    for name in wanted:
        expected = [(x["number"], policy["value"]) for x in found for policy in x["policies"] if policy["name"] == name]
        points = client.get_metric_history(series.info.run_id, f"value.{name}")
        assert [(p.step, p.value) for p in points] == expected
    assert [p.step for p in client.get_metric_history(series.info.run_id, f"rank.{wanted[0]}")] == [
        x["number"] for x in found
    ]
    head = project.run("git", "rev-parse", "HEAD").stdout.strip()
    assert {run.data.tags["git_commit"] for run in children.values()} == {head}
    assert [x.path for x in client.list_artifacts(found[-1]["mlflow_run"])] == ["page.html"]
    assert f"{NAME}, watched: file://{project.data / 'watch' / NAME / 'page.html'}\n" in pages(project.data)

    # Prefect's page shows it; asked again, nothing is done; bad input is a failed run with one line
    rows = json.loads(artifacts(f"watch-{NAME}")[-1].data)
    assert {row["name"] for row in rows} <= set(wanted)
    run = finish(run_deployment(f"watch/{NAME}", timeout=0, as_subflow=False))
    assert run.state.is_completed(), run.state
    assert run.state.message == f"Nothing new in checkpoints since evaluation {len(found)}"
    assert evaluations(project) == found
    bad = {"study": "my-trainin", "stop": "best"}
    run = finish(run_deployment("watch/checkpoints", parameters=bad, timeout=0, as_subflow=False))
    assert run.state.is_failed()
    assert "watch: unknown study 'my-trainin'" in run.state.message


def test_what_would_fail_each_time_is_refused_before_there_is_a_deployment(new_project):
    for arguments, said in (
        (("--study", "mine", "--every", "5"), "nothing says when to stop, expected --precision 25 or --stop best"),
        (("--study", NAME, *WHAT, "--every", "0"), "--every is 0, expected a number of seconds of at least 1"),
        (("--study", NAME, *WHAT, "--every", "5"), "checkpoints: no such file or folder, expected checkpoints"),
    ):
        done = new_project.python("flows.watch", *arguments)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1, done.stderr
        assert said in done.stderr


def test_a_schedule_without_a_server_is_one_line(new_project, tmp_path):
    what = ("--study", NAME, "--env", "CartPole-v1", "--policies", str(tmp_path), "--stop", "best", "--every", "5")
    done = new_project.python("flows.watch", *what, PREFECT_API_URL="http://127.0.0.1:9/api")
    assert done.returncode == 2
    assert "run `make ui` in another terminal" in done.stderr.splitlines()[-1]
