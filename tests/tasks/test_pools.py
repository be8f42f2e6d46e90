"""A chain without exact values on a small data folder: the pool, the runs drawn from it, the truth."""

import functools
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from manyfold import policies
from manyfold.estimate import runs, summary
from manyfold.estimate.loggers import logging_of
from manyfold.estimate.methods import LOGGERS
from manyfold.estimate.registry import ESTIMATORS
from manyfold.rollout import Steps
from manyfold.streams import stream
from tasks import accuracy, accuracy_sampled, evaluate, offline, q, q_hat, report, studies
from tasks.behavior import design
from tasks.groups import Group
from tests.tasks.conftest import GRID, changed, run
from tests.tasks.conftest import ROBOT as STUDY

ROBOT, PROTOCOL = STUDY.name, evaluate.read_protocol(STUDY)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Commands that read params.yaml find the small study of the tests there."""
    original = studies.read
    monkeypatch.setattr(studies, "read", lambda name, *path: STUDY if name == ROBOT else original(name, *path))


def parts_of(folder, name):
    return evaluate.cached(folder / f"{name}.safetensors", lambda: pytest.fail("not cached"))


def pooled(data, parts, tick):
    group = Group(STUDY, 1, data)
    return evaluate.evaluate_pool(group, group.environment(), PROTOCOL, parts, tick)[0]


def load(data, group=0):
    return evaluate.Result.load(data / "evaluate" / ROBOT / "runs" / f"group-{group:02d}" / "runs.safetensors")


@pytest.fixture(scope="module")
def again(robot_data, tmp_path_factory):
    """Group 1 on its own, and the folder with its parts."""
    parts, done = tmp_path_factory.mktemp("parts"), []
    return pooled(robot_data, parts, done.append), parts, done


def test_a_group_is_the_same_whichever_groups_run_with_it(robot_data, again):
    whole = load(robot_data, 1)
    for name, x in again[0]._asdict().items():
        np.testing.assert_array_equal(x, getattr(whole, name), name)
    assert not np.array_equal(whole.truth, load(robot_data, 0).truth)
    assert again[2] == [1, 2, 3]


def test_variances_and_estimates_are_those_of_the_whole_pool(again):
    group, parts, _ = again
    saved = {name: parts_of(parts, name) for name in (*LOGGERS, "truth")}
    names = list(ESTIMATORS)
    son, mpe = saved["targets"]["pdis"], saved["mu"]["pdis"]  # [K, pool]
    assert son.shape == mpe.shape == (3, 90)
    for k in range(3):
        own = son[k, k::3]
        assert group.variances[0, 0, k] == pytest.approx(3 * own.var(ddof=1))
        assert group.pool[0, 0, k] == pytest.approx(own.mean())
        assert group.pool[1, 0, k] == pytest.approx(own.std(ddof=1) / np.sqrt(30))
        i = names.index("mpe")
        assert group.variances[0, i, k] == pytest.approx(mpe[k].var(ddof=1))
        assert group.pool[:, i, k] == pytest.approx([mpe[k].mean(), mpe[k].std(ddof=1) / np.sqrt(90)])
        i = names.index("son")
        within = np.mean([son[k, j::3].var(ddof=1) for j in range(3)])
        assert group.variances[0, i, k] == pytest.approx(within)
        assert group.pool[:, i, k] == pytest.approx([son[k].mean(), np.sqrt(within / 90)])
    np.testing.assert_array_equal(group.truth, saved["truth"]["truth"])


def test_runs_are_drawn_from_the_pool(again):
    group, parts, _ = again
    own = parts_of(parts, "targets")["pdis"][0, 0::3]
    first = group.estimates[:, 0, 0, 0]  # on-policy MC of one episode: a return of the pool
    assert group.estimates.shape == (3, len(ESTIMATORS), len(group.points), 3)
    assert all(np.isclose(own, x).any() for x in first)
    assert not np.array_equal(group.estimates[0], group.estimates[1])


def test_runs_are_disjoint_where_the_pool_is_large_enough(robot_data):
    """90 episodes make three runs of 30; 60 make none of three, and runs of 60 overlap."""
    assert evaluate.run_length(PROTOCOL, 3) == 30
    assert evaluate.run_length(PROTOCOL._replace(pool=60), 3) == 60
    assert evaluate.run_length(PROTOCOL._replace(pool=10**6), 3) == PROTOCOL.episodes == 60
    assert load(robot_data).points[-1] == 30
    assert json.loads((robot_data / "evaluate" / ROBOT / "metrics.json").read_text())["runs_disjoint"]


def test_the_errors_of_relative_variances_are_their_spread_over_pools(data):
    """Of estimators without heavy tails; on a Gridworld, where pools cost next to nothing."""
    group = Group(GRID, 0, data)
    logging = logging_of(group.environment(), design(group))
    pools = []
    for i in range(60):
        log = functools.partial(lambda i, by: next(logging.log(by, 600, stream("pools", by, i))), i)
        pools.append(runs.logged(log))
    variances = np.stack([runs.estimates(pool, np.array([600])).variances for pool in pools])
    spread = summary.relative_variances(variances).std(0, ddof=1)
    said = np.mean([evaluate.variance_errors(pool, 3)[1] for pool in pools[:8]], 0)
    for i, name in enumerate(ESTIMATORS):
        if name in ("mpe", "odi", "mpe_baseline", "son_balanced", "pooled"):
            assert said[i] == pytest.approx(spread[i], rel=0.4), name
    assert said[0] == spread[0] == 0


def test_an_interrupted_group_resumes_to_the_same_numbers(robot_data, again, tmp_path):
    group, parts, _ = again
    shutil.copy(parts / "mu.safetensors", tmp_path)
    before = (tmp_path / "mu.safetensors").stat().st_mtime_ns
    found = pooled(robot_data, tmp_path, lambda done: None)
    assert (tmp_path / "mu.safetensors").stat().st_mtime_ns == before
    np.testing.assert_array_equal(found.estimates, group.estimates)


def test_metrics_say_where_runs_and_truth_come_from(robot_data):
    metrics = json.loads((robot_data / "evaluate" / ROBOT / "metrics.json").read_text())
    assert (metrics["runs_from"], metrics["pool"], metrics["truth"]["episodes"]) == ("pool", 90, 30)
    groups = [load(robot_data, i) for i in range(2)]
    errors = np.stack([g.truth_error for g in groups])
    assert metrics["truth"]["standard_error"] == pytest.approx(errors.mean(), abs=1e-6)
    on_policy = np.sqrt(np.stack([g.variances[0, 0] for g in groups]) / 30)  # at `match` episodes
    assert metrics["truth"]["largest_share"] == pytest.approx((errors / on_policy).max(), abs=1e-6)
    assert metrics["truth"]["share"] == pytest.approx((errors / on_policy).mean(), abs=1e-6)
    best = [np.sqrt(g.variances[0]).mean(-1).argmin() for g in groups]
    least = np.sqrt(np.stack([g.variances[0, i] for g, i in zip(groups, best, strict=True)]) / 200)
    assert metrics["truth"]["share_of_best_at_200"] == pytest.approx((errors / least).mean(), abs=1e-6)
    relative = [g.variances[0].sum(-1) / g.variances[0, 0].sum() for g in groups]
    own = np.stack([g.relative_error for g in groups])
    pool_se, share = metrics["relative_variance_pool_se"], metrics["relative_variance_pool_se_share"]
    for i, name in enumerate(ESTIMATORS):
        assert pool_se[name] == pytest.approx(np.sqrt((own[:, i] ** 2).sum()) / 2, abs=1e-6)
        assert share[name] == pytest.approx((own[:, i] / [one[i] for one in relative]).max(), abs=1e-4)
        assert metrics["episodes_to_match_se"][name] >= 0
    assert pool_se["on_policy"] == 0
    for i, name in enumerate(ESTIMATORS):
        assert metrics["relative_variance"][name] == pytest.approx(np.mean(relative, 0)[i], abs=1e-6)
        mean = np.mean([g.pool[0, i] - g.truth for g in groups], 0)
        error = np.sqrt(sum(g.pool[1, i] ** 2 + g.truth_error**2 for g in groups)) / 2
        assert metrics["largest_mean_error"][name] == pytest.approx(np.abs(mean / error).max(), abs=0.01)
        assert metrics["exact_relative_variance"][name] is None
    assert max(metrics["largest_mean_error"].values()) < 4.5


def test_a_gridworlds_files_know_nothing_of_pools(data):
    folder = data / "evaluate" / "gridworld-1000"
    assert "runs_from" not in json.loads((folder / "metrics.json").read_text())
    group = evaluate.Result.load(folder / "runs" / "group-00" / "runs.safetensors")
    assert group.pool is group.truth_error is None


def test_a_robot_is_described_and_reported(robot_data, capsys):
    rows = evaluate.STAGE.describe(robot_data / "evaluate" / ROBOT)
    assert [row[3] for row in rows] == [""] * len(ESTIMATORS)  # nothing exact
    assert report.main(["--study", ROBOT, "--data", str(robot_data)]) == 0
    table = (robot_data / "report" / ROBOT / "episodes_to_match.md").read_text().splitlines()
    metrics = json.loads((robot_data / "evaluate" / ROBOT / "metrics.json").read_text())
    match, error = (metrics[name]["mpe"] for name in ("episodes_to_match", "episodes_to_match_se"))
    assert table[3].startswith(f"| MPE | {match:.0f} | {error:.0f} |")
    assert "Hopper: 2 groups x 3 runs, 3 policies" in capsys.readouterr().out


def test_all_robots_are_joined_in_figure_2_and_each_cell_of_the_paper_is_compared(robot_data, capsys):
    assert report.main(["--all", "--data", str(robot_data)]) == 0
    out = robot_data / "report" / "all"
    assert f"Figures: {out / 'figure_2.png'}" in capsys.readouterr().out
    assert not (out / "figure_1.png").exists()
    cells = [line.strip("| ").split(" | ") for line in (out / "cells.md").read_text().splitlines()[2:]]
    metrics = json.loads((robot_data / "evaluate" / ROBOT / "metrics.json").read_text())
    assert [row[1] for row in cells] == ["MPE", "ODI", "SON", "SODI"]
    mpe, match = metrics["relative_variance"]["mpe"], metrics["episodes_to_match"]["mpe"]
    median = metrics["relative_variance_median"]["mpe"]
    difference = [f"{mpe - 0.114:+.3f}", "115", f"{match:.0f}", f"{match - 115:+.0f}"]
    assert cells[0] == ["Hopper", "MPE", "0.114", f"{mpe:.3f}", f"{median:.3f}", *difference]
    plans = [json.loads(p.read_text()) for p in (robot_data / "behavior" / ROBOT).glob("*/behavior.json")]
    promised = np.mean([plan["relative_variance"] for plan in plans])
    truths = np.stack([load(robot_data, group).truth for group in (0, 1)])
    worth = [f"{truths.min():.1f} to {truths.max():.1f}", f"{(truths.max(1) - truths.min(1)).mean():.1f}"]
    kept = [f"{metrics['truth']['share']:.0%}", f"{promised:.1%}", f"{mpe:.1%}"]
    (row,) = (out / "policies.md").read_text().splitlines()[2:]
    assert row.strip("| ").split(" | ") == ["Hopper", *worth, *kept]


def test_what_policies_are_worth_by_hand():
    found = evaluate.value_metrics(np.array([[1.0, 2, 4], [0, 5, 5], [3, 3, 3]]))
    assert found == {"lowest": 0, "highest": 5, "spread": 3}


def test_metrics_of_an_older_version_are_one_line(robot_data, tmp_path, capsys):
    metrics = json.loads((robot_data / "evaluate" / ROBOT / "metrics.json").read_text())
    del metrics["values"]
    path = tmp_path / "evaluate" / ROBOT / "metrics.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(metrics))
    assert report.main(["--all", "--data", str(tmp_path)]) == 2
    expected = f"report: {path}: no `values`, expected those of this version; run the stage `evaluate` again\n"
    assert capsys.readouterr().err == expected
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pool": 29}, "evaluate.pool is 29, expected at least 30 = match"),
        ({"pool": 61}, "evaluate.pool is 61, expected a multiple of 3 policies, 2 each or more"),
        ({"truth": 3}, "evaluate.truth is 3, expected a multiple of 3 policies, 2 each or more"),
        ({"truth": None}, "evaluate.truth is None, expected a whole number from 2"),
    ],
)
def test_bad_parameters_are_refused_by_name(change, message, robot_data):
    with pytest.raises(ValueError, match=message):
        evaluate.STAGE.prepare(changed(STUDY, "evaluate", **change), robot_data)


def test_a_robots_fits_are_measured_against_episodes(robot_data, capsys, monkeypatch):
    monkeypatch.setattr(accuracy_sampled, "EPISODES", 60)
    assert accuracy.main(["--study", ROBOT, "--data", str(robot_data)]) == 0
    printed = capsys.readouterr().out
    assert "fits against episodes" in printed
    assert "Predicted relative variance within 30% of the measured one" in printed
    assert (robot_data / "accuracy" / f"{ROBOT}.png").read_bytes().startswith(b"\x89PNG")
    table = (robot_data / "accuracy" / f"{ROBOT}.md").read_text().splitlines()
    assert table[0] == "|  | mean | median | lowest | highest |"
    for label in ("on-policy MC", "MPE", "MPE + q", "pooled", "pooled, after 20 rounds"):
        assert f"\n| {label} | " in (robot_data / "accuracy" / f"{ROBOT}-predictions.md").read_text()
    assert accuracy.main(["--study", ROBOT, "--data", str(robot_data), "--groups", "1"]) == 0
    assert "hopper: 1 groups, predicted before any episode against measured" in capsys.readouterr().out
    assert accuracy.main(["--study", "ant", "--data", str(robot_data)]) == 2
    assert capsys.readouterr().err.endswith("no groups, expected the stage `evaluate` to have run\n")
    group = accuracy_sampled.measure(Group(STUDY, 1, robot_data))
    variances = load(robot_data, 1).variances[0]
    np.testing.assert_allclose(group.plan[0], variances[list(ESTIMATORS).index("mpe")] / variances[0])
    both = np.concatenate([accuracy_sampled.measure(Group(STUDY, 0, robot_data)).plan, group.plan], 1)  # [2, policies]
    ranks = both.argsort(1).argsort(1)
    assert f"Their rank correlation: {np.corrcoef(ranks)[0, 1]:.2f}." in printed
    (line,) = (row for row in table if row.startswith("| MPE, predicted over measured |"))
    assert f" {np.median(both[1] / both[0]):.4f} | {(both[1] / both[0]).min():.4f} |" in line


def test_errors_of_a_pools_variances_are_those_of_fourth_moments(again):
    group, parts, _ = again
    x = parts_of(parts, "mu")["pdis"]
    squares = (x - x.mean(-1, keepdims=True)) ** 2
    found = group.variance_error[list(ESTIMATORS).index("mpe")]
    np.testing.assert_allclose(found, squares.std(-1) / np.sqrt(x.shape[-1]), rtol=0.25)


def test_promises_against_measurements_by_hand():
    """Of 4 policies: 1.1, 1.4, unknown and 0.75 of what was measured with no noise, or with as much as 30%."""
    unknown = np.array([False, False, True, False])
    promise = accuracy_sampled.Promise(np.array([11.0, 14, np.nan, 7.5]), np.full(4, 10.0), np.full(4, 1e-9), unknown)
    assert accuracy_sampled.within([promise]) == (1.1, 0.5, 2 / 3, 1.0)
    noisy = accuracy_sampled.within([promise._replace(error=np.full(4, 0.3))])[-1]
    draws = 1 / (1 + 0.3 * np.random.default_rng(0).standard_normal(100_000))
    assert noisy == pytest.approx(np.mean(np.abs(draws - 1) <= 0.3), abs=0.01)


def test_the_rest_of_the_return_and_a_fit_against_it_by_hand():
    ends = np.array([False, False, True, True, False, True])
    zeros = np.zeros(6)
    rows = Steps(zeros, zeros, zeros, zeros, np.array([1.0, 2, 3, 4, 5, 6]), zeros, ends, ~ends & False, zeros, {})
    np.testing.assert_array_equal(accuracy_sampled.rests(rows), [6, 5, 3, 4, 11, 6])
    episodes = replace(rows, episode=np.array([0, 0, 0, 1, 2, 2]))
    v, q = np.array([0.0, 0, 0, 0, 1, 0]), np.array([0.0, 1, 0, 0, 0, 0])
    # returns 6, 4, 11 and with the baseline 5, 4, 12
    one = accuracy_sampled.left(episodes, np.zeros(6, dtype=int), q, v, 1)
    np.testing.assert_allclose(one, np.var([5, 4, 12]) / np.var([6, 4, 11]))
    policy, found = np.repeat([0, 1], 4), np.array([1.0, 3, 5, 7, 2, 0, 2, 0])
    fit = accuracy_sampled.against(np.r_[found[:4] * 2 + 1, 3.0, 1, 3, 1], found, policy, 2)
    np.testing.assert_allclose(fit.correlation, [1, 1])
    np.testing.assert_allclose(fit.slope, [0.5, 1])
    np.testing.assert_allclose(fit.bias, [5 / np.sqrt(5), 1])


def test_with_a_companion_by_its_mean_the_state_is_s_alone(robot_data, tmp_path):
    """From the logged data to the fits and mu; what is executed is the mean of the group's companion."""
    study = replace(STUDY, environment={"mujoco": {"robot": "hopper", "companion": "mean"}})
    shutil.copytree(robot_data / "targets", tmp_path / "targets")
    for module in (offline, q, q_hat):
        run(module.STAGE, study, tmp_path)
    group, appended = Group(study, 0, tmp_path), Group(STUDY, 0, robot_data)
    (batch,) = group.transitions().batches(10**6, np.random.default_rng(0))
    assert (batch.state.shape[1], group.environment().width, group.values("q").shape.width) == (11, 11, 11)
    assert (appended.environment().width, appended.values("q").shape.width) == (13, 13)
    saved = policies.load(group.folder("targets") / "companion")
    env = group.environment()
    expected = saved.outputs(batch.state[:9], 0)[0, :, 1:]
    for seed in (0, 1):
        np.testing.assert_array_equal(env.companion(batch.state[:9], np.random.default_rng(seed)), expected)
    logging = logging_of(env, design(group))
    for loggers in LOGGERS:
        (episodes,) = logging.log(loggers, 6, np.random.default_rng(0))
        assert episodes.target_probs.shape[:2] == (3, 6)
