import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyfold import exact
from manyfold.envs.gridworld import Gridworld
from manyfold.exact import FiniteMDP
from tests.worlds import cases, distributions, enumerated_moments, recursive_return


def covering(case, kind="dense"):
    """A random mu that covers everything."""
    return distributions(case.rng, case.policies.shape[1:], kind)


def gridworld(m=4, n_policies=3, seed=0):
    world = Gridworld.draw(m, seed)
    rng = np.random.default_rng(seed)
    return world.mdp(), distributions(rng, (n_policies, m, m * m, 4))


# --- hand-computed ----------------------------------------------------------------------------------------------------


def test_two_step_mdp_by_hand():
    """From s=0, action 0 pays 1 and goes to s=1 or s=2 evenly, action 1 pays 0 and goes to s=2; r(1)=2, r(2)=4."""
    p = np.zeros((3, 2, 3))
    p[0, 0] = [0, 0.5, 0.5]
    p[0, 1] = [0, 0, 1]
    p[1:, :, 0] = 1
    mdp = FiniteMDP(p, [[1, 0], [2, 2], [4, 4]], [1, 0, 0], 2)
    pi = np.full((1, 2, 3, 2), 0.5)
    assert exact.action_values(mdp, pi)[0, 0, 0].tolist() == [1 + 3, 4]
    assert exact.state_values(mdp, pi)[0, :, 0].tolist() == [4, 0.5]
    assert exact.values(mdp, pi).tolist() == [4]
    assert exact.next_value_variances(mdp, pi)[0, 0, 0].tolist() == [1, 0]
    assert exact.next_value_variances(mdp, pi)[0, 1].tolist() == [[0, 0]] * 3
    assert exact.second_moments(mdp, pi)[0, 0, 0].tolist() == [17, 16]  # 4^2 + 1, 4^2
    mu = exact.shared_behavior(pi, exact.second_moments(mdp, pi))
    np.testing.assert_allclose(mu[0, 0], np.sqrt([17, 16]) / np.sqrt([17, 16]).sum())
    # Returns under mu = pi: 3 or 5 with 1/4 each, 4 with 1/2.
    np.testing.assert_allclose(exact.pdis_variance(mdp, pi, pi[0]), [0.5])


# --- two ways to the same number --------------------------------------------------------------------------------------


@given(cases(max_states=5, max_actions=4, max_horizon=6, max_policies=4))
def test_q_hat_by_definition_and_by_bellman_agree(case):
    by_definition = exact.second_moments(case.mdp, case.policies)
    scale = max(1.0, by_definition.max())
    np.testing.assert_allclose(by_definition, exact.second_moments_bellman(case.mdp, case.policies), atol=1e-10 * scale)
    q = exact.action_values(case.mdp, case.policies)
    assert (by_definition >= q**2 - 1e-20 * scale).all()  # rounding is set to 0


def test_q_hat_by_definition_and_by_bellman_agree_on_gridworld():
    mdp, pi = gridworld(10)
    np.testing.assert_allclose(exact.second_moments(mdp, pi), exact.second_moments_bellman(mdp, pi), atol=1e-10)


@given(cases())
def test_q_hat_is_the_second_moment_of_the_on_policy_return(case):
    """Enumerated from every start: E[G^2] = sum_{s, a} p_0 pi q_hat."""
    q_hat = exact.second_moments(case.mdp, case.policies)
    for k, pi in enumerate(case.policies):
        mean, variance = enumerated_moments(case.mdp, pi, recursive_return(case.mdp, pi, pi))
        expected = case.mdp.initial @ (pi[0] * q_hat[k, 0]).sum(-1)
        np.testing.assert_allclose(expected, variance + mean**2, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(exact.values(case.mdp, case.policies)[k], mean, atol=1e-9)


def test_q_hat_at_a_single_step_is_q_squared():
    rng = np.random.default_rng(3)
    mdp = FiniteMDP(distributions(rng, (2, 3, 2)), rng.standard_normal((2, 3)), [0.5, 0.5], 1)
    pi = distributions(rng, (2, 1, 2, 3))
    assert np.array_equal(exact.second_moments(mdp, pi), exact.action_values(mdp, pi) ** 2)


@given(cases())
def test_exact_variance_equals_the_enumerated_one(case):
    mu = covering(case)
    b = case.rng.standard_normal(case.policies.shape)
    pdis = exact.pdis_variance(case.mdp, case.policies, mu)
    baseline = exact.baseline_variance(case.mdp, case.policies, mu, b)
    values = exact.values(case.mdp, case.policies)
    for k, pi in enumerate(case.policies):
        for variance, base in ((pdis[k], None), (baseline[k], b[k])):
            mean, enumerated = enumerated_moments(case.mdp, mu, recursive_return(case.mdp, pi, mu, base))
            np.testing.assert_allclose(mean, values[k], rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(variance, enumerated, rtol=1e-8, atol=1e-8)


@given(cases())
def test_conditional_variance_is_the_variance_from_each_initial_state(case):
    mu = covering(case)
    by_state = exact.conditional_variances(case.mdp, case.policies, mu)
    for s in range(case.mdp.n_states):
        from_s = FiniteMDP(case.mdp.transitions, case.mdp.rewards, np.eye(case.mdp.n_states)[s], case.mdp.horizon)
        np.testing.assert_allclose(by_state[:, 0, s], exact.pdis_variance(from_s, case.policies, mu), rtol=1e-12)


@given(cases())
def test_mu_equal_pi_is_monte_carlo(case):
    """Ratios are 1, so the PDIS return is the plain return: Var = E[G^2] - J^2."""
    q_hat = exact.second_moments(case.mdp, case.policies)
    for k, pi in enumerate(case.policies):
        second = case.mdp.initial @ (pi[0] * q_hat[k, 0]).sum(-1)
        one = case.policies[k : k + 1]
        expected = second - exact.values(case.mdp, one)[0] ** 2
        np.testing.assert_allclose(exact.pdis_variance(case.mdp, one, pi), expected, rtol=1e-8, atol=1e-8)


@given(cases(max_policies=1))
def test_mpe_of_one_policy_is_odi(case):
    q_hat = exact.second_moments(case.mdp, case.policies)
    mu = exact.shared_behavior(case.policies, q_hat)
    np.testing.assert_allclose(mu, exact.odi_behaviors(case.policies, q_hat)[0], rtol=1e-12)
    variances = exact.estimator_variances(case.mdp, case.policies)
    for name in ("odi", "sodi"):
        np.testing.assert_allclose(variances["mpe"], variances[name], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(variances["son"], variances["on_policy"], rtol=1e-9, atol=1e-12)


# --- Theorem 2 --------------------------------------------------------------------------------------------------------


def one_step_objective(policies, q_hat, mu):
    """sum_k E_mu[rho_k^2 q_hat_k] at every (t, s): Theorem 2's objective up to a constant."""
    w = (policies**2 * q_hat).sum(0)
    return np.divide(w, mu, out=np.where(w > 0, np.inf, 0.0), where=mu > 0).sum(-1)


@given(cases(max_states=4, max_actions=4, max_horizon=4), st.sampled_from([0.01, 0.3, 1.0]))
def test_no_other_mu_beats_theorem_2_on_its_objective(case, distance):
    q_hat = exact.second_moments(case.mdp, case.policies)
    mu = exact.shared_behavior(case.policies, q_hat)
    best = one_step_objective(case.policies, q_hat, mu)
    for kind in ("dense", "zeros", "dense"):
        other = (1 - distance) * mu + distance * covering(case, kind)
        assert (one_step_objective(case.policies, q_hat, other) >= best * (1 - 1e-12)).all()


def test_the_misprinted_formula_is_beaten():
    """The appendix prints sqrt(sum_k pi q_hat^2); Theorem 2's sqrt(sum_k pi^2 q_hat) has the lower objective."""
    mdp, pi = gridworld()
    q_hat = exact.second_moments(mdp, pi)
    misprint = np.sqrt((pi * q_hat**2).sum(0))
    misprint /= misprint.sum(-1, keepdims=True)
    right = exact.shared_behavior(pi, q_hat)
    assert (one_step_objective(pi, q_hat, misprint) > one_step_objective(pi, q_hat, right) * 1.01).mean() > 0.9
    assert exact.pdis_variance(mdp, pi, misprint).sum() > 1.1 * exact.pdis_variance(mdp, pi, right).sum()


def test_theorem_2_minimises_the_variance_it_is_stated_for():
    """At t, mu for one step and on-policy afterwards: perturbing mu_t raises the sum of exact variances."""
    mdp, pi = gridworld(3, 2)
    mu = exact.shared_behavior(pi, exact.second_moments(mdp, pi))
    rng = np.random.default_rng(0)

    def total(mu_0):
        variances = []
        for k in range(len(pi)):
            mixed = pi[k].copy()
            mixed[0] = mu_0
            variances.append(exact.pdis_variance(mdp, pi[k : k + 1], mixed)[0])
        return sum(variances)

    best = total(mu[0])
    for distance in (0.02, 0.2, 1.0):
        for _ in range(20):
            assert total((1 - distance) * mu[0] + distance * distributions(rng, mu[0].shape)) >= best


def test_mu_is_uniform_where_nothing_counts():
    mdp = FiniteMDP(np.ones((1, 3, 1)), np.zeros((1, 3)), [1.0], 2)
    pi = np.broadcast_to([1.0, 0.0, 0.0], (2, 2, 1, 3))
    mu = exact.shared_behavior(pi, exact.second_moments(mdp, pi))
    np.testing.assert_allclose(mu, 1 / 3)
    assert exact.pdis_variance(mdp, pi, mu).tolist() == [0, 0]
    with pytest.raises(ValueError, match="variance 0 for every policy"):
        exact.relative_variances(exact.estimator_variances(mdp, pi))


def test_mu_covers_a_probability_of_1e_200():
    mdp = FiniteMDP(np.ones((1, 2, 1)), [[1.0, 2.0]], [1.0], 1)
    pi = np.array([[[[1.0, 1e-200]]], [[[1.0, 1e-250]]]])
    mu = exact.shared_behavior(pi, exact.second_moments(mdp, pi))
    assert mu[0, 0, 1] > 0
    assert np.isfinite(exact.pdis_variance(mdp, pi, mu)).all()


@pytest.mark.parametrize("tiny", [1e-300, 5e-324])
def test_a_mu_of_1e_300_has_an_infinite_variance(tiny):
    """State 0, action 0 pays 1, action 1 pays 2; state 1 pays 0 in both, so that nothing there can be infinite."""
    mdp = FiniteMDP(np.eye(2)[:, None].repeat(2, 1), [[1.0, 2.0], [0.0, 0.0]], [1.0, 0.0], 2)
    pi = np.full((2, 2, 2, 2), 0.5)
    pi[1] = [1.0, 0.0]  # never takes what mu hardly takes
    mu = np.broadcast_to([1.0, tiny], (2, 2, 2))
    infinite = pytest.approx([np.inf, 0.0], abs=1e-290)
    assert exact.conditional_variances(mdp, pi, mu)[:, 0, 0] == infinite
    assert (exact.conditional_variances(mdp, pi, mu)[..., 1] == 0).all()
    assert exact.pdis_variance(mdp, pi, mu) == infinite
    assert exact.baseline_variance(mdp, pi, mu, np.zeros_like(pi)) == infinite
    assert exact.baseline_variance(mdp, pi, mu, exact.action_values(mdp, pi)).tolist() == [0.0, 0.0]
    elsewhere = FiniteMDP(mdp.transitions, mdp.rewards, [0.0, 1.0], 2)  # starts where nothing is infinite
    assert exact.pdis_variance(elsewhere, pi, mu).tolist() == [0.0, 0.0]
    found = exact.estimator_variances(mdp, pi, behaviors=(mu, np.stack([mu, mu])))
    for name in ("mpe", "odi", "sodi"):
        assert found[name] == infinite
    assert exact.relative_variances(found)["mpe"] == np.inf


@given(cases(max_states=4), st.sampled_from([1e-120, 1e-200, 1e-308, 5e-324]))
def test_no_mu_gives_nan(case, tiny):
    """However small its probabilities, on paths that are taken or not."""
    mu = covering(case)
    mu[case.rng.random(mu.shape) < 0.3] = tiny
    mu[..., 0] += (mu.sum(-1) < 0.5) * 1.0
    mu /= mu.sum(-1, keepdims=True)
    mu[mu == 0] = 5e-324  # 5e-324 / 2 is 0
    b = case.rng.standard_normal(case.policies.shape)
    for baseline in (None, b, exact.action_values(case.mdp, case.policies)):
        variance = exact.baseline_variance(case.mdp, case.policies, mu, baseline)
        assert (variance >= 0).all()
    found = exact.estimator_variances(case.mdp, case.policies, behaviors=(mu, np.stack([mu] * len(case.policies))))
    assert all((variance >= 0).all() for variance in found.values())
    least = exact.lowest_variances(case.mdp, case.policies)
    assert (least <= exact.pdis_variance(case.mdp, case.policies, mu) * (1 + 1e-9) + 1e-9).all()


@pytest.mark.parametrize("bad", [-1e-9, np.nan, np.inf])
def test_a_bad_q_hat_is_refused(bad):
    q_hat = np.ones((2, 1, 2, 2))
    q_hat[1, 0, 1, 0] = bad
    with pytest.raises(ValueError, match=r"q_hat\[1, 0, 1, 0\]"):
        exact.shared_behavior(np.full((2, 1, 2, 2), 0.5), q_hat)


# --- coverage ---------------------------------------------------------------------------------------------------------


def test_a_mu_that_does_not_cover_is_refused_by_name():
    mdp, pi = gridworld()
    mu = np.full(pi.shape[1:], 0.25)
    mu[2, 5] = [0.5, 0.5, 0.0, 0.0]
    with pytest.raises(ValueError, match="does not cover policy k=0 at t=2, s=5, a=2"):
        exact.pdis_variance(mdp, pi, mu)
    for b in (np.zeros_like(pi), exact.action_values(mdp, pi)):
        with pytest.raises(ValueError, match="does not cover policy k=0 at t=2, s=5, a=2"):
            exact.baseline_variance(mdp, pi, mu, b)


def test_mu_may_leave_out_what_is_worth_nothing():
    """q_hat = 0 at action 1: never taking it stays unbiased (Lambda-hat is larger than classical coverage)."""
    mdp = FiniteMDP(np.ones((1, 2, 1)), [[1.0, 0.0]], [1.0], 1)
    pi = np.full((1, 1, 1, 2), 0.5)
    mu = np.array([[[1.0, 0.0]]])
    assert exact.pdis_variance(mdp, pi, mu).tolist() == [0.0]
    assert enumerated_moments(mdp, mu, recursive_return(mdp, pi[0], mu)) == (0.5, 0.0)


def test_rounding_does_not_count_as_a_return():
    """0.1 + 0.2 - 0.3 is 5.6e-17, not a reason to refuse a mu that leaves it out."""
    p = np.zeros((3, 2, 3))
    p[0, :, 1] = p[1, :, 2] = p[2, :, 2] = 1
    mdp = FiniteMDP(p, [[0.1, 5.0], [0.2, 0.2], [-0.3, -0.3]], [1, 0, 0], 3)
    pi = np.full((1, 3, 3, 2), 0.5)
    mu = pi[0].copy()
    mu[0, 0] = [0.0, 1.0]
    _, enumerated = enumerated_moments(mdp, mu, recursive_return(mdp, pi[0], mu))
    np.testing.assert_allclose(exact.pdis_variance(mdp, pi, mu), enumerated, atol=1e-12)
    mu[0, 0] = [1.0, 0.0]
    with pytest.raises(ValueError, match="k=0 at t=0, s=0, a=1"):
        exact.pdis_variance(mdp, pi, mu)


def test_theorem_2_drops_an_action_whose_return_cancels():
    """Action 0 pays 1 and then surely -1: q_hat = 0 up to rounding. Taken with 1e-17 it would ruin the variance."""
    p = np.zeros((3, 2, 3))
    p[0, 0, 1] = p[0, 1, 2] = p[1, :, 1] = p[2, :, 2] = 1
    mdp = FiniteMDP(p, [[1.0, 0.0], [-1.0, -1.0], [2.0, 2.0]], [1, 0, 0], 2)
    rng = np.random.default_rng(0)
    pi = distributions(rng, (3, 2, 3, 2))
    q_hat = exact.second_moments(mdp, pi)
    assert (q_hat[:, 0, 0, 0] == 0).all()
    mu = exact.shared_behavior(pi, q_hat)
    assert mu[0, 0].tolist() == [0.0, 1.0]
    for k in range(3):
        mean, variance = enumerated_moments(mdp, mu, recursive_return(mdp, pi[k], mu))
        np.testing.assert_allclose(mean, exact.values(mdp, pi)[k])
        np.testing.assert_allclose(exact.pdis_variance(mdp, pi, mu)[k], variance, atol=1e-12)


@given(cases())
def test_theorem_2_always_covers(case):
    q_hat = exact.second_moments(case.mdp, case.policies)
    assert np.isfinite(exact.pdis_variance(case.mdp, case.policies, exact.shared_behavior(case.policies, q_hat))).all()
    assert np.isfinite(exact.pdis_variance(case.mdp, case.policies, exact.best_behavior(case.mdp, case.policies))).all()


# --- the best mu over whole episodes ----------------------------------------------------------------------------------


@given(cases(max_states=3, max_actions=3, max_horizon=3), st.sampled_from(["none", "random", "q"]))
def test_the_best_mu_lies_between_its_bound_and_every_other(case, baseline):
    b = {
        "none": None,
        "random": case.rng.standard_normal(case.policies.shape),
        "q": exact.action_values(case.mdp, case.policies),
    }[baseline]
    best = exact.baseline_variance(case.mdp, case.policies, exact.best_behavior(case.mdp, case.policies, b), b).sum()
    tolerance = 1e-9 * max(1.0, best)
    assert exact.lowest_variances(case.mdp, case.policies, b).sum() <= best + tolerance
    mpe = exact.shared_behavior(case.policies, exact.second_moments(case.mdp, case.policies, b))
    assert best <= exact.baseline_variance(case.mdp, case.policies, mpe, b).sum() + tolerance


@given(cases(max_policies=1))
def test_for_one_policy_the_best_mu_reaches_the_bound(case):
    best = exact.pdis_variance(case.mdp, case.policies, exact.best_behavior(case.mdp, case.policies))
    np.testing.assert_allclose(best, exact.lowest_variances(case.mdp, case.policies), rtol=1e-9, atol=1e-9)


def test_no_perturbation_beats_the_best_mu():
    mdp, pi = gridworld(3, 3)
    mu = exact.best_behavior(mdp, pi)
    best = exact.pdis_variance(mdp, pi, mu).sum()
    mpe = exact.pdis_variance(mdp, pi, exact.shared_behavior(pi, exact.second_moments(mdp, pi))).sum()
    assert exact.lowest_variances(mdp, pi).sum() < best < 0.99 * mpe
    rng = np.random.default_rng(0)
    for distance in (1e-3, 1e-2, 0.1, 1.0):
        for _ in range(50):
            other = (1 - distance) * mu + distance * distributions(rng, mu.shape)
            assert exact.pdis_variance(mdp, pi, other).sum() >= best


def test_one_backward_pass_is_not_enough_for_several_policies():
    """Why `best_behavior` repeats its pass: with equal weights for all policies everywhere, the sum is higher."""
    mdp, pi = gridworld(3, 3)
    q = exact.action_values(mdp, pi)
    nu = exact.next_value_variances(mdp, pi)
    v, plain = np.zeros((3, 9)), np.empty(pi.shape[1:])
    for t in reversed(range(3)):
        m = q[:, t] ** 2 + nu[:, t] + (mdp.expect(v) if t < 2 else 0)
        plain[t] = np.sqrt((pi[:, t] ** 2 * m).sum(0))
        plain[t] /= plain[t].sum(-1, keepdims=True)
        v = (pi[:, t] ** 2 / plain[t] * m).sum(-1) - (pi[:, t] * q[:, t]).sum(-1) ** 2
    best = exact.pdis_variance(mdp, pi, exact.best_behavior(mdp, pi)).sum()
    assert best < exact.pdis_variance(mdp, pi, plain).sum() * (1 - 1e-6)


# --- the baseline return ----------------------------------------------------------------------------------------------


@given(cases())
def test_with_exact_q_as_baseline_only_the_environment_is_random(case):
    """On-policy, b = q leaves sum_t E[nu_t]; from enumeration of the recursion."""
    q = exact.action_values(case.mdp, case.policies)
    for k, pi in enumerate(case.policies):
        one = case.policies[k : k + 1]
        variance = exact.baseline_variance(case.mdp, one, pi, q[k : k + 1])[0]
        _, enumerated = enumerated_moments(case.mdp, pi, recursive_return(case.mdp, pi, pi, q[k]))
        np.testing.assert_allclose(variance, enumerated, rtol=1e-8, atol=1e-8)


@given(cases(max_horizon=1))
def test_at_one_step_q_as_baseline_leaves_only_the_initial_state(case):
    q = exact.action_values(case.mdp, case.policies)
    v = exact.state_values(case.mdp, case.policies)[:, 0]
    variance = exact.baseline_variance(case.mdp, case.policies, covering(case), q)
    mean = v @ case.mdp.initial
    np.testing.assert_allclose(variance, (v - mean[:, None]) ** 2 @ case.mdp.initial, atol=1e-10)


def test_the_best_shared_mu_for_the_baseline_return_beats_theorem_2s_for_it():
    mdp, pi = gridworld()
    q = exact.action_values(mdp, pi)
    for_pdis = exact.shared_behavior(pi, exact.second_moments(mdp, pi))
    for_baseline = exact.shared_behavior(pi, exact.second_moments(mdp, pi, q))
    improved = exact.baseline_variance(mdp, pi, for_baseline, q).sum()
    assert improved < 0.98 * exact.baseline_variance(mdp, pi, for_pdis, q).sum()
    assert exact.baseline_variance(mdp, pi, exact.best_behavior(mdp, pi, q), q).sum() <= improved


def test_a_baseline_of_another_shape_is_refused():
    mdp, pi = gridworld()
    with pytest.raises(ValueError, match="b has shape"):
        exact.baseline_variance(mdp, pi, pi[0], pi[0])
    with pytest.raises(ValueError, match=r"b\[0, 0, 0, 0\] is nan"):
        exact.baseline_variance(mdp, pi, pi[0], np.full_like(pi, np.nan))


# --- estimators at equal cost -----------------------------------------------------------------------------------------


@given(cases(policy_kinds=("dense",)))
def test_estimator_variances_are_built_from_enumerated_ones(case):
    mdp, policies = case.mdp, case.policies
    n_policies = len(policies)
    q_hat = exact.second_moments(mdp, policies)
    mu = exact.shared_behavior(policies, q_hat)
    odi = exact.odi_behaviors(policies, q_hat)
    found = exact.estimator_variances(mdp, policies)

    def enumerated(k, behavior):
        return enumerated_moments(mdp, behavior, recursive_return(mdp, policies[k], behavior))[1]

    for k in range(n_policies):
        expected = {
            "on_policy": n_policies * enumerated(k, policies[k]),
            "mpe": enumerated(k, mu),
            "odi": n_policies * enumerated(k, odi[k]),
            "son": np.mean([enumerated(k, pi_j) for pi_j in policies]),
        }
        for name, variance in expected.items():
            np.testing.assert_allclose(found[name][k], variance, rtol=1e-7, atol=1e-7, err_msg=name)


def test_a_logger_that_does_not_cover_makes_sharing_infinite_and_leaves_the_rest():
    mdp = FiniteMDP(np.ones((1, 2, 1)), [[1.0, 2.0]], [1.0], 1)
    pi = np.array([[[[0.5, 0.5]]], [[[1.0, 0.0]]]])
    variances = exact.estimator_variances(mdp, pi)
    assert variances["son"].tolist() == [np.inf, pytest.approx(0.5 * (0 + 1 / 0.5 - 1))]
    assert np.isfinite(variances["mpe"]).all()
    assert np.isfinite(variances["odi"]).all()


@given(cases(policy_kinds=("dense",)))
def test_mpe_baseline_and_fitted_q_hat_are_what_they_say(case):
    mdp, pi = case.mdp, case.policies
    fitted = exact.second_moments(mdp, pi) + case.rng.random(pi.shape)
    b = case.rng.standard_normal(pi.shape)
    found = exact.estimator_variances(mdp, pi, fitted, b)
    mu = exact.shared_behavior(pi, fitted)
    np.testing.assert_allclose(found["mpe"], exact.pdis_variance(mdp, pi, mu))
    np.testing.assert_allclose(found["mpe_baseline"], exact.baseline_variance(mdp, pi, mu, b))
    by_default = exact.estimator_variances(mdp, pi, fitted)["mpe_baseline"]
    np.testing.assert_allclose(by_default, exact.baseline_variance(mdp, pi, mu, exact.action_values(mdp, pi)))


def test_a_penalty_elsewhere_does_not_hide_a_return():
    """Rounding is judged by the rewards that the policy can meet: 1 counts although r = -1e13 exists."""
    mdp = FiniteMDP(np.ones((1, 3, 1)), [[1.0, 20.0, -1e13]], [1.0], 1)
    pi = np.array([[[[0.5, 0.5, 0.0]]]])
    mu = exact.shared_behavior(pi, exact.second_moments(mdp, pi))
    assert mu[0, 0, 0] > 0
    mean, _ = enumerated_moments(mdp, mu, recursive_return(mdp, pi[0], mu))
    assert mean == pytest.approx(10.5)


def test_equal_rewards_leave_nothing_to_compare():
    mdp = FiniteMDP(np.full((2, 2, 2), 0.5), np.full((2, 2), 0.1), [1, 0], 5)
    pi = distributions(np.random.default_rng(0), (2, 5, 2, 2))
    with pytest.raises(ValueError, match="variance 0 for every policy"):
        exact.relative_variances(exact.estimator_variances(mdp, pi))
    with pytest.raises(ValueError, match="expected on_policy among them"):
        exact.relative_variances({"mpe": np.ones(2)})


def test_swapped_arguments_are_refused():
    mdp, pi = gridworld()
    with pytest.raises(ValueError, match="policies: probabilities at k=0, t=0, s=0 sum to"):
        exact.shared_behavior(exact.second_moments(mdp, pi), pi)


def test_relative_variances_are_ratios_of_sums():
    variances = {"on_policy": np.array([1.0, 3.0]), "mpe": np.array([0.5, 0.5])}
    assert exact.relative_variances(variances) == {"on_policy": 1.0, "mpe": 0.25}


def test_equal_policies_share_perfectly():
    """K copies of one policy: sharing divides the variance by K, for every sharing estimator."""
    mdp, pi = gridworld(4, 1)
    relative = exact.relative_variances(exact.estimator_variances(mdp, np.repeat(pi, 5, axis=0)))
    assert relative["son"] == pytest.approx(1 / 5)
    assert relative["mpe"] == pytest.approx(relative["odi"] / 5)
    assert relative["sodi"] == pytest.approx(relative["odi"] / 5)


@pytest.mark.slow
def test_gridworld_27000_takes_under_3_seconds_and_1_gib():
    done = subprocess.run([sys.executable, "-m", "benchmarks.exact"], capture_output=True, text=True, check=True)
    seconds, gib = re.search(r"27,000 +│ +([\d.]+) s │ +([\d.]+) GiB", done.stdout).groups()
    assert float(seconds) < 3
    assert float(gib) < 1
