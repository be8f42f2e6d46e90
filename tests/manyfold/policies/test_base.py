"""What every policy set is made of: indices, steps, sampling."""

import numpy as np
import pytest

from manyfold.policies.base import check_indices, check_steps, sample_actions


def test_sampled_actions_follow_the_probabilities_and_never_take_a_zero():
    probs = np.array([[0.0, 0.3, 0.7, 0.0], [0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 0.0, 1.0], [1 / 3, 1 / 3, 1 / 3, 0.0]])
    n = 50_000
    rng = np.random.default_rng(0)
    for p in probs:
        actions = sample_actions(np.tile(p, (n, 1)), rng)
        seen = np.bincount(actions, minlength=4) / n
        assert (np.abs(seen - p) <= 4 * np.sqrt(p * (1 - p) / n)).all()


def test_the_largest_random_number_takes_no_impossible_action():
    class AlmostOne:
        def random(self, n):
            return np.full(n, np.nextafter(1.0, 0.0))

    probs = np.array([[0.1, 0.2, 0.7 - 1e-16, 0.0], [1 / 3, 1 / 3, 1 / 3, 0.0]])
    assert sample_actions(probs, AlmostOne()).tolist() == [2, 2]


def test_each_row_has_its_own_distribution():
    """Row i takes action i mod 3 for sure, whatever the other rows do."""
    probs = np.eye(3)[np.arange(30) % 3]
    assert sample_actions(probs, np.random.default_rng(0)).tolist() == (np.arange(30) % 3).tolist()
    assert np.array_equal(probs, np.eye(3)[np.arange(30) % 3])  # and what was given is left as it is


def test_the_same_generator_gives_the_same_actions_by_inverting_the_distribution():
    """An action is how many thresholds of the cumulative distribution the row's uniform number has reached."""
    probs = np.random.default_rng(0).dirichlet(np.ones(5), 100)
    u = np.random.default_rng(1).random(100)
    expected = [int(np.searchsorted(np.cumsum(p) / p.sum(), x, side="right")) for p, x in zip(probs, u, strict=True)]
    assert sample_actions(probs, np.random.default_rng(1)).tolist() == expected


def test_indices_may_be_a_column_or_whole_floats():
    assert check_indices("obs", [[3.0], [0.0]], 4).tolist() == [3, 0]
    assert check_indices("obs", np.array([3, 0], dtype=np.int16), 4).dtype == np.int64
    assert check_indices("obs", np.empty(0, dtype=np.int64), 4).tolist() == []


@pytest.mark.parametrize("obs", [[4], [-1], [0.5], [np.nan], [[1, 2]], [["a"]], [None]])
def test_anything_else_is_refused_in_one_line(obs):
    with pytest.raises(ValueError, match=r"^obs: expected whole numbers \[N\] from 0 to 3, found .{1,60}$"):
        check_indices("obs", obs, 4)


def test_one_step_stands_for_all():
    assert check_steps(2, 3, 5).tolist() == [2, 2, 2]
    assert check_steps([0, 4], 2, 5).tolist() == [0, 4]
    for t in (5, -1, [0, 5], 1.5):
        with pytest.raises(ValueError, match=r"^t: expected whole numbers \[N\] from 0 to 4, found"):
            check_steps(t, 2, 5)
