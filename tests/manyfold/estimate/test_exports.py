"""rliable's forms and measures: numbers by hand, and by counting every duel."""

import numpy as np
import pytest

from manyfold.estimate.exports import performance_profile, probability_of_improvement, rliable_scores


def test_scores_have_a_row_for_each_run_and_a_column_for_each_task():
    found = rliable_scores([[1, 2, 3], [4, 5]], ["a", "b"])
    assert list(found) == ["a", "b"]
    assert found["a"].tolist() == [[1], [2], [3]]
    assert found["b"].tolist() == [[4], [5]]
    assert rliable_scores([np.ones((7, 2)), np.ones((3, 2))], ["a", "b"])["a"].shape == (7, 2)


def test_probability_of_improvement_by_hand():
    """(1, 2) against (0, 2, 3): 1 > 0, 2 > 0 and half of 2 = 2, of 6 duels."""
    found = probability_of_improvement([[1, 2], [0, 2, 3]])
    np.testing.assert_allclose(found, [[0.5, 2.5 / 6], [3.5 / 6, 0.5]])


def test_it_is_the_mean_over_tasks():
    """On the first task 1 of 1 duels is won, on the second half of one."""
    np.testing.assert_allclose(probability_of_improvement([[[1, 5]], [[0, 5]]])[0, 1], 0.75)


def test_equal_returns_are_half():
    np.testing.assert_array_equal(probability_of_improvement([[1, 1], [1, 1]]), np.full((2, 2), 0.5))
    np.testing.assert_array_equal(probability_of_improvement([[3, 1]]), [[0.5]])


def test_the_higher_mean_may_lose_most_duels():
    rare, steady = [0, 0, 0, 100], [1, 1, 1, 1]
    assert np.mean(rare) > np.mean(steady)
    assert probability_of_improvement([rare, steady])[0, 1] == 0.25


def test_every_duel_counted():
    rng = np.random.default_rng(0)
    each = [rng.integers(0, 5, (n, 2)) for n in (1, 8, 13)]
    found = probability_of_improvement(each)
    for i, x in enumerate(each):
        for j, y in enumerate(each):
            duels = [(a[m] > b[m]) + (a[m] == b[m]) / 2 for a in x for b in y for m in range(2)]
            assert found[i, j] == pytest.approx(np.mean(duels))
    np.testing.assert_allclose(found + found.T, 1)


def test_performance_profile_by_hand():
    """The share strictly above, over runs and tasks."""
    np.testing.assert_array_equal(
        performance_profile([[1, 2, 3, 4], [2, 2]], [0, 2, 3.5, 4]), [[1, 0.5, 0.25, 0], [1, 0, 0, 0]]
    )
    np.testing.assert_array_equal(performance_profile([[[1, 10], [3, 30]]], [2, 20]), [[0.75, 0.25]])
    assert performance_profile([[1.0]], []).shape == (1, 0)


@pytest.mark.parametrize(
    ("returns", "said"),
    [
        ([], "returns of no policy, expected one or more"),
        ([[1.0], []], r"policy 1: returns have shape \(0, 1\), expected"),
        ([[[[1.0]]]], r"policy 0: returns have shape \(1, 1, 1\), expected"),
        ([3.0], r"policy 0: returns have shape \(\), expected"),
        ([[1.0, np.nan, np.inf]], "policy 0: 2 of 3 returns are not finite"),
        ([[[1.0, 2.0]], [1.0]], r"policies have \[2, 1\] tasks, expected the same number"),
    ],
)
def test_bad_returns_are_refused_by_all(returns, said):
    names = [str(i) for i in range(len(returns))]
    for call in (
        lambda: rliable_scores(returns, names),
        lambda: probability_of_improvement(returns),
        lambda: performance_profile(returns, [0.0]),
    ):
        with pytest.raises(ValueError, match=said):
            call()


def test_bad_names_and_levels_are_refused():
    with pytest.raises(ValueError, match="1 different names of 2 policies, expected one each"):
        rliable_scores([[1], [2]], ["a", "a"])
    with pytest.raises(ValueError, match="1 different names of 2 policies"):
        rliable_scores([[1], [2]], ["a"])
    for taus in (1.0, [[1.0]], [np.nan]):
        with pytest.raises(ValueError, match="expected one row of numbers"):
            performance_profile([[1]], taus)
