"""The stages q and q_hat on a small data folder, against exact values."""

import json

import numpy as np
import pytest
import yaml

from manyfold import exact, fqe
from manyfold.gridworld import Gridworld
from manyfold.networks import NetworkPolicySet
from manyfold.offline import Rule
from manyfold.targets import Rule as TargetRule
from tasks import fits, offline, params, q, q_hat, shards, targets

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
    (folder / "params.yaml").write_text(yaml.safe_dump({"q": FIT, "q_hat": FIT}))
    original, fits.section = fits.section, lambda stage: params.section(stage, folder / "params.yaml")
    try:
        for stage in (q, q_hat):
            work = stage.run(ENV, [0], folder)
            stage.collect(ENV, 1, work, folder)
    finally:
        fits.section = original
    return folder


def error(found, true, policies, mdp):
    """Root mean square error over the cells that the targets visit, relative to the spread; the worst policy."""
    visits, at = np.zeros_like(policies), np.broadcast_to(mdp.initial, (len(policies), mdp.n_states)).copy()
    for t in range(mdp.horizon):
        visits[:, t] = at[..., None] * policies[:, t] / mdp.horizon
        at = mdp.push(visits[:, t] * mdp.horizon)
    mean = (visits * true).sum((1, 2, 3), keepdims=True)
    spread = (visits * (true - mean) ** 2).sum((1, 2, 3))
    return np.sqrt((visits * (found - true) ** 2).sum((1, 2, 3)) / spread).max()


def test_the_fits_are_near_the_exact_values_and_design_a_good_mu(data):
    policies = NetworkPolicySet.load(data / "targets" / ENV / "group-00" / "targets").table()
    mdp = Gridworld.draw(10, 0).to_mdp()
    (value, _), (moment, curves) = (
        fqe.ValueNets.load(data / stage / ENV / "group-00" / f"{stage}.safetensors") for stage in ("q", "q_hat")
    )
    assert error(value.table(), exact.action_values(mdp, policies), policies, mdp) < 0.1
    assert error(moment.table(), exact.second_moments(mdp, policies), policies, mdp) < 0.1
    fitted = np.maximum(moment.table(), value.table() ** 2)
    found = exact.relative_variances(exact.estimator_variances(mdp, policies, fitted, value.table()))
    best = exact.relative_variances(exact.estimator_variances(mdp, policies))
    assert found["mpe"] < 1.1 * best["mpe"]
    assert curves[-1].held_out < curves[0].held_out


def test_the_stage_says_how_its_fits_ended(data):
    ((name, updates, held_out),) = q.describe(data / "q" / ENV)
    about = json.loads((data / "q" / ENV / "group-00" / "q.json").read_text())
    assert (name, updates, held_out) == ("group-00", f"{about['update']:,}", f"{about['held_out']:.4g}")
    assert fits.is_whole("q", data / "q" / ENV / "group-00")
    assert not fits.is_whole("q_hat", data / "q" / ENV / "group-00")


def test_without_the_earlier_stages_it_says_what_to_run_first(tmp_path, capsys):
    status = shards.shard_main("q", "", q.run, ["--env", "ant", "--groups", "0-0", "--data", str(tmp_path)])
    assert status == 2
    assert capsys.readouterr().err == f"q: {tmp_path}/targets/ant: 0 groups, expected the stage `targets` to have run\n"


def test_bad_hyperparameters_are_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "params.yaml").write_text(yaml.safe_dump({"q": {**FIT, "hidden": 0}}))
    monkeypatch.setattr(fits, "section", lambda stage: params.section(stage, tmp_path / "params.yaml"))
    with pytest.raises(ValueError, match=r"q.hidden is 0, expected a whole number of at least 1"):
        fits.read_config("q")
