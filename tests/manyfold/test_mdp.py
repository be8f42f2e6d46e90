import re

import numpy as np
import pytest
from hypothesis import given
from scipy import sparse

from manyfold import exact
from manyfold.exact import FiniteMDP
from tests.worlds import cases, distributions

P = np.full((2, 3, 2), 0.5)
R = np.zeros((2, 3))
START = np.array([1.0, 0.0])


def test_dense_and_sparse_transitions_give_the_same_values():
    rng = np.random.default_rng(0)
    p = distributions(rng, (4, 3, 4), "zeros")
    r = rng.standard_normal((4, 3))
    pi = distributions(rng, (2, 5, 4, 3))
    dense = FiniteMDP(p, r, [0.25] * 4, 5)
    for form in (sparse.csr_array, sparse.coo_array, sparse.csr_matrix):
        other = FiniteMDP(form(p.reshape(12, 4)), r, [0.25] * 4, 5)
        assert np.array_equal(exact.values(dense, pi), exact.values(other, pi))


@given(cases())
def test_expect_variance_and_push_match_their_sums(case):
    mdp, rng = case.mdp, case.rng
    p = mdp.transitions.toarray().reshape(mdp.n_states, mdp.n_actions, mdp.n_states)
    f = rng.standard_normal((2, mdp.n_states)) + 5
    x = rng.standard_normal((2, mdp.n_states, mdp.n_actions))
    mean = np.einsum("saz,kz->ksa", p, f)
    np.testing.assert_allclose(mdp.expect(f), mean, atol=1e-12)
    np.testing.assert_allclose(mdp.variance(f), np.einsum("saz,kz->ksa", p, f**2) - mean**2, atol=1e-10)
    assert (mdp.variance(f) >= 0).all()
    np.testing.assert_allclose(mdp.push(x), np.einsum("saz,ksa->kz", p, x), atol=1e-12)


def test_steps_follow_the_transition_probabilities():
    rng = np.random.default_rng(1)
    p = distributions(rng, (3, 2, 3), "zeros")
    mdp = FiniteMDP(p, rng.standard_normal((3, 2)), [1 / 3] * 3, 2)
    n = 60_000
    starts = np.bincount(mdp.start(n, rng), minlength=3) / n
    assert (np.abs(starts - 1 / 3) < 4 * np.sqrt(2 / 9 / n)).all()
    for s in range(3):
        for a in range(2):
            nxt, r = mdp.step(np.full(n, s), np.full(n, a), rng)
            seen = np.bincount(nxt, minlength=3) / n
            assert (np.abs(seen - p[s, a]) <= 4 * np.sqrt(p[s, a] * (1 - p[s, a]) / n)).all()  # 0 stays exactly 0
            assert (r == mdp.rewards[s, a]).all()


NAN = np.where(np.arange(6).reshape(2, 3) == 4, np.nan, 0.0)
SHORT = P.copy()
SHORT[1, 2] = [0.5, 0.47]
NEGATIVE = P.copy()
NEGATIVE[0, 1] = [1.5, -0.5]
INFINITE = P.copy()
INFINITE[0, 1, 0] = np.inf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((P, R, START, 0), "horizon is 0, expected a whole number of at least 1"),
        ((P, R, START, 2.5), "horizon is 2.5, expected a whole number of at least 1"),
        ((P, R, START, True), "horizon is True, expected a whole number"),
        ((P[:, :2], R, START, 1), "transitions has shape [2, 2, 2], expected [2, 3, 2] = [S, A, S]"),
        ((sparse.csr_array(P.reshape(6, 2)[:5]), R, START, 1), "transitions has shape [5, 2], expected [6, 2]"),
        ((P, R[0], START, 1), "rewards has shape [3], expected [S, A]"),
        ((P, NAN, START, 1), "rewards[1, 1] is nan, expected a finite number"),
        ((SHORT, R, START, 1), "transitions: row s=1, a=2 sums to 0.97, expected 1"),
        ((NEGATIVE, R, START, 1), "transitions: p(s'=1 | s=0, a=1) is -0.5, expected a probability"),
        ((INFINITE, R, START, 1), "transitions: p(s'=0 | s=0, a=1) is inf, expected a probability"),
        ((P, R, [1.0, 0.0, 0.0], 1), "initial has shape [3], expected [2] = [S]"),
        ((P, R, [0.5, 0.4], 1), "initial: probabilities at the start sum to 0.9, expected 1"),
        ((P, R, [1.5, -0.5], 1), "initial: probability -0.5"),
        ((P, R, [np.nan, 1.0], 1), "initial[0] is nan"),
    ],
)
def test_a_bad_mdp_is_refused_with_one_clear_line(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        FiniteMDP(*arguments)
    assert "\n" not in str(error.value)


def _bad(index, value):
    pi = np.full((4, 2, 2, 3), 1 / 3)
    pi[index] = value
    return pi


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (np.full((4, 3, 2, 3), 1 / 3), "policies has shape [4, 3, 2, 3], expected [4, 2, 2, 3] = [K, T, S, A]"),
        (np.full((2, 2, 3), 1 / 3), "policies has shape [2, 2, 3], expected [K, T, S, A]"),
        (np.empty((0, 2, 2, 3)), "expected [K, T, S, A] with K >= 1"),
        (_bad((3, 1, 0), [0.3, 0.3, 0.3]), "policies: probabilities at k=3, t=1, s=0 sum to 0.9, expected 1"),
        (_bad((2, 0, 1, 1), np.nan), "policies[2, 0, 1, 1] is nan"),
        (_bad((1, 1, 1), [1.2, -0.2, 0.0]), "policies: probability -0.2 at k=1, t=1, s=1, a=1 is negative"),
    ],
)
def test_bad_policies_are_refused_by_every_function(policies, message):
    mdp = FiniteMDP(P, R, START, 2)
    mu = np.full((2, 2, 3), 1 / 3)
    calls = [
        lambda: exact.action_values(mdp, policies),
        lambda: exact.state_values(mdp, policies),
        lambda: exact.values(mdp, policies),
        lambda: exact.next_value_variances(mdp, policies),
        lambda: exact.second_moments(mdp, policies),
        lambda: exact.second_moments_bellman(mdp, policies),
        lambda: exact.pdis_variance(mdp, policies, mu),
        lambda: exact.baseline_variance(mdp, policies, mu, policies),
        lambda: exact.conditional_variances(mdp, policies, mu),
        lambda: exact.best_behavior(mdp, policies),
        lambda: exact.lowest_variances(mdp, policies),
        lambda: exact.estimator_variances(mdp, policies),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


@pytest.mark.parametrize(
    ("mu", "message"),
    [
        (np.full((2, 3), 1 / 3), "mu has shape [2, 3], expected [2, 2, 3] = [T, S, A]"),
        (_bad((0, 1, 0), [0.3, 0.3, 0.3])[0], "mu: probabilities at t=1, s=0 sum to 0.9, expected 1"),
        (_bad((0, 1, 1, 2), np.inf)[0], "mu[1, 1, 2] is inf"),
    ],
)
def test_a_bad_mu_is_refused(mu, message):
    mdp = FiniteMDP(P, R, START, 2)
    with pytest.raises(ValueError, match=re.escape(message)):
        exact.pdis_variance(mdp, np.full((1, 2, 2, 3), 1 / 3), mu)
