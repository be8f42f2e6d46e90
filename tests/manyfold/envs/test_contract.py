"""What every environment promises, one test for all of them."""

import gymnasium
import numpy as np
import pytest

from manyfold.envs import BinnedMujoco, Environment, EnvpoolEnvironment, Finite, Gridworld, GymnasiumEnvironment
from manyfold.mdp import FiniteMDP
from manyfold.policies import CallablePolicySet
from manyfold.rollout import in_turns, rollout
from tests.worlds import distributions


class Countdown(gymnasium.Env):
    """Ends by itself: terminated when action 2 is taken, truncated after a number of steps that the seed draws.

    Says both at once where both happen in the same step; observations are two numbers, actions 1, 2 and 3.
    """

    observation_space = gymnasium.spaces.Box(-1e9, 1e9, (1, 2), np.float32)
    action_space = gymnasium.spaces.Discrete(3, start=1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.limit = int(self.np_random.integers(2, 9))
        return self.observe(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.left -= 1
        return self.observe(), float(action) + self.limit, action == 2, self.left <= 0, {}

    def observe(self):
        return np.array([[self.left, self.limit]], dtype=np.float32)


def random_mdp():
    rng = np.random.default_rng(0)
    return FiniteMDP(distributions(rng, (5, 3, 5)), rng.standard_normal((5, 3)), distributions(rng, (5,)), 6)


def companion(obs, rng):
    return 0.7 * rng.standard_normal((len(obs), 2))


MAKE = {
    "gridworld": lambda: Gridworld.draw(4, 0),
    "finite": lambda: Finite(random_mdp()),
    "inverted-pendulum": lambda: BinnedMujoco("inverted-pendulum", horizon=25),
    "hopper": lambda: BinnedMujoco("hopper", companion, horizon=25, bins=5),
    "hopper, its companion a function of s": lambda: BinnedMujoco(
        "hopper", lambda obs, rng: np.tanh(obs[:, -2:]), horizon=20, bins=5, appended=False
    ),
    "cartpole": lambda: GymnasiumEnvironment("CartPole-v1", horizon=25),
    "cartpole with a TimeLimit below the horizon": lambda: GymnasiumEnvironment(
        lambda: gymnasium.make("CartPole-v1", max_episode_steps=15), horizon=25, name="short"
    ),
    "envpool's cartpole": lambda: EnvpoolEnvironment("CartPole-v1", horizon=25),
    "frozen lake": lambda: GymnasiumEnvironment("FrozenLake-v1", horizon=12),
    "factory with its own truncation": lambda: GymnasiumEnvironment(Countdown, horizon=7, name="countdown"),
}
LIMIT = {"cartpole with a TimeLimit below the horizon": 15}  # the environment's own, where it is below the horizon
FIXED = ("gridworld", "finite")  # every episode has exactly T steps


@pytest.fixture(params=MAKE, name="env")
def made(request):
    env = MAKE[request.param]()
    env.case = request.param
    return env


def play(env, steps, n=6, seed=0, resets=()):
    """Random actions in n slots, some slots started again before some steps: everything that came, step by step."""
    running, rng = env.open(n, np.random.default_rng(seed)), np.random.default_rng(1)
    assert running.n == n
    assert running.done.all()  # nothing has begun
    rows, obs = [], running.reset(np.arange(n))
    for step in range(steps):
        if step in resets:
            obs = running.reset(np.array([1, 3]))
        before, t, done = obs.copy(), running.t.copy(), running.done.copy()
        actions = rng.integers(env.n_actions, size=n)
        obs, rewards, terminated, truncated = running.step(actions)
        after = (obs.copy(), rewards, terminated, truncated, running.t.copy(), running.done.copy())
        rows.append((before, t, done, actions, *after))
    return [np.array(x) for x in zip(*rows, strict=True)]


def test_it_says_what_it_is(env):
    assert isinstance(env, Environment)
    assert env.horizon >= 1
    assert env.n_actions == env.action_space.n
    assert env.n_states == getattr(env.observation_space, "n", 0)
    assert env.width == (1 if env.n_states else int(np.prod(env.observation_space.shape)))
    obs = env.open(3, np.random.default_rng(0)).reset(np.arange(3))
    assert obs.shape == (3, env.width)
    assert np.issubdtype(obs.dtype, np.integer) == bool(env.n_states)
    mdp = env.mdp()
    assert (mdp is not None) == (env.case in FIXED)
    if mdp is not None:
        assert (mdp.horizon, mdp.n_states, mdp.n_actions) == (env.horizon, env.n_states, env.n_actions)


def test_the_same_seed_gives_the_same_episodes_and_another_gives_others(env):
    first, again, other = (play(env, 2 * env.horizon, seed=seed, resets=(5, 6)) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[4], other[4])


def test_ended_slots_are_frozen_and_everything_else_moves(env):
    before, t, done, _, obs, rewards, terminated, truncated, t_after, done_after = play(env, env.horizon + 3)
    ended = terminated | truncated
    assert not (terminated & truncated).any()
    assert (ended.sum(0) == 1).all()  # once each, at the horizon at the latest
    np.testing.assert_array_equal(done_after, done | ended)
    np.testing.assert_array_equal(t_after, t + ~done)
    np.testing.assert_array_equal(obs[done], before[done])
    assert (rewards[done] == 0).all()
    assert not ended[done].any()
    assert (before[1:] == obs[:-1]).all()


def test_the_horizon_and_the_environments_own_limit_are_respected(env):
    _, _, _, _, obs, _, terminated, truncated, t, _ = play(env, env.horizon + 1, n=40)
    ended, lengths, limit = terminated | truncated, t[-1], LIMIT.get(env.case, env.horizon)
    assert lengths.max() == limit
    assert (lengths == limit).all() == (env.case in FIXED)
    assert (lengths == ended.argmax(0) + 1).all()
    if env.case in FIXED:
        assert not truncated.any()
        return
    assert terminated.any()
    assert truncated.any()
    own = np.minimum(obs[-1, :, 1], limit) if env.case == "factory with its own truncation" else limit
    assert (truncated.any(0) == ((lengths == own) & ~terminated.any(0))).all()
    assert (lengths <= own).all()


def test_some_slots_begin_anew_while_the_others_go_on(env):
    plain, mixed = play(env, 4), play(env, 4, resets=(3,))
    assert (mixed[1][3, [1, 3]] == 0).all()
    assert not mixed[2][3, [1, 3]].any()
    others = [0, 2, 4, 5]
    for a, b in zip(plain[:3], mixed[:3], strict=True):
        np.testing.assert_array_equal(a[3, others], b[3, others])  # observation, t and done before the step


def test_what_was_handed_out_is_not_changed_later(env):
    running = env.open(3, np.random.default_rng(0))
    obs = running.reset(np.arange(3))
    kept = obs.copy()
    for _ in range(3):
        running.step(np.zeros(3, dtype=np.int64))
    running.reset(np.array([0]))
    np.testing.assert_array_equal(obs, kept)


@pytest.mark.parametrize("action", [-1, 99])
def test_an_action_out_of_range_is_refused_in_one_line(env, action):
    running = env.open(3, np.random.default_rng(0))
    running.reset(np.arange(3))
    with pytest.raises(ValueError, match=f"^[^\n]*expected[^\n]* 0 to {env.n_actions - 1}$"):
        running.step(np.array([0, action, 0]))


def test_episodes_of_a_rollout_are_whole_and_each_is_run_once(env, monkeypatch):
    """More episodes than slots, in blocks: rows by episode and t, states that follow one another, one end each."""
    uniform = CallablePolicySet(
        [lambda obs, t: np.full((len(obs), env.n_actions), 1 / env.n_actions)],
        env.n_actions,
        env.width,
        env.horizon,
        n_states=env.n_states,
    )
    monkeypatch.setattr(type(env), "slots", env.slots and 7)
    blocks = list(rollout(env, in_turns(uniform), np.zeros(20, dtype=np.int64), np.random.default_rng(0), 8))
    assert [np.unique(block.episode).tolist() for block in blocks] == [
        list(range(8)),
        list(range(8, 16)),
        list(range(16, 20)),
    ]
    for block in blocks:
        for episode in np.unique(block.episode):
            rows = block.take(block.episode == episode)
            length = len(rows.t)
            assert length <= LIMIT.get(env.case, env.horizon)
            assert rows.t.tolist() == list(range(length))
            np.testing.assert_array_equal(rows.next_state[:-1], rows.state[1:])
            assert (rows.terminated | rows.truncated).tolist() == [False] * (length - 1) + [True]
            np.testing.assert_allclose(rows.prob, 1 / env.n_actions)
