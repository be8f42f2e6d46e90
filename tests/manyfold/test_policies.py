import numpy as np
import pytest

from manyfold.policies import TabularPolicySet, cumulative_probs, sample_actions
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
