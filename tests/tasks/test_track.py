"""What MLflow holds after a run, in a real SQLite store."""

import json
import subprocess

import mlflow
import numpy as np
import pytest
import yaml

from manyfold.estimate.registry import ESTIMATORS
from manyfold.tracking import metric_names
from tasks import behavior, track
from tasks.deciding import decisions_file, read_decisions
from tasks.groups import Group
from tests.decisions import decisions
from tests.tasks.conftest import GRID

ENV = GRID.name

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own


@pytest.fixture(scope="module")
def store(data, tmp_path_factory):
    """A project's root with the data of one group, recorded twice."""
    root = tmp_path_factory.mktemp("root")
    (root / "data").symlink_to(data)
    section = {"environment": GRID.environment, **{stage: {} for stage in GRID.params}}
    (root / "params.yaml").write_text(yaml.safe_dump({**GRID.params, "studies": {ENV: section}}))
    outs = [{"path": f"data/q/{ENV}", "md5": "abc.dir"}]
    (root / "dvc.lock").write_text(yaml.safe_dump({"stages": {f"q@{ENV}": {"outs": outs}, "q@ant": {"outs": outs}}}))
    for command in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "a"],
    ):
        subprocess.run(["git", *command], cwd=root, check=True)
    runs = [track.record(ENV, {"q": 2.5}, root) for _ in range(2)]
    return root, track.client(root), runs


def test_a_parent_has_a_child_for_each_estimator(store):
    root, client, (parent, _) = store
    where = client.get_experiment_by_name(ENV).experiment_id
    children = client.search_runs([where], f"tags.mlflow.parentRunId = '{parent}'")
    assert {run.data.tags["estimator"] for run in children} == set(ESTIMATORS)
    assert all(run.info.status == "FINISHED" for run in children)
    metrics = track.read_metrics(ENV, root / "data")
    for run in children:
        name = run.data.tags["estimator"]
        assert run.data.metrics["relative_variance"] == metrics["relative_variance"][name]
        assert run.data.metrics["episodes_to_match"] == metrics["episodes_to_match"][name]
        assert run.data.params["loggers"] == ESTIMATORS[name].method.loggers
        assert run.data.metrics["steps_per_episode"] == metrics["steps_per_episode"][name]
        curve = client.get_metric_history(run.info.run_id, "relative_error")
        assert [point.step for point in curve][:3] == [3, 6, 9]


def test_the_parent_leads_to_its_code_and_data(store):
    root, client, (parent, _) = store
    run = client.get_run(parent)
    assert run.info.artifact_uri.startswith((root.resolve() / "mlartifacts" / ENV).as_uri())
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True).stdout
    assert run.data.tags["git_commit"] == head.strip()
    assert run.data.tags[f"dvc.q.{ENV}"] == "abc.dir"
    assert run.data.metrics["seconds.q"] == 2.5
    assert run.data.params["q.hidden"] == "64"
    errors = client.get_metric_history(parent, "q.held_out_error")
    assert errors[-1].value < errors[0].value
    returns = client.get_metric_history(parent, "ppo.return")
    plan = json.loads((root / "data" / "targets" / ENV / "group-00" / "plan.json").read_text())
    assert [(p.step, p.value) for p in returns] == [(p["step"], p["return"]) for p in plan["returns"]]
    assert returns[0].step == 512
    assert returns[-1].value > returns[0].value
    names = {artifact.path for artifact in client.list_artifacts(parent)}
    assert {"relative_error.png", "relative_variance.md", "metrics.json", "card.json"} <= names


def test_the_parent_shows_how_the_decision_became_sure(store):
    root, client, (parent, _) = store
    found = read_decisions(ENV, root / "data")
    counts = client.get_metric_history(parent, "may_be_best")
    assert [(p.step, p.value) for p in counts] == list(zip(found.episodes, found.may_be_best.sum(1), strict=True))
    for k, name in enumerate(metric_names(found.names)):
        sure = client.get_metric_history(parent, f"p_best.{name}")
        assert [(p.step, p.value) for p in sure] == list(zip(found.episodes, found.p_best[:, k], strict=True))
        widths = client.get_metric_history(parent, f"half_width.{name}")
        half = (found.high[:, k] - found.low[:, k]) / 2
        assert [p.value for p in widths] == half[np.isfinite(half)].tolist()
        assert widths[-1].value < widths[0].value
    final, run = found.final, client.get_run(parent).data
    leader = int(final.mean.argmax())
    columns = {"value": final.mean[leader], "p_best": final.p_best[leader], "policies": len(found.names)}
    columns |= {"low": final.low[leader], "high": final.high[leader], "episodes": final.episodes, "seconds": 2.5}
    columns |= {"half_width": (final.high - final.low).max() / 2}
    assert {key: run.metrics[key] for key in columns} == columns
    steps = final.episodes * track.read_metrics(ENV, root / "data")["steps_per_episode"][found.estimator]
    assert run.metrics["steps"] == steps
    assert [run.metrics[f"value.{name}"] for name in metric_names(found.names)] == final.mean.tolist()
    assert sorted(run.metrics[f"rank.{name}"] for name in metric_names(found.names)) == [1, 2, 3]
    best = "None" if final.best is None else found.names[final.best]
    assert (run.params["best"], run.params["leads"]) == (best, found.names[leader])
    assert run.params["environment"] == str(GRID.environment)
    names = {artifact.path for artifact in client.list_artifacts(parent)}
    assert {"decision.md", "decision.txt", "decision_forest.png"} <= names


def write(content, data):
    path = decisions_file(ENV, data)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def test_unknown_widths_are_left_out_and_without_decisions_there_is_nothing(tmp_path):
    assert track.decision_curves(ENV, tmp_path) == []
    found = decisions(2)
    found["looks"][0]["low"][1] = None
    write(found, tmp_path)
    keys = [metric.key for metric in track.decision_curves(ENV, tmp_path)]
    looks = len(found["looks"])
    assert keys.count("may_be_best") == keys.count("p_best.policy-0") == keys.count("half_width.policy-0") == looks
    assert keys.count("half_width.policy-1") == looks - 1


def test_mlflow_takes_any_name_of_a_policy_and_more_metrics_than_it_takes_at_once(store, tmp_path):
    names = ("$a$ (1)", "runs/x y", "runs:x y", "π", "_" * 400, *(f"p.{i}" for i in range(45)))
    found = decisions(50, names=names)
    write(found, tmp_path)
    metrics = track.decision_curves(ENV, tmp_path)
    assert len(metrics) > track.BATCH
    assert len({(metric.key, metric.step) for metric in metrics}) == len(metrics)
    root, client, _ = store
    run = client.create_run(track.experiment(client, "names", root)).info.run_id
    for i in range(0, len(metrics), track.BATCH):
        client.log_batch(run, metrics=metrics[i : i + track.BATCH])
    kept = client.get_run(run).data.metrics
    assert {"p_best._a_1_", "p_best.runs_x_y.1", "p_best.runs_x_y.2", "p_best._", "p_best.p_44"} <= kept.keys()
    assert kept["p_best.p_44"] == found["looks"][-1]["p_best"][-1]


def test_the_behavior_policy_is_a_registered_model(store, data):
    _, client, _ = store
    versions = client.search_model_versions(f"name = 'mu-{ENV}'")
    assert {version.version for version in versions} == {1, 2} or {version.version for version in versions} == {
        "1",
        "2",
    }
    model = mlflow.pyfunc.load_model(f"models:/mu-{ENV}/2")
    assert [spec.name for spec in model.metadata.signature.inputs] == ["observation", "t"]
    cells, t = np.array([[0.0], [55.0], [99.0]], np.float32), np.array([0, 3, 9])
    found = model.predict({"observation": cells, "t": t})
    designed = behavior.design(Group(GRID, 0, data))
    np.testing.assert_allclose(found["mu"], designed.mu(cells, t), atol=1e-6)
    np.testing.assert_allclose(found["targets"], designed.fitted(cells, t).policies, atol=1e-6)
