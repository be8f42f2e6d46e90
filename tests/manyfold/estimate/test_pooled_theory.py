"""The variance of pooled evaluation, term by term, on the corners where it could break; all by enumeration.

With W_t the prefix balance weights, d = q - b, and E over the mixture of all loggers' episodes,

    n Var = Var(v_0(S_0)) + sum_t E[W_t^2 nu_t] + sum_t (E[W_t^2 d_t^2] - E[W_{t-1}^2 (sum_a pi d)^2]),

since the return is a sum of martingale differences. The bounds follow from W_t <= 1 / alpha_k.
docs/explain/proof.md has the proof, step by step.
"""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyfold import exact
from manyfold.estimate import pooled
from manyfold.mdp import FiniteMDP
from tests.worlds import cases, distributions, trajectories


class Enumerated(NamedTuple):
    """Every episode that some target can run, R of them."""

    weight: np.ndarray  # its probability under the mixture, [R]
    logger: np.ndarray  # who ran it, [R]
    states: np.ndarray  # [R, T]
    actions: np.ndarray  # [R, T]
    w: np.ndarray  # W_t, [K, R, T]
    found: pooled.Columns


def enumerate_all(mdp, pi, shares, b):
    """The columns of all episodes; the targets are the loggers."""
    rows = [
        (shares[j] * probability, states, actions, j)
        for j in range(len(pi))
        for probability, states, actions in trajectories(mdp, pi[j])
    ]
    weight, states, actions, logger = (np.array(x) for x in zip(*rows, strict=True))
    t = np.arange(mdp.horizon)
    with np.errstate(divide="ignore"):
        log_pi = np.log(pi[:, t, states, actions])
    alpha = np.repeat(shares[:, None], len(states), 1)
    log_w, log_j = pooled.log_weights(log_pi, log_pi, alpha)
    given = [(b[:, t, states, actions], (pi * b).sum(-1)[:, t, states])]
    found = pooled.columns(mdp.rewards[states, actions], log_w, log_j, logger, np.arange(len(pi)), alpha, given)
    return Enumerated(weight, logger, states, actions, np.exp(log_w), found)


def variance_of(x, mdp, pi):
    """n Var of the doubly robust return, from its definition; `[K]`."""
    robust = x.found.whole + x.found.decisions + x.found.baselines[0, 0]
    return ((robust - exact.values(mdp, pi)[:, None]) ** 2) @ x.weight


def terms_of(x, mdp, pi, b):
    """Var(v_0), sum_t E[W_t^2 nu_t] and what b != q adds, `[K]` each, as the module's docstring has them."""
    q, v, nu = exact.action_values(mdp, pi), exact.state_values(mdp, pi), exact.next_value_variances(mdp, pi)
    starts = ((v[:, 0] - exact.values(mdp, pi)[:, None]) ** 2) @ mdp.initial
    t, d = np.arange(mdp.horizon), q - b
    before = np.concatenate([np.ones_like(x.w[..., :1]), x.w[..., :-1]], -1)
    world = (x.w**2 * nu[:, t, x.states, x.actions]).sum(-1) @ x.weight
    squares = (x.w * d[:, t, x.states, x.actions]) ** 2 - (before * (pi * d).sum(-1)[:, t, x.states]) ** 2
    return starts, world, squares.sum(-1) @ x.weight


def under_itself(mdp, pi, f):
    """sum_t E_pi[f_t(S_t, A_t)] of `f [K, T, S, A]`, by pushing the distribution forward; `[K]`."""
    at, total = np.broadcast_to(mdp.initial, (len(pi), mdp.n_states)), np.zeros(len(pi))
    for t in range(mdp.horizon):
        visited = at[..., None] * pi[:, t]
        total = total + (visited * f[:, t]).sum((1, 2))
        at = mdp.push(visited)
    return total


def check(mdp, pi, shares, b):
    """Everything that section 6 of the science says of this set."""
    q, nu = exact.action_values(mdp, pi), exact.next_value_variances(mdp, pi)
    on_policy = exact.estimator_variances(mdp, pi)["on_policy"] / len(pi)
    for baseline in (q, b):
        size = 1e-9 * (1 + np.abs(q).max() + np.abs(q - baseline).max()) ** 2 / shares.min()
        x = enumerate_all(mdp, pi, shares, baseline)
        assert x.weight.sum() == pytest.approx(1)
        assert (x.w <= (1 + 1e-9) / shares[:, None, None]).all()
        variance = variance_of(x, mdp, pi)
        starts, world, added = terms_of(x, mdp, pi, baseline)
        np.testing.assert_allclose(variance, starts + world + added, atol=size)
        assert (world <= under_itself(mdp, pi, nu) / shares + size).all()
        assert (added <= under_itself(mdp, pi, (q - baseline) ** 2) / shares + size).all()
        if baseline is q:
            np.testing.assert_allclose(added, 0, atol=size)
            assert (variance <= on_policy / shares + size).all()


def corner(name):
    """A set that hypothesis might not draw: an MDP, policies and shares."""
    rng = np.random.default_rng(0)
    states, horizon, k, kind = 2, 3, 3, "dense"
    rewards, shares = rng.standard_normal((2, 2)) + 5, np.array([0.2, 0.3, 0.5])
    if name == "T = 1":
        horizon = 1
    if name == "K = 1":
        k, shares = 1, np.ones(1)
    if name == "zero rewards":
        rewards = np.zeros((2, 2))
    if name in ("zeros", "deterministic"):
        kind = name
    if name == "unequal shares":
        shares = np.array([0.001, 0.009, 0.99])
    pi = distributions(rng, (k, horizon, states, 2), kind)
    if name == "far apart":  # no episode of one is possible for another
        pi, shares = np.stack([np.broadcast_to(x, (horizon, states, 2)) for x in np.eye(2)]), np.array([0.1, 0.9])
    if name == "nearly far apart":
        rows = [[1 - 1e-9, 1e-9], [1e-9, 1 - 1e-9]]
        pi, shares = np.stack([np.broadcast_to(x, (horizon, states, 2)) for x in rows]), np.array([0.5, 0.5])
    if name == "the same policy twice":
        pi[1] = pi[0]
    return FiniteMDP(distributions(rng, (states, 2, states)), rewards, [0.3, 0.7], horizon), pi, shares


CORNERS = (
    *("T = 1", "K = 1", "zero rewards", "zeros", "deterministic", "unequal shares"),
    *("far apart", "nearly far apart", "the same policy twice"),
)


def check_steps(mdp, pi, shares, b):
    """The other lines of the proof, by the numbers of its steps."""
    x, truth = enumerate_all(mdp, pi, shares, b), exact.values(mdp, pi)
    size = 1e-9 * (1 + np.abs(b).max() + np.abs(exact.action_values(mdp, pi)).max()) ** 2 / shares.min()
    robust = x.found.whole + x.found.decisions + x.found.baselines[0, 0]
    np.testing.assert_allclose(robust @ x.weight, truth, atol=size)  # 4: unbiased
    for t in range(mdp.horizon):  # 3: given the past and S_t, the mean of W_t is W_{t-1}
        past = np.concatenate([x.states[:, : t + 1], x.actions[:, :t]], 1)
        _, same = np.unique(past, axis=0, return_inverse=True)
        before = x.w[..., t - 1] if t else np.ones_like(x.w[..., 0])
        for now, earlier in zip(x.w[..., t], before, strict=True):
            sums = (np.bincount(same.ravel(), x.weight * w) for w in (now, earlier))
            np.testing.assert_allclose(*sums, atol=size)
    mean, inside = 0, 0  # 7: turns are at least as good as draws from the mixture
    for j, share in enumerate(shares):
        p = np.where(x.logger == j, x.weight, 0) / share
        mean, inside = mean + share * (robust @ p), inside + share * ((robust**2) @ p - (robust @ p) ** 2)
    np.testing.assert_allclose(mean, truth, atol=size)
    assert (inside <= ((robust - truth[:, None]) ** 2) @ x.weight + size).all()
    controlled = x.found.whole - truth[:, None] * (x.w[..., -1] - 1)  # 9: W G - J (W - 1)
    np.testing.assert_allclose(controlled @ x.weight, truth, atol=size)
    on_policy = exact.estimator_variances(mdp, pi)["on_policy"] / len(pi)
    assert (((controlled - truth[:, None]) ** 2) @ x.weight <= on_policy / shares + size).all()


@pytest.mark.parametrize("name", CORNERS)
@pytest.mark.parametrize("error", [0.0, 1.0, 30.0])
def test_the_theorem_holds_on_every_corner(name, error):
    mdp, pi, shares = corner(name)
    q = exact.action_values(mdp, pi)
    b = q + error * np.random.default_rng(1).standard_normal(q.shape)
    check(mdp, pi, shares, b)
    check_steps(mdp, pi, shares, b)


@given(cases(max_states=2, max_actions=2, max_horizon=3, max_policies=3), st.sampled_from([0.0, 0.3, 10.0]))
def test_the_theorem_holds_on_random_sets(case, error):
    mdp, pi, rng = case
    q = exact.action_values(mdp, pi)
    shares = rng.dirichlet(np.ones(len(pi))) * 0.9 + 0.1 / len(pi)
    b = q + error * rng.standard_normal(q.shape)
    check(mdp, pi, shares, b)
    check_steps(mdp, pi, shares, b)


@given(cases(max_states=2, max_actions=3, max_horizon=2, max_policies=3), st.floats(0, 2))
def test_a_baseline_within_qs_spread_over_the_actions_never_loses(case, c):
    """b = v + c (q - v), 0 <= c <= 2, errs by (1 - c)^2 times q's variance over the actions: below Var_on / alpha."""
    mdp, pi, rng = case
    q, v = exact.action_values(mdp, pi), exact.state_values(mdp, pi)[..., None]
    shares = rng.dirichlet(np.ones(len(pi))) * 0.9 + 0.1 / len(pi)
    variance = variance_of(enumerate_all(mdp, pi, shares, v + c * (q - v)), mdp, pi)
    on_policy = exact.estimator_variances(mdp, pi)["on_policy"] / len(pi)
    spread = under_itself(mdp, pi, (q - v) ** 2)
    starts = ((v[:, 0, :, 0] - exact.values(mdp, pi)[:, None]) ** 2) @ mdp.initial
    parts = starts + under_itself(mdp, pi, exact.next_value_variances(mdp, pi)) + spread
    scale = 1e-9 * (1 + np.abs(q).max()) ** 2 / shares.min()
    np.testing.assert_allclose(on_policy, parts, atol=scale)  # what Var_on is made of
    assert (variance <= on_policy / shares + scale).all()


def test_where_no_episode_can_be_shared_it_is_on_policy_mc():
    """Weights are 1 / alpha for one's own and 0 for the rest, so whole episodes are `own` and nothing is lost."""
    mdp, pi, shares = corner("far apart")
    x = enumerate_all(mdp, pi, shares, np.zeros_like(pi))
    assert np.isin(x.w.round(9), np.r_[0, 1 / shares].round(9)).all()
    np.testing.assert_allclose(x.found.whole, x.found.own)
    np.testing.assert_allclose(x.found.decisions, 0, atol=1e-9)
    on_policy = exact.estimator_variances(mdp, pi)["on_policy"] / len(pi)
    second = (x.found.whole**2) @ x.weight
    np.testing.assert_allclose(second, (on_policy + exact.values(mdp, pi) ** 2) / shares)  # E[G^2] / alpha


def test_equal_policies_share_all_episodes():
    """K copies: every weight is 1, and n Var is one episode's, alpha_k or not."""
    mdp, pi, _ = corner("K = 1")
    copies, shares = np.repeat(pi, 3, 0), np.array([0.2, 0.3, 0.5])
    x = enumerate_all(mdp, copies, shares, np.zeros_like(copies))
    np.testing.assert_allclose(x.w, 1)
    np.testing.assert_allclose(variance_of(x, mdp, copies), exact.estimator_variances(mdp, pi)["on_policy"].repeat(3))


def test_weights_stay_bounded_over_500_steps():
    """Where the product of one-step ratios to the mean policy exceeds 1e43, and a target's probability underflows."""
    rng, alpha = np.random.default_rng(0), np.array([0.1, 0.2, 0.7])
    p = np.array([0.9, 0.5, 0.1])  # of action 1, for all steps
    actions = rng.random((30, 500)) < p[np.arange(30) % 3, None]
    log_pi = np.log(np.where(actions, p[:, None, None], 1 - p[:, None, None]))
    log_w, log_j = pooled.log_weights(log_pi, log_pi, np.repeat(alpha[:, None], 30, 1))
    assert (log_pi - np.log((np.exp(log_pi)).mean(0))).sum(-1).max() > 100
    assert np.exp(log_pi.sum(-1)).min() == 0
    assert (np.exp(log_w) <= (1 + 1e-9) / alpha[:, None, None]).all()
    np.testing.assert_allclose(alpha @ np.exp(log_j), 1)
