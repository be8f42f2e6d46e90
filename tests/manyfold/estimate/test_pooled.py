"""Pooled evaluation against enumeration on small random MDPs, and by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyfold import exact
from manyfold.estimate import estimators, pooled
from manyfold.mdp import FiniteMDP
from manyfold.rollout import rollout_tabular
from tests.worlds import cases, distributions, trajectories


def columns_of(mdp, policies, loggers, own, shares, b, states, actions, logger):
    """The columns of some episodes `[N, T]`, all in one fold."""
    t = np.arange(mdp.horizon)
    with np.errstate(divide="ignore"):
        log_pi, log_mu = (np.log(x[:, t, states, actions]) for x in (policies, loggers))
    alpha = np.repeat(shares[:, None], len(states), 1)
    log_w, log_j = pooled.log_weights(log_pi, log_mu, alpha)
    taken, expected = b[:, t, states, actions], (policies * b).sum(-1)[:, t, states]
    rewards = mdp.rewards[states, actions]
    return pooled.columns(rewards, log_w, log_j, logger, own, alpha, [(taken, expected)]), log_w


def enumerated(mdp, policies, loggers, own, shares, b):
    """Every episode that some logger can run: its probability under the mixture, who ran it, and its columns."""
    rows = [
        (shares[j] * probability, states, actions, j)
        for j, mu in enumerate(loggers)
        for probability, states, actions in trajectories(mdp, mu)
    ]
    weight, states, actions, logger = (np.array(x) for x in zip(*rows, strict=True))
    found, log_w = columns_of(mdp, policies, loggers, own, shares, b, states, actions, logger)
    return weight, logger, found, np.exp(log_w)


@st.composite
def pools(draw):
    """A case, loggers (the targets, and perhaps one more) with their shares, and a baseline from exact to useless."""
    mdp, policies, rng = draw(cases(max_states=2, max_actions=2, max_horizon=3, max_policies=3))
    loggers = policies
    if draw(st.booleans()):
        loggers = np.concatenate([policies, distributions(rng, policies.shape[1:])[None]])
    shares = rng.dirichlet(np.ones(len(loggers))) * 0.9 + 0.1 / len(loggers)
    q = exact.action_values(mdp, policies)
    b = {"exact": q, "noisy": q + rng.standard_normal(q.shape), "useless": 10 * rng.standard_normal(q.shape)}
    kind = draw(st.sampled_from(sorted(b)))
    return mdp, policies, loggers, shares, q, b[kind]


@given(pools())
def test_every_estimate_is_unbiased_and_every_control_has_mean_0(pool):
    """So any combination whose coefficients come from elsewhere is unbiased, for any shares and any baseline."""
    mdp, policies, loggers, shares, _, b = pool
    weight, _, found, _ = enumerated(mdp, policies, loggers, np.arange(len(policies)), shares, b)
    j = exact.values(mdp, policies)
    size = np.abs(b).max() + np.abs(mdp.rewards).max() * mdp.horizon + 1
    np.testing.assert_allclose(found.own @ weight, j, atol=1e-9 * size)
    np.testing.assert_allclose(found.whole @ weight, j, atol=1e-9 * size)
    np.testing.assert_allclose(found.decisions @ weight, 0, atol=1e-9 * size)
    np.testing.assert_allclose(found.baselines[0, 0] @ weight, 0, atol=1e-9 * size)
    np.testing.assert_allclose(found.loggers @ weight, 0, atol=1e-9)
    np.testing.assert_allclose(shares @ found.loggers, 0, atol=1e-9)  # they are collinear


@given(pools())
def test_no_weight_exceeds_one_over_the_share(pool):
    mdp, policies, loggers, shares, _, b = pool
    *_, w = enumerated(mdp, policies, loggers, np.arange(len(policies)), shares, b)
    assert (w <= 1 / shares[: len(policies), None, None] * (1 + 1e-9)).all()


@given(pools())
def test_with_the_exact_q_the_variance_is_the_theorems_and_never_above_on_policys(pool):
    """n Var = Var(v_0) + sum_t E_pi[W_t nu_t] <= Var_on / alpha_k; stratifying by logger only lowers it."""
    mdp, policies, loggers, shares, q, _ = pool
    weight, logger, found, w = enumerated(mdp, policies, loggers, np.arange(len(policies)), shares, q)
    robust = found.whole + found.decisions + found.baselines[0, 0]
    j = exact.values(mdp, policies)
    variance = ((robust - j[:, None]) ** 2) @ weight
    v, nu = exact.state_values(mdp, policies), exact.next_value_variances(mdp, policies)
    expected = ((v[:, 0] - j[:, None]) ** 2) @ mdp.initial
    rows = [(s, a) for mu in loggers for _, s, a in trajectories(mdp, mu)]
    states, actions = (np.array(x) for x in zip(*rows, strict=True))
    for t in range(mdp.horizon):  # E_pi[W_t nu_t] = E_mix[W_t^2 nu_t]
        expected = expected + (w[..., t] ** 2 * nu[:, t, states[:, t], actions[:, t]]) @ weight
    scale = 1 + np.abs(q).max() ** 2
    np.testing.assert_allclose(variance, expected, atol=1e-8 * scale)
    on_policy = exact.estimator_variances(mdp, policies)["on_policy"] / len(policies)
    assert (variance <= on_policy / shares[: len(policies)] + 1e-8 * scale).all()
    within = np.zeros(len(policies))
    for i, share in enumerate(shares):
        x, p = robust[:, logger == i], weight[logger == i] / share
        within += share * ((x - (x @ p)[:, None]) ** 2) @ p
    assert (within <= variance + 1e-8 * scale).all()


@given(pools())
def test_another_baseline_costs_at_most_its_squared_error(pool):
    """The bound with b != q: (Var(v_0) + sum_t E_pi[nu_t + (q - b)^2]) / alpha_k."""
    mdp, policies, loggers, shares, q, b = pool
    weight, _, found, _ = enumerated(mdp, policies, loggers, np.arange(len(policies)), shares, b)
    robust = found.whole + found.decisions + found.baselines[0, 0]
    j = exact.values(mdp, policies)
    variance = ((robust - j[:, None]) ** 2) @ weight
    v, nu = exact.state_values(mdp, policies), exact.next_value_variances(mdp, policies)
    bound = ((v[:, 0] - j[:, None]) ** 2) @ mdp.initial
    at = np.broadcast_to(mdp.initial, (len(policies), mdp.n_states))
    for t in range(mdp.horizon):
        visited = at[..., None] * policies[:, t]  # [K, S, A]
        bound = bound + (visited * (nu[:, t] + (q - b)[:, t] ** 2)).sum((1, 2))
        at = mdp.push(visited)
    assert (variance <= bound / shares[: len(policies)] + 1e-8 * (1 + variance)).all()


def sample(n, seed=0, horizon=5, policies=4, far=0.5):
    """Episodes of all targets in turns on a random MDP, as `columns` takes them."""
    rng = np.random.default_rng(seed)
    transitions = rng.dirichlet(np.ones(5), size=(5, 3))
    mdp = FiniteMDP(transitions, rng.standard_normal((5, 3)) + 1, np.full(5, 0.2), horizon)
    base, own = rng.dirichlet(np.ones(3), size=(1, 1, 5)), rng.dirichlet(np.ones(3), size=(policies, 1, 5))
    pi = np.repeat((1 - far) * base + far * own, horizon, 1)
    episodes, logger = rollout_tabular(mdp, pi, n, rng), np.arange(n) % policies
    return mdp, pi, episodes, logger


def test_without_controls_it_is_the_balance_heuristic():
    mdp, pi, episodes, logger = sample(40)
    q = exact.action_values(mdp, pi)
    found, _ = columns_of(mdp, pi, pi, np.arange(4), np.full(4, 0.25), q, episodes.states, episodes.actions, logger)
    probs = episodes.probs(pi)
    b = episodes.probs(q), episodes.at((pi * q).sum(-1))
    counts = np.bincount(logger)
    np.testing.assert_allclose(
        found.whole + found.decisions, estimators.balanced(episodes.rewards, probs, probs, counts)
    )
    robust = found.whole + found.decisions + found.baselines[0, 0]
    np.testing.assert_allclose(robust, estimators.balanced(episodes.rewards, probs, probs, counts, b=b))


def test_folds_hold_every_logger_in_its_share():
    logger = np.array([0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 0])
    fold, folds = pooled.folds_of(logger, 3)
    assert folds == 3
    assert fold.tolist() == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 0]
    shares = pooled.shares_of(logger, fold, 2)
    np.testing.assert_allclose(shares[:, fold == 0], [[3 / 5] * 5, [2 / 5] * 5])
    np.testing.assert_allclose(shares[:, fold == 2], [[2 / 3] * 3, [1 / 3] * 3])
    assert pooled.folds_of(np.arange(8) % 4)[1] == 0  # two rounds: nothing can be chosen by others
    assert pooled.folds_of(np.arange(12) % 4)[1] == 0
    assert pooled.folds_of(np.arange(16) % 4)[1] == 3  # the first fold has two rounds: a variance
    assert pooled.folds_of(np.arange(40) % 4)[1] == 5


def test_ridge_by_hand():
    """A control of variance 4 whose covariance with the start is 2: the best coefficient is -2/4, shrunk by 1.25."""
    covariance = np.array([[[1.0, 2.0], [2.0, 4.0]]])
    recipe = pooled.Recipe("", np.array([1.0, 0.0]), np.array([1]), 0.25)
    np.testing.assert_allclose(pooled.ridges(covariance, [recipe])[0], [[1, -0.5 / 1.25]])
    constant = np.array([[[1.0, 0.0], [0.0, 0.0]]])  # a control that never varies is left out
    np.testing.assert_allclose(pooled.ridges(constant, [recipe])[0], [[1, 0]])


def test_an_episode_that_no_logger_could_run_is_refused():
    log_pi = np.zeros((1, 2, 3))
    log_mu = np.zeros((1, 2, 3))
    log_mu[0, 1, 2] = -np.inf
    with pytest.raises(ValueError, match="no logger could have run episode 1 up to t=2; are these its loggers"):
        pooled.log_weights(log_pi, log_mu, np.ones((1, 2)))


def test_estimates_at_many_points_are_those_of_the_first_episodes_alone():
    mdp, pi, episodes, logger = sample(80)
    q = exact.action_values(mdp, pi)
    found, _ = columns_of(mdp, pi, pi, np.arange(4), np.full(4, 0.25), q, episodes.states, episodes.actions, logger)
    points = np.array([4, 8, 12, 16, 20, 44, 80])
    estimates, variance = pooled.at_points(found, points)
    for estimate, n in zip(estimates, points, strict=True):
        fold, folds = pooled.folds_of(logger[:n])
        cut = pooled.Columns(*(part[..., :n] for part in found))
        alone = pooled.combine(cut, logger[:n], fold, folds)
        robust = (cut.whole + cut.decisions + cut.baselines[0, 0]).mean(-1)
        np.testing.assert_allclose(estimate, alone.mean if folds else robust, rtol=1e-9)
    np.testing.assert_allclose(variance, pooled.within(alone.values, logger, fold), rtol=1e-9)


def test_between_points_the_last_coefficients_are_kept():
    """Found anew where episodes have grown by a fifth; the estimate of another point is still all of its episodes."""
    assert pooled._grown(np.array([10, 11, 12, 13, 15, 16])).tolist() == [True, False, True, False, True, True]
    mdp, pi, episodes, logger = sample(80)
    q = exact.action_values(mdp, pi)
    found, _ = columns_of(mdp, pi, pi, np.arange(4), np.full(4, 0.25), q, episodes.states, episodes.actions, logger)
    few, many = (pooled.at_points(found, np.array(points)) for points in ([40, 80], [40, 44, 80]))
    np.testing.assert_allclose(few[0], many[0][[0, 2]])
    np.testing.assert_allclose(few[1], many[1])


def test_the_variance_is_within_loggers_and_folds_by_hand():
    values = np.array([[1.0, 10, 3, 14, 100, 50]])  # loggers in turns; the third round is another fold
    logger, fold = np.arange(6) % 2, np.array([0, 0, 0, 0, 1, 1])
    # logger 0: squares (1 + 1) / 1 degree of freedom; logger 1: (4 + 4) / 1; the third round has none
    np.testing.assert_allclose(pooled.within(values, logger, fold), [(3 * 2 + 3 * 8) / 6])
    with pytest.raises(ValueError, match="logger 0 has one episode, expected at least 2"):
        pooled.within(values[:, :2], logger[:2], fold[:2])
