"""Shares that a pilot chooses, against enumeration."""

import numpy as np
import pytest

from manyfold import exact
from manyfold.estimate.shares import best_shares, predicted_variances
from manyfold.mdp import FiniteMDP
from tests.worlds import trajectories


def world(seed, policies=3, horizon=3):
    rng = np.random.default_rng(seed)
    mdp = FiniteMDP(rng.dirichlet(np.ones(3), size=(3, 2)), rng.standard_normal((3, 2)), np.full(3, 1 / 3), horizon)
    return mdp, rng.dirichlet(np.full(2, 0.5), size=(policies, horizon, 3))


def enumerated(mdp, pi):
    """Terms and ratios of every episode under the pilot of equal shares, weighted with its probability."""
    q, v = exact.action_values(mdp, pi), exact.state_values(mdp, pi)
    terms, ratios = [], []
    for i, logger in enumerate(pi):
        for probability, s, a in trajectories(mdp, logger):
            prefix = np.cumprod([pi[:, t, s[t], a[t]] for t in range(mdp.horizon)], 0)  # [T, K]
            pilot = prefix.mean(1)
            for t in range(mdp.horizon):
                v_tp1 = v[:, t + 1, s[t + 1]] if t + 1 < mdp.horizon else 0.0
                d = mdp.rewards[s[t], a[t]] + v_tp1 - q[:, t, s[t], a[t]]
                terms.append(probability / len(pi) * (prefix[t] / pilot[t]) ** 2 * d**2)
                ratios.append(prefix[t] / pilot[t])
        assert i < len(pi)
    return np.array(terms).T, np.array(ratios).T


def variances(mdp, pi, shares):
    """sum_t E_pi[W_t nu_t] of these shares, from all episodes of the mixture."""
    nu = exact.next_value_variances(mdp, pi)
    out = np.zeros(len(pi))
    for share, logger in zip(shares, pi, strict=True):
        for probability, s, a in trajectories(mdp, logger):
            prefix = np.cumprod([pi[:, t, s[t], a[t]] for t in range(mdp.horizon)], 0)
            w = prefix / (prefix @ shares)[:, None]  # [T, K]
            out += share * probability * sum(w[t] ** 2 * nu[:, t, s[t], a[t]] for t in range(mdp.horizon))
    return out


@pytest.mark.parametrize("seed", range(5))
def test_the_prediction_is_the_exact_variance_for_any_shares(seed):
    mdp, pi = world(seed)
    terms, ratios = enumerated(mdp, pi)
    for shares in (np.full(3, 1 / 3), np.array([0.6, 0.3, 0.1])):
        np.testing.assert_allclose(predicted_variances(shares, terms, ratios), variances(mdp, pi, shares), rtol=1e-9)


@pytest.mark.parametrize("goal", ["sum", "largest"])
@pytest.mark.parametrize("seed", range(5))
def test_the_shares_found_beat_equal_ones_in_the_exact_variance(seed, goal):
    mdp, pi = world(seed)
    floor = 0.1
    found = best_shares(*enumerated(mdp, pi), floor, goal)
    assert found.sum() == pytest.approx(1)
    assert found.min() >= floor - 1e-9
    total = {"sum": np.sum, "largest": np.max}[goal]
    best, equal = total(variances(mdp, pi, found)), total(variances(mdp, pi, np.full(3, 1 / 3)))
    assert best < equal
    rng = np.random.default_rng(seed)
    for _ in range(20):  # nothing on the simplex above the floor is better: it is convex
        other = floor + (1 - 3 * floor) * rng.dirichlet(np.ones(3))
        assert best <= total(variances(mdp, pi, other)) * (1 + 1e-6)


def test_a_floor_that_leaves_no_room_is_refused():
    with pytest.raises(ValueError, match=r"floor sums to 1.2, expected at most 1"):
        best_shares(np.ones((3, 4)), np.ones((3, 4)), 0.4)


def test_nothing_to_choose_is_equal_shares():
    np.testing.assert_allclose(best_shares(np.zeros((2, 3)), np.ones((2, 3)), 0.1), [0.5, 0.5])
