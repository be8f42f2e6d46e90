"""A user's own environment and policies through all three doors, by nothing but a section of params.yaml and a file."""

import json

import numpy as np
import pytest
import torch

from manyfold import policies
from manyfold.policies.mlp import MlpPolicySet, Spec
from tests.projects import STUDY, wait_until

HORIZON = 50
STAGES = ("targets", "offline", "q", "q_hat", "behavior", "evaluate", "report")


def cartpole_policies():
    """Three networks of one hidden layer with a frozen normaliser that push the way the pole falls, more or less."""
    push = torch.tensor([[0.0, 0.0], [0.1, -0.1], [-1.0, 1.0], [-1.0, 1.0]])  # [observation, action]
    tensors = {
        "w1": torch.eye(4).repeat(3, 1, 1),
        "b1": torch.zeros(3, 1, 4),
        "w2": torch.stack([strength * push for strength in (0.6, 0.9, 1.2)]),
        "b2": torch.zeros(3, 1, 2),
        "obs_mean": torch.zeros(3, 4, dtype=torch.float64),
        "obs_var": torch.full((3, 4), 0.25, dtype=torch.float64),
    }
    names = ("weak", "middle", "strong")
    return MlpPolicySet(tensors, Spec("CartPole-v1", "softmax", HORIZON, 2, names, 0, 4, activation="relu"))


@pytest.fixture(scope="module")
def own(finished, tmp_path_factory):
    """A finished project to which CartPole is added, run by `dvc repro`."""
    project = finished.copy(tmp_path_factory.mktemp("own") / "project")
    before = project.run("git", "status", "--porcelain").stdout
    project.add_cartpole(cartpole_policies(), horizon=HORIZON)
    project.changed = project.run("git", "status", "--porcelain").stdout.removeprefix(before).split()
    project.done = project.repro(study="cartpole")
    return project


def test_it_takes_a_section_and_a_file_and_nothing_else(own):
    assert own.changed == ["M", "params.yaml", "??", "policies/"]


def test_all_seven_stages_run_through_dvc(own):
    assert own.done.returncode == 0, own.done.stderr
    assert own.done.stdout.count("Running stage") == 7
    lock = (own.folder / "dvc.lock").read_text()
    assert all(f"{stage}@cartpole:" in lock for stage in STAGES)
    metrics = json.loads(own.metrics("cartpole"))
    assert (metrics["env"], metrics["policies"], metrics["runs_from"]) == ("cartpole", 3, "pool")
    assert metrics["relative_variance"]["on_policy"] == 1
    bounded = ("on_policy", "mpe", "son_balanced")  # with 60 episodes and hardly a fit, ODI's tails are long
    assert max(metrics["largest_mean_error"][name] for name in bounded) < 4
    # stronger pushes keep the pole up for longer, and the truth is what episodes of their own give
    assert 9 < metrics["values"]["lowest"] < metrics["values"]["highest"] <= HORIZON
    table = (own.data / "report" / "cartpole" / "relative_variance.md").read_text()
    assert "paper" not in table.splitlines()[0]  # it has no such environment


def test_the_policies_are_the_users_own(own):
    found = policies.load(own.data / "targets" / "cartpole" / "group-00" / "targets")
    obs = np.random.default_rng(0).standard_normal((7, 4))
    np.testing.assert_array_equal(found.probs(obs, 0), cartpole_policies().probs(obs, 0))


def test_nothing_of_the_other_study_becomes_stale(own):
    done = own.repro(study=STUDY)
    assert done.stdout.count("didn't change, skipping") == 7, done.stdout


def test_another_policy_file_makes_all_of_it_stale_and_nothing_else(own):
    status = json.loads(own.python("dvc", "status", "--json").stdout)
    assert status == {}
    path = own.folder / "policies" / "cartpole"
    saved = path.with_suffix(".safetensors").read_bytes()
    changed = cartpole_policies()
    changed.tensors["w2"] *= 1.1
    changed.save(path)
    status = json.loads(own.python("dvc", "status", "--json").stdout)
    path.with_suffix(".safetensors").write_bytes(saved)
    assert list(status) == ["targets@cartpole"]


@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_prefect_runs_it_and_mlflow_shows_it(own):
    """The other two doors: a pipeline run of the changed study, recorded in MLflow."""
    from mlflow.tracking import MlflowClient

    own.set("match: 30", "match: 45")
    done = own.python("flows.pipeline", "--study", "cartpole", PREFECT_API_URL="")
    assert done.returncode == 0, done.stderr
    assert "evaluate" in done.stdout.splitlines()[-1]
    uri = f"sqlite:///{own.folder / 'mlflow.db'}"
    store = MlflowClient(uri, uri)
    runs = store.search_runs([store.get_experiment_by_name("cartpole").experiment_id])
    parent = next(run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    assert parent.data.params["evaluate.match"] == "45"
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    relative = json.loads(own.metrics("cartpole"))["relative_variance"]
    assert {run.data.tags["estimator"]: run.data.metrics["relative_variance"] for run in children} == relative
    assert wait_until(lambda: not own.processes(), 30), own.processes()
