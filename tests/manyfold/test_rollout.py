import numpy as np
import pytest

from manyfold.gridworld import Gridworld
from manyfold.rollout import Episodes, rollout
from manyfold.streams import stream
from tests.worlds import distributions


def test_visits_and_actions_follow_the_forward_equation():
    world = Gridworld.draw(3, 0)
    mdp = world.to_mdp()
    mu = distributions(np.random.default_rng(0), (3, 9, 4), "zeros")
    n = 100_000
    for simulated in (world, mdp):
        episodes = rollout(simulated, mu, n, stream("test-rollout", type(simulated).__name__))
        visits = mdp.initial
        for t in range(3):
            joint = visits[:, None] * mu[t]
            seen = np.zeros((9, 4))
            np.add.at(seen, (episodes.states[:, t], episodes.actions[:, t]), 1 / n)
            assert (np.abs(seen - joint) <= 4 * np.sqrt(joint * (1 - joint) / n)).all()
            visits = mdp.push(joint)


def test_probs_pick_the_actions_taken():
    table = distributions(np.random.default_rng(0), (2, 3, 4, 2))
    episodes = Episodes(np.array([[0, 3, 2]]), np.array([[1, 0, 1]]), np.zeros((1, 3)))
    expected = np.stack([table[:, 0, 0, 1], table[:, 1, 3, 0], table[:, 2, 2, 1]], axis=-1)
    assert np.array_equal(episodes.probs(table)[:, 0], expected)


def test_a_table_of_another_world_is_refused():
    episodes = Episodes(np.array([[5]]), np.array([[1]]), np.zeros((1, 1)))
    with pytest.raises(ValueError, match="table has 8 entries a step, expected more than 11: is it of this world?"):
        episodes.probs(np.full((1, 4, 2), 0.5))


def test_the_same_stream_gives_the_same_episodes_and_another_gives_others():
    world = Gridworld.draw(5, 0)
    mu = np.full((5, 25, 4), 0.25)
    first, again, other = (rollout(world, mu, 10, stream("test", i)) for i in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first.actions, other.actions)


def test_streams_are_the_same_on_every_machine():
    assert stream("gridworld-1000", 3, "mpe", 7).integers(1 << 30) == 90805342
    assert stream("1", 2).random() != stream(1, 2).random()
    assert stream("a", np.int64(2)).random() == stream("a", 2).random()
    with pytest.raises(ValueError, match="expected words and whole numbers"):
        stream("a", None)


def test_a_mu_of_another_world_is_refused():
    with pytest.raises(ValueError, match=r"mu has shape \[4, 25, 4\], expected \[5, 25, 4\] = \[T, S, A\]"):
        rollout(Gridworld.draw(5, 0), np.full((4, 25, 4), 0.25), 10, stream("test"))
