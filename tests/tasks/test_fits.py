"""The stages q, q_hat and behavior on a small data folder, against exact values."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from manyfold import exact, policies
from manyfold.design import prediction
from manyfold.envs import Gridworld
from tasks import accuracy, behavior, export, q, q_hat, stages
from tasks.groups import Group
from tests.tasks.conftest import FIT, GRID, changed

ENV = GRID.name


def test_the_fits_are_near_the_exact_values_and_design_a_good_mu(data):
    mdp = Gridworld.draw(10, 0).mdp()
    found = accuracy.measure(Group(GRID, 0, data), mdp)
    assert found.q_error.max() < 0.1
    assert found.q_hat_error.max() < 0.1
    pi = policies.load(data / "targets" / ENV / "group-00" / "targets").table()
    assert found.exact_mpe == pytest.approx(exact.relative_variances(exact.estimator_variances(mdp, pi))["mpe"])
    assert found.fitted_mpe < 1.1 * found.exact_mpe
    for curves in found.curves:
        assert curves[-1].held_out < curves[0].held_out
    true, predicted = found.plan
    np.testing.assert_allclose(predicted, true, rtol=0.05)
    on = np.array([exact.pdis_variance(mdp, pi[[k]], pi[k])[0] for k in range(3)])
    about = json.loads((data / "behavior" / ENV / "group-00" / "behavior.json").read_text())
    np.testing.assert_allclose(about["predicted_on_policy"], on, rtol=0.05)
    np.testing.assert_allclose(about["predicted_values"], exact.values(mdp, pi), atol=0.1)
    assert f"MPE {about['relative_variance']:.0%}. Run pooled: " in about["verdict"]
    assert about["recommended"] == "pooled"
    assert about["unknown"] == {"on_policy": [], "mpe": [], "mpe_baseline": [], "pooled": []}
    assert about["predicted_plan"] == about["predicted_mpe"]
    assert about["predicted_lengths"] == [10.0] * 4


def test_the_accuracy_command_prints_and_draws(data, capsys):
    assert accuracy.main(["--study", ENV, "--data", str(data)]) == 0
    assert "MPE, fitted over exact" in capsys.readouterr().out
    assert (data / "accuracy" / f"{ENV}.png").read_bytes().startswith(b"\x89PNG")
    assert accuracy.main(["--study", "ants"]) == 2
    assert capsys.readouterr().err.startswith("accuracy: unknown study 'ants'; did you mean 'ant'?")
    assert accuracy.main(["--study", "gridworld-27000", "--data", str(data)]) == 2
    assert capsys.readouterr().err.endswith("no groups, expected the stage `behavior` to have run\n")


def test_errors_are_weighted_by_visits_and_relative_to_the_spread():
    share = np.array([0.5, 0.25, 0.25, 0.0]).reshape(1, 1, 1, 4)
    true = np.array([0.0, 2.0, 2.0, 9.0]).reshape(1, 1, 1, 4)  # mean 1, spread 1
    fitted = np.array([0.2, 2.0, 2.0, 0.0]).reshape(1, 1, 1, 4)  # the unvisited cell does not count
    np.testing.assert_allclose(accuracy.relative_error(fitted, true, share), [np.sqrt(0.5 * 0.04)])


def test_the_stage_says_how_its_fits_ended(data):
    ((name, updates, held_out),) = q.STAGE.describe(data / "q" / ENV)
    about = json.loads((data / "q" / ENV / "group-00" / "q.json").read_text())
    assert (name, updates, held_out) == ("group-00", f"{about['update']:,}", f"{about['held_out']:.4g}")
    assert q.STAGE.is_whole(data / "q" / ENV / "group-00")
    assert not q_hat.STAGE.is_whole(data / "q" / ENV / "group-00")


def test_without_the_earlier_stages_it_says_what_to_run_first(tmp_path):
    with pytest.raises(
        ValueError, match=f"{tmp_path}/targets/{ENV}: 0 groups, expected the stage `targets` to have run"
    ):
        q.STAGE.prepare(GRID, tmp_path)


def test_bad_hyperparameters_are_refused_by_name(data):
    for change, line in (
        ({"hidden": 0}, "q.hidden is 0, expected a whole number from 1"),
        ({"batch": 10**12}, "q.batch is"),
    ):
        with pytest.raises(ValueError, match=line):
            q.STAGE.prepare(changed(GRID, "q", **change), data)


def test_the_behavior_stage_leaves_a_plan_and_files_for_another_machine(data):
    folder = data / "behavior" / ENV / "group-00"
    about = json.loads((folder / "mu.json").read_text())
    assert (about["env"], about["horizon"], about["actions"]) == (ENV, 10, 4)
    parquet = data / "offline" / ENV / "group-00" / "transitions.parquet"
    assert about["offline_data_sha256"] == hashlib.sha256(parquet.read_bytes()).hexdigest()
    assert {path.suffix for path in folder.glob("mu.*")} == {".pt2", ".onnx", ".json"}
    ((name, spread, theorems, *predicted, said),) = behavior.STAGE.describe(data / "behavior" / ENV)
    assert (name, float(spread) > 1, "%" in theorems) == ("group-00", True, True)
    assert said.startswith("Expect ")
    assert all(0 < float(x) < 2 for x in predicted)


def test_a_variance_that_runs_away_is_a_result_not_an_end(data, tmp_path, monkeypatch):
    group = Group(GRID, 0, data)
    designed = behavior.design(group)
    monkeypatch.setattr(prediction, "count", lambda *args: np.full((3, 10, 100, 4), 2.0))
    found = prediction.forecast(designed, group.transitions(), np.random.default_rng(0))
    missing = found._replace(mpe=np.full(3, np.nan), unknown={**found.unknown, "mpe": np.ones(3) > 0})
    behavior.finish(group, designed, missing, tmp_path)
    assert behavior.STAGE.is_whole(tmp_path)
    about = json.loads((tmp_path / "behavior.json").read_text())
    assert about["relative_variance"] is None
    assert "MPE unknown, run a pilot of 30 rounds" in about["verdict"]
    assert about["unknown"]["mpe"] == [0, 1, 2]
    assert about["predicted_on_policy"][0] > 0
    assert (tmp_path / "mu.onnx").exists()
    (tmp_path / "behavior.json").write_text("{")
    assert not behavior.STAGE.is_whole(tmp_path)


def test_a_collection_that_was_cut_off_goes_on(tmp_path):
    work, out = tmp_path / "work", tmp_path / "out"
    for name in ("whole/group-00", "group-01"):
        (work / name).mkdir(parents=True)
    assert stages.collect(out, 2, work, Path.exists) == out
    assert sorted(path.name for path in out.iterdir()) == ["group-00", "group-01"]
    assert not work.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": -1}, "behavior.alpha is -1, expected a number from 0 to 1"),
        ({"fit": 3}, "behavior.fit is 3, expected hyperparameters like those of q"),
        ({"fit": {**FIT, "batch": 0}}, "behavior.fit.batch is 0, expected a whole number from 1"),
    ],
)
def test_bad_parameters_of_the_behavior_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        behavior.params(changed(GRID, "behavior", **change))


def test_any_group_is_exported_on_demand_with_the_same_bytes(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(export.studies, "read", lambda name: GRID)
    arguments = ["--study", ENV, "--data", str(data)]
    assert export.main([*arguments, "--out", str(tmp_path / "mine")]) == 0
    for name in ("mu.pt2", "mu.onnx", "mu.json"):
        ours = (data / "behavior" / ENV / "group-00" / name).read_bytes()
        assert (tmp_path / "mine" / name).read_bytes() == ours, name
    assert export.main([*arguments, "--group", "7", "--out", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.endswith("group-07: no such folder, expected the stage `q_hat` to have run\n")
    assert not (tmp_path / "none").exists()
