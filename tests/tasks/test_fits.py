"""The stages q, q_hat and behavior on a small data folder, against exact values."""

import json

import numpy as np
import pytest
import yaml

from manyfold import exact
from manyfold.gridworld import Gridworld
from manyfold.networks import NetworkPolicySet
from manyfold.offline import Rule
from manyfold.targets import Rule as TargetRule
from tasks import accuracy, behavior, fits, offline, params, q, q_hat, shards, targets

ENV = "gridworld-1000"
FIT = {
    "hidden": 64,
    "learning_rate": 0.01,
    "batch": 512,
    "updates_per_step": 150,
    "average": 0.98,
    "patience": 20,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """One group with targets, offline data, q and q_hat, made by the tasks themselves."""
    folder = tmp_path_factory.mktemp("data")
    rule = TargetRule(policies=3, start=(6000, 7000), width=4000, history=4)
    work = targets.work_folder(ENV, rule, folder)
    targets.train_shard(ENV, [0], rule, work)
    targets.collect(ENV, 1, work, folder)
    with shards.whole_folder(folder / "offline" / ENV / "group-00") as part:
        offline.log_group(ENV, 0, Rule(6000, (0.1, 0.5)), folder / "targets" / ENV / "group-00", part)
    (folder / "params.yaml").write_text(
        yaml.safe_dump({"q": FIT, "q_hat": FIT, "behavior": {"alpha": 0.0, "fit": FIT}})
    )
    original = params.section
    fits.section = behavior.section = lambda stage: original(stage, folder / "params.yaml")
    try:
        for stage in (q, q_hat, behavior):
            work = stage.run(ENV, [0], folder)
            stage.collect(ENV, 1, work, folder)
    finally:
        fits.section = behavior.section = original
    return folder


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
    assert accuracy.main(["--env", "ant"]) == 2
    assert capsys.readouterr().err == "accuracy: --env is 'ant', expected gridworld-1000 or gridworld-27000\n"
    assert accuracy.main(["--env", "gridworld-27000", "--data", str(data)]) == 2
    assert capsys.readouterr().err.endswith("no fits, expected the stage `behavior` to have run\n")


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
