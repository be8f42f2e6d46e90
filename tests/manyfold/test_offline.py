import dataclasses

import numpy as np
import pytest
import torch

from manyfold import offline, slots
from manyfold.gridworld import Gridworld
from manyfold.networks import NetworkPolicySet, Spec
from manyfold.offline import Rule
from manyfold.ppo import Position
from manyfold.targets import Plan, Training

RULE = Rule(episodes=100, epsilons=(0.1, 0.5))


@pytest.fixture(scope="module")
def gridworld_history():
    rng = torch.Generator().manual_seed(0)
    shapes = {"w1": (3, 101, 8), "b1": (3, 1, 8), "w2": (3, 8, 8), "b2": (3, 1, 8), "w3": (3, 8, 4), "b3": (3, 1, 4)}
    tensors = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    return NetworkPolicySet(tensors, Spec("gridworld-1000", "softmax", 10, 4, 100, 0, 0.0, 0.0, ("a", "b", "c")))


def joined(parts):
    parts = list(parts)
    return [x[0] for x in parts], {name: np.concatenate([x[1][name] for x in parts]) for name in parts[0][1]}


def test_gridworld_rows_are_whole_episodes_of_the_world(gridworld_history):
    loggers, rows = joined(offline.log_gridworld("gridworld-1000", 2, gridworld_history, RULE))
    assert loggers == list(range(6))
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
    for logger, rows in offline.log_gridworld("gridworld-1000", 2, gridworld_history, RULE):
        epsilon = RULE.epsilons[logger // 3]
        mu = (1 - epsilon) * table[logger % 3] + epsilon / 4
        expected = np.log(mu[rows["t"], rows["state"][:, 0], rows["action"]])
        np.testing.assert_allclose(rows["behavior_log_prob"], expected)
    names = offline.logger_names(gridworld_history, RULE)
    assert names == [f"{name}, epsilon {e:g}" for e in (0.1, 0.5) for name in "abc"]


def test_logged_data_are_reproducible_and_differ_between_groups(gridworld_history):
    first, again, other = (
        joined(offline.log_gridworld("gridworld-1000", group, gridworld_history, RULE))[1] for group in (0, 0, 1)
    )
    assert np.array_equal(first["action"], again["action"])
    assert not np.array_equal(first["action"], other["action"])


def test_a_robots_rows_are_whole_episodes(monkeypatch):
    monkeypatch.setattr(slots, "SLOTS", 30)
    monkeypatch.setattr(slots, "BLOCK", 40)
    plan = Plan((0.0, 1.0), (Position(1, 1),), Position(1, 1), (Position(0, 0), Position(1, 1)))
    training = Training("hopper", [0], [plan])
    training.run_segment()
    (drawn,) = training.results()
    rule = dataclasses.replace(RULE, episodes=70)
    loggers, rows = joined(offline.log_robot("hopper", 0, drawn.history, drawn.companion, rule))
    assert sorted(np.bincount(np.concatenate(loggers))) == [17, 17, 18, 18]  # 70 episodes of 4 loggers
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
        ((0, (0.1,)), "offline.episodes is 0, expected a whole number of at least 1"),
        ((10, ()), r"offline.epsilons is \[\], expected one or more numbers from 0 to 1"),
        ((10, (0.1, 1.5)), r"offline.epsilons is \[0.1, 1.5\]"),
        ((10, ("x",)), r"offline.epsilons is \['x'\]"),
    ],
)
def test_bad_rules_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Rule(*values)
