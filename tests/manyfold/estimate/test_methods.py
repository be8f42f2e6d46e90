"""What decides an estimator's numbers: its loggers and its return, which is checked by its definition."""

import numpy as np
import pytest

from manyfold.data.episodes import Padded
from manyfold.estimate import estimators
from manyfold.estimate.methods import LOGGERS, METHODS, RETURNS, n_loggers


def test_the_methods_are_the_papers_and_on_policy_is_first():
    assert list(METHODS) == ["on_policy", "mpe", "odi", "son", "sodi", "mpe_baseline", "son_balanced", "pooled"]
    assert LOGGERS == ("targets", "mu", "odi")
    for method in METHODS.values():
        assert method.returns in RETURNS
        assert method.loggers in LOGGERS
        assert not (method.own and method.loggers == "mu")  # mu is nobody's own


def test_mu_is_one_logger_and_the_others_are_one_for_each_target():
    assert [n_loggers(loggers, 7) for loggers in LOGGERS] == [7, 1, 7]


@pytest.fixture
def episodes():
    """Three targets, two loggers with 2 episodes each in turns, T = 3, one that ends early."""
    rng = np.random.default_rng(0)
    target, every = rng.uniform(0.1, 1, (3, 4, 3)), rng.uniform(0.1, 1, (2, 4, 3))
    own = np.stack([every[i % 2, i] for i in range(4)])
    b, v = rng.standard_normal((2, 3, 4, 3))
    lengths = np.array([3, 2, 3, 3])
    return Padded(rng.standard_normal((4, 3)), target, own, lambda: every, lambda: (b, v), np.array([2, 2]), lengths)


def literal(episodes, k, n):
    """The four returns of one policy and episode by their definitions: name -> number."""
    rewards, length = episodes.rewards[n], episodes.lengths[n]
    pi, mu, every = episodes.target_probs[k, n], episodes.own_probs[n], episodes.logger_probs()[:, n]
    b, v = (x[k, n] for x in episodes.baseline())
    pdis = baseline = balanced = both = 0.0
    for t in reversed(range(length)):
        pdis = pi[t] / mu[t] * (rewards[t] + pdis)
        baseline = v[t] + pi[t] / mu[t] * (rewards[t] + baseline - b[t])
    before = 1.0
    for t in range(length):
        weight = pi[: t + 1].prod() / every[:, : t + 1].prod(1).mean()
        balanced += weight * rewards[t]
        both += before * v[t] + weight * (rewards[t] - b[t])
        before = weight
    return {"pdis": pdis, "baseline": baseline, "balanced": balanced, "balanced_baseline": both}


def test_the_columns_of_pooled_add_up_to_the_balanced_returns(episodes):
    found = RETURNS["pooled"](episodes)
    assert found.shape == (4 + 2, 3, 4)
    for k in range(3):
        for n in range(4):
            expected = literal(episodes, k, n)
            assert found[1:3, k, n].sum() == pytest.approx(expected["balanced"])
            assert found[1:4, k, n].sum() == pytest.approx(expected["balanced_baseline"])
    np.testing.assert_allclose(found[4:, 0].mean(0), 0, atol=1e-12)  # shares of a half: sum_j alpha_j (W^j - 1) = 0


@pytest.mark.parametrize("name", [name for name in RETURNS if name != "pooled"])
def test_every_return_is_its_definition(name, episodes):
    found = RETURNS[name](episodes)
    assert found.shape == (3, 4)
    for k in range(3):
        for n in range(4):
            assert found[k, n] == pytest.approx(literal(episodes, k, n)[name])


def test_ratios_are_those_of_the_logger_that_ran_the_episode(episodes):
    expected = estimators.log_ratios(episodes.target_probs, episodes.own_probs, episodes.lengths)
    np.testing.assert_array_equal(episodes.log_rho, expected)
    assert episodes.log_rho[0, 0, 1] == pytest.approx(np.log(episodes.target_probs[0, 0, 1] / episodes.own_probs[0, 1]))
    assert episodes.log_rho[2, 1, 2] == 0  # behind the end
