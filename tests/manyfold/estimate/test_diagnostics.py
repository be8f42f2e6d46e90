"""Diagnostics by hand, against samples of known tails, and on evaluations that fail or do not."""

import numpy as np
import pytest
from scipy import stats

from manyfold import exact
from manyfold.envs.gridworld import Gridworld
from manyfold.estimate import diagnostics, estimators
from manyfold.estimate.diagnostics import diagnose, hardly_vary, pareto_k, trust
from manyfold.mdp import FiniteMDP
from manyfold.rollout import rollout_tabular


def logs(x):
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(x, dtype=np.float64))


def test_weights_by_hand():
    found = diagnose(logs([[1.0, 1, 1, 1], [3, 1, 0, 0]]), [[1.0, 2, 3, 4]] * 2)
    np.testing.assert_allclose(found.effective_sample_size, [4, 16 / 10])
    np.testing.assert_allclose(found.largest_share, [1 / 4, 3 / 4])
    np.testing.assert_allclose(found.mean_z, [0, 0], atol=1e-12)
    below = diagnose(logs([[0.1, 0.3]]), [[0.0, 0.0]])  # mean 0.2, standard error 0.1
    np.testing.assert_allclose(below.mean_z, [-8])


def test_zero_and_extreme_weights():
    log_w = np.array([[-np.inf, -np.inf], [-900.0, -900.0], [900.0, 899.0], [0.0, -np.inf]])
    found = diagnose(log_w, np.zeros((4, 2)))
    e = np.exp(-1)
    np.testing.assert_allclose(found.effective_sample_size, [0, 2, (1 + e) ** 2 / (1 + e**2), 1])
    np.testing.assert_allclose(found.largest_share, [0, 0.5, 1 / (1 + e), 1])
    assert found.mean_z[:2].tolist() == [-np.inf, -np.inf]
    assert found.mean_z[2] == pytest.approx((1 + e) / 2 / ((1 - e) / 2))  # far above 1: the mean in standard errors


@pytest.mark.parametrize("k", [-0.5, 0.0, 0.5, 1.0, 1.5])
def test_the_tail_index_of_generalised_pareto_samples(k):
    """The fit sees 190 of 4,000 values; its own standard error is about (1 + k) / sqrt(190), over 20 samples."""
    found = [pareto_k(stats.genpareto.rvs(k, size=4000, random_state=seed)) for seed in range(20)]
    assert np.mean(found) == pytest.approx(k, abs=0.12)
    whole = diagnostics._fit(np.sort(stats.genpareto.rvs(k, size=100_000, random_state=0)))
    assert whole == pytest.approx(k, abs=0.02)


def test_the_tail_index_does_not_depend_on_the_scale():
    x = stats.genpareto.rvs(0.8, size=500, random_state=0)
    assert pareto_k(x * 1e200) == pytest.approx(pareto_k(x))
    assert pareto_k(x * 1e-200) == pytest.approx(pareto_k(x))


@pytest.mark.parametrize("k", [1.2, 2.0])
def test_the_tail_index_is_the_likeliest_drawn_towards_a_half(k):
    """By ten observations' worth, (n k + 10 / 2) / (n + 10), with k of SciPy's maximum likelihood.

    Heavy tails only: below 0 the likeliest k is biased by more than these ten (-0.35 instead of -0.3 at n = 300).
    """
    samples = [stats.genpareto.rvs(k, size=300, random_state=seed) for seed in range(10)]
    likeliest = np.mean([stats.genpareto.fit(x, floc=0)[0] for x in samples])
    found = np.mean([diagnostics._fit(np.sort(x)) for x in samples])
    drawn = (300 * likeliest + 5) / 310
    assert found == pytest.approx(drawn, abs=(likeliest - drawn) / 2)  # nearer to it than to the likeliest itself


def test_values_without_a_tail():
    assert pareto_k(np.ones(100)) == -np.inf
    assert pareto_k(np.zeros(100)) == -np.inf
    assert pareto_k(8 + 1e-12 * np.arange(100)) == -np.inf  # rounding
    assert pareto_k(np.r_[np.zeros(97), 1, 2, 3]) == np.inf  # three stand out
    assert np.isnan(pareto_k(np.arange(20)))
    assert np.isfinite(pareto_k(np.arange(21)))


def test_equal_weights_are_trusted():
    rng = np.random.default_rng(0)
    for n in (2, 20, 200):
        found = diagnose(np.zeros((1, n)), rng.standard_t(1.5, (1, n)))
        assert trust(found) == [""]
        assert np.isnan(found.weights_k[0]) if n < 21 else found.weights_k[0] == -np.inf
    assert trust(diagnose(np.full((1, 50), np.log(0.5)), np.ones((1, 50)))) == [""]  # mu leaves out what is worth 0
    assert trust(diagnose(np.zeros((1, 1)), np.ones((1, 1)))) == [""]


def test_what_cannot_be_trusted_says_why_and_what_to_do():
    rng = np.random.default_rng(0)
    log_w = np.stack([np.full(200, -np.inf), 20 * rng.standard_normal(200) - 200, 0.2 * rng.standard_normal(200)])
    values = np.where(np.isneginf(log_w), 0.0, np.exp(log_w)) * rng.standard_normal(200)
    none, heavy, fine = trust(diagnose(log_w, values))
    assert none == ("all 200 weights are 0: no episode says anything of policy 0; run more episodes of policy 0 itself")
    assert heavy.startswith("Pareto k ")
    assert "> 0.7: a few of 200 episodes decide this estimate (effective sample size 1." in heavy
    assert heavy.endswith("run more episodes of policy 1 itself")
    assert fine == ""
    few = trust(diagnose(log_w[1:, :10], values[1:, :10]), ["a", "b"])
    assert few[1] == (
        "10 episodes are too few to judge their weights, expected at least 21; run more episodes of b itself"
    )
    flat = trust(diagnose(log_w[1:2], np.zeros((1, 200))))[0]  # values that hide it
    assert flat.startswith("effective sample size 1.")
    assert flat.endswith("of 200, expected at least 5; run more episodes of policy 0 itself")


def test_returns_that_hardly_vary_are_flagged():
    most = np.full(96, 500.0)
    found = hardly_vary(
        [
            np.r_[most, 499, 300, 7, 7],  # four others
            np.r_[most, 499, 300, 7, 7, 8],
            most,
            np.arange(3.0),  # few, but all different
            np.array([1.0, 0.0]),  # no more than half are equal
            np.array([1.0, 1.0, 0.0]),
            np.array([1.0]),
            np.empty(0),
        ],
        "abcdefgh",
    )
    assert found[0] == (
        "only 4 of 100 returns of a differ from 500, expected at least 5; run more episodes of a, or in Python take "
        "the intervals of result.bounded(low, high)"
    )
    assert found[2] == "all returns of c were equal: what is rarer than 1 in 32 may not have been seen"
    assert found[5].startswith("only 1 of 3 returns of f differ from 1,")
    assert [i for i, said in enumerate(found) if said] == [0, 2, 5]
    assert hardly_vary([most])[0].startswith("all returns of policy 0 were equal")


@pytest.mark.parametrize("n", [25, 50, 100, 400])
def test_what_is_not_flagged_misses_in_8_percent_at_worst(n):
    """Two outcomes, exactly: every number of successes by its binomial probability."""
    m = np.arange(n + 1)
    flagged = np.array([bool(hardly_vary([np.r_[np.ones(i), np.zeros(n - i)]])[0]) for i in m])
    reach = stats.t.isf(0.025, n - 1) * np.sqrt(m / n * (1 - m / n) / (n - 1))
    for p in (0.002, 0.02, 0.05, 0.1, 0.136, 0.24, 0.5):
        missed = np.abs(m / n - p) > reach
        assert stats.binom.pmf(m, n, p)[missed & ~flagged].sum() < 0.08
    rare = stats.binom.pmf(m, n, 0.002)
    assert rare[np.abs(m / n - 0.002) > reach].sum() > 0.4  # without the rule


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_input_is_refused_with_one_clear_line(bad):
    ok = np.zeros((2, 30))
    broken = ok.copy()
    broken[1, 3] = bad
    with pytest.raises(ValueError, match=rf"log_w\[1, 3\] is {bad}, expected a number or -inf"):
        diagnose(broken, ok)
    with pytest.raises(ValueError, match=rf"values\[1, 3\] is {bad}, expected a finite number"):
        diagnose(ok, broken)
    with pytest.raises(ValueError, match=r"log_w has shape \[30\], expected \[K, N\]"):
        diagnose(ok[0], ok[0])
    with pytest.raises(ValueError, match=r"values has shape \[2, 29\], expected \[2, 30\]"):
        diagnose(ok, ok[:, 1:])


def test_a_long_episode_of_far_policies_is_flagged_although_its_weights_look_small():
    """T = 100, two actions, targets of 0.9 and 0.1: mu is half of each, a weight is a product of 100 of 1.8 or 0.2."""
    mdp = FiniteMDP(np.ones((1, 2, 1)), [[1.0, 1.5]], [1.0], 100)
    pi = np.stack([np.broadcast_to(p, (100, 1, 2)) for p in ([0.9, 0.1], [0.1, 0.9])])
    mu = np.full((100, 1, 2), 0.5)
    episodes = rollout_tabular(mdp, mu, 400, np.random.default_rng(0))
    log_rho = estimators.log_ratios(episodes.probs(pi), episodes.probs(mu))
    values = estimators.pdis(episodes.rewards, log_rho)
    found, result = diagnose(log_rho.sum(-1), values), estimators.estimate(values)
    assert (found.mean_z < -5).all()
    assert (np.abs(result.mean - exact.values(mdp, pi)) > 1.96 * result.standard_error).all()  # both intervals miss
    assert all(trust(found))


def test_near_policies_are_trusted():
    """MPE and its mean weight on a Gridworld, 20 policies that share four fifths."""
    world = Gridworld.draw(m=5, seed=0)
    mdp, rng = world.mdp(), np.random.default_rng(0)
    base = rng.dirichlet(np.ones(4), size=(1, 5, 25))
    policies = 0.8 * base + 0.2 * rng.dirichlet(np.ones(4), size=(20, 5, 25))
    mu = exact.shared_behavior(policies, exact.second_moments(mdp, policies))
    episodes = rollout_tabular(world, mu, 500, rng)
    log_rho = estimators.log_ratios(episodes.probs(policies), episodes.probs(mu))
    found = diagnose(log_rho.sum(-1), estimators.pdis(episodes.rewards, log_rho))
    assert trust(found) == [""] * 20
    assert np.abs(found.mean_z).max() < 4
    assert (found.effective_sample_size < 500).all()


def test_without_own_episodes_the_weights_must_say_enough():
    """100 weights of mean 1 by hand; the same of mean 0.5, which is many standard errors below; ten that count."""
    even = np.log(np.tile([0.5, 1.5], 50))
    missing = even + np.log(0.5)
    few = np.log(np.concatenate([np.full(10, 10.0), np.full(90, 1e-9)]))
    found = diagnostics.diagnose(np.stack([even, missing, few, few]), np.random.default_rng(0).random((4, 100)))
    np.testing.assert_allclose(found.effective_sample_size, [80, 80, 10, 10], atol=1e-6)
    assert found.mean_z[1] == pytest.approx(-0.5 / (np.tile([0.25, 0.75], 50).std(ddof=1) / 10))
    none, own = np.empty(0), np.ones(5)
    said = diagnostics.borrowed(found, [none, none, none, own], ["a", "b", "c", "d"])
    assert [bool(one) for one in said] == [False, True, True, False]
    assert said[1].endswith("mean weight -19.9 standard errors from 1; expected 20 and -2 at least); run b itself")
    assert "effective sample size 10.0" in said[2]
