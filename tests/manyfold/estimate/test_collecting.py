"""Episodes that were run before, described again: the same densities as when they were run."""

import numpy as np
import pytest
import torch

import manyfold as mf
from manyfold.estimate.collecting import Job, collect, describe


def set_of(env, head, seeds):
    modules = []
    for seed in seeds:
        torch.manual_seed(seed)
        modules.append(torch.nn.Linear(env.width, getattr(head, "size", head)))
    return mf.ModulePolicySet(modules, head, env.width)


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_described_episodes_are_the_collected_ones(name):
    """Two targets and another logger; in parts of 100 steps, the least there are, and all at once."""
    env = mf.GymnasiumEnvironment(name, horizon=25)
    head = 2 if name == "CartPole-v1" else mf.Gaussian((-2.0,), (2.0,))
    job = Job(env, set_of(env, head, (0, 1)), set_of(env, head, (2,)))
    run = collect(env, job.policies, 12, np.random.default_rng(0), others=job.others)
    for at_once in (1, 10**9):
        given = run.states, run.t, run.actions, run.rewards, run.lengths, run.logger
        found = describe(job, *given, at_once=at_once)
        assert len(run.t) > 100
        assert np.shares_memory(found.log_targets, found.log_loggers)
        for field in ("log_targets", "log_loggers", "probs", "expected", "features", "own", "t", "rewards"):
            one, two = getattr(found, field), getattr(run, field)
            assert (one is None) == (two is None), field
            if one is not None:
                np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6, err_msg=field)
