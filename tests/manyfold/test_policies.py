import re

import numpy as np
import pytest
from scipy import stats

from manyfold.policies import TabularPolicySet, bin_probs, cumulative_probs, sample_actions
from tests.worlds import distributions


def test_probs_are_the_tables_rows():
    table = distributions(np.random.default_rng(0), (3, 4, 5, 2))
    policies = TabularPolicySet(table)
    assert (policies.n_policies, policies.horizon, policies.n_states, policies.n_actions) == (3, 4, 5, 2)
    states = np.array([4, 0, 2])
    assert np.array_equal(policies.probs(states, 1), table[:, 1, states])
    steps = np.array([0, 3, 2])
    expected = np.stack([table[:, t, s] for s, t in zip(states, steps, strict=True)], axis=1)
    assert np.array_equal(policies.probs(states, steps), expected)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.full((2, 3, 2), 0.5), r"table has shape \[2, 3, 2\], expected \[K, T, S, A\]"),
        (np.empty((1, 0, 2, 2)), "none of them 0"),
        (np.full((1, 1, 1, 2), 0.4), "table: probabilities at k=0, t=0, s=0 sum to 0.8, expected 1"),
    ],
)
def test_bad_tables_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        TabularPolicySet(table)


@pytest.mark.parametrize(
    ("states", "t", "message"),
    [
        ([5], 0, "state: expected whole numbers from 0 to 4"),
        ([-1], 0, "state: expected whole numbers from 0 to 4"),
        ([0.5], 0, "state: expected whole numbers"),
        ([0], 4, "t: expected whole numbers from 0 to 3"),
    ],
)
def test_observations_out_of_range_are_refused(states, t, message):
    policies = TabularPolicySet(distributions(np.random.default_rng(0), (3, 4, 5, 2)))
    with pytest.raises(ValueError, match=message):
        policies.probs(np.array(states), t)


def test_sampled_actions_follow_the_probabilities_and_never_take_a_zero():
    probs = np.array([[0.0, 0.3, 0.7, 0.0], [0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 0.0, 1.0], [1 / 3, 1 / 3, 1 / 3, 0.0]])
    n = 50_000
    rng = np.random.default_rng(0)
    for state, p in enumerate(probs):
        actions = sample_actions(cumulative_probs(probs), np.full(n, state), rng)
        seen = np.bincount(actions, minlength=4) / n
        assert (np.abs(seen - p) <= 4 * np.sqrt(p * (1 - p) / n)).all()


def test_the_largest_random_number_takes_no_impossible_action():
    class AlmostOne:
        def random(self, n):
            return np.full(n, np.nextafter(1.0, 0.0))

    probs = np.array([[0.1, 0.2, 0.7 - 1e-16, 0.0], [1 / 3, 1 / 3, 1 / 3, 0.0]])
    assert sample_actions(cumulative_probs(probs), np.array([0, 1]), AlmostOne()).tolist() == [2, 2]


# --- bin_probs -----------------------------------------------------------------------------------------------------

EDGES = np.linspace(-1, 1, 11)


def test_bin_probs_by_hand():
    # One and two standard deviations hold 0.6827 and 0.9545; what lies beyond the outer edges is in the end bins.
    np.testing.assert_allclose(
        bin_probs(0.0, 0.5, [-1, -0.5, 0, 0.5, 1]), [0.158655, 0.341345, 0.341345, 0.158655], 1e-5
    )
    np.testing.assert_allclose(bin_probs(0.0, 0.5, [-2, -1, 1, 2]), [0.02275, 0.9545, 0.02275], 1e-5)
    assert bin_probs(0.3, 0.5, [-1, 1]) == [1.0]


def test_bin_probs_equal_scipys_and_broadcast():
    rng = np.random.default_rng(0)
    mean, std = rng.normal(size=(6, 1)), rng.uniform(0.05, 2, size=7)
    probs = bin_probs(mean, std, EDGES)
    assert probs.shape == (6, 7, 10)
    cdf = stats.norm(mean[..., None], std[:, None]).cdf(EDGES[1:-1])
    expected = np.diff(cdf, axis=-1, prepend=0.0, append=1.0)
    np.testing.assert_allclose(probs, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("sign", [-1, 1])
def test_far_tails_keep_their_relative_precision(sign):
    z = (EDGES[1:-1] + 0.9) / 0.03  # 1 - Phi(z) is lost to rounding from z = 8.3, the second of these nine, onwards
    survival = stats.norm.sf(z)
    expected = np.r_[stats.norm.cdf(z[0]), survival[:-1] - survival[1:], survival[-1]]
    probs = bin_probs(-0.9 * sign, 0.03, EDGES)[::sign]
    np.testing.assert_allclose(probs[:7], expected[:7], rtol=1e-10)
    assert 0 < probs[6] < 1e-290


@pytest.mark.parametrize("std", [1e-300, 1e-8, 1e-3, 1.0, 1e8, 1e300])
@pytest.mark.parametrize("mean", [-1e300, -50.0, -1.0, -0.2, 0.0, 1e-9, 0.2, 0.77, 1.0, 50.0, 1e300])
def test_rows_are_distributions_whatever_the_gaussian(mean, std):
    probs = bin_probs(mean, std, EDGES)
    assert (probs >= 0).all()
    assert abs(probs.sum() - 1) < 1e-14


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 0.0, EDGES), "std is 0, expected more than 0"),
        ((0.0, [1.0, -2.0], EDGES), "std is -2, expected more than 0; was it saved as a logarithm?"),
        (([0.0, np.nan], 1.0, EDGES), "mean[1] is nan, expected a finite number"),
        ((0.0, 1.0, [0, 1, 1]), "edges are [0. 1. 1.], expected increasing numbers [bins + 1]"),
        ((0.0, 1.0, [0.0]), "edges are [0.], expected increasing numbers [bins + 1]"),
    ],
)
def test_a_bad_gaussian_is_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        bin_probs(*arguments)
