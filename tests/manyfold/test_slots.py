"""Episodes in slots: all of a list, each whole, however many run at the same time."""

import numpy as np
import pytest

from manyfold import slots
from manyfold.mujoco import BinnedMujoco
from manyfold.streams import stream


def push(states, t, episode):
    """Odd episodes lean on the last bin and fall soon; even ones stay near the middle."""
    probs = np.full((len(t), 10), 0.02)
    probs[np.arange(len(t)), np.where(episode % 2, 9, 4 + t % 2)] = 0.82
    return probs, lambda actions: np.column_stack([episode, actions])


def played(episodes, many=4, horizon=20):
    world = BinnedMujoco("inverted-pendulum", None, list(range(many)), horizon=horizon)
    return world, list(slots.play(world, episodes, push, stream("test")))


@pytest.mark.parametrize(("episodes", "many"), [(11, 4), (4, 4), (1, 1), (9, 2)])
def test_every_episode_of_the_list_is_run_once_and_whole(episodes, many):
    _, steps = played(episodes, many)
    (rows,) = slots.blocks(steps, episodes, episodes)
    assert np.array_equal(np.unique(rows.episode), np.arange(episodes))
    for i in range(episodes):
        mine = slots.Steps._make(x[rows.episode == i] for x in rows)
        length = len(mine.t)
        np.testing.assert_array_equal(mine.t, np.arange(length))
        np.testing.assert_array_equal(mine.next_state[:-1], mine.state[1:])
        ended = mine.terminated | mine.truncated
        assert ended.tolist() == [False] * (length - 1) + [True]
        assert mine.truncated[-1] == (length == 20 and not mine.terminated[-1])
        np.testing.assert_array_equal(mine.reward, ~mine.terminated)  # 1 for every step that does not fall


def test_what_is_noted_and_the_probability_are_those_of_the_action_taken():
    _, steps = played(6)
    (rows,) = slots.blocks(steps, 6, 6)
    np.testing.assert_array_equal(rows.noted, np.column_stack([rows.episode, rows.action]))
    likely = np.where(rows.episode % 2, 9, 4 + rows.t % 2)
    np.testing.assert_allclose(rows.prob, np.where(rows.action == likely, 0.82, 0.02))
    assert 0.6 < np.mean(rows.action == likely) < 1


def test_a_slot_waits_only_when_no_episode_is_left():
    world, steps = played(12)
    begun = np.maximum.accumulate([step.episode.max() + 1 for step in steps])
    running = np.array([len(step.t) for step in steps])
    assert (running[begun < 12] == world.n).all()
    assert running.min() < world.n


def test_blocks_are_in_order_whole_and_all_there_is():
    _, steps = played(11)
    (whole,) = slots.blocks(steps, 11, 11)
    parts = list(slots.blocks(steps, 11, 3))
    assert [np.unique(p.episode).tolist() for p in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]
    for a, b in zip(whole, map(np.concatenate, zip(*parts, strict=True)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_action_of_probability_0_never_comes():
    def sure(states, t, episode):
        return np.tile([0, 0, 0, 0.3, 0, 0, 0.7, 0, 0, 0.0], (len(t), 1)), lambda actions: np.empty((len(t), 0))

    world = BinnedMujoco("inverted-pendulum", None, range(8), horizon=20)
    actions = np.concatenate([step.action for step in slots.play(world, 100, sure, stream("test"))])
    assert set(actions) == {3, 6}
    assert np.mean(actions == 6) == pytest.approx(0.7, abs=0.1)
