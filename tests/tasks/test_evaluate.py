"""The stages evaluate and report on a small data folder."""

import csv
import json
import re

import numpy as np
import pytest

from manyfold import exact
from manyfold.envs import Gridworld
from manyfold.estimate import coverage
from manyfold.estimate.registry import ESTIMATORS
from tasks import evaluate, report, studies, truth
from tasks.groups import Group
from tests.tasks.conftest import GRID, changed

ENV, STAGE = GRID.name, evaluate.STAGE


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Commands that read params.yaml find the small study of the tests there."""
    original = studies.read
    monkeypatch.setattr(studies, "read", lambda name, *path: GRID if name == ENV else original(name, *path))


def load(data):
    return evaluate.Result.load(data / "evaluate" / ENV / "runs" / "group-00" / "runs.safetensors")


def test_runs_hold_every_estimate_and_the_truth(data):
    group = load(data)
    points = [3 * i for i in (*range(1, 11), *range(15, 201, 5))]
    assert group.points.tolist() == points
    assert group.estimates.shape == (4, len(ESTIMATORS), len(points), 3)
    policies = Group(GRID, 0, data).policies().table()
    mdp = Gridworld.draw(10, 0).mdp()
    np.testing.assert_allclose(group.truth, exact.values(mdp, policies))
    assert (np.abs(group.estimates[:, 0, -1].mean(0) - group.truth) < 1).all()
    assert not np.array_equal(group.estimates[0], group.estimates[1])  # runs are independent


def test_the_same_seed_gives_the_same_runs(data):
    group = Group(GRID, 0, data)
    env, protocol = group.environment(), evaluate.read_protocol(GRID)._replace(runs=2)
    again, _ = evaluate.evaluate_exact(group, env, env.mdp(), protocol)
    np.testing.assert_array_equal(again.estimates, load(data).estimates[:2])


def test_metrics_follow_the_contract_and_the_runs(data):
    metrics = json.loads((data / "evaluate" / ENV / "metrics.json").read_text())
    assert {name: metrics[name] for name in ("env", "groups", "runs", "policies", "episodes")} == {
        "env": ENV,
        "groups": 1,
        "runs": 4,
        "policies": 3,
        "episodes": 300,
    }
    for name in ("relative_variance", "relative_variance_se", "relative_variance_median", "episodes_to_match"):
        assert list(metrics[name]) == list(ESTIMATORS)
    group = load(data)
    total = group.variances.mean(0).sum(-1)
    for i, name in enumerate(ESTIMATORS):
        assert metrics["relative_variance"][name] == pytest.approx(total[i] / total[0], abs=1e-6)
    assert metrics["relative_variance"]["on_policy"] == 1
    assert metrics["episodes_to_match"]["on_policy"] == pytest.approx(300)
    assert set(metrics["episodes_to_match_se"].values()) == {None}  # of one group
    assert not {"relative_variance_pool_se", "runs_disjoint"} & metrics.keys()  # runs are independent
    assert max(metrics["largest_mean_error"].values()) < 6  # few runs
    known = metrics["exact_relative_variance"]
    assert known["son_balanced"] is None
    assert metrics["relative_variance"]["mpe"] == pytest.approx(known["mpe"], rel=0.2)
    assert metrics["relative_variance"]["mpe_baseline"] == pytest.approx(known["mpe_baseline"], rel=0.2)


def test_curves_start_at_on_policys_error(data):
    with (data / "evaluate" / ENV / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(ESTIMATORS) * 4 * len(load(data).points)
    first = next(row for row in rows if (row["estimator"], row["policy"]) == ("on_policy", "all"))
    assert (first["episodes"], float(first["relative_error"])) == ("3", 1.0)


def test_the_stage_prints_its_table(data):
    rows = STAGE.describe(data / "evaluate" / ENV)
    assert [row[0] for row in rows] == list(ESTIMATORS)
    assert rows[0][4] == "300"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runs": 1}, "evaluate.runs is 1, expected a whole number from 2"),
        ({"match": 900}, "evaluate.match is 900, expected at most 600 = episodes"),
        ({"match": 301}, "evaluate.match and evaluate.episodes are 301 and 600, expected multiples of 15"),
        ({"less": 1}, "params.yaml: evaluate.less is unknown"),
        ({"episodes": 10**12}, "evaluate.episodes is 1000000000000, expected a whole number from 2 to 1e"),
    ],
)
def test_bad_parameters_are_refused_by_name(change, message, data):
    with pytest.raises(ValueError, match=message):
        STAGE.prepare(changed(GRID, "evaluate", **change), data)


def test_without_the_earlier_stages_it_says_what_to_run_first(tmp_path):
    with pytest.raises(
        ValueError, match=f"{tmp_path}/targets/{ENV}: 0 groups, expected the stage `targets` to have run"
    ):
        STAGE.prepare(GRID, tmp_path)


def test_a_cut_off_file_of_runs_is_not_whole(data, tmp_path):
    whole = (data / "evaluate" / ENV / "runs" / "group-00" / "runs.safetensors").read_bytes()
    assert STAGE.is_whole(data / "evaluate" / ENV / "runs" / "group-00")
    (tmp_path / "runs.safetensors").write_bytes(whole[:-9])
    assert not STAGE.is_whole(tmp_path)
    (tmp_path / "runs.safetensors").write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])  # one bit
    with pytest.raises(ValueError, match="its content does not match its checksum"):
        evaluate.Result.load(tmp_path / "runs.safetensors")


def test_the_report_has_tables_in_three_forms_and_figures_in_two(data):
    out = data / "report" / ENV
    for name in ("relative_variance", "episodes_to_match"):
        for suffix in ("md", "csv", "tex"):
            assert "SODI" in (out / f"{name}.{suffix}").read_text()
    table = (out / "relative_variance.md").read_text().splitlines()
    metrics = json.loads((data / "evaluate" / ENV / "metrics.json").read_text())
    assert table[3].startswith(f"| MPE | {metrics['relative_variance']['mpe']:.3f} |")
    assert table[3].endswith("| 0.125 |")  # the paper's
    for name in ("relative_error", "policies"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "SON, balanced" in (out / f"{name}.svg").read_text() or name == "policies"
    for name in ("behavior", "card"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "verdict.txt").read_text().startswith("Of on-policy's variance, ")


def test_the_report_is_printed_and_joined(data, capsys):
    assert report.main(["--study", ENV, "--data", str(data)]) == 0
    printed = capsys.readouterr().out
    assert "MPE + q baseline" in printed
    assert f"Figures: {data}/report/{ENV}/relative_error.png" in printed
    assert report.main(["--all", "--data", str(data)]) == 0
    assert "Gridworld-1000, ours" in capsys.readouterr().out
    assert (data / "report" / "all" / "figure_1.svg").exists()
    assert report.main(["--study", "ant", "--data", str(data)]) == 2
    assert capsys.readouterr().err.endswith("metrics.json: no such file, expected the stage `evaluate` to have run\n")


def test_many_on_policy_episodes_agree_with_the_exact_values(data, capsys):
    assert truth.main(["--study", ENV, "--episodes", "40000", "--data", str(data)]) == 0
    printed = capsys.readouterr().out
    (off,) = re.findall(r"Largest difference: ([\d.]+) standard errors", printed)
    assert 0 < float(off) < 4.5
    assert truth.main(["--study", "ant", "--data", str(data)]) == 2
    assert capsys.readouterr().err.endswith(
        "targets/ant/group-00: no such folder, expected the stage `targets` to have run\n"
    )


def test_decisions_are_of_the_first_run_and_end_with_its_estimates(data):
    """Of group 0: the last means are the run's own estimates, and what is said of them is `ranking`'s."""
    found, result = json.loads((data / "evaluate" / GRID.name / "decisions.json").read_text()), load(data)
    pooled = list(ESTIMATORS).index("pooled")
    final, names = found["final"], Group(GRID, 0, data).policies().names
    assert tuple(found["policies"]) == names
    assert final["episodes"] == found["looks"][-1]["episodes"] == result.points[-1]
    np.testing.assert_allclose(final["mean"], result.estimates[0, pooled, -1], atol=1e-5)
    np.testing.assert_allclose(np.sum(final["p_best"]), 1, atol=1e-5)
    assert final["winner"]["policy"] == int(np.argmax(final["mean"]))
    wide = np.subtract(found["looks"][-1]["high"], found["looks"][-1]["low"])
    assert (wide > np.subtract(final["high"], final["low"])).all()  # for all times, against one look
    assert [row[0] for row in final["rows"][1:]] == [names[i] for i in np.argsort(-np.array(final["mean"]))]


def test_intervals_about_another_truth_do_not_hold():
    values = {("targets", "pdis"): np.random.default_rng(0).normal(5.0, 1.0, (2, 40))}
    found = {}
    for value in (5.0, 50.0):
        some = coverage.of_runs(["on_policy"], [values], np.full(2, value), np.array([40]), 40)
        found[value] = coverage.shares(some["on_policy"])[0]
    np.testing.assert_array_equal(found[5.0], 1)
    np.testing.assert_array_equal(found[50.0], [0, 0, 1, 0])  # differences are still 0
