"""mu and ODI's policies from fits, however bad they are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from manyfold import exact
from manyfold.design.behavior import FLOOR, Behavior, floored
from manyfold.fqe.nets import Shape
from tests.networks import constant_nets, mlp_policies, nets_from_table

STATES, HORIZON, ACTIONS = 16, 4, 4


def softmax_policies(k=3, seed=0, sharpness=1.0):
    policies = mlp_policies(seed, k=k, horizon=HORIZON, n_actions=ACTIONS, n_states=STATES)
    policies.tensors["w3"] *= sharpness
    return policies


def constant(value, k=3, scale=1.0):
    return constant_nets(value, Shape(HORIZON, ACTIONS, k, 2, STATES, 1), scale)


def test_the_design_is_theorem_2_with_floors():
    policies = softmax_policies()
    rng = np.random.default_rng(0)
    q, q_hat = rng.standard_normal((3, HORIZON, STATES, ACTIONS)), rng.exponential(size=(3, HORIZON, STATES, ACTIONS))
    designed = Behavior(policies, nets_from_table(q), nets_from_table(q_hat))
    fitted, mu, odi = designed.tables()
    np.testing.assert_allclose(fitted.q, q, rtol=1e-5)
    expected = np.maximum(np.maximum(q_hat, q**2), FLOOR)
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
        ValueError, match=r"q_hat has \(policies, actions, horizon, states\) = \(2, 4, 4, 16\), expected the targets'"
    ):
        Behavior(softmax_policies(), constant(1.0), constant(1.0, k=2))


def test_floors_by_hand():
    """max(q_hat, q^2, FLOOR scale), each the largest once."""
    assert floored([[5.0, 1.0, -3.0]], [[1.0, 2.0, 0.0]], [2.0]).tolist() == [[5.0, 4.0, FLOOR * 2]]
    with pytest.raises(ValueError, match=r"q_hat has shape \[1, 2\], q \[1, 3\] and scale \[1\], expected"):
        floored(np.ones((1, 2)), np.ones((1, 3)), [1.0])
    with pytest.raises(ValueError, match="K positive scales"):
        floored(np.ones((1, 2)), np.ones((1, 2)), [0.0])
