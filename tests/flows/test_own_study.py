"""Checkpoints of Stable-Baselines3 through all three doors, by `manyfold study new` and nothing else."""

import json

import numpy as np
import pytest
import torch
from prefect.deployments import run_deployment
from stable_baselines3 import PPO

from flows.ui import pages
from manyfold import policies
from tests.flows.test_deployments import finish
from tests.projects import STUDY, wait_until

HORIZON, NAME = 50, "my-robot"
STAGES = ("targets", "offline", "q", "q_hat", "behavior", "evaluate", "report")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Three of one short training, as CheckpointCallback names them: their folder."""
    folder = tmp_path_factory.mktemp("training")
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=128, batch_size=64, n_epochs=2, seed=0, device="cpu")
    for steps in (128, 256, 384):
        model.learn(128, reset_num_timesteps=False)
        model.save(folder / f"ppo_{steps}_steps.zip")
    return folder


@pytest.fixture(scope="module")
def own(finished, checkpoints, tmp_path_factory):
    """A finished project to which the study is added, run by `dvc repro`."""
    project = finished.copy(tmp_path_factory.mktemp("own") / "project")
    before = project.run("git", "status", "--porcelain").stdout
    what = ("--env", "CartPole-v1", "--horizon", str(HORIZON), "--policies", f"{checkpoints}/*.zip")
    made = project.python("manyfold.cli", "study", "new", NAME, *what)
    assert made.returncode == 0, made.stderr
    project.changed = project.run("git", "status", "--porcelain").stdout.removeprefix(before).split()
    project.done = project.repro(study=NAME)
    return project


def stale(project):
    """Stages that have changed."""
    return list(json.loads(project.python("dvc", "status", "--json").stdout))


def test_it_takes_a_section_and_the_files_and_nothing_else(own):
    assert own.changed == ["M", "params.yaml", "??", "studies/"]


def test_all_seven_stages_run_through_dvc(own):
    assert own.done.returncode == 0, own.done.stderr
    assert own.done.stdout.count("Running stage") == 7
    lock = (own.folder / "dvc.lock").read_text()
    assert all(f"{stage}@{NAME}:" in lock for stage in STAGES)
    metrics = json.loads(own.metrics(NAME))
    assert (metrics["env"], metrics["policies"], metrics["runs_from"]) == (NAME, 3, "pool")
    assert metrics["relative_variance"]["on_policy"] == 1
    bounded = ("on_policy", "mpe", "son_balanced")  # with 60 episodes and hardly a fit, ODI's tails are long
    assert max(metrics["largest_mean_error"][name] for name in bounded) < 4
    assert 9 < metrics["values"]["lowest"] < metrics["values"]["highest"] <= HORIZON
    page = own.data / "report" / NAME / "page.html"
    assert all(f"ppo_{steps}_steps" in page.read_text() for steps in (128, 256, 384))
    assert f"{NAME}: file://{page}" in pages(own.data)  # what `make ui` prints
    table = (own.data / "report" / NAME / "relative_variance.md").read_text()
    assert "paper" not in table.splitlines()[0]  # it has no such environment


def test_the_policies_are_stable_baselines3s_own(own, checkpoints):
    found = policies.load(own.data / "targets" / NAME / "group-00" / "targets")
    assert found.names == ("ppo_128_steps", "ppo_256_steps", "ppo_384_steps")
    obs = np.random.default_rng(0).standard_normal((7, 4)).astype(np.float32)
    for k, name in enumerate(found.names):
        model = PPO.load(checkpoints / f"{name}.zip", device="cpu")
        with torch.no_grad():
            expected = model.policy.get_distribution(torch.as_tensor(obs)).distribution.probs.numpy()
        np.testing.assert_allclose(found.probs(obs, 0)[k], expected, atol=1e-6)


def test_nothing_of_the_other_study_becomes_stale(own):
    assert stale(own) == []
    done = own.repro(study=STUDY)
    assert done.stdout.count("didn't change, skipping") == 7, done.stdout


def test_another_checkpoint_makes_all_of_it_stale_and_nothing_else(own, checkpoints):
    path = own.folder / "studies" / NAME / "policies" / "ppo_128_steps.zip"
    saved = path.read_bytes()
    path.write_bytes((checkpoints / "ppo_384_steps.zip").read_bytes())
    assert stale(own) == [f"targets@{NAME}"]  # and what depends on its result
    done = own.repro("targets", study=NAME)
    assert done.returncode == 0, done.stderr
    assert sorted(stale(own)) == sorted(f"{stage}@{NAME}" for stage in STAGES[1:6])
    path.write_bytes(saved)
    assert own.repro("targets", study=NAME).returncode == 0
    assert stale(own) == []


@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_a_deployment_runs_it_and_mlflow_shows_it(own):
    """The other two doors: a run of the changed study by a worker, recorded in MLflow."""
    from mlflow.tracking import MlflowClient

    own.set("match: 30", "match: 45")
    worker = own.start("flows.worker", PREFECT_WORKER_QUERY_SECONDS="1")
    try:
        assert "Deployments are there" in worker.stdout.readline()
        run = finish(run_deployment("pipeline/environment", parameters={"study": NAME}, timeout=0, as_subflow=False))
    finally:
        worker.terminate()
        worker.communicate()
    assert run.state.is_completed(), run.state
    uri = f"sqlite:///{own.folder / 'mlflow.db'}"
    store = MlflowClient(uri, uri)
    runs = store.search_runs([store.get_experiment_by_name(NAME).experiment_id])
    parent = next(run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    assert parent.data.params["evaluate.match"] == "45"
    assert {"p_best.ppo_128_steps", "half_width.ppo_128_steps"} <= parent.data.metrics.keys()
    columns = {
        "value",
        "low",
        "high",
        "p_best",
        "half_width",
        "may_be_best",
        "policies",
        "episodes",
        "steps",
        "seconds",
    }
    assert columns <= parent.data.metrics.keys()  # under the same names for every study
    assert parent.data.metrics["policies"] == 3
    assert parent.data.metrics["seconds"] == sum(parent.data.metrics[f"seconds.{stage}"] for stage in STAGES)
    assert parent.data.params["leads"] in {f"ppo_{steps}_steps" for steps in (128, 256, 384)}
    assert "CartPole-v1" in parent.data.params["environment"]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    relative = json.loads(own.metrics(NAME))["relative_variance"]
    assert {run.data.tags["estimator"]: run.data.metrics["relative_variance"] for run in children} == relative
    assert wait_until(lambda: not own.processes()), own.processes()
