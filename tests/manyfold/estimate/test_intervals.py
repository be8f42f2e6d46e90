"""Intervals against textbook numbers, exact coverage by simulation with fixed seeds, and bad input."""

import numpy as np
import pytest
from scipy import stats

from manyfold.estimate import intervals
from manyfold.estimate.intervals import join, sample


def test_one_policy_has_the_t_interval_of_the_textbook():
    x = np.array([3.0, 5.0, 4.0, 8.0])
    low, high = intervals.single(sample(x))
    expected = stats.t.interval(0.95, 3, x.mean(), stats.sem(x))
    assert np.allclose([low[0], high[0]], expected)


def test_strata_are_welchs_test():
    rng = np.random.default_rng(0)
    a, b = rng.normal(1, 1, 12), rng.normal(0, 3, 12)
    own = np.zeros((2, 24))  # each policy's own episodes, as values that serve both
    own[0, :12], own[1, 12:] = 2 * a, 2 * b
    found = sample(own, np.repeat([0, 1], 12))
    test = stats.ttest_ind(a, b, equal_var=False)
    pair = found.differences()
    assert np.allclose(found.mean, [a.mean(), b.mean()])
    assert np.allclose(pair.freedom, test.df)
    assert np.allclose(pair.estimate / pair.error, test.statistic)
    low, high = intervals.differences(found)
    assert np.allclose([low[0, 1], high[0, 1]], test.confidence_interval(0.95))
    assert np.allclose([low[1, 0], high[1, 0]], [-high[0, 1], -low[0, 1]])


def test_folds_may_have_means_of_their_own():
    x = np.array([[1.0, 2.0, 11.0, 12.0]])
    assert np.isclose(sample(x, fold=np.array([0, 0, 1, 1])).covariance[0, 0], 0.5 / 4)
    assert sample(x).covariance[0, 0] > 5


def test_the_joint_level_is_sidaks_where_policies_are_independent_and_alpha_where_they_are_one():
    found = intervals.Sample(tuple("abcde"), np.zeros(5), np.eye(5)[None], np.array([1e9]), 100)
    level = intervals.joint_level(found, np.eye(5), 0.05)
    assert abs(level - (1 - 0.95 ** (1 / 5))) < 0.0008
    same = intervals.Sample(tuple("abcde"), np.zeros(5), np.ones((1, 5, 5)), np.array([1e9]), 100)
    assert abs(intervals.joint_level(same, np.eye(5), 0.05) - 0.05) < 0.003


@pytest.mark.parametrize("k", [2, 5, 30])
def test_pairs_from_covariances_are_contrasts_and_their_levels_max_t_of_products(k):
    rng = np.random.default_rng(k)
    x = rng.normal(size=(k, 40 * k)) + 2 * rng.normal(size=40 * k)
    x[1] = x[0]  # policies that are the same have a difference of 0
    found = sample(x, np.arange(40 * k) % k)
    pairs, one = found.differences(), np.eye(k)
    first, second = np.triu_indices(k, 1)
    general = found.contrasts(one[first] - one[second])
    assert all(np.allclose(a, b) for a, b in zip(pairs, general, strict=True))
    assert pairs.error[0] == 0
    level = intervals.joint_level(found, general.weights, 0.05)
    low = intervals.square(found, general.interval(level)).low
    assert np.allclose(intervals.differences(found).low, low)
    one_sided = np.delete(one, 0, 0) - one[0]
    real = int((found.contrasts(one_sided).error > 0).sum())
    if real > 1:
        lead = intervals.level_of(intervals.largest_lead(found, 0), 0.05, real, 1)
        assert np.isclose(lead, intervals.joint_level(found, one_sided, 0.05, 1))


@pytest.mark.parametrize("n", [6, 30])
def test_coverage_of_normal_values(n):
    rng, runs, k = np.random.default_rng(n), 1500, 4
    root = rng.normal(size=(k, k))
    held = np.zeros(3)
    for _ in range(runs):
        found = sample(root @ rng.normal(size=(k, n)))
        one, every, pairs = intervals.single(found), intervals.simultaneous(found), intervals.differences(found)
        held += [
            np.mean((one.low <= 0) & (one.high >= 0)),
            np.all((every.low <= 0) & (every.high >= 0)),
            np.all((pairs.low <= 0) & (pairs.high >= 0)),
        ]
    assert ((held / runs > 0.935) & (held / runs < 0.985)).all(), held / runs


def test_anytime_intervals_hold_over_the_whole_path_where_fixed_ones_do_not():
    rng, runs, looks = np.random.default_rng(1), 300, np.arange(5, 400, 5)
    ever, fixed = 0, 0
    for _ in range(runs):
        x = rng.normal(size=400)
        missed = [[False, False]]
        for n in looks:
            every = sample(x[:n]).each()
            wide, narrow = intervals.anytime(every, 0.05), every.interval(0.05)
            missed.append([bool(abs(every.estimate[0]) > w.high[0] - every.estimate[0]) for w in (wide, narrow)])
        ever, fixed = ever + np.any(missed, 0)[0], fixed + np.any(missed, 0)[1]
    assert ever / runs < 0.05 + 2 * np.sqrt(0.05 * 0.95 / runs)
    assert fixed / runs > 0.15


def test_the_boundary_is_where_the_mixture_reaches_one_over_alpha():
    t = intervals.boundary(np.array([99.0]), 100, np.array([0.05]))[0]
    h = 1 + intervals.OPTIMAL * 100 / intervals.AROUND
    assert np.isclose(h**-0.5 * ((1 + t**2 / 99) / (1 + t**2 / (99 * h))) ** 50, 20)
    assert np.isinf(intervals.boundary(np.array([1.0]), 2, np.array([0.05]))[0])  # no t is that improbable


def test_betting_holds_for_skewed_values_and_shrinks():
    rng, missed = np.random.default_rng(2), 0
    for _ in range(40):
        low, high = intervals.betting((rng.random(300) < 0.1).astype(float), 0, 1)
        missed += bool((low > 0.1).any() or (high < 0.1).any())
    assert missed <= 5
    assert high[-1] - low[-1] < 0.2 < high[0] - low[0]


@pytest.mark.parametrize("n", [25, 50, 100])
def test_bounded_intervals_hold_where_returns_hardly_vary(n):
    """500, or once in 50 episodes 100: Student's intervals of such samples hold in 40 to 87% of them."""
    rng = np.random.default_rng(n)
    returns = [np.where(rng.random(n) < 0.02, 100.0, 500.0) for _ in range(400)]
    low, high = intervals.bounded(returns, 0, 500)
    assert np.mean((low <= 492) & (high >= 492)) >= 0.95
    assert (low >= 0).all()
    assert (high <= 500).all()
    student = [intervals.single(sample(x)) for x in returns]
    assert np.mean([(x.low[0] <= 492) & (x.high[0] >= 492) for x in student]) < 0.9


def test_bounded_intervals_are_each_policys_last_ones():
    x = np.array([0.0, 1.0, 1.0])
    found, path = intervals.bounded([x, np.empty(0)], 0, 2, 0.1), intervals.betting(x, 0, 2, 0.1)
    np.testing.assert_array_equal(found.low, [path.low[-1], 0])
    np.testing.assert_array_equal(found.high, [path.high[-1], 2])


def test_against_a_policy_and_a_number():
    x = np.array([[1.0, 2.0, 3.0, 4.0], [2.0, 3.1, 4.0, 4.9], [1.0, 2.0, 3.0, 4.0]])
    low, high = intervals.against(sample(x), 0)
    assert low[0] == 0
    assert low[2] == 0
    assert 0.8 < low[1] < 1
    assert np.isinf(high[1])
    low, _ = intervals.against(sample(x[0]), 0.5, 0.05)
    assert np.isclose(low[0], 2 - stats.t.isf(0.05, 3) * stats.sem(x[0]))


def test_stages_of_fewer_policies_are_joined_by_their_units():
    x, y = np.array([[1.0, 3.0], [2.0, 6.0]]), np.array([[5.0, 7.0, 6.0, 2.0]])
    found = join([sample(x, names=("a", "b")), sample(y, names=("b",))])
    assert np.allclose(found.mean, [2, (2 + 6 + 5 + 7 + 6 + 2) / 6])
    assert np.isclose(found.covariance[1, 1], (8 / 2) * (2 / 6) ** 2 + (y.var(ddof=1) / 4) * (4 / 6) ** 2)
    assert np.isclose(found.covariance[0, 1], 4 / 2 * (2 / 6))
    assert found.units == 6
    with pytest.raises(ValueError, match="other policies"):
        join([sample(y, names=("b",)), sample(x, names=("a", "b"))])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: sample([[1.0, np.nan]]), "1 not finite"),
        (lambda: sample(np.empty((2, 0))), "expected numbers"),
        (lambda: sample([[1.0]]), "at least 2"),
        (lambda: sample([[1.0, 2.0, 3.0]], [0, 0, 1]), "logger 1 has 1 episode"),
        (lambda: sample([[1.0, 2.0]], [0]), "one per episode"),
        (lambda: sample([[1.0, 2.0]], names=("a", "b")), "2 names of 1"),
        (lambda: intervals.single(sample([[1.0, 2.0]]), 0), "alpha is 0"),
        (lambda: intervals.simultaneous(sample([[1.0, 2.0]]), 1.0), "alpha is 1"),
        (lambda: intervals.against(sample([[1.0, 2.0]]), 3), "baseline is 3"),
        (lambda: intervals.betting([0.5, 2.0], 0, 1), "expected within 0 and 1"),
        (lambda: intervals.bounded([np.array([0.5, 2.0])], 0, 1), "expected within 0 and 1"),
    ],
)
def test_bad_input_is_one_line(call, said):
    with pytest.raises(ValueError, match=said) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_level_beyond_all_numbers_claims_nothing():
    """Scipy's quantile turns to minus infinity there, and bounds would change sides."""
    rng = np.random.default_rng(0)
    found = intervals.sample(np.array([[9.0], [0.0], [0.0]]) + rng.standard_normal((3, 12)), np.arange(12) % 3)
    low, high = intervals.simultaneous(found, 1e-300)
    assert (low == -np.inf).all()
    assert (high == np.inf).all()
    assert (intervals.differences(found, 1e-300).low <= 0).all()
