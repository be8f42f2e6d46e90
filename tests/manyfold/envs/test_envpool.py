"""envpool's environments: against Gymnasium's own, begun in the same states and moved by the same actions."""

import gymnasium
import numpy as np
import pytest

from manyfold import envs
from manyfold.data.store import Store
from manyfold.envs.envpool import EnvpoolEnvironment


def literal(name, first, put):
    """Gymnasium's environment at a given first observation."""
    env = gymnasium.make(name).unwrapped
    env.reset(seed=0)
    put(env, first)
    return env


def put_cartpole(env, first):
    env.state = first


def put_hopper(env, first):
    env.set_state(np.concatenate([[0.0], first[:5]]), first[5:])  # where it stands changes nothing


@pytest.mark.parametrize(
    ("name", "put", "tolerance"), [("CartPole-v1", put_cartpole, 1e-6), ("Hopper-v5", put_hopper, 1e-5)]
)
def test_steps_are_gymnasiums(name, put, tolerance):
    env = envs.make(f"envpool:{name}", horizon=40)
    assert isinstance(env, EnvpoolEnvironment)
    slots, rng = 4, np.random.default_rng(1)
    running = env.open(slots, np.random.default_rng(0))
    obs = running.reset(np.arange(slots))
    assert len(np.unique(obs, axis=0)) == slots  # every slot has a start of its own
    real = [literal(name, first, put) for first in obs]
    steps = 0
    while not running.done.all():
        active = np.flatnonzero(~running.done)
        actions = draw(env, slots, rng)
        obs, rewards, terminated, truncated = running.step(actions)
        steps += 1
        for i in active:
            expected, reward, ended, _, _ = real[i].step(actions[i])
            np.testing.assert_allclose(obs[i], expected, atol=tolerance, rtol=tolerance)
            assert rewards[i] == pytest.approx(reward, abs=1e-5)
            assert terminated[i] == ended
            assert truncated[i] == (not ended and steps == 40)
    assert steps > 5


def draw(env, n, rng):
    """Any actions, `[n]` or `[n, d]`."""
    space = env.action_space
    return (
        rng.integers(space.n, size=n) if hasattr(space, "n") else rng.uniform(space.low, space.high, (n, *space.shape))
    )


def test_the_horizon_is_the_time_limit_unless_given():
    assert EnvpoolEnvironment("Hopper-v5").horizon == 1000
    assert EnvpoolEnvironment("CartPole-v1", horizon=7).horizon == 7


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Nope-v1", {}, "envpool:Nope-v1: Nope-v1 is not supported"),
        ("Hopper-v5", {"weight": 3}, "envpool:Hopper-v5: .*unexpected keyword argument 'weight'"),
        ("Hopper-v5", {"horizon": 0}, "horizon is 0, expected a whole number from 1"),
    ],
)
def test_what_envpool_does_not_have_is_refused_in_one_line(name, options, message):
    with pytest.raises(ValueError, match=f"^{message}[^\n]*$"):
        envs.make(f"envpool:{name}", **options)


def test_a_store_knows_the_options(tmp_path):
    Store(tmp_path, envs.make("envpool:CartPole-v1", 9))
    with pytest.raises(ValueError, match="a store of another environment: settings"):
        Store(tmp_path, envs.make("envpool:CartPole-v1", 9, reward_threshold=3.0))
