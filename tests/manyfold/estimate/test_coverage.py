"""Whether an interval held: by hand-made numbers, by Welch's test, and by samples whose coverage is known."""

import numpy as np
import pytest
from scipy import stats

from manyfold.estimate import coverage, intervals, pooled, ranking, runs
from manyfold.estimate.coverage import along, at_once, claimed_best, holds, is_wrong, looks, p_values, samples_of
from manyfold.estimate.intervals import Contrasts, Interval, Sample, sample


def certain(mean, error=0.1, freedom=1e6):
    """Independent policies with these means and errors."""
    k = len(mean)
    return Sample(tuple(map(str, range(k))), np.array(mean), error**2 * np.eye(k)[None], np.array([freedom]), 100)


def test_p_values_by_hand():
    found = Contrasts(
        np.array([1.0, 2.0, 3.0, 3.0]), np.array([0.5, 1.0, 0.0, 0.0]), np.array([4.0, 9, 1, 1]), np.ones(4), np.eye(4)
    )
    p = p_values(found, np.array([0.0, 2.0, 3.0, 3.1]))
    np.testing.assert_allclose(p, [2 * stats.t.sf(2, 4), 1.0, 1.0, 0.0])


def test_an_interval_holds_within_its_ends():
    interval = Interval(np.array([0.0, 0.0, 1.0]), np.array([1.0, 1.0, 1.0]))
    assert holds(interval, np.array([0.5, 1.1, 1.0])).tolist() == [True, False, True]


def test_looks_grow_by_a_fifth_and_include_what_is_asked_for():
    found = looks(100, [10, 20, 300])
    assert found[0] == 5
    assert found[-1] == 100
    assert {10, 20} <= set(found)
    assert (np.diff(found) <= np.maximum(1, 0.3 * np.array(found[:-1]))).all()


def test_an_interval_far_off_is_a_miss():
    held = at_once(certain([0.0, 1.0, 2.0]), np.array([0.0, 1.0, 5.0]))
    assert held.single.tolist() == [True, True, False]
    assert not held.simultaneous
    assert not held.difference
    assert held.best == 2
    assert not is_wrong(held.best, np.array([0.0, 1.0, 5.0]))


def test_all_at_once_is_wider_than_each_by_itself():
    """2.2 errors off is outside of a policy's own interval, and within the joint one of ten."""
    truth = np.zeros(10)
    held = at_once(certain([0.22] + [0.0] * 9), truth)
    assert held.single.tolist() == [False] + [True] * 9
    assert held.simultaneous
    held = at_once(certain([0.35] + [0.0] * 9), truth)
    assert not held.simultaneous


def test_a_wrong_best_is_counted():
    truth = np.array([0.0, 1.0])
    held = at_once(certain([2.0, 1.0]), truth)
    assert held.best == 0
    assert is_wrong(held.best, truth)
    assert not is_wrong(None, truth)
    assert not is_wrong(held.best, np.array([1.0, 1.0]))  # one of two equal bests


def test_along_a_path_a_single_miss_and_a_single_wrong_claim_count():
    truth = np.array([0.0, 1.0])
    good, bad = certain([0.0, 1.0]), certain([2.0, 1.0])
    assert along([good, good], truth) == (True, 1, False)
    assert along([good, bad, good], truth) == (False, 1, True)
    unsure = certain([0.0, 0.1])
    assert along([unsure], np.array([0.0, 0.1])) == (True, None, False)


def test_the_claimed_best_is_rankings():
    rng, claims = np.random.default_rng(0), 0
    for _ in range(150):
        k = int(rng.integers(1, 6))
        root = rng.normal(size=(k, k))
        if k > 2 and rng.random() < 0.3:
            root[1] = root[0]  # two that are the same
        found = sample(rng.normal(0, 0.7, (k, 1)) * (rng.random() < 0.8) + root @ rng.normal(size=(k, 25)))
        best = claimed_best(found, found.differences())
        assert best == ranking.best(found)
        claims += best is not None
    assert 20 < claims < 130


def own_values(k, n, seed=0):
    """A run of `on_policy`: returns of all policies for every episode, of which only the logger's own count."""
    x = np.random.default_rng(seed).normal(np.arange(k)[:, None], 1 + np.arange(k)[:, None], (k, n))
    return {("targets", "pdis"): x}


def test_on_policys_values_are_own_means_and_welchs_test():
    values = own_values(3, 60)
    found = coverage.sample_of("on_policy", values, 45)
    own = [values["targets", "pdis"][i, i:45:3] for i in range(3)]
    np.testing.assert_allclose(found.mean, [x.mean() for x in own])
    np.testing.assert_allclose(found.standard_error, [stats.sem(x) for x in own])
    pairs = found.differences()
    for c, (i, j) in enumerate(zip(*found.pairs, strict=True)):
        test = stats.ttest_ind(own[i], own[j], equal_var=False)
        np.testing.assert_allclose([pairs.estimate[c] / pairs.error[c], pairs.freedom[c]], [test.statistic, test.df])
        np.testing.assert_allclose(p_values(pairs, np.zeros(3))[c], test.pvalue)


def pooled_runs(k, n, many):
    """Columns of `pooled`: own, whole, decisions, D and the loggers, `[4 + K, K, n]` of each run."""
    rng = np.random.default_rng(1)
    logger = np.arange(n) % k == np.arange(k)[:, None]
    found = []
    for _ in range(many):
        loggers = np.broadcast_to(rng.normal(size=(k, 1, n)), (k, k, n))
        x = np.concatenate(
            [np.where(logger, k * rng.normal(1, 1, (k, n)), 0)[None], rng.normal(1, 1, (3, k, n)), loggers]
        )
        found.append({("targets", "pooled"): x})
    return found


@pytest.mark.parametrize("rounds", [2, 4, 5, 13])
def test_pooled_runs_are_combined_at_once_as_each_by_itself(rounds):
    k = 3
    some = pooled_runs(k, rounds * k, 4)
    x = np.stack([one["targets", "pooled"] for one in some])
    alone = np.stack([pooled.in_turns(runs.columns_of(one)) for one in x])
    np.testing.assert_allclose(coverage.pooled_values(x), alone, atol=1e-9)
    for one, values in zip(samples_of("pooled", some, [rounds * k]), some, strict=True):
        expected = coverage.sample_of("pooled", values, rounds * k)
        np.testing.assert_allclose(one[rounds * k].parts, expected.parts, atol=1e-9)


def test_coverage_of_normal_returns_is_that_of_the_intervals():
    k, many = 3, 400
    points = np.array([30, 90])
    some = [own_values(k, 90, seed) for seed in range(many)]
    found = coverage.of_runs(["on_policy"], some, np.arange(3.0), points, 90)["on_policy"]
    share = coverage.shares(found)
    assert share.shape == (2, len(coverage.KINDS))
    error = np.sqrt(0.05 * 0.95 / many)
    assert (np.abs(share[:, :3] - 0.95) < 3 * error).all(), share
    assert share[0, 3] == share[1, 3] > 0.95
    assert np.mean([run.path.wrong for run in found]) < 0.05
    shifted = coverage.of_runs(["on_policy"], some[:20], np.arange(3.0) + 50, points, 90)["on_policy"]
    assert (coverage.shares(shifted)[:, [0, 1, 3]] == 0).all()  # differences are right


def test_a_diagnosis_is_of_own_episodes_where_only_they_count():
    k, n = 2, 60
    values = own_values(k, n) | {("targets", "log_weights"): np.random.default_rng(0).normal(0, 9, (k, n))}
    for i in range(k):
        values["targets", "log_weights"][i, i::k] = 0.0  # a policy's own episodes weigh the same
    assert not coverage.untrusted_of("on_policy", values, n).any()
    values |= {("mu", "pdis"): np.exp(values["targets", "log_weights"] * 2)}
    values |= {("mu", "log_weights"): np.random.default_rng(0).normal(0, 9, (k, n))}
    assert coverage.untrusted_of("mpe", values, n).all()


def test_own_returns_that_hardly_vary_are_not_trusted():
    k, n = 2, 60
    values = own_values(k, n) | {("targets", name): np.zeros((k, n)) for name in ("log_weights", "log_balanced")}
    values |= {("targets", "pooled"): pooled_runs(k, n, 1)[0]["targets", "pooled"]}
    values["targets", "pdis"][1, 1:40:k] = 500.0
    for name in ("on_policy", "pooled"):
        assert coverage.untrusted_of(name, values, 40).tolist() == [False, True]
        assert coverage.untrusted_of(name, values, n).tolist() == [False, False]  # ten others came


def test_the_joint_level_decides_where_p_values_do_not():
    """Between alpha / K and alpha the level itself is needed, and then it is `intervals`'."""
    for off in (0.2, 0.24, 0.26, 0.28, 0.3):
        found = certain([off, 0.0, 0.0, 0.0])
        low, high = intervals.simultaneous(found)
        assert at_once(found, np.zeros(4)).simultaneous == bool(((low <= 0) & (high >= 0)).all())
