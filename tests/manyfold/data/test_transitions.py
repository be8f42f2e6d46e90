import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manyfold.data import transitions
from manyfold.data.transitions import About, Transitions, Writer

ABOUT = About("hopper", horizon=5, n_actions=3, width=2, seed=7)


def columns(rows, start=0):
    number = np.arange(start, start + rows)
    return {
        "episode": number // 5,
        "t": number % 5,
        "state": np.column_stack([number, -number]),
        "action": number % 3,
        "reward": number / 10,
        "next_state": np.column_stack([number + 1, -number - 1]),
        "terminated": number % 5 == 4,
        "truncated": np.zeros(rows, dtype=bool),
        "behavior_log_prob": np.log(np.full(rows, 0.5)),
    }


def write(path, rows=1000, about=ABOUT, log_probs=True, pieces=1):
    with Writer(path, about, log_probs) as writer:
        for i in range(pieces):
            writer.write(columns(rows // pieces, i * (rows // pieces)))
    return path


def numbers(batches):
    """The row numbers, which the first component of a state carries."""
    return np.concatenate([batch.state[:, 0] for batch in batches]).astype(int)


def test_what_is_written_is_read_once_in_random_order(tmp_path):
    data = Transitions(write(tmp_path / "a.parquet"), ABOUT)
    assert data.rows == 1000
    found = list(data.batches(64, np.random.default_rng(0)))
    assert [len(batch.t) for batch in found] == [64] * 15 + [40]
    order = numbers(found)
    assert sorted(order) == list(range(1000))
    assert list(order) != list(range(1000))
    batch = found[3]
    number = batch.state[:, 0]
    np.testing.assert_array_equal(batch.t, number % 5)
    np.testing.assert_array_equal(batch.action, number % 3)
    np.testing.assert_allclose(batch.reward, number / 10, rtol=1e-6)
    np.testing.assert_array_equal(batch.next_state, np.column_stack([number + 1, -number - 1]))
    np.testing.assert_array_equal(batch.terminated, number % 5 == 4)


@pytest.mark.parametrize("pool_rows", [1, 300, 10**6])
def test_every_pool_size_reads_every_row_once(tmp_path, pool_rows, monkeypatch):
    monkeypatch.setattr(transitions, "ROW_GROUP", 100)
    write(tmp_path / "a.parquet", 700, pieces=7)
    write(tmp_path / "b.parquet", 300)
    data = Transitions(tmp_path, ABOUT, pool_rows)
    assert data.rows == 1000
    for seed in range(2):
        found = list(data.batches(37, np.random.default_rng(seed)))
        assert sum(len(batch.t) for batch in found) == 1000
        assert all(len(batch.t) == 37 for batch in found[:-1])
        assert np.bincount(numbers(found)).tolist() == [2] * 300 + [1] * 400


def test_the_same_generator_gives_the_same_batches(tmp_path):
    data = Transitions(write(tmp_path / "a.parquet"), ABOUT, pool_rows=10)
    first, again, other = (numbers(data.batches(64, np.random.default_rng(seed))) for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_batches_are_those_of_the_definition(tmp_path, monkeypatch):
    """Row groups in random order until a pool is full, shuffled together with what the last one left over."""
    monkeypatch.setattr(transitions, "ROW_GROUP", 50)
    data = Transitions(write(tmp_path / "a.parquet"), ABOUT, pool_rows=120)
    rng = np.random.default_rng(4)
    expected, left, pool = [], np.empty(0, dtype=int), []
    for i in (groups := rng.permutation(20)):
        pool.append(np.arange(50 * i, 50 * i + 50))
        if len(pool) == 3 or i == groups[-1]:
            rows = np.concatenate([left, *pool])
            rows = rows[rng.permutation(len(rows))]
            expected += [rows[first : first + 64] for first in range(0, len(rows) // 64 * 64, 64)]
            left, pool = rows[len(rows) // 64 * 64 :], []
    found = list(data.batches(64, np.random.default_rng(4)))
    assert [numbers([batch]).tolist() for batch in found] == [rows.tolist() for rows in [*expected, left]]


def test_rows_have_the_numbers_that_they_have_in_the_whole(tmp_path):
    data = Transitions(write(tmp_path / "a.parquet"), ABOUT)
    whole = data.whole("train")
    for rows, batch in data.numbered(64, np.random.default_rng(0), "train"):
        np.testing.assert_array_equal(whole.state[rows], batch.state)
    assert Transitions(tmp_path / "a.parquet", ABOUT, pool_rows=10).whole("train") is None


@pytest.mark.parametrize("pool_rows", [100, 10**6])
def test_held_out_rows_are_never_trained_on(tmp_path, pool_rows, monkeypatch):
    monkeypatch.setattr(transitions, "ROW_GROUP", 1000)
    data = Transitions(write(tmp_path / "a.parquet", 20_000), ABOUT, pool_rows)
    parts = [set(numbers(data.batches(500, np.random.default_rng(0), part))) for part in ("train", "held_out")]
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] == set(range(20_000))
    assert abs(len(parts[1]) / 20_000 - transitions.HELD_OUT) < 0.01


@pytest.mark.parametrize("pool_rows", [300, 10**6])
def test_relabelled_rows_differ_in_their_step_only(tmp_path, pool_rows, monkeypatch):
    """Every step is as frequent as any other, in every pass the same; rows of the last one keep theirs."""
    monkeypatch.setattr(transitions, "ROW_GROUP", 100)
    data = Transitions(write(tmp_path / "a.parquet", 10_000), ABOUT, pool_rows)
    passes = []
    for seed in range(2):
        found = list(data.relabelled().batches(64, np.random.default_rng(seed)))
        rows = [np.concatenate(column) for column in zip(*found, strict=True)]
        passes.append([column[np.argsort(rows[1][:, 0])] for column in rows])
    steps, *others = passes[0]
    expected = columns(10_000)
    for name, column in zip(transitions.Batch._fields[1:], others, strict=True):
        np.testing.assert_allclose(column, expected[name], rtol=1e-6)
    np.testing.assert_array_equal(steps, passes[1][0])
    last = expected["t"] == 4
    assert (steps[last] == 4).all()
    for t in range(4):  # whatever step it was logged at
        assert np.bincount(steps[expected["t"] == t], minlength=5) == pytest.approx(400, abs=80)
    np.testing.assert_array_equal(data.whole().t if data.whole() else expected["t"], expected["t"])


def test_tuples_of_no_whole_episodes_and_unknown_loggers_are_as_good(tmp_path):
    rows = columns(1000)
    some = np.random.default_rng(0).permutation(1000)[:333]
    with Writer(tmp_path / "a.parquet", ABOUT) as writer:  # without propensities
        writer.write({name: x[some] for name, x in rows.items()})
    assert sorted(numbers(Transitions(tmp_path).batches(50, np.random.default_rng(0)))) == sorted(some)


def test_an_error_while_writing_leaves_nothing(tmp_path):
    def fail():
        with Writer(tmp_path / "a.parquet", ABOUT) as writer:
            writer.write(columns(10))
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        fail()
    assert list(tmp_path.iterdir()) == []


def spoiled(path, **changes):
    """A whole file with one column changed."""
    with Writer(path, ABOUT) as writer:
        rows = columns(20)
        for name, (row, value) in changes.items():
            rows[name] = rows[name].astype(float) if name == "reward" else rows[name].copy()
            rows[name][row] = value
        writer.write(rows)


def without(path, name):
    table = pq.read_table(write(path))
    pq.write_table(table.drop_columns([name]), path)


def retyped(path, name, kind):
    table = pq.read_table(write(path))
    i = table.schema.get_field_index(name)
    pq.write_table(table.set_column(i, name, table.column(name).cast(kind)), path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: p.write_bytes(write(p).read_bytes()[:-20]), "a.parquet: not a whole Parquet file"),
        (lambda p: p.write_text("hello"), "a.parquet: not a whole Parquet file"),
        (lambda p: p.with_suffix(".txt").write_text("no data"), "no Parquet files"),
        (lambda p: without(p, "reward"), "a.parquet: column reward is missing, expected episode, t, state"),
        (lambda p: retyped(p, "reward", pa.float64()), "a.parquet: column reward is double, expected float"),
        (lambda p: spoiled(p, reward=(7, np.nan)), "a.parquet: row group 0, column reward: NaN or infinity in row 7"),
        (lambda p: spoiled(p, reward=(3, np.inf)), "row group 0, column reward: NaN or infinity in row 3"),
        (lambda p: spoiled(p, action=(2, 3)), "row group 0, column action: 3 in row 2, expected 0 to 2"),
        (lambda p: spoiled(p, action=(2, -1)), "row group 0, column action: -1 in row 2, expected 0 to 2"),
        (lambda p: spoiled(p, t=(9, 5)), "row group 0, column t: 5 in row 9, expected 0 to 4"),
        (lambda p: write(p, about=About("ant", 5, 3, 2, 0)), "a.parquet: its env is 'ant', expected 'hopper'"),
        (lambda p: write(p, about=About("hopper", 9, 3, 2, 0)), "a.parquet: its horizon is 9, expected 5"),
        (lambda p: write(p, rows=0), "0 rows, expected at least one logged transition"),
    ],
)
def test_bad_files_are_refused_with_one_line(spoil, message, tmp_path):
    spoil(tmp_path / "a.parquet")
    with pytest.raises(ValueError) as error:  # noqa: PT011 - matched below, with its path
        list(Transitions(tmp_path, ABOUT).batches(10, np.random.default_rng(0)))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_states_of_another_width_are_refused(tmp_path):
    with Writer(tmp_path / "a.parquet", About("hopper", 5, 3, 3, 0)) as writer:
        rows = columns(10)
        writer.write({**rows, "state": np.zeros((10, 3)), "next_state": np.zeros((10, 3))})
    with pytest.raises(ValueError, match="column state is fixed_size_list.*3.*, expected fixed_size_list.*2"):
        Transitions(tmp_path, ABOUT)


def test_a_corrupt_page_is_named_by_its_row_group(tmp_path):
    path = write(tmp_path / "a.parquet", 60_000)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle] ^= 1  # a single bit: zstd alone might not notice
    path.write_bytes(content)
    with pytest.raises(ValueError, match="a.parquet: row group 0"):
        list(Transitions(path, ABOUT).batches(10, np.random.default_rng(0)))


def test_files_of_other_programs_are_refused(tmp_path):
    pq.write_table(pq.read_table(write(tmp_path / "a.parquet")).replace_schema_metadata({}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="env is missing in the schema's metadata; was it written by another program?"):
        Transitions(tmp_path)


def test_states_at_which_episodes_start_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(transitions, "ROW_GROUP", 100)
    data = Transitions(write(tmp_path / "a.parquet"), ABOUT)
    np.testing.assert_array_equal(data.initial_states(10**6)[:, 0], np.arange(0, 1000, 5))
    np.testing.assert_array_equal(data.initial_states(30)[:, 0], np.arange(0, 150, 5))
    with Writer(tmp_path / "b.parquet", ABOUT) as writer:
        writer.write({name: x[1:4] for name, x in columns(5).items()})
    with pytest.raises(ValueError, match="b.parquet: no row with t = 0, expected some: episodes start there"):
        Transitions(tmp_path / "b.parquet", ABOUT).initial_states(10)


def nulls(path):
    table = pq.read_table(write(path, 20))
    i = table.schema.get_field_index("reward")
    values = pa.array([None, *range(19)], pa.float32())
    pq.write_table(table.set_column(i, table.schema.field(i), values), path)


def described(path, **changes):
    table = pq.read_table(write(path, 20))
    changed = {name.encode(): text.encode() for name, text in changes.items()}
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, **changed}), path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (nulls, "row group 0, column reward: 1 nulls, expected none"),
        (lambda p: described(p, horizon="x"), "horizon in the schema's metadata is 'x', expected a whole number"),
        (lambda p: described(p, width="3"), "column state is fixed_size_list"),
        (lambda p: None, "no such file, expected logged transitions"),
        (lambda p: p.mkdir(), "no Parquet files, expected logged transitions"),
    ],
)
def test_what_another_program_may_leave_is_refused_with_one_line(spoil, message, tmp_path):
    path = tmp_path / "a.parquet"
    spoil(path)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - matched below, with its path
        list(Transitions(path).batches(10, np.random.default_rng(0)))
    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)


def test_batches_have_a_size(tmp_path):
    data = Transitions(write(tmp_path / "a.parquet"), ABOUT)
    with pytest.raises(ValueError, match="size is 0, expected at least 1 row a batch"):
        next(data.batches(0, np.random.default_rng(0)))


def test_the_same_rows_give_the_same_bytes(tmp_path):
    assert write(tmp_path / "a.parquet").read_bytes() == write(tmp_path / "b.parquet").read_bytes()
