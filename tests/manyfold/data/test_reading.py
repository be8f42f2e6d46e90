"""Other people's logged data, written by NumPy, PyArrow, h5py and Minari itself, and the q that is fitted to them."""

import gymnasium
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gymnasium import spaces

import manyfold as mf
from manyfold.data import formats, reading
from manyfold.data.reading import fit_q, read
from tests.manyfold.estimate.test_vectors import linear

ENV = mf.GymnasiumEnvironment("CartPole-v1", 30)


def episodes(n=6, horizon=30):
    """Whole episodes of CartPole by random actions: observations with the last one, and the rest."""
    env, rng, found = gymnasium.make("CartPole-v1", max_episode_steps=horizon), np.random.default_rng(0), []
    for seed in range(n):
        rows = {
            "observations": [env.reset(seed=seed)[0]],
            "actions": [],
            "rewards": [],
            "terminals": [],
            "timeouts": [],
        }
        ended = False
        while not ended:
            action = int(rng.integers(2))
            obs, reward, terminated, truncated, _ = env.step(action)
            for name, x in zip(rows, (obs, action, reward, terminated, truncated), strict=True):
                rows[name].append(x)
            ended = terminated or truncated
        found.append({name: np.array(x) for name, x in rows.items()})
    return found


def table(found):
    """A row a step, with next observations, t and episode."""
    flat = {name: np.concatenate([x[name] for x in found]) for name in ("actions", "rewards", "terminals", "timeouts")}
    lengths = [len(x["rewards"]) for x in found]
    return flat | {
        "observations": np.concatenate([x["observations"][:-1] for x in found]),
        "next_observations": np.concatenate([x["observations"][1:] for x in found]),
        "t": np.concatenate([np.arange(n) for n in lengths]),
        "episode": np.repeat(np.arange(len(lengths)), lengths),
    }


def parquet(path, columns):
    pq.write_table(pa.table({x: list(v) if v.ndim > 1 else v for x, v in columns.items()}), path)
    return path


def check(logged, columns, where=slice(None)):
    rows = logged.rows
    np.testing.assert_array_equal(rows.state, columns["observations"][where])
    np.testing.assert_array_equal(rows.action, columns["actions"][where])
    np.testing.assert_array_equal(rows.reward, columns["rewards"][where])
    np.testing.assert_array_equal(rows.t, columns["t"][where])
    np.testing.assert_array_equal(rows.terminated, columns["terminals"][where])
    on = rows.goes_on(ENV.horizon)
    np.testing.assert_array_equal(rows.next_state[on], columns["next_observations"][where][on])


@pytest.mark.parametrize("size", [7, 65_536])
@pytest.mark.parametrize("kept", [("t", "episode"), ("episode",), ("t",), (), ("next_observations",)])
def test_a_table_in_parquet_with_more_or_fewer_columns(tmp_path, monkeypatch, kept, size):
    """Whatever is left out is found again from the order of the rows, also across pieces."""
    monkeypatch.setattr(formats, "ROWS", size)
    columns = table(episodes())
    some = {
        x: v for x, v in columns.items() if x in (*kept, "observations", "actions", "rewards", "terminals", "timeouts")
    }
    logged = read(parquet(tmp_path / "a.parquet", some), ENV)
    assert logged.episodes == 6
    check(logged, columns)


def test_a_time_limit_without_a_next_state_is_left_out(tmp_path):
    """Episodes cut off at 10 steps of 30: nobody knows what came next."""
    columns = table(episodes(horizon=10))
    some = {x: v for x, v in columns.items() if x != "next_observations"}
    cut = columns["timeouts"] & ~columns["terminals"]
    assert cut.any()
    check(read(parquet(tmp_path / "a.parquet", some), ENV), columns, ~cut)


def test_done_means_terminated_unless_truncated(tmp_path):
    columns = table(episodes(horizon=10))
    columns["done"] = columns.pop("terminals") | columns["timeouts"]
    logged = read(parquet(tmp_path / "a.parquet", columns), ENV)
    np.testing.assert_array_equal(logged.rows.terminated, columns["done"] & ~columns["timeouts"])


def test_d4rl_without_timeouts_is_cut_at_the_horizon(tmp_path):
    h5py, columns = pytest.importorskip("h5py"), table(episodes())
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for name in ("observations", "actions", "rewards", "terminals"):
            file[name] = columns[name]
        file["infos/action_log_probs"] = columns["rewards"]
    logged = read(tmp_path / "a.hdf5", ENV)
    check(logged, columns)
    assert logged.propensities


def test_d4rl_with_next_observations(tmp_path):
    h5py, columns = pytest.importorskip("h5py"), table(episodes())
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in ("observations", "actions", "rewards", "terminals", "timeouts", "next_observations"):
            file[name] = columns[name]
    check(read(tmp_path / "a.h5", ENV), columns)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::ResourceWarning", "ignore::DeprecationWarning")
def test_a_data_set_that_minari_wrote(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    minari = pytest.importorskip("minari")
    from minari.data_collector import EpisodeBuffer

    found = episodes(12)  # more than ten: episode_10 comes before episode_2 by name
    buffers = [
        EpisodeBuffer(
            id=i,
            observations=x["observations"],
            actions=x["actions"],
            rewards=x["rewards"].tolist(),
            terminations=x["terminals"].tolist(),
            truncations=x["timeouts"].tolist(),
        )
        for i, x in enumerate(found)
    ]
    minari.create_dataset_from_buffers(
        "cart/random-v0", buffers, env="CartPole-v1", algorithm_name="dice", author="a", author_email="b"
    )
    logged = read(tmp_path / "cart" / "random-v0", ENV)
    check(logged, table(found))
    assert "12 episodes, logged by dice, without propensities" in str(logged)


def test_npz_as_a_table_as_episodes_and_with_lengths(tmp_path):
    found = episodes()
    columns = table(found)
    np.savez(tmp_path / "a.npz", **columns)
    np.savez(tmp_path / "b.npz", **{f"episode_{i}/{x}": v for i, one in enumerate(found) for x, v in one.items()})
    joined = {x: np.concatenate([one[x] for one in found]) for x in found[0]}
    np.savez(tmp_path / "c.npz", lengths=[len(one["rewards"]) for one in found], **joined)
    for name in "abc":
        check(read(tmp_path / f"{name}.npz", ENV), columns)
    assert read(tmp_path, ENV).episodes == 18  # a folder is all of its files


def test_our_own_parquet(tmp_path):
    columns = table(episodes())
    names = {"state": "observations", "action": "actions", "reward": "rewards", "next_state": "next_observations"}
    names |= {"terminated": "terminals", "truncated": "timeouts", "t": "t", "episode": "episode"}
    with mf.Writer(tmp_path / "a.parquet", mf.About("CartPole-v1", 30, 2, 4, 0)) as writer:
        writer.write({ours: columns[theirs] for ours, theirs in names.items()})
    logged = read(tmp_path / "a.parquet", ENV)
    check(logged, columns)
    assert "logged by manyfold in CartPole-v1" in str(logged)


class Offset(gymnasium.Env):
    """Spaces that don't start at 0."""

    observation_space, action_space = spaces.Discrete(3, start=5), spaces.MultiDiscrete([2, 3], start=[1, 7])


def test_spaces_that_start_elsewhere(tmp_path):
    env = mf.GymnasiumEnvironment(Offset, 4, "offset")
    np.savez(tmp_path / "a.npz", obs=[5, 7, 6], action=[[1, 9], [2, 7], [2, 8]], reward=[0.0, 1, 2], done=[0, 0, 1])
    rows = read(tmp_path / "a.npz", env).rows
    assert rows.state.tolist() == [[0], [2], [1]]
    assert rows.action.tolist() == [[0, 2], [1, 0], [1, 1]]


def test_more_rows_than_asked_for_are_sampled(tmp_path):
    columns = table(episodes(40))
    path, n = parquet(tmp_path / "a.parquet", columns), len(columns["t"])
    logged = read(path, ENV, most=n // 4)
    assert abs(len(logged.rows.t) - n / 4) < 4 * np.sqrt(n * 3 / 16)
    assert logged.found == n
    assert str(logged).startswith(f"{len(logged.rows.t):,} of {n:,} rows of 40 episodes")


def bad(change):
    columns = table(episodes(2))
    change(columns)
    return columns


def at_3(name, value):
    def change(columns):
        columns[name] = columns[name].astype(float)
        columns[name][3] = value

    return change


def shuffled(columns):
    order = np.random.default_rng(0).permutation(len(columns["t"]))
    for name in columns:
        columns[name] = columns[name][order]
    del columns["t"], columns["episode"]


def without(*names):
    return lambda columns: [columns.pop(name) for name in names]


CASES = {
    "nan": (at_3("observations", np.nan), "state is NaN or infinite in row 3, expected finite numbers"),
    "reward": (at_3("rewards", np.inf), "reward is NaN or infinite in row 3"),
    "actions": (at_3("actions", 2), r"actions have 2 in them, expected whole numbers of Discrete\(2\)"),
    "halves": (at_3("actions", 0.5), r"actions have 0\.5 in them, expected whole numbers"),
    "time": (at_3("t", -1), "t is -1, expected steps 0, 1, 2"),
    "width": (lambda c: c.update(observations=c["observations"][:, :3]), "state has 3 numbers a row, expected 4"),
    "no rewards": (without("rewards"), "no column reward, expected one of reward, rewards, rew; found"),
    "no time": (without("t", "episode", "terminals", "timeouts"), "nothing says at which step a row was, expected"),
    "shuffled": (shuffled, "rows are in no order and have no t, expected a column t or whole episodes"),
    "empty": (lambda c: c.update({x: v[:0] for x, v in c.items()}), "0 rows, expected logged transitions"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_fit_gets_one_line(tmp_path, name):
    change, message = CASES[name]
    np.savez(tmp_path / "a.npz", **bad(change))
    with pytest.raises(ValueError, match=message) as found:
        read(tmp_path / "a.npz", ENV)
    assert "\n" not in str(found.value)


def test_tuples_of_which_nobody_knows_the_next_state(tmp_path):
    columns = bad(without("next_observations"))
    order = np.random.default_rng(0).permutation(len(columns["t"]))
    np.savez(tmp_path / "a.npz", **{name: x[order] for name, x in columns.items()})
    with pytest.raises(ValueError, match="next states of most rows are unknown"):
        read(tmp_path / "a.npz", ENV)


def test_files_that_are_none(tmp_path):
    with pytest.raises(ValueError, match="no such file or folder"):
        read(tmp_path / "none", ENV)
    with pytest.raises(ValueError, match=r"expected logged data: \.parquet"):
        read(tmp_path, ENV)
    for name, message in (("a.parquet", "not a whole Parquet"), ("a.npz", "not an npz file"), ("a.h5", "HDF5")):
        (tmp_path / name).write_bytes(b"nothing of the kind")
        with pytest.raises(ValueError, match=message):
            read(tmp_path / name, ENV)


def test_pickles_are_not_loaded(tmp_path):
    columns = table(episodes(2))
    np.savez(tmp_path / "a.npz", **columns | {"infos": np.array([{"a": 1}], dtype=object)})
    with pytest.raises(ValueError, match="not an npz file of plain arrays"):
        read(tmp_path / "a.npz", ENV)


def test_actions_of_another_kind(tmp_path):
    env, _ = linear()
    np.savez(tmp_path / "a.npz", obs=np.zeros((3, 1)), action=[0, 1, 0], reward=np.zeros(3), done=[0, 0, 1])
    with pytest.raises(ValueError, match="int64 of 1 numbers, expected 2 as in Box"):
        read(tmp_path / "a.npz", env)


# --- q ----------------------------------------------------------------------------------------------------------------


def test_q_of_vectors_helps(tmp_path):
    """Data of one policy; q lowers the variance of a linear-quadratic problem in most policies, and says what it is."""
    env, policies = linear()
    logged = mf.collect(env, mf.ChosenPolicySet(policies, [1]), 200, np.random.default_rng(0))
    ends = np.zeros(logged.steps, dtype=np.bool_)
    ends[np.cumsum(logged.lengths) - 1] = True
    np.savez(
        tmp_path / "a.npz", obs=logged.states, action=logged.actions, reward=logged.rewards, truncated=ends, t=logged.t
    )
    said = []
    q, card = fit_q(tmp_path / "a.npz", env, policies, progress=said.append)
    assert card.startswith(
        "2,000 rows of 200 episodes, logged by unknown policies, without propensities; q explains 0."
    )
    assert said[-1] == "fitting q: 100%"
    episodes = mf.collect(env, policies, 100, np.random.default_rng(1))
    with_q, without_q = mf.pool(episodes, q, policies), mf.pool(episodes)
    assert (with_q.variance < without_q.variance).all()
    few = mf.evaluate(env, policies, stop="best", episodes=400, q=q)  # and of those that are left
    assert np.isfinite(few.mean).all()


def test_q_of_counted_actions_against_exact_values(tmp_path):
    from manyfold import exact
    from manyfold.envs import Finite

    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(4, 0.3), (4, 2))
    mdp = mf.FiniteMDP(p, rng.normal(size=(4, 2)), np.full(4, 0.25), 5)
    env, pi = Finite(mdp), rng.dirichlet(np.ones(2), (3, 5, 4))
    policies = mf.TabularPolicySet(pi)
    logged = mf.collect(env, mf.TabularPolicySet(np.full((1, 5, 4, 2), 0.5)), 2000, np.random.default_rng(1))
    done = logged.t == 4
    np.savez(tmp_path / "a.npz", obs=logged.states, action=logged.actions, reward=logged.rewards, done=done)
    q, card = fit_q(tmp_path / "a.npz", env, policies)
    t, s = (x.ravel() for x in np.meshgrid(np.arange(5), np.arange(4)))
    truth = exact.action_values(mdp, pi)[:, t, s]
    assert 1 - ((q.predict(s[:, None], t) - truth) ** 2).mean() / truth.var() > 0.9
    assert "q explains" in card


def test_too_few_rows_for_q(tmp_path):
    np.savez(tmp_path / "a.npz", **table(episodes(1)))
    policies = mf.CallablePolicySet([lambda obs, t: np.full((len(obs), 2), 0.5)], 2, 4)
    with pytest.raises(ValueError, match="expected at least 100 to fit q"):
        reading.fit_q(tmp_path / "a.npz", ENV, policies)
