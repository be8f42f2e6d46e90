"""Policies that only act."""

import numpy as np
import pytest
from scipy import stats
from torch import nn

from manyfold.policies import CallablePolicySet
from manyfold.policies.actors import ActorSet, Drawn
from manyfold.policies.heads import Gaussian, MultiCategorical
from manyfold.policies.modules import ModulePolicySet
from tests.originals import spread

OBS, STEPS = np.zeros((20_000, 3), np.float32), np.zeros(20_000, np.int64)


def alone(actions):
    return ModulePolicySet([spread(nn.Linear(3, getattr(actions, "size", actions)))], actions, 3)


def test_draws_of_counted_actions_have_their_probabilities():
    policies = alone(4)
    actions = Drawn(policies, False, np.random.default_rng(0))(OBS, STEPS)
    expected = len(OBS) * policies.probs(OBS[:1], 0)[0, 0]
    assert stats.chisquare(np.bincount(actions, minlength=4), expected).pvalue > 0.001


def test_draws_of_vectors_are_clipped_normals():
    policies = alone(Gaussian((-0.5, -9.0), (0.5, 9.0)))
    actions = Drawn(policies, False, np.random.default_rng(0))(OBS, STEPS)
    mean, log_std = np.split(policies.parameters(OBS[:1], 0)[0, 0], 2)
    at_bound = 1 - stats.norm.cdf(0.5, mean[0], np.exp(log_std[0]))
    assert (actions[:, 0] == 0.5).mean() == pytest.approx(at_bound, abs=0.02)
    assert stats.kstest(actions[:, 1], stats.norm(mean[1], np.exp(log_std[1])).cdf).pvalue > 0.001


def test_greedy_actions_are_the_most_likely():
    for head in (Gaussian((-9.0,) * 2, (9.0,) * 2, True), MultiCategorical((2, 3))):
        policies = alone(head)
        expected = head.sent(head.greedy(policies.parameters(OBS[:5], 0)[0]))
        found = Drawn(policies, True, np.random.default_rng(0))(OBS[:5], STEPS[:5])
        np.testing.assert_array_equal(found, expected)


def test_sets_count_and_name_their_actors():
    actors = ActorSet([lambda obs, t: t, lambda obs, t: t])
    assert (actors.n_policies, actors.names, actors.width) == (2, ("policy 0", "policy 1"), 0)
    with pytest.raises(ValueError, match="1 names for 2 policies, expected one for each"):
        ActorSet(actors.acts, ["a"])
    with pytest.raises(ValueError, match="policies is 0, expected"):
        ActorSet([])


def test_steps_reach_the_policy():
    later = CallablePolicySet([lambda obs, t: np.eye(3)[t]], 3, 3, horizon=3)
    assert Drawn(later, False, np.random.default_rng(0))(OBS[:3], np.arange(3)).tolist() == [0, 1, 2]
