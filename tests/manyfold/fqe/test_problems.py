"""The named problems: their rewards and weights by hand, and that exact values solve them."""

import numpy as np
import pytest
from hypothesis import given

from manyfold import exact
from manyfold.data.transitions import Batch
from manyfold.fqe.problems import look_up, moment_reward, policy_weights, q_hat_problem, q_problem
from manyfold.policies import TabularPolicySet
from tests.networks import mlp_policies, nets_from_table, value_nets
from tests.worlds import cases, distributions


def batch(t, state, action, reward):
    n = len(t)
    state = np.asarray(state, dtype=np.float32).reshape(n, -1)
    no = np.zeros(n, dtype=bool)
    return Batch(np.array(t, np.int16), state, np.array(action, np.int16), np.array(reward), state, no, no)


def test_q_has_the_logged_reward_for_every_policy():
    policies = TabularPolicySet(distributions(np.random.default_rng(0), (3, 2, 4, 2)))
    problem = q_problem(policies)
    assert problem.reward(batch([0, 1], [1, 3], [0, 1], [2.0, -1.0])).tolist() == [[2.0, -1.0]] * 3


@pytest.mark.parametrize("problem", [q_problem, lambda policies: q_hat_problem(policies, nets_from_table(zeros()))])
def test_next_weights_are_the_policies_probabilities(problem):
    table = distributions(np.random.default_rng(0), (3, 2, 4, 2))
    found = problem(TabularPolicySet(table)).weights(np.array([[1.0], [3.0]], dtype=np.float32), np.array([1, 0]))
    np.testing.assert_allclose(found, table[:, [1, 0], [1, 3]], rtol=1e-6)


def zeros():
    return np.zeros((3, 2, 4, 2))


def test_weights_of_vectors_are_asked_of_the_policies():
    policies = mlp_policies(horizon=3, n_features=4)
    states, t = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32), np.arange(5) % 3
    assert np.array_equal(policy_weights(policies)(states, t), policies.probs(states, t))


def test_the_reward_of_a_moment_by_hand():
    """r_hat = 2 r q - r^2 of the action taken, in a table and in nets of vectors."""
    q = np.arange(48.0).reshape(3, 2, 4, 2)
    rows = batch([0, 1], [1, 3], [0, 1], [2.0, -1.0])
    expected = [[2 * 2 * q[k, 0, 1, 0] - 4, 2 * -1 * q[k, 1, 3, 1] - 1] for k in range(3)]
    np.testing.assert_allclose(moment_reward(nets_from_table(q))(rows), expected, rtol=1e-6)
    nets = value_nets(mlp_policies(horizon=2, n_features=4, n_actions=2), 0)
    states = np.random.default_rng(0).standard_normal((2, 4))
    rows = batch([0, 1], states, [0, 1], [2.0, -1.0])
    taken = [nets.predict(states[[0]], 0)[:, 0, 0], nets.predict(states[[1]], 1)[:, 0, 1]]
    expected = np.stack([2 * 2 * taken[0] - 4, 2 * -1 * taken[1] - 1], 1)
    np.testing.assert_allclose(moment_reward(nets)(rows), expected, rtol=1e-5)


@given(cases(max_states=3, max_actions=2))
def test_exact_values_solve_the_problems(case):
    """f(t, s, a) = reward + E[sum_a' weights f(t + 1, S', a')] at every place, by the exact q and second moments."""
    mdp = case.mdp
    q, q_hat = exact.action_values(mdp, case.policies), exact.second_moments(mdp, case.policies)
    problems = (
        (q, q_problem(TabularPolicySet(case.policies))),
        (q_hat, q_hat_problem(TabularPolicySet(case.policies), nets_from_table(q))),
    )
    s, a = (x.ravel() for x in np.indices((mdp.n_states, mdp.n_actions)))
    states = np.arange(mdp.n_states, dtype=np.float32)[:, None]
    scale = 1 + np.abs(q_hat).max()
    for exactly, problem in problems:
        for t in range(mdp.horizon):
            expected = problem.reward(batch(np.full(len(s), t), s, a, mdp.rewards[s, a]))
            if t + 1 < mdp.horizon:
                weights = problem.weights(states, np.full(len(states), t + 1))  # [K, S, A]
                after = mdp.expect((weights * exactly[:, t + 1]).sum(-1))  # [K, S, A]
                expected = expected + after.reshape(len(q), -1)
            np.testing.assert_allclose(exactly[:, t].reshape(len(q), -1), expected, atol=1e-4 * scale)


def test_a_table_is_looked_up_by_step_and_state():
    table = np.random.default_rng(0).standard_normal((2, 3, 4, 5))
    found = look_up(table)(np.array([[3.0], [0.0]], dtype=np.float32), np.array([0, 2]))
    np.testing.assert_allclose(found, table[:, [0, 2], [3, 0]], rtol=1e-6)
