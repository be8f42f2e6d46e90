"""What every policy set promises, one test for all kinds."""

import numpy as np
import pytest
import torch

from manyfold.policies import PolicySet, load
from tests.policy_kinds import ACTIONS, HORIZON, KINDS, NOT_EXPORTED, SAVED, observations


@pytest.fixture(params=KINDS, name="policies")
def made(request):
    return KINDS[request.param]()


def test_it_says_what_it_is(policies):
    assert isinstance(policies, PolicySet)
    assert policies.n_policies == len(policies.names) >= 2
    assert all(isinstance(name, str) for name in policies.names)
    assert (policies.horizon, policies.n_actions) == (HORIZON, ACTIONS)
    assert policies.width >= 1
    assert policies.n_states == 0 or policies.width == 1


def test_rows_are_distributions_and_the_policies_differ(policies):
    obs, t = observations(policies, 50)
    probs = policies.probs(obs, t)
    assert probs.shape == (policies.n_policies, 50, ACTIONS)
    assert probs.dtype == np.float64
    assert (probs >= 0).all()
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-6)
    for k in range(1, policies.n_policies):
        assert np.abs(probs[k] - probs[0]).max() > 0.01


def test_each_row_is_its_own_whatever_stands_beside_it(policies):
    obs, t = observations(policies, 12)
    together = policies.probs(obs, t)
    for i in range(12):
        np.testing.assert_allclose(policies.probs(obs[[i]], int(t[i]))[:, 0], together[:, i], atol=1e-6)
    assert policies.probs(obs[:0], t[:0]).shape == (policies.n_policies, 0, ACTIONS)


def test_the_policy_of_each_row_can_be_named(policies):
    obs, t = observations(policies, 30)
    which = np.random.default_rng(1).integers(policies.n_policies, size=30)
    expected = np.stack([policies.probs(obs, t)[k, i] for i, k in enumerate(which)])
    np.testing.assert_allclose(policies.probs_of(which, obs, t), expected, atol=1e-12)


def test_sampled_actions_follow_the_probabilities(policies):
    """At three observations, 4,000 times each: within 4 standard errors, and never an action of probability 0."""
    obs, t = observations(policies, 3, seed=2)
    n, rng = 4000, np.random.default_rng(3)
    for i in range(3):
        which = np.arange(n) % policies.n_policies
        actions = policies.sample(which, np.repeat(obs[[i]], n, 0), int(t[i]), rng)
        for k in range(policies.n_policies):
            p, count = policies.probs(obs[[i]], int(t[i]))[k, 0], int((which == k).sum())
            seen = np.bincount(actions[which == k], minlength=ACTIONS) / count
            assert (np.abs(seen - p) <= 4 * np.sqrt(p * (1 - p) / count) + 4 / count).all()
            assert (seen[p == 0] == 0).all()


@pytest.mark.parametrize("t", [HORIZON, -1, [0, HORIZON], [0, 1, 2], 0.5])
def test_steps_beyond_the_horizon_are_refused_in_one_line(policies, t):
    obs, _ = observations(policies, 2)
    with pytest.raises(ValueError, match=r"^t: expected [^\n]*$"):
        policies.probs(obs, t)
    with pytest.raises(ValueError, match=r"^t: expected [^\n]*$"):
        policies.probs_of(np.array([0, 1]), obs, t)


def test_observations_of_another_width_are_refused_in_one_line(policies):
    narrow = np.zeros((2, policies.width - 1 if policies.width > 1 else 2))
    for obs in (narrow, np.zeros(()), np.zeros((2, 1, policies.width))):
        with pytest.raises(ValueError, match=r"^(obs|state)[^\n]*expected [^\n]*$"):
            policies.probs(obs, 0)


def test_indices_out_of_range_are_refused_in_one_line(policies):
    if policies.n_states:
        for state in (-1, policies.n_states, 0.5):
            with pytest.raises(ValueError, match=rf"^(obs|state): [^\n]* from 0 to {policies.n_states - 1}, found"):
                policies.probs(np.array([state, 0]), 0)


def test_a_table_is_every_step_and_state_or_refused(policies):
    if not policies.n_states:
        with pytest.raises(ValueError, match="these policies take vectors, expected observations that can be counted"):
            policies.table()
        return
    table = policies.table()
    assert table.shape == (policies.n_policies, HORIZON, policies.n_states, ACTIONS)
    obs, t = observations(policies, 40)
    np.testing.assert_allclose(table[:, t, obs[:, 0].astype(int)], policies.probs(obs, t), atol=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NOT_EXPORTED])
def test_the_module_for_export_computes_the_same(kind):
    policies = KINDS[kind]()
    obs, t = observations(policies, 200)
    with torch.no_grad():
        found = policies.module()(torch.from_numpy(obs), torch.from_numpy(t)).numpy()
    np.testing.assert_allclose(found, policies.probs(obs, t), atol=1e-5)


@pytest.mark.parametrize("kind", NOT_EXPORTED)
def test_what_cannot_be_exported_says_so_in_one_line(kind):
    with pytest.raises(
        ValueError, match="^CallablePolicySet cannot be exported, expected a table, MLPs or torch modules$"
    ):
        KINDS[kind]().module()


@pytest.mark.parametrize("kind", SAVED)
def test_a_saved_set_is_the_same_and_the_same_bytes_again(kind, tmp_path):
    policies = KINDS[kind]()
    policies.save(tmp_path / "a")
    found = load(tmp_path / "a")
    assert type(found) is type(policies)
    for name in ("names", "horizon", "n_actions", "n_states", "width"):
        assert getattr(found, name) == getattr(policies, name), name
    obs, t = observations(policies, 40)
    assert np.array_equal(found.probs(obs, t), policies.probs(obs, t))
    found.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]
