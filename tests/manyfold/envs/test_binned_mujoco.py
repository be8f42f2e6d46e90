import re
import shutil
import sys
from pathlib import Path

import envpool
import gymnasium
import mujoco
import numpy as np
import pytest

from manyfold.envs.binned_mujoco import ROBOTS, BinnedMujoco, RunningMujoco, make_envpool

D_S = {"ant": 27, "hopper": 11, "inverted-double-pendulum": 9, "inverted-pendulum": 4, "walker": 17}
D_A = {"ant": 8, "hopper": 3, "inverted-double-pendulum": 1, "inverted-pendulum": 1, "walker": 6}
HIDDEN = {"ant": 2, "hopper": 1, "walker": 1}  # positions that the observation leaves out
FLOAT32 = 2.0**-23  # envpool's rewards are float32


# --- envpool against Gymnasium -------------------------------------------------------------------------------------
# envpool is compiled with MuJoCo 3.6.0: with `pip install mujoco==3.6.0` all observations below agree to the last bit
# (InvertedDoublePendulum's to 1e-14, as its angles pass through arctan2). Newer versions round differently, so that the
# contact solver, which stops at 1e-8, now and then takes an iteration more or less: 1e-6 at once, in 1 of 500 steps of
# a standing Hopper. And 4.0 has a better RK4 for free joints, which only Ant has.


def classic_rk4(model, data):
    """One step of RK4 as MuJoCo has it up to 3.17: one rotation by the stages' mean velocity, of second order only."""
    h = model.opt.timestep
    mujoco.mj_forward(model, data)
    start, velocities, accelerations = data.qpos.copy(), [data.qvel.copy()], [data.qacc.copy()]

    def move(weights):
        data.qpos[:] = start
        mujoco.mj_integratePos(model, data.qpos, sum(w * v for w, v in zip(weights, velocities, strict=True)), h)
        data.qvel[:] = velocities[0] + h * sum(w * a for w, a in zip(weights, accelerations, strict=True))

    for weights in [(1 / 2,), (0, 1 / 2), (0, 0, 1)]:
        move(weights)
        mujoco.mj_forward(model, data)
        velocities.append(data.qvel.copy())
        accelerations.append(data.qacc.copy())
    move((1 / 6, 1 / 3, 1 / 3, 1 / 6))
    data.qacc_warmstart[:] = data.qacc


def gymnasium_env(env, *, rk4=None):
    """Gymnasium's environment with our options, on another RK4 if given."""
    world = gymnasium.make(ROBOTS[env].id, **ROBOTS[env].gymnasium).unwrapped

    def simulate(ctrl, frames):
        world.data.ctrl[:] = ctrl
        for _ in range(frames):
            rk4(world.model, world.data)

    if rk4:
        world._step_mujoco_simulation = simulate
    return world


def full_pool(env, seed, horizon):
    """The twin of `make_envpool` whose observations hide no positions and clip no velocities."""
    clips = (
        ["observation"] if env == "inverted-double-pendulum" else ["velocity"] if env in ("hopper", "walker") else []
    )
    options = {f"{clip}_{end}": value for clip in clips for end, value in [("min", -1e9), ("max", 1e9)]}
    if env in HIDDEN:
        options["exclude_current_positions_from_observation"] = False
    options |= {"num_envs": 1, "num_threads": 1, "seed": [seed], "max_episode_steps": horizon, **ROBOTS[env].envpool}
    return envpool.make(ROBOTS[env].id, env_type="gymnasium", **options)


def state(env, full):
    """Positions and velocities behind a full observation."""
    if env == "inverted-double-pendulum":  # cart, sines, cosines, velocities, constraint force
        return np.r_[full[0], np.arctan2(full[1:3], full[3:5])], full[5:8]
    n_positions = len(full) // 2 + len(full) % 2  # Ant has a quaternion, one number more than its velocity
    return full[:n_positions], full[n_positions:]


def errors(env, scale, world, *, episodes, synchronise, seed=5, horizon=100):
    """Ours against Gymnasium over random episodes: for each one the errors of observations and rewards, `[T, 2]`.

    `synchronise` puts Gymnasium into envpool's state after every step, so that each error is of one step.
    """
    ours, twin = make_envpool(env, [seed], horizon, 1), full_pool(env, seed, horizon)
    rng, found = np.random.default_rng(seed), []
    for _ in range(episodes):
        obs, full = ours.reset()[0][0], twin.reset()[0][0]
        assert np.array_equal(obs[:3], full[HIDDEN.get(env, 0) :][:3])
        world.reset(seed=0)
        world.set_state(*state(env, full))
        done, steps = False, []
        while not done:
            action = scale * rng.uniform(ours.action_space.low, ours.action_space.high)
            obs, reward, terminated, truncated = (x[0] for x in ours.step(action[None])[:4])
            full = twin.step(action[None])[0][0]
            obs_g, reward_g, terminated_g, _, _ = world.step(action)
            steps.append([np.abs(obs - obs_g).max(), abs(reward - reward_g) / max(1, abs(reward_g))])
            assert terminated == terminated_g or (truncated and len(steps) == horizon)
            done = terminated or truncated
            if synchronise:  # without mj_forward, as envpool's bodies lag behind its joints by one substep, too
                world.data.qpos[:], world.data.qvel[:] = state(env, full)
        found.append(np.array(steps))
    return found


# Large actions end most episodes early, small ones let Ant and Hopper reach 100 steps.
RANDOM_ACTIONS = [
    ("ant", 1.0, 100),
    ("hopper", 1.0, 20),
    ("hopper", 0.02, 100),
    ("inverted-double-pendulum", 1.0, 5),
    ("inverted-double-pendulum", 0.1, 10),
    ("inverted-pendulum", 1.0, 4),
    ("inverted-pendulum", 0.003, 30),
    ("walker", 1.0, 20),
    ("walker", 0.02, 90),
]


@pytest.mark.parametrize(("env", "scale", "longest"), RANDOM_ACTIONS)
def test_every_step_equals_gymnasiums(env, scale, longest):
    world = gymnasium_env(env, rk4=classic_rk4 if env == "ant" else None)
    found = errors(env, scale, world, episodes=5, synchronise=True)
    assert max(map(len, found)) >= longest
    obs, rewards = np.concatenate(found).T
    assert np.mean(obs < 1e-12) > 0.99  # the rest: the contact solver's stop
    assert obs.max() < 1e-5
    assert rewards.max() < 1e-5
    assert np.mean(rewards < FLOAT32) > 0.99


@pytest.mark.parametrize(("env", "scale", "longest"), RANDOM_ACTIONS)
def test_whole_episodes_equal_gymnasiums_once_the_contact_solver_finishes(env, scale, longest, tmp_path, monkeypatch):
    assets = Path(envpool.make_spec(ROBOTS[env].id).config.base_path) / "mujoco/assets_gym"
    copies = shutil.copytree(assets, tmp_path / "mujoco/assets_gym")
    for model in copies.glob("*.xml"):
        text = model.read_text().replace('<option integrator="RK4"', '<option integrator="RK4" tolerance="1e-15"')
        model.write_text(text)
    monkeypatch.setitem(ROBOTS[env].envpool, "base_path", str(tmp_path))
    world = gymnasium_env(env, rk4=classic_rk4 if env == "ant" else None)
    world.model.opt.tolerance = 1e-15
    found = errors(env, scale, world, episodes=5, synchronise=False)
    assert max(map(len, found)) >= longest
    # Ant is chaotic: Gymnasium's own Ant, started 1e-15 away, is 1e-12 away after 30 steps and 1e-4 after 100.
    exact = 30 if env == "ant" else 100
    assert max(e[:exact, 0].max() for e in found) < 1e-10
    assert max(e[:exact, 1].max() for e in found) < FLOAT32
    assert max(e.max() for e in found) < 1e-2


def test_with_the_rk4_of_mujoco_4_only_ants_rotation_differs_a_little():
    newer, classic = (
        errors("ant", 1.0, gymnasium_env("ant", rk4=rk4), episodes=5, synchronise=False, horizon=1)
        for rk4 in (None, classic_rk4)
    )
    assert max(e[0, 0] for e in newer) < 1e-5  # in the air; contacts then amplify it
    assert max(e[0, 0] for e in classic) < 1e-13


# --- RunningMujoco -------------------------------------------------------------------------------------------------


def tanh_companion(env):
    """Deterministic, and different in every state."""
    return None if D_A[env] == 1 else lambda obs, rng: np.tanh(obs[:, -(D_A[env] - 1) :])


def noisy_companion(env):
    return None if D_A[env] == 1 else lambda obs, rng: 0.7 * rng.standard_normal((len(obs), D_A[env] - 1))


def play(world, steps, seed=0):
    """Resets, then steps in random bins: the observations `[steps + 1, N, d]` and rewards, ends `[steps, N]`."""
    rng, observations, rest = np.random.default_rng(seed), [world.reset()], []
    for _ in range(steps):
        obs, *others = world.step(rng.integers(world.n_actions, size=world.n))
        observations.append(obs)
        rest.append(others)
    return np.array(observations), *(np.array(x) for x in zip(*rest, strict=True))


@pytest.mark.parametrize("env", ROBOTS)
def test_the_companions_action_is_in_the_observation_before_the_bin_is_chosen_and_then_executed(env):
    world, raw = RunningMujoco(env, noisy_companion(env), [3, 8]), make_envpool(env, [3, 8], 100, 1)
    obs, expected = world.reset(), raw.reset()[0]
    assert obs.shape == (2, D_S[env] + D_A[env] - 1)
    assert obs.dtype == np.float64
    rng = np.random.default_rng(0)
    while not world.done.any():
        assert np.array_equal(obs[:, : D_S[env]], expected)
        bins = rng.integers(10, size=2)
        expected, reward, ended, _, _ = raw.step(np.column_stack([world.midpoints[bins], obs[:, D_S[env] :]]))
        previous, (obs, rewards, terminated, _) = obs, world.step(bins)
        assert rewards.dtype == np.float64
        assert np.array_equal(rewards, reward)
        assert np.array_equal(terminated, ended)
        assert D_A[env] == 1 or (obs[:, D_S[env] :] != previous[:, D_S[env] :]).any()  # sampled anew
    assert np.array_equal(obs[:, : D_S[env]], expected)


@pytest.mark.parametrize("env", ROBOTS)
def test_a_companion_that_is_a_function_of_s_is_executed_but_not_appended(env):
    """Its very action is sent, as the same function of raw observations says, and the observation is s alone."""
    world = RunningMujoco(env, tanh_companion(env), [3, 8], appended=False)
    raw, rng = make_envpool(env, [3, 8], 100, 1), np.random.default_rng(0)
    obs, expected = world.reset(), raw.reset()[0]
    low, high = raw.action_space.low[1:], raw.action_space.high[1:]
    while not world.done.any():
        assert obs.shape == (2, D_S[env])
        np.testing.assert_array_equal(obs, expected)
        bins = rng.integers(10, size=2)
        rest = tanh_companion(env)(expected, None).clip(low, high) if D_A[env] > 1 else np.empty((2, 0))
        expected, reward, _, _, _ = raw.step(np.column_stack([world.midpoints[bins], rest]))
        obs, rewards, _, _ = world.step(bins)
        np.testing.assert_array_equal(rewards, reward)
    np.testing.assert_array_equal(obs, expected)


def test_the_companion_sees_raw_observations_and_is_clipped():
    seen = []

    def companion(obs, rng):
        seen.append(obs.copy())
        obs[:] = 99  # a companion may do what it likes with its copy
        return np.tile([5.0, -5.0], (len(obs), 1))

    world = RunningMujoco("hopper", companion, [0, 1, 2])
    obs = world.reset()
    assert np.array_equal(obs[:, 11:], np.tile([1.0, -1.0], (3, 1)))
    assert np.array_equal(seen[0], obs[:, :11])
    obs = world.step([0, 5, 9])[0]
    assert len(seen) == 2
    assert np.array_equal(seen[1], obs[:, :11])


def test_bins_by_hand():
    world = RunningMujoco("inverted-pendulum", None, [0], bins=4)
    np.testing.assert_allclose(world.edges, [-3, -1.5, 0, 1.5, 3])
    np.testing.assert_allclose(world.midpoints, [-2.25, -0.75, 0.75, 2.25])
    hopper = RunningMujoco("hopper", tanh_companion("hopper"), [0])
    np.testing.assert_allclose(hopper.midpoints, [-0.9, -0.7, -0.5, -0.3, -0.1, 0.1, 0.3, 0.5, 0.7, 0.9])


def test_the_horizon_truncates():
    world = RunningMujoco("ant", lambda obs, rng: np.zeros((len(obs), 7)), [0, 1, 2])
    world.reset()
    for t in range(1, 101):
        assert (world.t == t - 1).all()
        _, _, terminated, truncated = world.step([5, 5, 5])
        assert not terminated.any()
        assert (truncated == (t == 100)).all()
    assert (world.t == 100).all()
    assert world.done.all()


def test_a_termination_in_the_last_step_is_no_truncation():
    def fall(horizon):
        world = RunningMujoco("inverted-pendulum", None, [0], horizon=horizon)
        world.reset()
        while not world.done.all():
            _, _, terminated, truncated = world.step([9])
        return int(world.t[0]), terminated[0], truncated[0]

    t, terminated, truncated = fall(100)
    assert (terminated, truncated) == (True, False)
    assert fall(t) == (t, True, False)
    assert fall(t - 1) == (t - 1, False, True)


@pytest.mark.parametrize("env", ["hopper", "inverted-double-pendulum", "walker"])
def test_ended_slots_stay_ended_and_frozen(env):
    world = RunningMujoco(env, noisy_companion(env), range(8), horizon=60)
    obs, rewards, terminated, truncated = play(world, 65)
    ended = terminated | truncated
    assert (ended.sum(0) == 1).all()  # once each
    assert len(set(ended.argmax(0))) > 1
    assert world.done.all()
    for slot, last in enumerate(ended.argmax(0)):
        assert (obs[last + 1 :, slot] == obs[last + 1, slot]).all()
        assert (obs[: last + 1, slot, 0] != obs[1 : last + 2, slot, 0]).all()
        assert (rewards[last + 1 :, slot] == 0).all()
        assert (rewards[:last, slot] != 0).all()


def test_every_reset_starts_new_episodes_however_the_last_ones_ended():
    world, raw = (
        RunningMujoco("hopper", tanh_companion("hopper"), range(6), horizon=20),
        make_envpool("hopper", range(6), 20, 1),
    )
    starts = []
    for steps in (0, 8, 15, 20, 25, 3):  # none, some and all slots have ended
        starts.append(play(world, steps)[0][0] if steps else world.reset())
        assert world.t.max() <= min(steps, 20)
        assert np.array_equal(starts[-1][:, :11], raw.reset()[0])
    assert len(np.unique(np.concatenate(starts), axis=0)) == 36
    world.reset()
    assert not world.t.any()
    assert not world.done.any()


def test_some_slots_begin_anew_while_the_others_go_on():
    world, raw = RunningMujoco("hopper", tanh_companion("hopper"), range(4)), make_envpool("hopper", range(4), 101, 1)
    world.reset()
    raw.reset()
    before = [world.step([5, 2, 7, 4])[0] for _ in range(3)][-1]
    after = world.reset(np.array([1, 3]))
    assert np.array_equal(after[[0, 2]], before[[0, 2]])
    assert np.array_equal(after[[1, 3], :11], raw.reset()[0][[1, 3]])  # their second start
    assert world.t.tolist() == [3, 0, 3, 0]
    world.step([5, 5, 5, 5])
    assert world.t.tolist() == [4, 1, 4, 1]


@pytest.mark.parametrize("env", ROBOTS)
def test_the_same_seeds_give_the_same_numbers(env):
    def numbers(seeds, threads=1):
        return play(RunningMujoco(env, noisy_companion(env), seeds, horizon=30, threads=threads), 30)

    first = numbers([4, 5, 6])
    for again in (numbers([4, 5, 6]), numbers([4, 5, 6], threads=2)):
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.isclose(first[0][0], numbers([7, 8, 9])[0][0]).all(1).any()


@pytest.mark.parametrize("env", ROBOTS)
def test_a_slot_does_not_depend_on_its_neighbours(env):
    together = RunningMujoco(env, tanh_companion(env), [4, 5, 6])
    alone = RunningMujoco(env, tanh_companion(env), [5])
    rng = np.random.default_rng(1)
    for _ in range(3):
        assert np.array_equal(together.reset()[1], alone.reset()[0])
        for _ in range(25):
            bins = rng.integers(10, size=3)
            for a, b in zip(together.step(bins), alone.step(bins[1:2]), strict=True):
                assert np.array_equal(a[1], b[0])


@pytest.mark.parametrize(
    ("bins", "message"),
    [
        ([0, 10], "bins[1] is 10, expected an integer from 0 to 9"),
        ([-1, 0], "bins[0] is -1, expected an integer from 0 to 9"),
        ([0.0, 1.0], "bins are float64, expected integers from 0 to 9"),
        ([True, False], "bins are bool, expected integers from 0 to 9"),
        ([0], "bins has shape [1], expected [2] = [N]"),
        ([[0, 1]], "bins has shape [1, 2], expected [2] = [N]"),
    ],
)
def test_bad_bins_are_refused(bins, message):
    world = RunningMujoco("inverted-pendulum", None, [0, 1])
    world.reset()
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        world.step(bins)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("hoper", None, [0]), {}, "unknown robot 'hoper', expected one of ant, hopper, "),
        (("Walker2d-v5", None, [0]), {}, "unknown robot 'Walker2d-v5', expected one of ant, "),
        (("hopper", None, [0]), {}, "hopper has 3 action dimensions, expected a companion for the last 2"),
        (("inverted-pendulum", None, []), {}, "seeds is empty, expected one whole number from 0 to 2^31 - 1 for every"),
        (("inverted-pendulum", None, [1, 2**31]), {}, "seeds contains 2147483648, expected one whole number"),
        (("inverted-pendulum", None, [0.5]), {}, "seeds contains 0.5, expected one whole number"),
        (("inverted-pendulum", None, [0]), {"horizon": 0}, "horizon is 0, expected a whole number from 1 to 1e+06"),
        (("inverted-pendulum", None, [0]), {"bins": 2.5}, "bins is 2.5, expected a whole number from 1 to 10,000"),
        (("inverted-pendulum", None, [0]), {"threads": 0}, "threads is 0, expected a whole number from 1 to 1,024"),
    ],
)
def test_bad_arguments_are_refused(arguments, options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        RunningMujoco(*arguments, **options)


def test_a_bad_companion_is_refused():
    with pytest.raises(
        ValueError, match=r"the companion's action has shape \[2, 3\], expected \[2, 2\] = \[N, d_a - 1\]"
    ):
        RunningMujoco("hopper", lambda obs, rng: np.zeros((2, 3)), [0, 1]).reset()
    with pytest.raises(ValueError, match=r"the companion's action\[0, 0\] is nan"):
        RunningMujoco("hopper", lambda obs, rng: np.full((2, 2), np.nan), [0, 1]).reset()


def test_stepping_before_the_first_reset_is_refused():
    with pytest.raises(ValueError, match="step was called before reset"):
        RunningMujoco("inverted-pendulum", None, [0]).step([0])


# --- the Environment --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("robot", ROBOTS)
def test_the_environment_says_what_its_slots_are(robot):
    env = BinnedMujoco(robot, noisy_companion(robot), horizon=30, bins=7)
    assert (env.name, env.horizon, env.n_actions, env.n_states) == (robot, 30, 7, 0)
    assert (env.n_features, env.width) == (D_S[robot], D_S[robot] + D_A[robot] - 1)
    assert len(env.low) == len(env.high) == D_A[robot]
    assert env.mdp() is None
    running = env.open(3, np.random.default_rng(0))
    assert (running.n, running.horizon, running.n_actions) == (3, 30, 7)
    np.testing.assert_allclose(running.edges[[0, -1]], [env.low[0], env.high[0]])
    assert running.reset().shape == (3, env.width)


def test_what_is_not_appended_is_not_in_the_width():
    env = BinnedMujoco("ant", tanh_companion("ant"), appended=False)
    assert env.width == env.n_features == D_S["ant"]
    assert env.open(3, np.random.default_rng(0)).reset().shape == (3, env.width)


def test_the_slots_have_seeds_of_the_generator():
    env = BinnedMujoco("hopper", tanh_companion("hopper"))
    seeds = np.random.default_rng(7).integers(2**31, size=4).tolist()
    expected = play(RunningMujoco("hopper", tanh_companion("hopper"), seeds), 5)
    found = play(env.open(4, np.random.default_rng(7)), 5)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_companion_may_be_left_out_where_no_episode_is_run():
    env = BinnedMujoco("hopper")
    assert env.n_actions == 10
    with pytest.raises(ValueError, match="hopper has 3 action dimensions, expected a companion for the last 2"):
        env.open(1, np.random.default_rng(0))


def test_where_the_action_has_one_dimension_a_companion_is_not_asked():
    def companion(obs, rng):
        raise AssertionError("asked")

    running = BinnedMujoco("inverted-pendulum", companion).open(2, np.random.default_rng(0))
    assert running.reset().shape == (2, 4)


def test_without_envpool_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(
        ValueError, match=r"^hopper needs envpool, which is not installed; install the extra `mujoco`: pip"
    ):
        BinnedMujoco("hopper")
