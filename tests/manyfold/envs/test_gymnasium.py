"""Any Gymnasium environment: against a literal loop on the environment itself, one episode at a time."""

import sys

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from manyfold.envs.gymnasium import GymnasiumEnvironment
from manyfold.policies import CallablePolicySet
from manyfold.policies.base import sample_actions
from manyfold.rollout import in_turns, play, rollout


class Fixed(gymnasium.Env):
    """Spaces as given; never ends by itself."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, False, False, {}


BOX, TWO = spaces.Box(-1, 1, (3,)), spaces.Discrete(2)


@pytest.mark.parametrize(("name", "horizon", "episodes"), [("CartPole-v1", 30, 3), ("FrozenLake-v1", 20, 4)])
def test_episodes_equal_a_literal_loop_on_the_real_environment(name, horizon, episodes):
    """Each slot is one real environment: seeded once by the generator's numbers, then reset without a seed."""
    slots = 5
    running = GymnasiumEnvironment(name, horizon).open(slots, np.random.default_rng(3))
    obs = running.reset(np.arange(slots))
    seeds = np.random.default_rng(3).integers(2**31, size=slots).tolist()
    rng = np.random.default_rng(0)
    actions = rng.integers(running.env.n_actions, size=(slots, episodes, horizon))
    played = [[] for _ in range(slots)]  # rows of each slot's episodes
    count = np.zeros(slots, dtype=int)
    current = [[] for _ in range(slots)]
    while (count < episodes).any():
        chosen = np.array([actions[i, min(count[i], episodes - 1), len(current[i])] for i in range(slots)])
        active = ~running.done
        obs_before = obs
        obs, rewards, terminated, truncated = running.step(chosen)
        for i in np.flatnonzero(active):
            current[i].append((obs_before[i].tolist(), obs[i].tolist(), rewards[i], terminated[i], truncated[i]))
            if terminated[i] or truncated[i]:
                played[i].append(current[i])
                current[i] = []
                count[i] += 1
        again = np.flatnonzero(running.done & (count < episodes))
        if again.size:
            obs = running.reset(again)
    for i in range(slots):
        env = gymnasium.make(name)
        for episode in range(episodes):
            found = played[i][episode]
            state, _ = env.reset(seed=seeds[i] if episode == 0 else None)
            for t in range(horizon):
                after, reward, terminated, cut, _ = env.step(int(actions[i, episode, t]))
                truncated = not terminated and (cut or t == horizon - 1)
                expected = np.ravel(state).tolist(), np.ravel(after).tolist(), reward, terminated, truncated
                assert found[t] == expected
                state = after
                if terminated or truncated:
                    break
            assert len(found) == t + 1


def test_a_rollout_equals_episodes_played_one_at_a_time():
    """As many slots as episodes: every episode is its own real environment, with the actions that were drawn for it."""
    lean = [lambda obs, t: np.column_stack([0.5 - 0.4 * np.sign(obs[:, 2]), 0.5 + 0.4 * np.sign(obs[:, 2])])]
    policies = CallablePolicySet(lean, 2, 4, 40)
    env = GymnasiumEnvironment("CartPole-v1", horizon=40)
    (rows,) = rollout(env, in_turns(policies), np.zeros(12, dtype=np.int64), np.random.default_rng(5))
    rng = np.random.default_rng(5)
    envs = [gymnasium.make("CartPole-v1") for _ in range(12)]
    states = [env.reset(seed=seed)[0] for env, seed in zip(envs, rng.integers(2**31, size=12).tolist(), strict=True)]
    running, expected = list(range(12)), []
    for t in range(40):
        probs = policies.probs(np.array([states[i] for i in running], dtype=np.float64), t)[0]
        actions = sample_actions(probs, rng)
        still = []
        for i, action, p in zip(running, actions, probs, strict=True):
            after, reward, terminated, _, _ = envs[i].step(int(action))
            expected.append((i, t, states[i], action, reward, after, terminated, not terminated and t == 39, p[action]))
            states[i] = after
            if not terminated:
                still.append(i)
        running = still
    expected.sort(key=lambda row: row[:2])
    names = ("episode", "t", "state", "action", "reward", "next_state", "terminated", "truncated", "prob")
    assert len(set(rows.lengths)) > 2
    for name, column in zip(names, zip(*expected, strict=True), strict=True):
        np.testing.assert_array_equal(getattr(rows, name), np.array(column), err_msg=name)


def test_environments_of_an_id_serve_again_with_the_same_bytes(monkeypatch):
    """Once all episodes have ended; those of a factory, of a crash and of another process are new each time."""
    monkeypatch.setattr(GymnasiumEnvironment, "slots", 4)
    coin = CallablePolicySet([lambda obs, t: np.full((len(obs), 2), 0.5)], 2, 4)
    env, made = GymnasiumEnvironment("CartPole-v1", 30), []
    plain = env._make

    def make():
        made.append(plain())
        return made[-1]

    env._make = make

    def whole(env, seed):
        (rows,) = rollout(env, in_turns(coin), np.zeros(6, dtype=np.int64), np.random.default_rng(seed), 6)
        return rows

    first = whole(env, 0)
    assert len(made) == len(env.idle) == 4
    assert set(env.idle) == set(made)
    whole(env, 1)
    again = whole(env, 0)
    assert len(made) == 4
    for name in ("state", "action", "reward", "next_state", "terminated"):
        np.testing.assert_array_equal(getattr(again, name), getattr(first, name))
    assert cloudpickle.loads(cloudpickle.dumps(env)).idle == []
    factory = GymnasiumEnvironment(lambda: gymnasium.make("CartPole-v1"), 30)
    whole(factory, 0)
    assert not factory.idle
    left = play(env, in_turns(coin), np.zeros(6, dtype=np.int64), np.random.default_rng(0))
    next(left)
    left.close()  # in the middle of its episodes
    assert not env.idle


def test_the_horizon_is_the_time_limit_unless_given():
    assert GymnasiumEnvironment("CartPole-v1").horizon == 500
    assert GymnasiumEnvironment("CartPole-v1", 30).horizon == 30
    assert GymnasiumEnvironment("CartPole-v1", max_episode_steps=77).horizon == 77
    assert GymnasiumEnvironment(lambda: gymnasium.make("CartPole-v1", max_episode_steps=9)).horizon == 9
    limited = GymnasiumEnvironment(lambda: gymnasium.wrappers.TimeLimit(Fixed(BOX, TWO), 8))
    assert limited.horizon == 8
    outer = GymnasiumEnvironment(
        lambda: gymnasium.wrappers.ClipReward(gymnasium.wrappers.TimeLimit(Fixed(BOX, TWO), 8), -1, 1)
    )
    assert outer.horizon == 8


def test_names_are_the_id_the_functions_or_given():
    def my_env():
        return Fixed(BOX, TWO)

    assert GymnasiumEnvironment("CartPole-v1").name == "CartPole-v1"
    assert GymnasiumEnvironment(my_env, 3).name == "my_env"
    assert GymnasiumEnvironment(my_env, 3, name="mine").name == "mine"


@pytest.mark.parametrize(
    ("space", "sample", "width", "n_states", "expected"),
    [
        (spaces.Box(-9, 9, (2, 2)), [[1, 2], [3, 4]], 4, 0, [1.0, 2.0, 3.0, 4.0]),
        (spaces.Box(0, 255, (2,), np.uint8), [7, 255], 2, 0, [7.0, 255.0]),
        (spaces.Box(-9, 9, ()), 3.5, 1, 0, [3.5]),
        (spaces.Discrete(5), 4, 1, 5, [4]),
        (spaces.Discrete(5, start=10), 14, 1, 5, [4]),
    ],
)
def test_observations_are_flat_vectors_or_indices_from_0(space, sample, width, n_states, expected, monkeypatch):
    env = GymnasiumEnvironment(lambda: Fixed(space, TWO), 3)
    assert (env.width, env.n_states) == (width, n_states)
    sampled = np.asarray(sample, dtype=space.dtype)
    monkeypatch.setattr(type(space), "sample", lambda self: sampled)
    obs = env.open(2, np.random.default_rng(0)).reset(np.arange(2))
    assert obs.tolist() == [expected, expected]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            "NoSuchEnvironment-v0",
            {},
            "environment 'NoSuchEnvironment-v0': Environment `NoSuchE",
        ),
        ("CartPole-v99", {}, "environment 'CartPole-v99': Environment version `v99` for"),
        ("not an id", {}, "environment 'not an id': Malformed environment ID"),
        ("no_such_module:CartPole-v1", {}, "environment 'no_such_module:CartPole-v1': No module named"),
        ("CartPole-v1", {"no_such_option": 1}, "environment 'CartPole-v1': .*no_such_option"),
        ("CartPole-v1", {"horizon": 0}, "horizon is 0, expected a whole number from 1 to 1e.06"),
        ("CartPole-v1", {"horizon": 2.5}, "horizon is 2.5, expected a whole number"),
        ("CartPole-v1", {"horizon": 10**9}, "horizon is 1000000000, expected a whole number"),
        (
            lambda: Fixed(BOX, TWO),
            {},
            "<lambda> has no TimeLimit, expected a horizon: horizon=500 or --horizon 500, steps",
        ),
        (lambda: Fixed(spaces.MultiBinary(3), TWO), {"horizon": 3, "name": "x"}, "x: observations are MultiBinary"),
        (lambda: Fixed(spaces.Dict({"a": BOX}), TWO), {"horizon": 3, "name": "x"}, "x: observations are Dict"),
        (
            lambda: Fixed(BOX, spaces.Dict({"a": BOX})),
            {"horizon": 3, "name": "x"},
            "x: actions are Dict.*, expected one",
        ),
        (lambda: "CartPole", {"horizon": 3, "name": "x"}, "x: .*expected a gymnasium.Env"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(make, options, message):
    with pytest.raises(ValueError, match=f"^{message}[^\n]*$"):
        GymnasiumEnvironment(make, **options)


class Odd(gymnasium.Env):
    """Returns what it is told to at the second step."""

    observation_space, action_space = gymnasium.spaces.Box(-9, 9, (3,)), gymnasium.spaces.Discrete(2)

    def __init__(self, obs=(0.0, 0.0, 0.0), reward=0.0, ended=False):
        self.obs, self.reward, self.ended = obs, reward, ended

    def reset(self, seed=None, options=None):
        return np.zeros(3), {}

    def step(self, action):
        return self.obs, self.reward, self.ended, False, {}


@pytest.mark.parametrize(
    ("told", "line"),
    [
        ({"obs": np.ones(1)}, r"observation array\(\[1.\]\) after 1 steps, expected 3 finite numbers"),
        ({"obs": np.array([0, np.nan, 0])}, "after 1 steps, expected 3 finite numbers"),
        ({"reward": float("nan")}, "reward nan at step 1, expected a finite number"),
        ({"reward": 1e39}, "at step 1, expected a finite number"),
        ({"reward": None}, "reward nan at step 1, expected a finite number"),
        ({"reward": np.array([1.0])}, r"step 1 gave reward array\(\[1\.\]\), .*, expected a number, True or False"),
        ({"reward": "much"}, "step 1 gave reward 'much', .*, expected a number, True or False"),
        ({"ended": np.array([True, False])}, "step 1 gave .*, terminated array.*, expected a number, True or False"),
    ],
)
def test_what_an_environment_returns_is_checked(told, line):
    running = GymnasiumEnvironment(lambda: Odd(**told), 5, "odd").open(1, np.random.default_rng(0))
    running.reset(np.array([0]))
    with pytest.raises(ValueError, match=f"odd: .*{line}"):
        running.step(np.array([0]))


def test_a_factory_that_returns_one_environment_again_and_again_is_refused():
    """All slots would share one state."""
    one = Odd()
    env = GymnasiumEnvironment(lambda: one, 5, "odd")
    with pytest.raises(ValueError, match="odd: the factory returned the same environment twice"):
        env.open(2, np.random.default_rng(0))


class Crashing(Odd):
    """Fails where it is told to: in its second reset, its third step, or as environments before gymnasium did."""

    def __init__(self, where):
        super().__init__()
        self.where, self.resets, self.steps = where, 0, 0

    def reset(self, seed=None, options=None):
        self.resets += 1
        if (self.where, self.resets) == ("reset", 2):
            raise ConnectionError("the simulator\n  is gone")
        return super().reset()

    def step(self, action):
        self.steps += 1
        if (self.where, self.steps) == ("step", 3):
            raise ZeroDivisionError("mass is 0")
        return super().step(action)[: 4 if self.where == "old" else 5]


@pytest.mark.parametrize(
    ("where", "line", "cause"),
    [
        (
            "reset",
            r"reset failed inside of the environment \(ConnectionError: the simulator is gone\)",
            ConnectionError,
        ),
        ("step", r"step 3 of an episode failed .* \(ZeroDivisionError: mass is 0\)", ZeroDivisionError),
        ("old", r"step 1 of an episode failed .* \(ValueError: not enough values to unpack.*\)", ValueError),
    ],
)
def test_what_an_environment_raises_is_one_line_with_its_error_as_the_cause(where, line, cause, monkeypatch):
    coin = CallablePolicySet([lambda obs, t: np.full((len(obs), 2), 0.5)], 2, 3)
    env = GymnasiumEnvironment(lambda: Crashing(where), 4, "robot")
    monkeypatch.setattr(type(env), "slots", 1)  # all episodes in one, one after the other
    with pytest.raises(ValueError, match=f"^robot: {line}, expected it to run$") as caught:
        list(rollout(env, in_turns(coin), np.zeros(2, dtype=np.int64), np.random.default_rng(0)))
    assert type(caught.value.__cause__) is cause


@pytest.mark.parametrize("before", [0, 1])
def test_a_factory_that_fails_is_one_line_too(before):
    """When it is asked first, and when it is asked for the slots."""
    made = []

    def make():
        if len(made) == before:
            raise RuntimeError("no licence\nleft")
        made.append(Odd())
        return made[-1]

    with pytest.raises(
        ValueError, match=r"^make: making it failed .* \(RuntimeError: no licence left\)[^\n]*$"
    ) as caught:
        GymnasiumEnvironment(make, 5).open(1, np.random.default_rng(0))
    assert isinstance(caught.value.__cause__, RuntimeError)


class Exits(Fixed):
    """As a robot's driver that gives up."""

    def __init__(self, where):
        super().__init__(BOX, TWO)
        self.where = where

    def reset(self, *, seed=None, options=None):
        return sys.exit(0) if self.where == "reset" else super().reset(seed=seed)

    def step(self, action):
        return sys.exit(0) if self.where == "step" else super().step(action)

    def close(self):
        if self.where == "close":
            raise RuntimeError("no port")


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("reset", "reset failed .*SystemExit: 0"),
        ("step", "step 1 of an episode failed .*SystemExit: 0"),
        ("close", "closing it failed .*RuntimeError: no port"),
    ],
)
def test_sys_exit_inside_of_an_environment_does_not_end_ours(where, said):
    def run():
        running = GymnasiumEnvironment(lambda: Exits(where), 5, "robot").open(1, np.random.default_rng(0))
        running.reset(np.arange(1))
        running.step(np.zeros(1, dtype=np.int64))

    with pytest.raises(ValueError, match=f"^robot: .*{said}"):
        run()


def test_environments_are_closed():
    """They may be processes of their own; one that can't be closed costs no episodes."""
    closed = []

    class Simulator(Fixed):
        def close(self):
            closed.append(self)
            if len(closed) == 3:
                raise RuntimeError("gone already")

    env = GymnasiumEnvironment(lambda: Simulator(BOX, TWO), 5, "simulator")
    assert len(closed) == 1  # it was asked for its spaces
    policies = CallablePolicySet([lambda obs, t: np.full((len(obs), 2), 0.5)], 2, 3)
    list(rollout(env, in_turns(policies), np.zeros(4, dtype=np.int64), np.random.default_rng(0)))
    assert len(closed) == 5


def test_an_environment_without_spaces_gets_one_line():
    with pytest.raises(ValueError, match="^bare: asking for its spaces .*observation_space"):
        GymnasiumEnvironment(gymnasium.Env, 5, "bare")
