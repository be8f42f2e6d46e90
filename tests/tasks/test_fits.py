"""The stages q, q_hat and behavior on a small data folder, against exact values."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from manyfold import exact
from manyfold.gridworld import Gridworld
from manyfold.networks import NetworkPolicySet
from tasks import accuracy, behavior, fits, params, q, q_hat, shards
from tests.tasks.conftest import ENV, FIT


def test_the_fits_are_near_the_exact_values_and_design_a_good_mu(data):
    found = accuracy.measure(ENV, 0, data)
    assert found.q_error.max() < 0.1
    assert found.q_hat_error.max() < 0.1
    policies = NetworkPolicySet.load(data / "targets" / ENV / "group-00" / "targets").table()
    mdp = Gridworld.draw(10, 0).to_mdp()
    assert found.exact_mpe == pytest.approx(exact.relative_variances(exact.estimator_variances(mdp, policies))["mpe"])
    assert found.fitted_mpe < 1.1 * found.exact_mpe
    for curves in found.curves:
        assert curves[-1].held_out < curves[0].held_out
    true, predicted = found.plan
    np.testing.assert_allclose(predicted, true, rtol=0.15)
    on = np.array([exact.pdis_variance(mdp, policies[[k]], policies[k])[0] for k in range(3)])
    about = json.loads((data / "behavior" / ENV / "group-00" / "behavior.json").read_text())
    np.testing.assert_allclose(about["predicted_on_policy"], on, rtol=0.1)
    np.testing.assert_allclose(about["predicted_values"], exact.values(mdp, policies), atol=0.1)
    assert about["verdict"].startswith(f"Expect {about['relative_variance']:.0%} of on-policy's variance")


def test_the_accuracy_command_prints_and_draws(data, capsys):
    assert accuracy.main(["--env", ENV, "--data", str(data)]) == 0
    assert "MPE, fitted over exact" in capsys.readouterr().out
    assert (data / "accuracy" / f"{ENV}.png").read_bytes().startswith(b"\x89PNG")
    assert accuracy.main(["--env", "ants"]) == 2
    assert capsys.readouterr().err.startswith("accuracy: unknown environment 'ants'; did you mean 'ant'?")
    assert accuracy.main(["--env", "gridworld-27000", "--data", str(data)]) == 2
    assert capsys.readouterr().err.endswith("no groups, expected the stage `behavior` to have run\n")


def test_errors_are_weighted_by_visits_and_relative_to_the_spread():
    share = np.array([0.5, 0.25, 0.25, 0.0]).reshape(1, 1, 1, 4)
    true = np.array([0.0, 2.0, 2.0, 9.0]).reshape(1, 1, 1, 4)  # mean 1, spread 1
    fitted = np.array([0.2, 2.0, 2.0, 0.0]).reshape(1, 1, 1, 4)  # the unvisited cell does not count
    np.testing.assert_allclose(accuracy.relative_error(fitted, true, share), [np.sqrt(0.5 * 0.04)])


def test_the_stage_says_how_its_fits_ended(data):
    ((name, updates, held_out),) = q.describe(data / "q" / ENV)
    about = json.loads((data / "q" / ENV / "group-00" / "q.json").read_text())
    assert (name, updates, held_out) == ("group-00", f"{about['update']:,}", f"{about['held_out']:.4g}")
    assert q.STAGE.is_whole(data / "q" / ENV / "group-00")
    assert not q_hat.STAGE.is_whole(data / "q" / ENV / "group-00")


def test_without_the_earlier_stages_it_says_what_to_run_first(tmp_path, capsys):
    status = shards.shard_main("q", "", q.run, ["--env", "ant", "--groups", "0-0", "--data", str(tmp_path)])
    assert status == 2
    assert capsys.readouterr().err == f"q: {tmp_path}/targets/ant: 0 groups, expected the stage `targets` to have run\n"


def test_bad_hyperparameters_are_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "params.yaml").write_text(yaml.safe_dump({"q": {**FIT, "hidden": 0}}))
    monkeypatch.setattr(fits, "section", lambda stage: params.section(stage, tmp_path / "params.yaml"))
    with pytest.raises(ValueError, match=r"q.hidden is 0, expected a whole number of at least 1"):
        q.STAGE.params()


def test_the_behavior_stage_leaves_a_plan_a_picture_and_files_for_another_machine(data):
    folder = data / "behavior" / ENV / "group-00"
    about = json.loads((folder / "mu.json").read_text())
    assert (about["env"], about["horizon"], about["actions"]) == (ENV, 10, 4)
    parquet = data / "offline" / ENV / "group-00" / "transitions.parquet"
    assert about["offline_data_sha256"] == hashlib.sha256(parquet.read_bytes()).hexdigest()
    assert (folder / "behavior.png").read_bytes().startswith(b"\x89PNG")
    assert {path.suffix for path in folder.glob("mu.*")} == {".pt2", ".onnx", ".json"}
    ((name, spread, theorems, predicted, verdict),) = behavior.describe(data / "behavior" / ENV)
    assert (name, float(spread) > 1, "%" in theorems) == ("group-00", True, True)
    assert verdict.startswith("Expect ")
    assert 0 < float(predicted) < 2


def test_a_plan_whose_variance_runs_away_is_a_result_not_an_end(data, tmp_path):
    inputs = fits.Inputs(ENV, 0, data)
    behavior.finish(inputs, None, tmp_path)
    (tmp_path / "m.json").write_text(json.dumps({"diverged": "the fit diverged"}))
    assert behavior.STAGE.is_whole(tmp_path)
    about = json.loads((tmp_path / "behavior.json").read_text())
    assert about["relative_variance"] is None
    assert about["verdict"].startswith("Expect an explosion")
    assert about["predicted_on_policy"][0] > 0
    assert (tmp_path / "mu.onnx").exists()


def test_a_collection_that_was_cut_off_goes_on(tmp_path):
    work, out = tmp_path / "work", tmp_path / "out"
    for name in ("whole/group-00", "group-01"):
        (work / name).mkdir(parents=True)
    assert shards.collect(out, 2, work, Path.exists) == out
    assert sorted(path.name for path in out.iterdir()) == ["group-00", "group-01"]
    assert not work.exists()


@pytest.mark.parametrize(
    ("relative", "total", "said"),
    [
        ([0.1, 0.12], 0.11, "Expect 11% of on-policy's variance."),
        ([0.1, 0.6, 0.1], 0.11, "Expect 11% of on-policy's variance; policy 1 (b) is the odd one out: 60%."),
        (
            [3.0, 2.0],
            2.5,
            "Expect 250% of on-policy's variance: sharing does not pay, evaluate these policies one by one",
        ),
    ],
)
def test_the_verdict_is_one_sentence_to_act_on(relative, total, said):
    assert behavior.verdict(np.array(relative), total, ("a", "b", "c")).startswith(said)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": -1}, "behavior.alpha is -1, expected a number from 0 to 1"),
        ({"fit": 3}, "behavior.fit is 3, expected hyperparameters like those of q"),
        ({"fit": {**FIT, "batch": 0}}, "behavior.fit.batch is 0, expected a whole number of at least 1"),
    ],
)
def test_bad_parameters_of_the_behavior_are_refused_by_name(change, message, monkeypatch):
    monkeypatch.setattr(behavior, "section", lambda stage: {"alpha": 0.0, "fit": FIT, **change})
    with pytest.raises(ValueError, match=message):
        behavior.params()
