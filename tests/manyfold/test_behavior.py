"""mu from fits, however bad they are; predictions against exact variances."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from manyfold import behavior, exact
from manyfold.behavior import Behavior
from manyfold.gridworld import Gridworld
from manyfold.networks import NetworkPolicySet, Spec
from manyfold.values import Shape, ValueNets, size

CELLS, HORIZON, ACTIONS = 16, 4, 4


def softmax_policies(k=3, seed=0, sharpness=1.0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w1": (k, CELLS + 1, 8), "b1": (k, 1, 8), "w2": (k, 8, 8), "b2": (k, 1, 8)}
    shapes |= {"w3": (k, 8, ACTIONS), "b3": (k, 1, ACTIONS)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors["w3"] *= sharpness
    names = tuple(str(i) for i in range(k))
    return NetworkPolicySet(tensors, Spec("test", "softmax", HORIZON, ACTIONS, CELLS, 0, 0.0, 0.0, names))


def constant(value, k=3, scale=1.0):
    """Nets that give `value [K, A]` at every state, up to their scale."""
    shape = Shape(HORIZON, ACTIONS, k, 2, CELLS, 1)
    nets = ValueNets(shape, torch.zeros(size(shape)), torch.zeros(1), torch.ones(1), torch.full((k,), scale))
    nets.parameters["b2"][:, 0] = torch.as_tensor(np.broadcast_to(value, (k, ACTIONS)) / scale, dtype=torch.float32)
    return nets


def from_table(table):
    """Nets that are a table `[K, T, S, A]`: one hidden unit for each (t, s), which is on only there."""
    k, horizon, cells, actions = table.shape
    shape = Shape(horizon, actions, k, horizon * cells, cells, 1)
    nets = ValueNets(shape, torch.zeros(size(shape)), torch.zeros(1), torch.ones(1), torch.ones(k))
    p = {name: nets.apart(nets.parameters[name]) for name in ("w1", "w1_time", "w2")}  # [K, rows, h]
    for t in range(horizon):
        for s in range(cells):
            unit = t * cells + s
            p["w1"][:, s, unit] = 1.0
            p["w1_time"][:, :, unit] = -1.0
            p["w1_time"][:, t, unit] = 0.0
            p["w2"][:, :, unit] = torch.as_tensor(table[:, t, s], dtype=torch.float32)
    return nets


def test_the_design_is_theorem_2_with_floors():
    policies = softmax_policies()
    rng = np.random.default_rng(0)
    q, q_hat = rng.standard_normal((3, HORIZON, CELLS, ACTIONS)), rng.exponential(size=(3, HORIZON, CELLS, ACTIONS))
    designed = Behavior(policies, from_table(q), from_table(q_hat))
    fitted, mu, odi = designed.tables()
    np.testing.assert_allclose(fitted.q, q, rtol=1e-5)
    expected = np.maximum(np.maximum(q_hat, q**2), behavior.FLOOR)
    np.testing.assert_allclose(fitted.q_hat, expected, rtol=1e-5)
    table = policies.table()
    np.testing.assert_allclose(mu, exact.shared_behavior(table, expected), rtol=1e-5)
    np.testing.assert_allclose(odi, exact.odi_behaviors(table, expected), rtol=1e-5)
    states, t = np.array([[3.0], [0.0]]), np.array([2, 1])
    np.testing.assert_allclose(designed.mu(states, t), mu[[2, 1], [3, 0]], rtol=1e-6)
    np.testing.assert_allclose(designed.odi(states, t), odi[:, [2, 1], [3, 0]], rtol=1e-6)


@given(
    hnp.arrays(np.float32, (3, ACTIONS), elements=st.floats(-(2.0**60), 2.0**60, width=32)),
    hnp.arrays(np.float32, (3, ACTIONS), elements=st.floats(-(2.0**60), 2.0**60, width=32)),
    st.sampled_from([0.1, 1.0, 30.0, 300.0]),
)
def test_no_fit_however_bad_leaves_an_action_uncovered(q, q_hat, sharpness):
    """Zeros, negatives, huge values; targets that are nearly deterministic."""
    policies = softmax_policies(sharpness=sharpness)
    designed = Behavior(policies, constant(q), constant(q_hat))
    fitted, mu, odi = designed.tables()
    taken = fitted.policies > 0
    assert (mu[taken.any(0)] > 0).all()
    assert (odi[taken] > 0).all()
    np.testing.assert_allclose(mu.sum(-1), 1)
    np.testing.assert_allclose(odi.sum(-1), 1)


def test_a_fit_that_is_not_finite_is_refused():
    broken = constant(1.0)
    broken.parameters["b2"][0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="q_hat: NaN or infinity, expected finite numbers; did the fit diverge?"):
        Behavior(softmax_policies(), constant(1.0), broken).mu(np.zeros((1, 1)), 0)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0])
def test_the_defensive_mixture_bounds_every_ratio(alpha):
    policies = softmax_policies(sharpness=5.0)
    q_hat = np.full((3, ACTIONS), 1.0)
    q_hat[1:] = 1e12  # policies 1 and 2 drown policy 0
    fitted, mu, odi = Behavior(policies, constant(0.0), constant(q_hat), alpha).tables()
    ratios = fitted.policies / mu
    assert ratios.max() <= 3 / alpha + 1e-9
    assert (fitted.policies / odi).max() <= 1 / alpha + 1e-9
    if alpha == 1:
        np.testing.assert_allclose(mu, fitted.policies.mean(0))
        np.testing.assert_allclose(odi, fitted.policies)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="alpha is 2, expected a number from 0 to 1"):
        Behavior(softmax_policies(), constant(1.0), constant(1.0), 2)
    with pytest.raises(
        ValueError, match=r"q_hat has \(policies, actions, horizon\) = \(2, 4, 4\), expected the targets'"
    ):
        Behavior(softmax_policies(), constant(1.0), constant(1.0, k=2))


def test_predictions_from_exact_moments_are_exact():
    """With the true q, q_hat and m, the prediction is the true variance of every policy under mu, and on-policy."""
    world = Gridworld.draw(4, 1)
    mdp, policies = world.to_mdp(), softmax_policies(seed=1)
    table = policies.table()
    q, q_hat = exact.action_values(mdp, table), exact.second_moments(mdp, table)
    designed = Behavior(policies, from_table(q), from_table(q_hat))
    mu = designed.tables()[1]
    m = 2 * mdp.rewards * q - mdp.rewards**2
    for t in reversed(range(HORIZON - 1)):
        m[:, t] += mdp.expect((table[:, t + 1] ** 2 / mu[t + 1] * m[:, t + 1]).sum(-1))
    start = np.array([[mdp.initial.argmax()]])
    found = behavior.predict(designed, from_table(m), start)
    np.testing.assert_allclose(found.plan, exact.pdis_variance(mdp, table, mu), rtol=1e-4)
    on = [exact.pdis_variance(mdp, table[[k]], table[k])[0] for k in range(3)]
    np.testing.assert_allclose(found.on_policy, on, rtol=1e-4)
    np.testing.assert_allclose(found.values, exact.values(mdp, table), rtol=1e-4)
    np.testing.assert_allclose(found.relative, found.plan / 3 / found.on_policy)
    weights = behavior.plan_weights(designed)(np.array([[2.0], [5.0]], dtype=np.float32), np.array([1, 3]))
    assert isinstance(weights, np.ndarray)  # cells: no bounds, nothing is carried from one to another
    np.testing.assert_allclose(weights, (table**2 / mu)[:, [1, 3], [2, 5]], rtol=1e-5)


def test_a_fit_of_m_below_q_squared_is_floored_and_a_variance_stays_positive():
    policies = softmax_policies(k=1)
    q = np.ones((1, HORIZON, CELLS, ACTIONS))
    designed = Behavior(policies, from_table(q), from_table(q**2))
    found = behavior.predict(designed, constant(-5.0, k=1), np.array([[0.0]]))
    assert found.plan[0] == pytest.approx(1e-6, rel=1e-3)  # of the second moment, 1
    assert found.on_policy[0] == pytest.approx(1e-6, rel=1e-3)


def test_theorem_4_is_the_stricter_condition():
    """Theorem 4 compares n with nK episodes, Theorem 3 equal n: where 4 holds 3 does, and not the other way round."""
    rng = np.random.default_rng(1)
    q = rng.standard_normal((3, HORIZON, CELLS, ACTIONS))
    designed = Behavior(softmax_policies(sharpness=0.2), from_table(q), from_table(q**2 + 0.1))
    found = behavior.similar(designed, np.arange(CELLS)[:, None], np.arange(CELLS) % HORIZON, 1 / 3)
    assert (found.theorem_3 >= found.theorem_4).all()
    assert found.theorem_3.mean() > found.theorem_4.mean()


def test_an_initial_state_that_varies_counts():
    """Two starts with values 1 and 3 and no other randomness: the variance of J's estimate is 1, on- and off-policy."""
    policies = softmax_policies(k=1)
    q = np.ones((1, HORIZON, CELLS, ACTIONS))
    q[:, :, 1] = 3
    designed = Behavior(policies, from_table(q), from_table(q**2))
    found = behavior.predict(designed, from_table(q**2), np.array([[0.0], [1.0]]))
    np.testing.assert_allclose([found.values, found.on_policy, found.plan], [[2.0], [1.0], [1.0]], rtol=1e-5)


def test_equal_policies_meet_every_condition_and_different_ones_do_not():
    same = softmax_policies(k=3)
    same = NetworkPolicySet({name: x[[0, 0, 0]] for name, x in same.tensors.items()}, same.spec)
    rng = np.random.default_rng(0)
    q = np.repeat(rng.standard_normal((1, HORIZON, CELLS, ACTIONS)), 3, 0)
    states, t = np.arange(CELLS)[:, None], np.arange(CELLS) % (HORIZON - 1)
    alike = behavior.similar(Behavior(same, from_table(q), from_table(q**2 + 1)), states, t, 1 / 3)
    np.testing.assert_allclose(alike.eta_spread[:, :3], 1, rtol=1e-4)
    assert (alike.theorem_3[:, :3] == 1).all()
    assert (alike.theorem_4[:, :3] == 1).all()
    assert np.isnan(alike.eta_spread[:, 3]).all()  # no state was logged at the last step
    apart = Behavior(softmax_policies(sharpness=5.0), from_table(q), from_table(q**2 + 1))
    unlike = behavior.similar(apart, states, t, 1 / 3)
    assert np.nanmedian(unlike.eta_spread) > 2
    assert np.nanmean(unlike.theorem_4) < 0.5
