import numpy as np
import pytest

from manyfold.estimate import summary


def test_relative_variance_is_a_ratio_of_sums_over_policies():
    variances = np.array([[[1.0, 3.0], [1.0, 1.0]], [[2.0, 2.0], [8.0, 0.0]]])  # [G, E, K]
    np.testing.assert_allclose(summary.relative_variances(variances), [[1, 0.5], [1, 2]])
    found = summary.summarise(summary.relative_variances(variances))
    np.testing.assert_allclose(found.mean, [1, 1.25])
    np.testing.assert_allclose(found.median, [1, 1.25])
    np.testing.assert_allclose(found.standard_error, [0, 0.75])
    assert np.isnan(summary.summarise(np.ones((1, 2))).standard_error).all()


def test_errors_are_relative_to_on_policys_first():
    truth = np.array([[1.0]])
    estimates = np.array(
        [[[[[3.0], [2.0]], [[1.0], [0.0]]], [[[-1.0], [0.0]], [[2.0], [1.0]]]]]
    )  # [1, R, E, points, 1]
    each, together = summary.relative_errors(estimates, truth)
    np.testing.assert_allclose(each[0, :, :, 0], [[1, 0.5], [0.25, 0.25]])
    np.testing.assert_allclose(together, each[..., 0])


def test_each_policy_has_its_own_unit_and_one_that_hardly_varies_decides_nothing():
    estimates = np.array([[[[[1.0, 10.0]], [[0.5, 5.0]]]]])  # [G, R, E, points, K]
    each, together = summary.relative_errors(estimates, np.zeros((1, 2)))
    np.testing.assert_allclose(each[0, :, 0], [[1, 1], [0.5, 0.5]])
    np.testing.assert_allclose(together[0, :, 0], [1, 0.5])
    estimates[0, 0, 0, 0, 0] = 0.001  # on-policy MC's of the first: 500 times the error would be 0.5
    each, together = summary.relative_errors(estimates, np.zeros((1, 2)))
    np.testing.assert_allclose(each[0, 1, 0], [500, 0.5])
    np.testing.assert_allclose(together[0, 1], 5.5 / 10.001)


def test_a_perfect_estimator_needs_nothing_and_nan_is_refused():
    points = np.array([10, 100])
    assert summary.episodes_to_match(points, np.array([[1.0, 0.3], [0.0, 0.0]]), 100)[1] == pytest.approx(0)
    with pytest.raises(ValueError, match="errors have NaN"):
        summary.episodes_to_match(points, np.array([[1.0, np.nan]]), 100)


def test_episodes_to_match_follows_the_square_root_law():
    """An estimator with a quarter of the variance needs a quarter of the episodes, inside the points and outside."""
    points = np.array([10, 100, 1000, 2000])
    on = 1 / np.sqrt(points)
    errors = np.stack([on, 0.5 * on, np.sqrt(3) * on, 0.01 * on])
    np.testing.assert_allclose(summary.episodes_to_match(points, errors, 1000), [1000, 250, 3000, 0.1], rtol=5e-3)
    assert summary.episodes_to_match(points, errors, 1000)[0] == pytest.approx(1000)
    dense = np.arange(1, 201) * 10
    noise = np.exp(0.03 * np.random.default_rng(0).standard_normal((2, 200)))
    noisy = np.stack([1 / np.sqrt(dense), 0.5 / np.sqrt(dense)]) * noise
    np.testing.assert_allclose(summary.episodes_to_match(dense, noisy, 1000), [1000, 250], rtol=0.04)
    with pytest.raises(ValueError, match="at is 500, expected one of the points"):
        summary.episodes_to_match(points, errors, 500)


def test_the_bootstrap_over_groups_knows_the_error_of_episodes_to_match():
    """Against many sets of groups: an estimator with a quarter of the variance, each group's with its own factor."""
    points, rng = np.array([10, 100, 1000]), np.random.default_rng(0)

    def groups():
        factors = np.exp(0.2 * rng.standard_normal((30, 1, 1))) * np.array([0.5])[:, None]
        on = np.broadcast_to(1 / np.sqrt(points), (30, 1, 3))
        return np.concatenate([on, factors * on], 1)

    found = [summary.episodes_to_match(points, groups().mean(0), 1000) for _ in range(300)]
    said = [summary.match_errors(points, groups(), 1000, rng, 100) for _ in range(20)]
    np.testing.assert_allclose(np.mean(said, 0), np.std(found, axis=0), rtol=0.15, atol=1e-6)
    assert np.isnan(summary.match_errors(points, groups()[:1], 1000, rng)).all()


def test_bias_is_seen_policy_by_policy():
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((20, 30, 2, 3))
    truth = rng.standard_normal((20, 3))
    estimates = truth[:, None, None] + noise + np.array([[0.0, 0.0, 0.0], [0.5, -0.5, 0.0]])  # cancels over policies
    mean, error = summary.bias(estimates, truth)
    np.testing.assert_allclose(error, 1 / np.sqrt(600), rtol=0.1)
    z = mean / error
    assert (np.abs(z[0]) < 4).all()
    assert z[1, 0] > 8
    assert z[1, 1] < -8
    assert abs(z[1, 2]) < 4
