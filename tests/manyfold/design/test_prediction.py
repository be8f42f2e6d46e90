"""What logged data say of a plan: predictions against exact variances, the theorems' conditions, the verdict."""

import numpy as np
import pytest

from manyfold import exact
from manyfold.data.transitions import Batch
from manyfold.design.behavior import FLOOR, Behavior
from manyfold.design.prediction import plan_problem, plan_weights, predict, similar, verdict
from manyfold.envs.gridworld import Gridworld
from manyfold.fqe.nets import Shape
from manyfold.policies.mlp import MlpPolicySet
from tests.networks import constant_nets, mlp_policies, nets_from_table, value_nets, value_row

STATES, HORIZON, ACTIONS = 16, 4, 4


def softmax_policies(k=3, seed=0, sharpness=1.0):
    policies = mlp_policies(seed, k=k, horizon=HORIZON, n_actions=ACTIONS, n_states=STATES)
    policies.tensors["w3"] *= sharpness
    return policies


def test_predictions_from_exact_moments_are_exact():
    """With the true q, q_hat and m, the prediction is the true variance of every policy under mu, and on-policy."""
    world = Gridworld.draw(4, 1)
    mdp, policies = world.mdp(), softmax_policies(seed=1)
    table = policies.table()
    q, q_hat = exact.action_values(mdp, table), exact.second_moments(mdp, table)
    designed = Behavior(policies, nets_from_table(q), nets_from_table(q_hat))
    mu = designed.tables()[1]
    m = 2 * mdp.rewards * q - mdp.rewards**2
    for t in reversed(range(HORIZON - 1)):
        m[:, t] += mdp.expect((table[:, t + 1] ** 2 / mu[t + 1] * m[:, t + 1]).sum(-1))
    start = np.array([[mdp.initial.argmax()]])
    found = predict(designed, nets_from_table(m), start)
    np.testing.assert_allclose(found.plan, exact.pdis_variance(mdp, table, mu), rtol=1e-4)
    on = [exact.pdis_variance(mdp, table[[k]], table[k])[0] for k in range(3)]
    np.testing.assert_allclose(found.on_policy, on, rtol=1e-4)
    np.testing.assert_allclose(found.values, exact.values(mdp, table), rtol=1e-4)
    np.testing.assert_allclose(found.relative, found.plan / 3 / found.on_policy)
    weights = plan_weights(designed)(np.array([[2.0], [5.0]], dtype=np.float32), np.array([1, 3]))
    assert isinstance(weights, np.ndarray)  # states are counted: no bounds, nothing is carried from one to another
    np.testing.assert_allclose(weights, (table**2 / mu)[:, [1, 3], [2, 5]], rtol=1e-5)


def test_a_fit_of_m_below_q_squared_is_floored_and_a_variance_stays_positive():
    policies = softmax_policies(k=1)
    q = np.ones((1, HORIZON, STATES, ACTIONS))
    designed = Behavior(policies, nets_from_table(q), nets_from_table(q**2))
    found = predict(designed, constant_nets(-5.0, Shape(HORIZON, ACTIONS, 1, 2, STATES, 1)), np.array([[0.0]]))
    assert found.plan[0] == pytest.approx(1e-6, rel=1e-3)  # of the second moment, 1
    assert found.on_policy[0] == pytest.approx(1e-6, rel=1e-3)


def test_theorem_4_is_the_stricter_condition():
    """Theorem 4 compares n with nK episodes, Theorem 3 equal n: where 4 holds 3 does, and not the other way round."""
    rng = np.random.default_rng(1)
    q = rng.standard_normal((3, HORIZON, STATES, ACTIONS))
    designed = Behavior(softmax_policies(sharpness=0.2), nets_from_table(q), nets_from_table(q**2 + 0.1))
    found = similar(designed, np.arange(STATES)[:, None], np.arange(STATES) % HORIZON, 1 / 3)
    assert (found.theorem_3 >= found.theorem_4).all()
    assert found.theorem_3.mean() > found.theorem_4.mean()


def test_an_initial_state_that_varies_counts():
    """Two starts with values 1 and 3 and no other randomness: the variance of J's estimate is 1, on- and off-policy."""
    policies = softmax_policies(k=1)
    q = np.ones((1, HORIZON, STATES, ACTIONS))
    q[:, :, 1] = 3
    designed = Behavior(policies, nets_from_table(q), nets_from_table(q**2))
    found = predict(designed, nets_from_table(q**2), np.array([[0.0], [1.0]]))
    np.testing.assert_allclose([found.values, found.on_policy, found.plan], [[2.0], [1.0], [1.0]], rtol=1e-5)


def test_equal_policies_meet_every_condition_and_different_ones_do_not():
    same = softmax_policies(k=3)
    same = MlpPolicySet({name: x[[0, 0, 0]] for name, x in same.tensors.items()}, same.spec)
    rng = np.random.default_rng(0)
    q = np.repeat(rng.standard_normal((1, HORIZON, STATES, ACTIONS)), 3, 0)
    states, t = np.arange(STATES)[:, None], np.arange(STATES) % (HORIZON - 1)
    alike = similar(Behavior(same, nets_from_table(q), nets_from_table(q**2 + 1)), states, t, 1 / 3)
    np.testing.assert_allclose(alike.eta_spread[:, :3], 1, rtol=1e-4)
    assert (alike.theorem_3[:, :3] == 1).all()
    assert (alike.theorem_4[:, :3] == 1).all()
    assert np.isnan(alike.eta_spread[:, 3]).all()  # no state was logged at the last step
    apart = Behavior(softmax_policies(sharpness=5.0), nets_from_table(q), nets_from_table(q**2 + 1))
    unlike = similar(apart, states, t, 1 / 3)
    assert np.nanmedian(unlike.eta_spread) > 2
    assert np.nanmean(unlike.theorem_4) < 0.5


@pytest.mark.parametrize("cap", [10.0, 3.0])
def test_the_second_moment_under_mu_is_kept_between_q_squared_and_a_multiple_of_q_hat(cap):
    policies = mlp_policies(0, kind="binned_gaussian", horizon=9, n_actions=10, n_features=5, scale=0.4)
    q, q_hat = value_nets(policies, 1, width=7, scale=5.0), value_nets(policies, 2, width=7, scale=40.0)
    behavior = Behavior(policies, q, q_hat)
    states, t = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32), np.arange(5)
    weights, low, high = plan_weights(behavior, cap)(states, t)
    fitted = behavior.fitted(states, t)
    np.testing.assert_allclose(weights, fitted.policies**2 / behavior.design(fitted), rtol=1e-9)
    for i in range(5):
        for k in range(3):
            values, moments = (value_row(nets, k, states[i], t[i]) for nets in (q, q_hat))
            least = np.maximum(np.maximum(moments, values**2), FLOOR * float(q_hat.scale[k]))
            np.testing.assert_allclose(low[k, i], values**2, rtol=1e-3, atol=1e-2)
            np.testing.assert_allclose(high[k, i], cap * least, rtol=1e-3, atol=1e-2)
    default = plan_weights(behavior)(states, t)
    np.testing.assert_allclose(default.high, 10 * fitted.q_hat, rtol=1e-6)


def test_the_problem_of_a_plan_has_the_moments_reward_and_the_plans_weights():
    policies = softmax_policies()
    rng = np.random.default_rng(2)
    q = rng.standard_normal((3, HORIZON, STATES, ACTIONS))
    behavior = Behavior(policies, nets_from_table(q), nets_from_table(q**2 + 0.5))
    problem = plan_problem(behavior)
    states, t = np.array([[3.0], [0.0]], dtype=np.float32), np.array([2, 1])
    table, (_, mu, _) = policies.table(), behavior.tables()
    np.testing.assert_allclose(problem.weights(states, t), (table**2 / mu)[:, [2, 1], [3, 0]], rtol=1e-5)
    batch = Batch(*(np.array(x) for x in ([2, 1], states, [1, 3], [0.5, -2.0], states, [False] * 2, [False] * 2)))
    taken = q[:, [2, 1], [3, 0], [1, 3]]  # [K, 2]
    np.testing.assert_allclose(problem.reward(batch), 2 * np.array([0.5, -2]) * taken - [0.25, 4.0], rtol=1e-5)


@pytest.mark.parametrize(
    ("relative", "total", "said"),
    [
        ([0.1, 0.3], 0.2, "Expect 20% of on-policy's variance."),
        ([0.1, 0.1, 0.9], 0.3, "Expect 30% of on-policy's variance; policy 2 (c) is the odd one out: 90%."),
        (
            [1.5, 1.2],
            1.4,
            "Expect 140% of on-policy's variance: sharing does not pay, evaluate these policies one by one or drop the "
            "odd ones.",
        ),
        (
            [0.2, 9.0, 0.2],
            3.0,
            "Expect 300% of on-policy's variance; policy 1 (b) is the odd one out: 900%: sharing does not pay, "
            "evaluate these policies one by one or drop the odd ones.",
        ),
        (
            [1.0, 1.0],
            np.nan,
            "Expect an explosion: even the fit of the variance ran away. Evaluate these policies one by one.",
        ),
    ],
)
def test_the_verdict_is_one_sentence(relative, total, said):
    assert verdict(np.array(relative), total, tuple("abc")) == said
