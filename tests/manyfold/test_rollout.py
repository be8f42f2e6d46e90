"""The one rollout: all episodes of a list, each whole, however many run at the same time; and tables of them."""

import numpy as np
import pytest

from manyfold import exact
from manyfold.envs.base import Environment, Finite
from manyfold.envs.binned_mujoco import BinnedMujoco
from manyfold.envs.gridworld import Gridworld
from manyfold.envs.gymnasium import GymnasiumEnvironment
from manyfold.mdp import FiniteMDP
from manyfold.policies import CallablePolicySet, TabularPolicySet
from manyfold.rollout import BLOCK, Choice, TabularEpisodes, in_turns, rollout, rollout_tabular
from manyfold.streams import stream
from tests.worlds import distributions

# --- tables -----------------------------------------------------------------------------------------------------------


def test_visits_and_actions_follow_the_forward_equation():
    world = Gridworld.draw(3, 0)
    mdp = world.mdp()
    mu = distributions(np.random.default_rng(0), (3, 9, 4), "zeros")
    n = 100_000
    for simulated in (world, mdp):
        episodes = rollout_tabular(simulated, mu, n, stream("test-rollout", type(simulated).__name__))
        visits = mdp.initial
        for t in range(3):
            joint = visits[:, None] * mu[t]
            seen = np.zeros((9, 4))
            np.add.at(seen, (episodes.states[:, t], episodes.actions[:, t]), 1 / n)
            assert (np.abs(seen - joint) <= 4 * np.sqrt(joint * (1 - joint) / n)).all()
            visits = mdp.push(joint)


def test_probs_pick_the_actions_taken():
    table = distributions(np.random.default_rng(0), (2, 3, 4, 2))
    episodes = TabularEpisodes(np.array([[0, 3, 2]]), np.array([[1, 0, 1]]), np.zeros((1, 3)))
    expected = np.stack([table[:, 0, 0, 1], table[:, 1, 3, 0], table[:, 2, 2, 1]], axis=-1)
    assert np.array_equal(episodes.probs(table)[:, 0], expected)


def test_a_table_of_another_world_is_refused():
    episodes = TabularEpisodes(np.array([[5]]), np.array([[1]]), np.zeros((1, 1)))
    with pytest.raises(ValueError, match="table has 8 entries a step, expected more than 11: is it of this world?"):
        episodes.probs(np.full((1, 4, 2), 0.5))


def test_the_same_stream_gives_the_same_episodes_and_another_gives_others():
    world = Gridworld.draw(5, 0)
    mu = np.full((5, 25, 4), 0.25)
    first, again, other = (rollout_tabular(world, mu, 10, stream("test", i)) for i in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first.actions, other.actions)


def test_a_mu_of_another_world_is_refused():
    with pytest.raises(ValueError, match=r"mu has shape \[4, 25, 4\], expected \[5, 25, 4\] = \[T, S, A\]"):
        rollout_tabular(Gridworld.draw(5, 0), np.full((4, 25, 4), 0.25), 10, stream("test"))


def test_a_rollout_of_tables_is_the_one_rollout():
    """States, actions and rewards are those of the steps, and every episode has exactly T of them."""
    world = Gridworld.draw(3, 0)
    loggers = distributions(np.random.default_rng(0), (2, 3, 9, 4))
    found = rollout_tabular(world, loggers, 20, stream("test"))
    (rows,) = rollout(world, in_turns(TabularPolicySet(loggers)), np.arange(20) % 2, stream("test"))
    assert rows.lengths.tolist() == [3] * 20
    np.testing.assert_array_equal(found.states.ravel(), rows.state[:, 0])
    np.testing.assert_array_equal(found.actions.ravel(), rows.action)
    np.testing.assert_array_equal(found.rewards.ravel(), rows.reward)
    np.testing.assert_allclose(found.own_probs(loggers).ravel(), rows.prob)


def test_tables_are_looked_up_at_every_step():
    episodes = TabularEpisodes(np.array([[0, 3], [1, 1]]), np.array([[1, 0], [0, 1]]), np.zeros((2, 2)))
    values = np.arange(16.0).reshape(2, 2, 4)  # [K, T, S]
    assert episodes.at(values).tolist() == [[[0, 7], [1, 5]], [[8, 15], [9, 13]]]
    loggers = distributions(np.random.default_rng(0), (2, 2, 4, 2))
    own = [[loggers[0, 0, 0, 1], loggers[0, 1, 3, 0]], [loggers[1, 0, 1, 0], loggers[1, 1, 1, 1]]]
    assert episodes.own_probs(loggers).tolist() == own


@pytest.mark.parametrize(
    ("mu", "episodes", "message"),
    [
        (np.full((3, 9, 4), 0.25), 0, "episodes is 0, expected a whole number from 1 to 1e.09"),
        (np.full((3, 9, 4), 0.25), 2.5, "episodes is 2.5, expected a whole number"),
        (np.full((3, 9, 4), 0.2), 5, "mu: probabilities at j=0, t=0, s=0 sum to 0.8, expected 1"),
        (np.full((9, 4), 0.25), 5, "mu has shape"),
    ],
)
def test_what_cannot_be_rolled_out_is_refused(mu, episodes, message):
    with pytest.raises(ValueError, match=f"^{message}[^\n]*$"):
        rollout_tabular(Gridworld.draw(3, 0), mu, episodes, stream("test"))


# --- any environment --------------------------------------------------------------------------------------------------


def push(states, t, logger):
    """Odd loggers lean on the last bin and fall soon; even ones stay near the middle."""
    probs = np.full((len(t), 10), 0.02)
    probs[np.arange(len(t)), np.where(logger % 2, 9, 4 + t % 2)] = 0.82
    return Choice(probs, lambda actions: {"logger": logger, "both": np.column_stack([logger, actions])})


def pendulum(monkeypatch, slots):
    monkeypatch.setattr(Environment, "slots", slots)
    return BinnedMujoco("inverted-pendulum", horizon=20)


@pytest.mark.parametrize(("episodes", "slots"), [(11, 4), (4, 4), (1, 1), (9, 2), (3, 7)])
def test_every_episode_of_the_list_is_run_once_and_whole(episodes, slots, monkeypatch):
    (rows,) = rollout(pendulum(monkeypatch, slots), push, np.arange(episodes), stream("test"))
    assert np.array_equal(np.unique(rows.episode), np.arange(episodes))
    assert rows.lengths.sum() == len(rows.t)
    for i in range(episodes):
        mine = rows.take(rows.episode == i)
        length = len(mine.t)
        assert rows.lengths[i] == length
        np.testing.assert_array_equal(mine.t, np.arange(length))
        np.testing.assert_array_equal(mine.next_state[:-1], mine.state[1:])
        ended = mine.terminated | mine.truncated
        assert ended.tolist() == [False] * (length - 1) + [True]
        assert mine.truncated[-1] == (length == 20 and not mine.terminated[-1])
        np.testing.assert_array_equal(mine.reward, ~mine.terminated)  # 1 for every step that does not fall


def test_every_logger_runs_its_share_and_what_is_noted_is_of_the_action_taken(monkeypatch):
    loggers = np.array([0, 1, 5, 0, 2, 1])
    (rows,) = rollout(pendulum(monkeypatch, 4), push, loggers, stream("test"))
    np.testing.assert_array_equal(rows.noted["logger"], loggers[rows.episode])
    np.testing.assert_array_equal(rows.noted["both"], np.column_stack([loggers[rows.episode], rows.action]))
    likely = np.where(loggers[rows.episode] % 2, 9, 4 + rows.t % 2)
    np.testing.assert_allclose(rows.prob, np.where(rows.action == likely, 0.82, 0.02))
    assert 0.6 < np.mean(rows.action == likely) < 1
    lengths = rows.lengths
    assert lengths[loggers % 2 == 1].max() < lengths[loggers % 2 == 0].min()  # who leans falls first


def test_a_slot_waits_only_when_no_episode_is_left(monkeypatch):
    seen, begun = [], set()

    def watch(states, t, logger):
        begun.update(logger.tolist())
        seen.append((len(t), len(begun)))
        return push(states, t, logger)

    list(rollout(pendulum(monkeypatch, 4), watch, np.arange(12), stream("test")))
    running, started = np.array(seen).T
    assert (running[started < 12] == 4).all()
    assert running.min() < 4
    assert running.sum() == sum(
        len(rows.t) for rows in rollout(pendulum(monkeypatch, 4), push, np.arange(12), stream("test"))
    )


def test_blocks_are_in_order_whole_and_all_there_is(monkeypatch):
    env = pendulum(monkeypatch, 4)
    (whole,) = rollout(env, push, np.arange(11), stream("test"), 11)
    parts = list(rollout(env, push, np.arange(11), stream("test"), 3))
    assert [np.unique(p.episode).tolist() for p in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]
    joined = type(whole).join(parts)
    for name, x in vars(whole).items():
        if name == "noted":
            for key, noted in x.items():
                np.testing.assert_array_equal(noted, joined.noted[key])
        else:
            np.testing.assert_array_equal(x, vars(joined)[name])


def test_blocks_come_as_soon_as_they_are_whole_so_that_memory_is_bounded(monkeypatch):
    """When a block arrives, no more episodes have begun than it holds, the slots run, and long ones let overtake."""
    begun = set()

    def watch(states, t, logger):
        begun.update(logger.tolist())
        return push(states, t, logger)

    env, sizes = pendulum(monkeypatch, 5), []
    for rows in rollout(env, watch, np.arange(200), stream("test"), 10):
        sizes.append(len(rows.lengths))
        done = sum(sizes)
        assert len(begun) <= min(200, done + 5 * 20)  # a slot begins at most T others while one of T steps runs
    assert sizes == [10] * 20
    first = next(iter(rollout(env, push, np.arange(200), stream("test"), 10)))
    assert first.episode.max() == 9


def test_blocks_are_of_200_episodes_or_all_where_all_run_at_once(monkeypatch):
    env = pendulum(monkeypatch, 50)
    sizes = [len(rows.lengths) for rows in rollout(env, push, np.arange(450), stream("test"))]
    assert sizes == [BLOCK, BLOCK, 50]
    grid = Gridworld.draw(3, 0)
    uniform = in_turns(TabularPolicySet(np.full((1, 3, 9, 4), 0.25)))
    (rows,) = rollout(grid, uniform, np.zeros(450, dtype=np.int64), stream("test"))
    assert len(rows.lengths) == 450


def test_the_size_of_a_block_changes_no_number():
    """Where all run at once too: cut into blocks, the steps are the same."""
    grid = Gridworld.draw(4, 0)
    choose = in_turns(TabularPolicySet(distributions(np.random.default_rng(0), (3, 4, 16, 4))))
    (whole,) = rollout(grid, choose, np.arange(20) % 3, stream("test"))
    joined = type(whole).join(list(rollout(grid, choose, np.arange(20) % 3, stream("test"), 6)))
    for name in ("episode", "t", "state", "action", "reward", "next_state", "terminated", "truncated", "prob"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(joined, name), err_msg=name)


def test_an_action_of_probability_0_never_comes(monkeypatch):
    def sure(states, t, logger):
        return Choice(np.tile([0, 0, 0, 0.3, 0, 0, 0.7, 0, 0, 0.0], (len(t), 1)))

    (rows,) = rollout(pendulum(monkeypatch, 8), sure, np.arange(100), stream("test"))
    assert set(rows.action) == {3, 6}
    assert np.mean(rows.action == 6) == pytest.approx(0.7, abs=0.1)
    assert rows.noted == {}


def test_the_loggers_of_a_set_run_the_episodes_that_are_theirs():
    """Logger k always takes action k."""
    sure = CallablePolicySet([lambda obs, t, k=k: np.eye(2)[np.full(len(obs), k)] for k in range(2)], 2, 4, 30)
    loggers = np.array([1, 1, 0, 1, 0])
    (rows,) = rollout(GymnasiumEnvironment("CartPole-v1", 30), in_turns(sure), loggers, stream("test"))
    np.testing.assert_array_equal(rows.action, loggers[rows.episode])
    np.testing.assert_array_equal(rows.prob, 1.0)


def test_means_of_rewards_are_the_exact_values():
    """Through `rollout` alone: the mean return of 20,000 episodes of each policy, within 4 standard errors of J."""
    world = Gridworld.draw(3, 5)
    policies = distributions(np.random.default_rng(1), (2, 3, 9, 4), "zeros")
    for env in (world, Finite(world.mdp())):
        (rows,) = rollout(env, in_turns(TabularPolicySet(policies)), np.arange(40_000) % 2, stream("mean"))
        returns = rows.reward.reshape(-1, 3).sum(1)
        for k, expected in enumerate(exact.values(world.mdp(), policies)):
            mine = returns[k::2]
            assert abs(mine.mean() - expected) < 4 * mine.std() / np.sqrt(len(mine))


@pytest.mark.parametrize("probs", [[np.nan, 1.0], [3.0, 3.0], [-1.0, 2.0], [1.0]])
def test_probabilities_that_are_none_are_refused_instead_of_taking_the_first_action(probs):
    env = Finite(FiniteMDP(np.full((2, 2, 2), 0.5), np.zeros((2, 2)), [0.5, 0.5], 3))
    with pytest.raises(ValueError, match="a logger's probabilities at t=0 have shape"):
        next(rollout(env, lambda obs, t, who: Choice(np.tile(probs, (len(t), 1))), np.zeros(4, int), stream("test")))


@pytest.mark.parametrize("loggers", [[], [0.5], [-1, 0], [[0]]])
def test_loggers_that_are_no_numbers_of_policies_are_refused(loggers):
    env = Finite(FiniteMDP(np.full((2, 2, 2), 0.5), np.zeros((2, 2)), [0.5, 0.5], 3))
    with pytest.raises(ValueError, match="expected the number of each episode's logger"):
        rollout(env, push, np.array(loggers), stream("test"))
    with pytest.raises(ValueError, match="size is -1, expected a whole number of at least 0"):
        rollout(env, push, np.array([0]), stream("test"), -1)
