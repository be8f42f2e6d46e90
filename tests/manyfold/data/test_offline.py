import dataclasses

import numpy as np
import pytest
import torch

from manyfold import rollout as rollouts
from manyfold.data import offline
from manyfold.data.offline import Rule
from manyfold.data.transitions import About, Transitions, Writer
from manyfold.envs.base import Environment
from manyfold.envs.binned_mujoco import BinnedMujoco
from manyfold.envs.gridworld import Gridworld
from manyfold.envs.gymnasium import GymnasiumEnvironment
from manyfold.policies.mlp import MlpPolicySet, Spec
from manyfold.train.ppo import Position
from manyfold.train.targets import Plan, Training
from tests.networks import mlp_policies

RULE = Rule(episodes=100, epsilons=(0.1, 0.5))


@pytest.fixture(scope="module")
def gridworld_history():
    rng = torch.Generator().manual_seed(0)
    shapes = {"w1": (3, 101, 8), "b1": (3, 1, 8), "w2": (3, 8, 8), "b2": (3, 1, 8), "w3": (3, 8, 4), "b3": (3, 1, 4)}
    tensors = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    return MlpPolicySet(tensors, Spec("gridworld-1000", "softmax", 10, 4, ("a", "b", "c"), n_states=100))


def grid_log(history, group):
    return offline.log(Gridworld.draw(10, group), history, RULE, "gridworld-1000", group)


def joined(parts):
    parts = list(parts)
    return np.concatenate([x[0] for x in parts]), {
        name: np.concatenate([x[1][name] for x in parts]) for name in parts[0][1]
    }


def test_gridworld_rows_are_whole_episodes_of_the_world(gridworld_history):
    loggers, rows = joined(grid_log(gridworld_history, 2))
    np.testing.assert_array_equal(loggers, np.repeat(np.arange(6), [17, 17, 17, 17, 16, 16]))
    world = Gridworld.draw(10, 2)
    assert len(rows["t"]) == 1000
    np.testing.assert_array_equal(rows["episode"], np.repeat(np.arange(100), 10))
    np.testing.assert_array_equal(rows["t"], np.tile(np.arange(10), 100))
    cell, action, after = rows["state"][:, 0], rows["action"], rows["next_state"][:, 0]
    np.testing.assert_array_equal(rows["reward"], world.rewards[cell, action])
    assert all(b in world.moves[a] for a, b in zip(cell, after, strict=True))
    inside = rows["t"] < 9
    np.testing.assert_array_equal(after[:-1][inside[:-1]], cell[1:][inside[:-1]])
    np.testing.assert_array_equal(rows["terminated"], ~inside)
    assert not rows["truncated"].any()


def test_gridworld_propensities_are_the_noisy_loggers(gridworld_history):
    table = gridworld_history.table()
    for loggers, rows in grid_log(gridworld_history, 2):
        (logger,) = set(loggers.tolist())
        epsilon = RULE.epsilons[logger // 3]
        mu = (1 - epsilon) * table[logger % 3] + epsilon / 4
        expected = np.log(mu[rows["t"], rows["state"][:, 0], rows["action"]])
        np.testing.assert_allclose(rows["behavior_log_prob"], expected)
    names = offline.logger_names(gridworld_history, RULE)
    assert names == [f"{name}, epsilon {e:g}" for e in (0.1, 0.5) for name in "abc"]


def test_logged_data_are_reproducible_and_differ_between_groups(gridworld_history):
    first, again, other = (joined(grid_log(gridworld_history, group))[1] for group in (0, 0, 1))
    assert np.array_equal(first["action"], again["action"])
    assert not np.array_equal(first["action"], other["action"])


def test_a_robots_rows_are_whole_episodes(monkeypatch):
    monkeypatch.setattr(Environment, "slots", 30)
    monkeypatch.setattr(rollouts, "BLOCK", 40)
    plan = Plan((0.0, 1.0), (Position(1, 1),), Position(1, 1), (Position(0, 0), Position(1, 1)))
    training = Training(BinnedMujoco("hopper"), "hopper", [0], [plan])
    training.run_segment()
    (drawn,) = training.results()
    rule = dataclasses.replace(RULE, episodes=70)
    env = BinnedMujoco("hopper", drawn.companion.companion())
    loggers, rows = joined(offline.log(env, drawn.history, rule, "hopper", 0))
    assert sorted(np.bincount(loggers)) == [17, 17, 18, 18]  # 70 episodes of 4 loggers
    assert rows["state"].shape[1] == 11 + 2
    assert np.array_equal(np.unique(rows["episode"]), np.arange(70))
    for episode in range(70):
        mine = {name: x[rows["episode"] == episode] for name, x in rows.items()}
        length = len(mine["t"])
        np.testing.assert_array_equal(mine["t"], np.arange(length))
        np.testing.assert_array_equal(mine["next_state"][:-1], mine["state"][1:])
        ended = mine["terminated"] | mine["truncated"]
        assert ended.tolist() == [False] * (length - 1) + [True]
        assert mine["truncated"][-1] == (length == 100 and not mine["terminated"][-1])
    chosen = np.exp(rows["behavior_log_prob"])
    assert ((chosen > 0.1 * 0.1 - 1e-9) & (chosen <= 1)).all()  # at least epsilon / A


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, (0.1,)), "offline.episodes is 0, expected a whole number from 1 to 1e.07"),
        ((2 * 10**9, (0.1,)), "offline.episodes is 2000000000, expected a whole number from 1 to 1e.07"),
        ((10, (True,)), "offline.epsilons is True, expected a number from 0 to 1"),
        ((10, ()), r"offline.epsilons is \[\], expected one or more numbers from 0 to 1"),
        ((10, (0.1, 1.5)), "offline.epsilons is 1.5, expected a number from 0 to 1"),
        ((10, ("x",)), "offline.epsilons is 'x', expected a number from 0 to 1"),
    ],
)
def test_bad_rules_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Rule(*values)


def test_the_propensities_of_vectors_are_the_noisy_loggers():
    """CartPole: every row's probability is (1 - epsilon) pi + epsilon / A of the logger that ran its episode."""
    policies = mlp_policies(0, k=2, horizon=15, n_actions=2, n_features=4)
    env = GymnasiumEnvironment("CartPole-v1", horizon=15)
    loggers, rows = joined(offline.log(env, policies, Rule(episodes=40, epsilons=(0.2, 0.7)), "my-study", 0))
    assert np.bincount(loggers).tolist() == [10] * 4
    assert loggers.tolist() != sorted(loggers)  # all kinds side by side
    who = loggers[rows["episode"]]
    probs = policies.probs(rows["state"], rows["t"])[who % 2, np.arange(len(who)), rows["action"]]
    epsilon = np.where(who < 2, 0.2, 0.7)
    np.testing.assert_allclose(np.exp(rows["behavior_log_prob"]), (1 - epsilon) * probs + epsilon / 2, rtol=1e-5)


def test_what_is_logged_can_be_written_and_read(tmp_path):
    env = GymnasiumEnvironment("CartPole-v1", horizon=15)
    policies = mlp_policies(0, k=2, horizon=15, n_actions=2, n_features=4)
    about = About("cartpole", 15, 2, 4, 0)
    with Writer(tmp_path / "a.parquet", about, log_probs=True) as writer:
        for _, rows in offline.log(env, policies, Rule(episodes=30, epsilons=(0.5,)), "my-study", 0):
            writer.write(rows)
    data = Transitions(tmp_path, about)
    assert data.rows == writer.rows
    assert len(data.initial_states(10**6)) == 30
