import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyfold import exact, similarity
from manyfold.exact import FiniteMDP
from tests.worlds import cases, distributions

SCOPES = ("step", "state")


def near(case, distance):
    """The case's policies drawn towards the first one, so that the conditions hold at some places."""
    return (1 - distance) * case.policies[:1] + distance * case.policies


def variances(mdp, policies):
    """Var(G_t | s) under the shared mu and on-policy, `[K, T, S]` each."""
    q_hat = exact.second_moments(mdp, policies)
    shared = exact.conditional_variances(mdp, policies, exact.shared_behavior(policies, q_hat))
    on_policy = np.concatenate([exact.conditional_variances(mdp, pi[None], pi) for pi in policies])
    return shared, on_policy


distances = st.sampled_from([0.0, 1e-3, 0.03, 0.3, 1.0])


@given(cases(), distances, st.sampled_from(SCOPES))
def test_where_theorem_4_holds_its_inequality_holds(case, distance, scope):
    policies = near(case, distance)
    q_hat = exact.second_moments(case.mdp, policies)
    promised = similarity.promised(case.mdp, policies, similarity.theorem_4(policies, q_hat, scope))
    shared, on_policy = variances(case.mdp, policies)
    assert (shared <= on_policy * (1 + 1e-9) + 1e-9)[promised].all()


@given(cases(), distances, st.sampled_from(SCOPES), st.sampled_from(["equal", "random"]))
def test_where_theorem_3_holds_its_inequality_holds(case, distance, scope, split):
    policies = near(case, distance)
    n_policies = len(policies)
    share = np.full(n_policies, 1 / n_policies) if split == "equal" else distributions(case.rng, (n_policies,))
    q_hat = exact.second_moments(case.mdp, policies)
    q, nu = exact.action_values(case.mdp, policies), exact.next_value_variances(case.mdp, policies)
    promised = similarity.promised(case.mdp, policies, similarity.theorem_3(policies, q, nu, q_hat, share, scope))
    shared, on_policy = variances(case.mdp, policies)
    assert (share[:, None, None] * shared <= on_policy * (1 + 1e-9) + 1e-9)[promised].all()


@given(cases(max_horizon=1, max_actions=4), distances, st.sampled_from(SCOPES))
def test_where_the_lemmas_hold_their_inequalities_hold(case, distance, scope):
    policies = near(case, distance)
    q = exact.action_values(case.mdp, policies)
    share = distributions(case.rng, (len(policies),))
    shared, on_policy = variances(case.mdp, policies)
    lemma_4 = similarity.lemma_4(policies, q, scope)
    assert (shared <= on_policy * (1 + 1e-9) + 1e-9)[lemma_4].all()
    lemma_3 = similarity.lemma_3(policies, q, share, scope)
    assert (share[:, None, None] * shared <= on_policy * (1 + 1e-9) + 1e-9)[lemma_3].all()
    assert (lemma_3 >= lemma_4).all()  # equal n asks for less


@given(cases(), distances)
def test_the_sharper_scope_holds_wherever_the_stated_one_does(case, distance):
    policies = near(case, distance)
    q_hat = exact.second_moments(case.mdp, policies)
    stated, sharper = (similarity.theorem_4(policies, q_hat, scope) for scope in SCOPES)
    spread = [similarity.eta_spread(similarity.eta(policies, q_hat), scope) for scope in SCOPES]
    assert (spread[1] <= spread[0] * (1 + 1e-12)).all()
    assert sharper[stated].all()


def test_the_conditions_hold_and_fail_where_they_should():
    """Equal policies satisfy Theorem 4 everywhere; opposite ones nowhere; theorem 3 asks for less than 4."""
    rng = np.random.default_rng(0)
    mdp = FiniteMDP(distributions(rng, (3, 3, 3)), rng.standard_normal((3, 3)), [1, 0, 0], 4)
    pi = distributions(rng, (1, 4, 3, 3))
    equal = np.repeat(pi, 3, axis=0)
    q_hat = exact.second_moments(mdp, equal)
    np.testing.assert_allclose(similarity.eta(equal, q_hat), 1.0)
    assert similarity.theorem_4(equal, q_hat).all()
    assert similarity.promised(mdp, equal, similarity.theorem_4(equal, q_hat)).all()

    opposite = np.stack([np.broadcast_to([1.0, 0, 0], (4, 3, 3)), np.broadcast_to([0, 0, 1.0], (4, 3, 3))])
    q_hat = exact.second_moments(mdp, opposite)
    assert np.isinf(similarity.eta_spread(similarity.eta(opposite, q_hat))).all()
    assert not similarity.theorem_4(opposite, q_hat).any()

    mixed = 0.97 * equal + 0.03 * distributions(rng, equal.shape)
    q, nu, q_hat = (f(mdp, mixed) for f in (exact.action_values, exact.next_value_variances, exact.second_moments))
    easier = similarity.theorem_3(mixed, q, nu, q_hat, 1 / 3)
    harder = similarity.theorem_4(mixed, q_hat)
    assert (easier >= harder).all()
    assert easier.sum() > harder.sum()


@given(cases(max_actions=1))
def test_equality_counts_as_holding(case):
    """With one action, or equal policies, both sides of Theorem 4's condition are the same number."""
    q_hat = exact.second_moments(case.mdp, case.policies)
    assert similarity.theorem_4(case.policies, q_hat).all()


def test_equal_deterministic_policies_meet_theorem_4_everywhere():
    rng = np.random.default_rng(0)
    mdp = FiniteMDP(distributions(rng, (9, 4, 9)), rng.standard_normal((9, 4)), [1 / 9] * 9, 4)
    pi = np.repeat(distributions(rng, (1, 4, 9, 4), "deterministic"), 3, axis=0)
    assert similarity.theorem_4(pi, exact.second_moments(mdp, pi)).all()


def test_eta_by_hand():
    pi = np.array([[[[0.5, 0.5, 0.0]]], [[[0.25, 0.0, 0.75]]]])
    q_hat = np.array([[[[4.0, 1.0, 1.0]]], [[[4.0, 1.0, 0.0]]]])
    # w = [1, 0.25, 0], [0.25, 0, 0]; w_bar = [0.625, 0.125, 0]
    expected = [[1.6, 2.0, np.nan], [0.4, 0.0, np.nan]]
    np.testing.assert_allclose(similarity.eta(pi, q_hat)[:, 0, 0], expected)
    assert similarity.eta_spread(similarity.eta(pi, q_hat))[0, 0, 0] == np.inf
    by_state = similarity.eta_spread(similarity.eta(pi, q_hat), "state")
    np.testing.assert_allclose(by_state[:, 0, 0], [np.sqrt(2.0 / 1.6), np.inf])


def test_a_condition_promises_nothing_where_policy_k_can_leave_it():
    """The condition fails at (t=1, s=1); from s=0 only action 1 leads there, and only policy 1 takes it."""
    p = np.zeros((2, 2, 2))
    p[:, 0, 0] = p[:, 1, 1] = 1
    mdp = FiniteMDP(p, np.ones((2, 2)), [1, 0], 2)
    pi = np.stack([np.broadcast_to([1.0, 0.0], (2, 2, 2)), np.full((2, 2, 2), 0.5)])
    holds = np.ones((2, 2, 2), dtype=bool)
    holds[:, 1, 1] = False
    assert similarity.promised(mdp, pi, holds)[:, 0, 0].tolist() == [True, False]


def test_the_printed_lemma_4_fails_for_rewards_of_both_signs():
    """The paper prints (sum pi q)^2: near 0 for policy 0, so its condition holds, yet the inequality fails."""
    mdp = FiniteMDP(np.ones((1, 3, 1)), [[1.0, -1.0, 3.0]], [1.0], 1)
    pi = np.array([[[[0.495, 0.495, 0.01]]], [[[0.01, 0.01, 0.98]]]])
    q = exact.action_values(mdp, pi)
    spread = similarity.eta_spread(similarity.eta(pi, q**2), "step")[:, 0, 0]
    printed = spread * (pi * q).sum(-1)[:, 0, 0] ** 2 <= (pi * q**2).sum(-1)[:, 0, 0]
    shared, on_policy = variances(mdp, pi)
    assert printed[0]
    assert shared[0, 0, 0] > on_policy[0, 0, 0]
    assert not similarity.lemma_4(pi, q)[0, 0, 0]


@pytest.mark.parametrize("share", [0.0, 1.5, np.nan])
def test_bad_shares_and_horizons_are_refused(share):
    pi = np.full((2, 1, 1, 2), 0.5)
    with pytest.raises(ValueError, match=r"expected n_k / n in \(0, 1\]"):
        similarity.lemma_3(pi, pi, share)
    with pytest.raises(ValueError, match="the lemmas are for T = 1"):
        similarity.lemma_4(np.full((2, 2, 1, 2), 0.5), np.ones((2, 2, 1, 2)))
    with pytest.raises(ValueError, match="scope is 'all', expected 'step' or 'state'"):
        similarity.theorem_4(pi, pi, "all")
    with pytest.raises(ValueError, match=r"q_hat\[0, 0, 0, 0\] is nan"):
        similarity.theorem_4(pi, pi * np.nan)
