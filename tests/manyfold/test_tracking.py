"""What a real MLflow store holds after `manyfold evaluate --mlflow`, beside what the pipeline logs."""

import numpy as np
import pytest
from mlflow.tracking import MlflowClient

from manyfold.cli import main
from manyfold.tracking import Experiment, metric_names
from tests import pages

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('server') / 'store.db'}"


@pytest.fixture
def client(server, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    return MlflowClient(server, server)


def points(client, run, key):
    return [(p.step, p.value) for p in client.get_metric_history(run, key)]


def test_decisions_over_episodes_and_values(client, tmp_path):
    result = pages.stopped(seed=1)
    names = list(result.names)
    run = Experiment("looks").log(result, {"environment": "e", "seed": 1}, 2.5)
    found = client.get_run(run)
    assert found.info.status == "FINISHED"
    assert found.data.params == {"environment": "e", "seed": "1", "best": names[result.best], "alpha": "0.05"}
    assert len(result.looks) > 2
    at = [look.episodes for look in result.looks]
    counts = [look.decision.may_be_best.sum() for look in result.looks]
    assert points(client, run, "may_be_best") == list(zip(at, counts, strict=True))
    for k, name in enumerate(names):
        for key, column in (("p_best", "p_best"), ("half_width", "half_width")):
            expected = [(look.episodes, getattr(look.decision, column)[k]) for look in result.looks]
            assert points(client, run, f"{key}.{name}") == [(n, x) for n, x in expected if np.isfinite(x)]
        assert points(client, run, f"value.{name}") == [(result.episodes, result.mean[k])]
    spent = {"episodes": result.episodes, "steps": result.steps, "seconds.evaluate": 2.5}
    assert {key: found.data.metrics[key] for key in spent} == spent


def test_the_command_logs_parameters_and_the_page(client, place, zips, capfd):
    given = "--policies", str(zips), "--episodes", "60", "--workers", "1", "--report", "x.html", "--mlflow", "mine"
    assert main(["evaluate", "--env", "own:make", *given]) == 0
    run = capfd.readouterr().err.split()[-1]
    found = client.get_run(run)
    assert found.info.experiment_id == client.get_experiment_by_name("mine").experiment_id
    said = {"environment": "own:make", "policies": "stochastic", "seed": "0", "best": "a", "alpha": "0.05"}
    assert said.items() <= found.data.params.items()
    assert found.data.params["command"].startswith("manyfold evaluate --env own:make")
    assert {f"{key}.{name}" for key in ("value", "half_width", "p_best") for name in "abc"} < found.data.metrics.keys()
    assert [file.path for file in client.list_artifacts(run)] == ["x.html"]


def test_names_of_metrics():
    assert metric_names(["a b/ü", "c-1_2"]) == ["a_b_", "c-1_2"]
    assert metric_names(["a.b", "a b", "c"]) == ["a_b.0", "a_b.1", "c"]
    (long,) = metric_names(["x" * 300])
    assert len(long) == 200


def test_a_server_that_does_not_answer_is_refused_before_an_episode_is_run(place, zips, capfd, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://x")
    given = "--policies", str(zips), "--episodes", "60", "--workers", "1", "--store", "evals", "--mlflow", "mine"
    assert main(["evaluate", "--env", "own:make", *given]) == 2
    out, errors = capfd.readouterr()
    assert out == ""
    assert errors.startswith("manyfold evaluate: MLflow at nonsense://x, experiment 'mine': ")
    assert errors.count("\n") == 1
    assert not (place / "evals").exists()
