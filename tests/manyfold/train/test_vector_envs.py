import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers.utils import RunningMeanStd

from manyfold.envs.binned_mujoco import BinnedMujoco, make_envpool
from manyfold.envs.gridworld import Gridworld
from manyfold.envs.gymnasium import GymnasiumEnvironment
from manyfold.policies.mlp import Spec
from manyfold.streams import stream
from manyfold.train.vector_envs import GridworldVector, MujocoVector, Running, policy_spec, vector_envs


def test_gridworld_groups_step_each_in_their_own_world():
    groups = GridworldVector(3, [4, 9], envs=50)
    obs = groups.start(0)
    rng = np.random.default_rng(0)
    assert (obs == 4).all()  # t = 0, the centre
    for t in range(7):
        step, cell = (t % 3), obs % 9
        assert (obs // 9 == step).all()
        actions = rng.integers(4, size=(2, 50))
        after, rewards, done = groups.step(actions)
        for g, group in enumerate((4, 9)):
            world = Gridworld.draw(3, group)
            np.testing.assert_allclose(rewards[g], world.rewards[cell[g], actions[g]], rtol=1e-6)
            if step < 2:
                assert all(b in world.moves[a] for a, b in zip(cell[g], after[g] % 9, strict=True))
        assert (done == (step == 2)).all()
        if step == 2:
            assert (after == 4).all()
        obs = after


def test_gridworld_groups_slip_as_the_world_does():
    groups = GridworldVector(3, [0], envs=40_000)
    groups.start(0)
    obs, _, _ = groups.step(np.zeros((1, 40_000), dtype=np.int64))
    seen = np.bincount(obs[0] % 9, minlength=9) / 40_000
    p = Gridworld.draw(3, 0).mdp().transitions.toarray().reshape(9, 4, 9)[4, 0]
    assert (np.abs(seen - p) <= 4 * np.sqrt(p * (1 - p) / 40_000)).all()


def test_segments_are_reproducible_and_differ():
    def moves(segment):
        groups = GridworldVector(5, [0, 1], envs=8)
        groups.start(segment)
        return np.stack([groups.step(np.zeros((2, 8), dtype=np.int64))[0] for _ in range(4)])

    assert np.array_equal(moves(0), moves(0))
    assert not np.array_equal(moves(0), moves(1))


def test_running_statistics_equal_gymnasiums():
    rng = np.random.default_rng(0)
    ours = Running(2, 3)
    theirs = [RunningMeanStd(shape=(3,)) for _ in range(2)]
    for i in range(50):
        x = rng.normal(5, 3, (2, 3))
        which = np.array([i % 2]) if i % 5 == 0 else np.arange(2)
        ours.update(x, which)
        for g in which:
            theirs[g].update(x[g : g + 1])
    for g in range(2):
        np.testing.assert_allclose(ours.mean[g], theirs[g].mean)
        np.testing.assert_allclose(ours.var[g], theirs[g].var)


class Played(gymnasium.Env):
    """One slot of an envpool as a Gymnasium environment, so that Gymnasium's own wrappers can be put around it."""

    def __init__(self, seed):
        self.pool = make_envpool("hopper", [seed], 1000, 1)
        self.observation_space, self.action_space = self.pool.observation_space, self.pool.action_space

    def reset(self, *, seed=None, options=None):
        return self.pool.reset()[0][0], {}

    def step(self, action):
        obs, reward, terminated, truncated, _ = self.pool.step(np.asarray(action, dtype=np.float64)[None])
        return obs[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}


def test_robots_are_wrapped_as_cleanrl_wraps_them():
    """Gymnasium's ClipAction, NormalizeObservation, NormalizeReward and clipping at 10, over several episodes."""
    groups = MujocoVector("hopper", [3, 8], gamma=0.99)
    obs = groups.start(2)
    twins = []
    for group in (3, 8):
        env = gymnasium.wrappers.ClipAction(Played(int(stream("mujoco-groups", "hopper", group, 2).integers(2**31))))
        env = gymnasium.wrappers.NormalizeObservation(env)
        env = gymnasium.wrappers.TransformObservation(env, lambda o: np.clip(o, -10, 10), env.observation_space)
        env = gymnasium.wrappers.NormalizeReward(env, gamma=0.99)
        twins.append(gymnasium.wrappers.TransformReward(env, lambda r: float(np.clip(r, -10, 10))))
    expected = np.stack([twin.reset()[0] for twin in twins])
    np.testing.assert_allclose(obs[:, 0], expected, rtol=1e-5, atol=1e-6)
    rng = np.random.default_rng(0)
    ends = 0
    for _ in range(150):
        actions = rng.normal(0, 2, (2, 1, 3)).astype(np.float32)
        obs, rewards, done = groups.step(actions)
        for g, twin in enumerate(twins):
            o, r, terminated, truncated, _ = twin.step(actions[g, 0])
            assert done[g, 0] == (terminated or truncated)
            np.testing.assert_allclose(rewards[g, 0], r, rtol=1e-4, atol=1e-5)
            if terminated or truncated:
                ends += 1
                o = twin.reset()[0]
            np.testing.assert_allclose(obs[g, 0], o, rtol=1e-4, atol=1e-5)
    assert ends >= 4
    returns = groups.recent[np.isfinite(groups.recent)]
    assert len(returns) == ends
    np.testing.assert_array_equal(groups.mean_returns(), groups.recent[:, -1])


def test_each_kind_of_environment_has_its_own_training_environments():
    grid = vector_envs(Gridworld.draw(3, 0), [4, 9], 5, 0.99)
    assert isinstance(grid, GridworldVector)
    assert (grid.envs, grid.horizon, grid.groups, grid.n_states) == (5, 3, [4, 9], 9)
    robot = vector_envs(BinnedMujoco("hopper"), [1], 1, 0.9)
    assert isinstance(robot, MujocoVector)
    assert (robot.robot, robot.gamma, robot.horizon, robot.n_features, robot.n_actions) == ("hopper", 0.9, 1000, 11, 3)
    with pytest.raises(ValueError, match="^CartPole-v1: PPO here trains Gridworlds and robots; give its policies"):
        vector_envs(GymnasiumEnvironment("CartPole-v1"), [0], 4, 0.99)


def test_trained_networks_are_policies_of_their_environment():
    names = ("a", "b")
    assert policy_spec(Gridworld.draw(3, 0), "grid", names) == Spec("grid", "softmax", 3, 4, names, n_states=9)
    expected = Spec("study", "binned_gaussian", 100, 10, names, n_features=4, low=-3.0, high=3.0)
    assert policy_spec(BinnedMujoco("inverted-pendulum"), "study", names) == expected
    cartpole = Spec("pole", "softmax", 500, 2, names, n_features=4)
    assert policy_spec(GymnasiumEnvironment("CartPole-v1"), "pole", names) == cartpole
