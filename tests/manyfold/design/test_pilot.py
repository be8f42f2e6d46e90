"""Predictions after a pilot, against exact variances."""

import numpy as np

from manyfold import exact
from manyfold.design.behavior import Behavior
from manyfold.design.pilot import after_pilot
from manyfold.design.prediction import LABELS, Prediction
from manyfold.envs.gridworld import Gridworld
from manyfold.estimate.loggers import logging_of
from tests.networks import mlp_policies, nets_from_table


def test_a_pilot_measures_what_was_unknown_and_leaves_the_rest():
    world = Gridworld.draw(4, 1)
    mdp, policies = world.mdp(), mlp_policies(1, k=3, horizon=4, n_actions=4, n_states=16)
    policies.tensors["w3"] *= 0.3  # near each other: a measured variance has a standard error of 3%
    table = policies.table()
    q, q_hat = exact.action_values(mdp, table), exact.second_moments(mdp, table)
    designed = Behavior(policies, nets_from_table(q), nets_from_table(q_hat))
    mu = designed.tables()[1]
    known = exact.estimator_variances(mdp, table, q_hat, q, (mu, table))
    logging, nothing, unknown = logging_of(world, designed), np.full(3, np.nan), {of: np.ones(3) > 0 for of in LABELS}
    before = Prediction(np.zeros(3), nothing, nothing, nothing, nothing, unknown, np.full(4, 4.0))
    targets = list(logging.log("targets", 60_000, np.random.default_rng(0)))
    shared = list(logging.log("mu", 60_000, np.random.default_rng(1)))
    after = after_pilot(before, targets)
    np.testing.assert_allclose(after.n_var["on_policy"], known["on_policy"], rtol=0.1)
    assert after.is_known("pooled")
    assert (after.pooled < known["on_policy"]).all()
    assert not after.is_known("mpe")
    both = after_pilot(after._replace(on_policy=np.ones(3)), targets, shared)
    np.testing.assert_allclose(both.mpe, known["mpe"], rtol=0.1)
    np.testing.assert_allclose(both.mpe_baseline, known["mpe_baseline"], rtol=0.1)
    assert both.on_policy.tolist() == [1, 1, 1]  # it was known: logged data tell it better
