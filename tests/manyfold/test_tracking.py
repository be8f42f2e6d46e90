"""What a real MLflow store holds after `manyfold evaluate --mlflow`, beside what the pipeline logs."""

import subprocess

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
    run = Experiment("looks").log(result, {"environment": "e", "seed": 1}, {"seconds": 2.5})
    found = client.get_run(run)
    assert found.info.status == "FINISHED"
    leader = int(result.mean.argmax())
    known = {"best": names[result.best], "leads": names[leader], "alpha": "0.05"}
    assert found.data.params == {"environment": "e", "seed": "1", **known}
    assert len(result.looks) > 2
    at = [look.episodes for look in result.looks]
    counts = [look.decision.may_be_best.sum() for look in result.looks]
    assert points(client, run, "may_be_best") == list(zip(at, counts, strict=True))
    for k, name in enumerate(names):
        for key, column in (("p_best", "p_best"), ("half_width", "half_width")):
            expected = [(look.episodes, getattr(look.decision, column)[k]) for look in result.looks]
            assert points(client, run, f"{key}.{name}") == [(n, x) for n, x in expected if np.isfinite(x)]
        assert points(client, run, f"value.{name}") == [(result.episodes, result.mean[k])]
        rank = 1 + sorted(result.mean, reverse=True).index(result.mean[k])
        assert points(client, run, f"rank.{name}") == [(result.episodes, rank)]
    last = result.decision
    columns = {"value": result.mean[leader], "p_best": last.p_best[leader], "policies": len(names)}
    columns |= {"low": last.interval.low[leader], "high": last.interval.high[leader]}
    columns |= {"half_width": last.half_width.max(), "may_be_best": last.may_be_best.sum()}
    columns |= {"episodes": result.episodes, "steps": result.steps, "seconds": 2.5}
    assert {key: found.data.metrics[key] for key in columns} == columns


def test_the_commit_of_the_folder_that_one_is_in(client, tmp_path, monkeypatch):
    log, result = Experiment("commits").log, pages.stopped(seed=1)
    monkeypatch.chdir(tmp_path)
    assert client.get_run(log(result, {}, {"seconds": 1.0})).data.tags["git_commit"] == "none"
    subprocess.run(["git", "init", "-q"], check=True)
    assert client.get_run(log(result, {}, {"seconds": 1.0})).data.tags["git_commit"] == "none"  # nothing is committed
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *who, "commit", "-q", "--allow-empty", "-m", "a"], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert client.get_run(log(result, {}, {"seconds": 1.0}, tags={"mine": "1"})).data.tags.items() >= {
        ("git_commit", head),
        ("mine", "1"),
    }


def test_a_parameter_longer_than_mlflow_takes_is_cut(client):
    run = Experiment("long").log(pages.stopped(seed=1), {"command": "x" * 7000}, {})
    assert client.get_run(run).data.params["command"] == "x" * 6000


def test_a_series_is_one_run_that_goes_on(client):
    """Each result is a point at its number: MLflow draws values and ranks by policy as lines."""
    found, (first, second) = Experiment("series"), (pages.stopped(seed=seed) for seed in (1, 2))
    run = found.series("mine")
    found.go_on(run, 1, first, {"episodes.run": 30})
    assert Experiment("series").series("mine") == run
    assert found.series("other") != run
    found.go_on(run, 2, second, {"episodes.run": 10})
    assert points(client, run, "episodes.run") == [(1, 30), (2, 10)]
    assert points(client, run, "may_be_best") == [
        (i, x.decision.may_be_best.sum()) for i, x in ((1, first), (2, second))
    ]
    for k, name in enumerate(first.names):
        assert points(client, run, f"value.{name}") == [(1, first.mean[k]), (2, second.mean[k])]
        assert points(client, run, f"p_best.{name}") == [(1, first.decision.p_best[k]), (2, second.decision.p_best[k])]
    assert client.get_run(run).info.status == "FINISHED"


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
