import numpy as np
import pytest
from hypothesis import given

from manyfold import exact
from manyfold.envs.gridworld import Gridworld
from manyfold.estimate import estimators
from manyfold.rollout import TabularEpisodes, rollout_tabular
from manyfold.streams import stream
from tests.worlds import cases, distributions, recursive_return, trajectories


def sampled(case, n=20):
    mu = distributions(case.rng, case.policies.shape[1:])
    return mu, rollout_tabular(case.mdp, mu, n, case.rng)


# --- identities -------------------------------------------------------------------------------------------------------


@given(cases())
def test_returns_equal_their_recursions_episode_by_episode(case):
    mu, episodes = sampled(case)
    log_rho = estimators.log_ratios(episodes.probs(case.policies), episodes.probs(mu))
    b = case.rng.standard_normal(case.policies.shape)
    b_taken, b_expected = baselines(episodes, case.policies, b)
    pdis = estimators.pdis(episodes.rewards, log_rho)
    with_baseline = estimators.baseline_return(episodes.rewards, log_rho, b_taken, b_expected)
    for k, pi in enumerate(case.policies):
        for values, base in ((pdis, None), (with_baseline, b[k])):
            value = recursive_return(case.mdp, pi, mu, base)
            expected = [value(s, a) for s, a in zip(episodes.states, episodes.actions, strict=True)]
            np.testing.assert_allclose(values[k], expected, rtol=1e-9, atol=1e-9)


def baselines(episodes, policies, b):
    """b(S_t, A_t) and sum_a pi(a|S_t) b(S_t, a), `[K, N, T]` each."""
    steps = np.arange(episodes.states.shape[1])
    return episodes.probs(b), (policies * b).sum(-1)[:, steps, episodes.states]


@given(cases())
def test_mu_equal_pi_gives_monte_carlo(case):
    episodes = rollout_tabular(case.mdp, case.policies[0], 20, case.rng)
    probs = episodes.probs(case.policies[:1])
    log_rho = estimators.log_ratios(probs, probs[0])
    np.testing.assert_allclose(estimators.pdis(episodes.rewards, log_rho)[0], estimators.mc(episodes.rewards))


@given(cases())
def test_a_baseline_of_zero_gives_pdis(case):
    mu, episodes = sampled(case)
    log_rho = estimators.log_ratios(episodes.probs(case.policies), episodes.probs(mu))
    zero = np.zeros_like(log_rho)
    np.testing.assert_allclose(
        estimators.baseline_return(episodes.rewards, log_rho, zero, zero), estimators.pdis(episodes.rewards, log_rho)
    )


@given(cases())
def test_balanced_with_one_logger_gives_pdis(case):
    mu, episodes = sampled(case)
    log_rho = estimators.log_ratios(episodes.probs(case.policies), episodes.probs(mu))
    found = estimators.balanced(episodes.rewards, episodes.probs(case.policies), episodes.probs(mu)[None], [20])
    np.testing.assert_allclose(found, estimators.pdis(episodes.rewards, log_rho), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("with_baseline", [False, True])
@given(case=cases(max_policies=3))
def test_balanced_weights_are_unbiased_over_all_trajectories_of_all_loggers(case, with_baseline):
    """sum_j n_j/n E_{mu_j}[value] = J(pi_k), enumerated; loggers are the targets themselves, zeros and all."""
    loggers = case.policies
    table = case.rng.standard_normal(loggers.shape)
    counts = np.arange(1, len(loggers) + 1)
    total = np.zeros(len(loggers))
    for j, mu in enumerate(loggers):
        for probability, states, actions in trajectories(case.mdp, mu):
            s, a = np.array([states]), np.array([actions])
            one = TabularEpisodes(s, a, case.mdp.rewards[s, a])
            probs = one.probs(loggers)
            # as if n_j episodes of every logger were there: this one stands for its kind
            repeat = [np.repeat(x, counts.sum(), axis=-2) for x in (one.rewards, probs)]
            b = one.probs(table), one.at((loggers * table).sum(-1))
            many = tuple(np.repeat(x, counts.sum(), axis=-2) for x in b) if with_baseline else None
            value = estimators.balanced(repeat[0], repeat[1], repeat[1], counts, b=many)[:, 0]
            total += counts[j] / counts.sum() * probability * value
    np.testing.assert_allclose(total, exact.values(case.mdp, case.policies), rtol=1e-9, atol=1e-9)


def test_balanced_weights_are_bounded_where_the_target_is_a_logger():
    rng = np.random.default_rng(0)
    world = Gridworld.draw(6, 0)
    policies = distributions(rng, (4, 6, 36, 4))
    pooled = pool(world, policies, 50, rng)
    ones = np.zeros_like(pooled.rewards)
    ones[:, -1] = 1  # the value is then the whole episode's weight
    probs = pooled.probs(policies)
    assert estimators.balanced(ones, probs, probs, [50] * 4).max() <= 4 + 1e-9
    logger = np.repeat(np.arange(4), 50)
    own = probs[logger, np.arange(200)]
    assert estimators.pdis(ones, estimators.log_ratios(probs, own)).max() > 50  # what SON's weights do


# --- against the exact oracle -----------------------------------------------------------------------------------------


def pool(world, behaviors, n, rng):
    """n episodes of every behavior policy, one after the other."""
    parts = [rollout_tabular(world, mu, n, rng) for mu in behaviors]
    return TabularEpisodes(*(np.concatenate(x) for x in zip(*parts, strict=True)))


def assert_within_four_standard_errors(values, mean, variance):
    """Sample mean and variance of `[K, N]` values against exact `[K]` ones."""
    n = values.shape[-1]
    np.testing.assert_array_less(np.abs(values.mean(-1) - mean), 4 * np.sqrt(variance / n))
    centred = values - values.mean(-1, keepdims=True)
    found = (centred**2).mean(-1)
    error = np.sqrt(((centred**2 - found[:, None]) ** 2).mean(-1) / n)
    np.testing.assert_array_less(np.abs(found - variance), 4 * error)


def similar_policies(m, n_policies, seed):
    rng = np.random.default_rng(seed)
    base = distributions(rng, (1, m, m * m, 4))
    return 0.8 * base + 0.2 * distributions(rng, (n_policies, m, m * m, 4))


@pytest.fixture(scope="module")
def grid():
    world = Gridworld.draw(4, 1)
    return world, world.mdp(), similar_policies(4, 3, 1)


N = 200_000


def test_monte_carlo_has_its_exact_mean_and_variance(grid):
    world, mdp, policies = grid
    for k, pi in enumerate(policies):
        values = estimators.mc(rollout_tabular(world, pi, N, stream("test-mc", k)).rewards)
        one = policies[k : k + 1]
        assert_within_four_standard_errors(values[None], exact.values(mdp, one), exact.pdis_variance(mdp, one, pi))


def test_mpe_and_its_baseline_return_have_their_exact_mean_and_variance(grid):
    world, mdp, policies = grid
    mu = exact.shared_behavior(policies, exact.second_moments(mdp, policies))
    episodes = rollout_tabular(world, mu, N, stream("test-mpe"))
    log_rho = estimators.log_ratios(episodes.probs(policies), episodes.probs(mu))
    values = estimators.pdis(episodes.rewards, log_rho)
    assert_within_four_standard_errors(values, exact.values(mdp, policies), exact.pdis_variance(mdp, policies, mu))
    q = exact.action_values(mdp, policies)
    for b in (q, q + np.random.default_rng(0).normal(0, 0.5, q.shape)):  # a wrong b is as unbiased
        values = estimators.baseline_return(episodes.rewards, log_rho, *baselines(episodes, policies, b))
        variance = exact.baseline_variance(mdp, policies, mu, b)
        assert_within_four_standard_errors(values, exact.values(mdp, policies), variance)


@pytest.mark.parametrize("name", ["odi", "son", "sodi"])
def test_separate_and_pooled_estimators_have_their_exact_mean_and_variance(grid, name):
    world, mdp, policies = grid
    n_policies = len(policies)
    odi = exact.odi_behaviors(policies, exact.second_moments(mdp, policies))
    behaviors = policies if name == "son" else odi
    pooled = pool(world, behaviors, N // 2, stream("test-pool", name))
    logger = np.repeat(np.arange(n_policies), N // 2)
    own = pooled.probs(behaviors)[logger, np.arange(len(logger))]
    values = estimators.pdis(pooled.rewards, estimators.log_ratios(pooled.probs(policies), own))
    truth = exact.values(mdp, policies)
    expected = exact.estimator_variances(mdp, policies)[name]
    if name == "odi":
        separate = np.stack([values[k, logger == k] for k in range(n_policies)])
        assert_within_four_standard_errors(separate, truth, expected / n_policies)
    else:
        found = estimators.estimate(values, logger)
        assert (np.abs(found.mean - truth) < 4 * found.standard_error).all()
        # The exact variance per episode is the mean over loggers; its sampling error from the fourth moments.
        errors = []
        for j in range(n_policies):
            squares = (values[:, logger == j] - truth[:, None]) ** 2
            errors.append(squares.var(-1) / squares.shape[-1])
        assert (np.abs(found.variance - expected) < 4 * np.sqrt(np.sum(errors, axis=0)) / n_policies).all()


def test_balanced_pooling_is_unbiased_and_better_than_son(grid):
    world, mdp, policies = grid
    pooled = pool(world, policies, 20_000, stream("test-balanced"))
    logger = np.repeat(np.arange(3), 20_000)
    probs = pooled.probs(policies)
    found = estimators.estimate(estimators.balanced(pooled.rewards, probs, probs, [20_000] * 3), logger)
    assert (np.abs(found.mean - exact.values(mdp, policies)) < 4 * found.standard_error).all()
    assert (found.variance < 0.97 * exact.estimator_variances(mdp, policies)["son"]).all()


def test_balanced_pooling_has_its_enumerated_variance():
    """On a world small enough to list every trajectory: per-logger means and variances, then 4 standard errors."""
    rng = np.random.default_rng(5)
    world = Gridworld.draw(2, 5)
    mdp = world.mdp()
    policies = similar_policies(2, 2, 5)
    pooled = pool(world, policies, 30_000, rng)
    probs = pooled.probs(policies)
    found = estimators.balanced(pooled.rewards, probs, probs, [30_000] * 2)
    for j, mu in enumerate(policies):
        rows = list(trajectories(mdp, mu))
        weight = np.array([row[0] for row in rows])
        states, actions = (np.array([row[i] for row in rows]) for i in (1, 2))
        path = [np.prod(pi[np.arange(2), states, actions][:, None, :] ** np.tri(2)[None], axis=-1) for pi in policies]
        ratio = np.stack(path) / np.mean(path, axis=0)  # pi_{0:t} / mean_j mu_{j, 0:t}, [K, trajectories, T]
        value = (ratio * mdp.rewards[states, actions]).sum(-1)
        mean = value @ weight
        variance = (value - mean[:, None]) ** 2 @ weight
        assert_within_four_standard_errors(found[:, j * 30_000 : (j + 1) * 30_000], mean, variance)


# --- padded and ragged ------------------------------------------------------------------------------------------------


def test_ragged_episodes_equal_each_one_alone_whatever_stands_in_the_padding():
    rng = np.random.default_rng(0)
    lengths = np.array([3, 1, 5, 0, 2])
    steps = lengths.sum()
    flat = {
        "rewards": rng.standard_normal(steps),
        "pi": rng.random((2, steps)),
        "mu": rng.uniform(0.1, 1, steps),
        "b": rng.standard_normal((2, steps)),
        "e": rng.standard_normal((2, steps)),
    }
    padded = {name: estimators.pad(x, lengths) for name, x in flat.items()}
    outside = np.arange(5) >= lengths[:, None]
    for x in padded.values():
        assert (x[..., outside] == 0).all()
        x[..., outside] = np.nan
    log_rho = estimators.log_ratios(padded["pi"], padded["mu"], lengths)
    loggers = np.stack([padded["mu"], padded["pi"][0]])
    found = {
        "mc": estimators.mc(padded["rewards"], lengths)[None],
        "pdis": estimators.pdis(padded["rewards"], log_rho, lengths),
        "baseline": estimators.baseline_return(padded["rewards"], log_rho, padded["b"], padded["e"], lengths),
        "balanced": estimators.balanced(padded["rewards"], padded["pi"], loggers, [3, 2], lengths),
    }
    starts = np.cumsum(lengths) - lengths
    for n, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        one = {name: x[..., start : start + length] for name, x in flat.items()}
        rho = np.cumprod(one["pi"] / one["mu"], axis=-1)
        before = np.concatenate([np.ones((2, 1)), rho], axis=-1)[:, :length]
        mix = 0.6 * np.cumprod(one["mu"]) + 0.4 * np.cumprod(one["pi"][0])
        expected = {
            "mc": [one["rewards"].sum()],
            "pdis": (rho * one["rewards"]).sum(-1),
            "baseline": (before * one["e"] + rho * (one["rewards"] - one["b"])).sum(-1),
            "balanced": (np.cumprod(one["pi"], axis=-1) / mix * one["rewards"]).sum(-1),
        }
        for name, values in expected.items():
            np.testing.assert_allclose(found[name][:, n], values, err_msg=name)


def test_hundreds_of_steps_do_not_overflow_on_the_way():
    """The ratio rises to 1e+400 and falls back to 1 before the only reward."""
    log_rho = np.zeros((1, 1, 800))
    log_rho[..., :400] = np.log(10)
    log_rho[..., 400:] = -np.log(10)
    rewards = np.zeros((1, 800))
    rewards[0, -1] = 2.0
    zero = np.zeros_like(log_rho)
    np.testing.assert_allclose(estimators.pdis(rewards, log_rho), [[2.0]], rtol=1e-9)
    np.testing.assert_allclose(estimators.baseline_return(rewards, log_rho, zero, zero), [[2.0]], rtol=1e-9)


# --- estimates and weights --------------------------------------------------------------------------------------------


def test_estimate_by_hand():
    found = estimators.estimate([[1.0, 3.0, 5.0, 7.0]])
    assert found.mean == [4.0]
    np.testing.assert_allclose(found.variance, [20 / 3])
    np.testing.assert_allclose(found.standard_error, [np.sqrt(20 / 3 / 4)])
    stratified = estimators.estimate([[1.0, 3.0, 5.0, 7.0]], logger=[0, 0, 1, 1])
    np.testing.assert_allclose(stratified.variance, [2.0])  # 2 within each logger: the means' difference is no error
    np.testing.assert_allclose(stratified.standard_error, [np.sqrt(2 / 4)])
    with pytest.raises(ValueError, match=r"episodes per logger are \[3, 1\], expected at least 2"):
        estimators.estimate([[1.0, 2.0, 3.0, 4.0]], logger=[0, 0, 0, 1])


# --- bad input --------------------------------------------------------------------------------------------------------

OK = np.full((2, 3, 4), 0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: estimators.log_ratios(OK, np.zeros((3, 4))), "episode 0 took an action of probability 0 at t=0"),
        (lambda: estimators.log_ratios(OK, OK), r"behavior_probs has shape \[2, 3, 4\], expected \[N, T\]"),
        (lambda: estimators.log_ratios(OK * np.nan, OK[0]), r"target_probs\[0, 0, 0\] is nan, expected a number"),
        (lambda: estimators.log_ratios(OK * 3, OK[0]), r"target_probs\[0, 0, 0\] is 1.5, expected a probability"),
        (lambda: estimators.log_ratios(OK[:, :2], OK[0]), r"with \[N, T\] = \[3, 4\]"),
        (lambda: estimators.mc(np.zeros((3, 4)), [1, 2]), "lengths is .* expected 3 whole numbers from 0 to 4"),
        (lambda: estimators.mc(np.zeros((3, 4)), [1, 2, 5]), "expected 3 whole numbers from 0 to 4"),
        (lambda: estimators.balanced(np.zeros((3, 4)), OK, OK, [1, 1]), "expected one per logger"),
        (lambda: estimators.balanced(np.zeros((3, 4)), OK, OK * 0, [1, 2]), "no logger could have run episode 0"),
        (lambda: estimators.pad(np.zeros(4), [1, 2]), "lengths sum to 3 steps, found 4"),
        (lambda: estimators.pad(5.0, [1]), r"expected \[..., steps\] and \[N\]"),
        (lambda: estimators.balanced(np.zeros((3, 4)), OK * np.nan, OK, [1, 2]), r"target_probs\[0, 0, 0\] is nan"),
        (lambda: estimators.balanced(np.zeros((3, 4)), OK, OK, [4, -1]), "expected one per logger"),
        (lambda: estimators.pdis(np.ones((1, 4)), np.zeros((2, 3, 4))), r"with \[N, T\] = \[1, 4\]"),
        (lambda: estimators.pdis(np.full((3, 4), np.nan), np.zeros((2, 3, 4))), r"rewards\[0, 0\] is nan"),
        (lambda: estimators.mc(np.zeros((1, 4)), [1.5]), "expected 1 whole numbers from 0 to 4"),
    ],
)
def test_bad_input_is_refused_with_one_clear_line(call, message):
    with pytest.raises(ValueError, match=message):
        call()
