"""Distributions over vectors, against scipy and torch."""

import numpy as np
import pytest
import torch
from scipy import stats

from manyfold.policies.heads import Gaussian, MultiCategorical
from manyfold.policies.modules import CallablePolicySet, JoinedPolicySet, ModulePolicySet

HEADS = [Gaussian((-1.0, -2.0), (1.0, 3.0)), Gaussian((-1.0, -2.0), (1.0, 3.0), True), MultiCategorical((2, 3))]


def parameters(head, rng, *shape):
    return rng.normal(size=(*shape, head.size)) * 0.7


def test_gaussian_densities_are_scipys():
    head, rng = HEADS[0], np.random.default_rng(0)
    x = parameters(head, rng, 3, 50)
    actions = head.draw(x[0], rng)
    expected = stats.norm.logpdf(actions, x[..., :2], np.exp(x[..., 2:])).sum(-1)
    np.testing.assert_allclose(head.log_probs(x, actions), expected, atol=1e-12)


def test_probabilities_of_several_choices_are_torchs():
    head, rng = HEADS[2], np.random.default_rng(1)
    x = parameters(head, rng, 3, 50)
    actions = head.draw(x[0], rng)
    logits = torch.from_numpy(x).split([2, 3], -1)
    one, two = (torch.distributions.Categorical(logits=part) for part in logits)
    expected = one.log_prob(torch.from_numpy(actions[:, 0])) + two.log_prob(torch.from_numpy(actions[:, 1]))
    np.testing.assert_allclose(head.log_probs(x, actions), expected.numpy(), atol=1e-12)


@pytest.mark.parametrize("head", HEADS, ids=["gaussian", "squashed", "choices"])
def test_draws_have_the_expected_features_and_ratios_have_mean_1(head):
    rng = np.random.default_rng(2)
    one, other = parameters(head, rng, 2) * 0.5
    n = 200_000
    rows = np.broadcast_to(one, (n, head.size))
    actions = head.draw(rows, rng)
    found = head.features(actions)
    assert found.shape == (n, head.n_features)
    z = (found.mean(0) - head.expected(one)) / (found.std(0) / np.sqrt(n))
    assert np.abs(z).max() < 4
    log_probs = head.log_probs(np.stack([np.broadcast_to(other, rows.shape), rows]), actions)
    ratio = np.exp(log_probs[0] - log_probs[1])
    assert abs(ratio.mean() - 1) < 5 * ratio.std() / np.sqrt(n)


def test_what_the_environment_gets_is_within_its_bounds():
    rng = np.random.default_rng(3)
    actions = rng.normal(size=(100, 2)) * 5
    clipped, squashed = HEADS[0].sent(actions), HEADS[1].sent(actions)
    np.testing.assert_array_equal(clipped, np.clip(actions, [-1, -2], [1, 3]))
    np.testing.assert_allclose(squashed[:, 1], -2 + 2.5 * (np.tanh(actions[:, 1]) + 1))


@pytest.mark.parametrize("head", HEADS, ids=["gaussian", "squashed", "choices"])
def test_the_greedy_action_is_the_most_likely_one(head):
    rng = np.random.default_rng(4)
    x = parameters(head, rng, 20)
    best = head.log_probs(x[None], head.greedy(x))[0]
    for _ in range(50):
        assert (head.log_probs(x[None], head.draw(x, rng))[0] <= best + 1e-12).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gaussian((0.0,), (0.0,)), "expected low < high"),
        (lambda: Gaussian((0.0,), (1.0, 2.0)), "expected low < high, d numbers each"),
        (lambda: Gaussian((0.0,), (np.inf,), True), "squashed action has infinite bounds"),
        (lambda: MultiCategorical(()), "expected the number of choices"),
        (lambda: HEADS[0].draw(np.full((1, 4), np.nan), np.random.default_rng(0)), "NaN, infinity or a vanishing"),
        (lambda: HEADS[2].expected(np.full((1, 5), np.inf)), "expected finite logits"),
    ],
)
def test_bad_heads_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_sets_over_vectors_say_parameters_and_no_probabilities():
    head = Gaussian((-1.0,), (1.0,))
    modules = ModulePolicySet([torch.nn.Linear(3, 2) for _ in range(2)], head, 3)
    functions = CallablePolicySet([lambda obs, t: np.zeros((len(obs), 2))], head, 3)
    joined = JoinedPolicySet([modules, functions])
    obs = np.random.default_rng(5).normal(size=(7, 3))
    found = joined.parameters(obs, 0)
    assert found.shape == (3, 7, 2)
    with torch.no_grad():
        expected = modules.modules[1](torch.from_numpy(obs).float()).numpy()
    np.testing.assert_allclose(found[1], expected, atol=1e-6)
    for policies in (modules, functions):
        with pytest.raises(ValueError, match="actions are vectors"):
            policies.probs(obs, 0)
    counted = CallablePolicySet([lambda obs, t: np.full((len(obs), 2), 0.5)], 2, 3)
    with pytest.raises(ValueError, match="counted actions"):
        counted.parameters(obs, 0)
    with pytest.raises(ValueError, match="n_actions is 2 in one set and 0 in another"):
        JoinedPolicySet([modules, counted])
    with pytest.raises(ValueError, match="head is .* in one set and .* in another"):
        JoinedPolicySet([functions, CallablePolicySet(functions.functions, Gaussian((-1.0,), (1.0,), True), 3)])


def test_moments_of_clipped_actions_by_integration():
    """Wide and narrow, inside and beyond the bounds -1 and 3: in units of the bounds, z = (a - 1) / 2."""
    head, free = Gaussian((-1.0,), (3.0,)), Gaussian((-np.inf,), (np.inf,))
    for mean, std in ((0.5, 0.1), (2.5, 3.0), (-4.0, 1.0), (9.0, 0.2)):
        grid = np.linspace(mean - 12 * std, mean + 12 * std, 400_001)
        weights = stats.norm.pdf(grid, mean, std) * (grid[1] - grid[0])
        z = (np.clip(grid, -1, 3) - 1) / 2
        found = head.expected(np.array([mean, np.log(std)]))
        np.testing.assert_allclose(found, [weights @ z, weights @ z**2], atol=1e-6)
        np.testing.assert_allclose(head.features(grid[:, None])[:, 0], z)
        np.testing.assert_allclose(free.expected(np.array([mean, np.log(std)])), [mean, mean**2 + std**2])
