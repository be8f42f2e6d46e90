import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import manyfold  # noqa: F401 - registers the environment
from manyfold.envs.gridworld import Gridworld
from manyfold.rollout import rollout_tabular

UP, DOWN, LEFT, RIGHT = range(4)


@pytest.mark.parametrize("m", [1, 2, 3, 10, 30])
def test_simulated_transitions_match_the_mdp(m):
    world = Gridworld.draw(m, 0)
    p = world.mdp().transitions.toarray().reshape(m * m, 4, m * m)
    rng = np.random.default_rng(m)
    n = 40_000
    corner, edge, centre = 0, m - 1, world.centre
    for cell in {corner, edge, centre, m * m - 1}:
        for action in range(4):
            cells, rewards = world.step(np.full(n, cell), np.full(n, action), rng)
            seen = np.bincount(cells, minlength=m * m) / n
            assert (np.abs(seen - p[cell, action]) <= 4 * np.sqrt(p[cell, action] * (1 - p[cell, action]) / n)).all()
            assert (rewards == world.rewards[cell, action]).all()


def test_moves_slips_and_walls_by_hand():
    world = Gridworld.draw(3, 0)
    p = world.mdp().transitions.toarray().reshape(9, 4, 9)
    # From the centre (cell 4): the asked neighbour 0.9 + 0.1/4, each other 0.1/4.
    np.testing.assert_allclose(p[4, UP][[1, 7, 3, 5]], [0.925, 0.025, 0.025, 0.025])
    np.testing.assert_allclose(p[4, RIGHT][[1, 7, 3, 5]], [0.025, 0.025, 0.025, 0.925])
    # From the corner (cell 0): up and left run into walls and keep the place.
    np.testing.assert_allclose(p[0, UP][[0, 3, 1]], [0.95, 0.025, 0.025])
    np.testing.assert_allclose(p[0, DOWN][[0, 3, 1]], [0.05, 0.925, 0.025])


def test_rewards_are_drawn_per_seed_from_a_standard_normal():
    a, b = Gridworld.draw(30, 0).rewards, Gridworld.draw(30, 1).rewards
    assert np.array_equal(a, Gridworld.draw(30, 0).rewards)
    assert not np.isclose(a, b).any()
    assert abs(a.mean()) < 4 / 60  # 3,600 draws: standard error 1/60
    assert abs(a.std() - 1) < 4 / np.sqrt(2 * 3600)


def test_episodes_start_in_the_centre_and_last_m_steps():
    world = Gridworld.draw(10, 0)
    episodes = rollout_tabular(world, np.full((10, 100, 4), 0.25), 50, np.random.default_rng(0))
    assert episodes.states.shape == (50, 10)
    assert (episodes.states[:, 0] == 55).all()  # row 5, column 5
    assert Gridworld.draw(3, 0).centre == 4


@pytest.mark.parametrize("m", [1, 10])
def test_gymnasiums_own_checker_passes(m):
    env = gymnasium.make("manyfold/Gridworld-v0", m=m, reward_seed=3)
    check_env(env.unwrapped, skip_render_check=False)
    assert env.observation_space.shape == (m * m + 1,)


def test_the_gymnasium_environment_is_the_same_gridworld():
    env = gymnasium.make("manyfold/Gridworld-v0", m=4, reward_seed=7)
    world = Gridworld.draw(4, 7)
    obs, _ = env.reset(seed=0)
    assert obs.argmax() == world.centre
    cell, total = world.centre, 0
    for t in range(4):
        action = t % 4
        obs, reward, terminated, truncated, _ = env.step(action)
        assert reward == world.rewards[cell, action]
        assert obs[-1] == np.float32((t + 1) / 4)
        after = int(obs[:-1].argmax())
        assert after in world.moves[cell]
        cell, total = after, total + 1
        assert terminated == (t == 3)
        assert not truncated
    assert total == 4


def test_the_same_seed_gives_the_same_gymnasium_episode():
    def episode(seed):
        env = gymnasium.make("manyfold/Gridworld-v0", m=6)
        env.reset(seed=seed)
        return [int(env.step(0)[0][:-1].argmax()) for _ in range(6)]

    assert episode(5) == episode(5)
    assert len({tuple(episode(seed)) for seed in range(30)}) > 1


def test_rendering_shows_the_agent():
    env = gymnasium.make("manyfold/Gridworld-v0", m=3, render_mode="ansi")
    env.reset(seed=0)
    assert env.render() == ". . .\n. @ .\n. . ."
    env = gymnasium.make("manyfold/Gridworld-v0", m=3, render_mode="rgb_array")
    env.reset(seed=0)
    picture = env.render()
    assert picture.shape == (48, 48, 3)
    assert (picture[16:32, 16:32] == (0, 114, 178)).all()
    assert (picture != 255).any(-1).sum() == 16 * 16


def test_bad_actions_modes_and_steps_are_refused():
    env = gymnasium.make("manyfold/Gridworld-v0", m=1, disable_env_checker=True).unwrapped
    env.reset(seed=0)
    for action in (-1, 4):
        with pytest.raises(ValueError, match="expected 0 to 3"):
            env.step(action)
    env.step(0)
    with pytest.raises(ValueError, match="the episode ended after 1 steps"):
        env.step(0)
    with pytest.raises(ValueError, match="render_mode is 'human'"):
        type(env)(render_mode="human")


@pytest.mark.parametrize("m", [0, -1, 2.5, True, "3", 10**9])
def test_a_bad_size_is_refused(m):
    with pytest.raises(
        ValueError, match=r"^m \(the width, height and horizon\) is .*, expected a whole number from 1 to 1,000$"
    ):
        Gridworld.draw(m, 0)


def test_bad_rewards_are_refused():
    with pytest.raises(ValueError, match=r"rewards has shape \[4, 3\], expected \[4, 4\]"):
        Gridworld(2, np.zeros((4, 3)))
    with pytest.raises(ValueError, match=r"rewards\[0, 0\] is nan"):
        Gridworld(2, np.full((4, 4), np.nan))


def test_the_environment_says_what_it_is():
    world = Gridworld.draw(4, 0)
    assert (world.name, world.horizon, world.n_states, world.n_actions, world.width) == ("gridworld-64", 4, 16, 4, 1)
    assert (world.mdp().horizon, world.mdp().n_states, world.mdp().n_actions) == (4, 16, 4)
    assert world.mdp().initial.argmax() == world.centre
    np.testing.assert_array_equal(world.mdp().rewards, world.rewards)


def test_observations_are_one_hot_with_the_time():
    world = Gridworld.draw(2, 0)
    assert world.observe(np.array([3, 0]), 1).tolist() == [[0, 0, 0, 1, 0.5], [1, 0, 0, 0, 0.5]]
