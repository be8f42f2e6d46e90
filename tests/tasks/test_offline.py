import json

import numpy as np
import pytest
import torch

from manyfold import policies
from manyfold.data.transitions import About, Transitions, Writer
from manyfold.policies import TabularPolicySet
from tasks import offline, targets
from tasks.groups import Group
from tests.tasks.conftest import SMALL, changed, run

STAGE, RULE = offline.STAGE, offline.read_rule(SMALL)


def logged(data, folder):
    folder.mkdir()
    offline.log_group(SMALL, Group(SMALL, 0, data), RULE, folder)
    return folder


def test_the_card_says_what_is_in_the_file(small_data, tmp_path):
    folder = logged(small_data, tmp_path / "group-00")
    assert STAGE.is_whole(folder)
    card = json.loads((folder / "card.json").read_text())
    assert (card["env"], card["episodes"], card["rows"]) == ("gridworld-1000", 60, 600)
    (rows,) = Transitions(folder / "transitions.parquet").batches(600, np.random.default_rng(0))
    seen = {(t, int(s), a) for t, s, a in zip(rows.t, rows.state[:, 0], rows.action, strict=True)}
    assert card["coverage"] == pytest.approx(len(seen) / (10 * 100 * 4))
    assert [logger["episodes"] for logger in card["loggers"]] == [10] * 6
    total = sum(logger["episodes"] * logger["mean_return"] for logger in card["loggers"])
    assert total == pytest.approx(rows.reward.sum(), rel=1e-5)
    history = policies.load(small_data / "targets" / SMALL.name / "group-00" / "history")
    assert card["loggers"][4]["name"] == f"{history.names[1]}, epsilon 0.5"
    quantiles = card["loggers"][4]["quantiles"]
    assert quantiles == sorted(quantiles)
    assert min(quantiles) <= card["loggers"][4]["mean_return"] <= max(quantiles)
    (row,) = STAGE.describe(tmp_path)
    assert row[:3] == ("group-00", "60", "600")


def test_the_same_group_is_logged_the_same_twice(small_data, tmp_path):
    first, again = (logged(small_data, tmp_path / name) for name in ("a", "b"))
    assert (first / "transitions.parquet").read_bytes() == (again / "transitions.parquet").read_bytes()


def test_a_damaged_group_is_not_whole(small_data, tmp_path):
    folder = logged(small_data, tmp_path / "group-00")
    content = (folder / "transitions.parquet").read_bytes()
    (folder / "transitions.parquet").write_bytes(content[:-30])
    assert not STAGE.is_whole(folder)
    (folder / "transitions.parquet").write_bytes(content)
    (folder / "card.json").write_text("{")
    assert not STAGE.is_whole(folder)
    assert not STAGE.is_whole(tmp_path / "nothing")


def test_without_targets_the_stage_says_what_to_run_first(tmp_path):
    line = f"{tmp_path}/targets/{SMALL.name}: 0 groups, expected the stage `targets` to have run"
    with pytest.raises(ValueError, match=line):
        STAGE.prepare(SMALL, tmp_path)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"epsilons": None}, "offline.epsilons is None, expected a list"),
        ({"epsilons": 0.1}, "offline.epsilons is 0.1, expected a list of numbers from 0 to 1"),
        ({"epsilons": []}, r"offline.epsilons is \[\], expected one or more numbers"),
        ({"episodes": -1}, "offline.episodes is -1, expected a whole number from 1 to 1e"),
        ({"episodes": 2 * 10**9}, "offline.episodes is 2000000000, expected a whole number from 1 to 1e"),
        ({"epsilons": [2]}, "offline.epsilons is 2, expected a number from 0 to 1"),
        ({"more": 5}, "offline.more is unknown"),
    ],
)
def test_bad_parameters_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        offline.read_rule(changed(SMALL, "offline", **params))


# --- the user's own files ---------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path):
    """FrozenLake with a policy table from a file, and logs of the user's own."""
    table = np.full((2, 5, 16, 4), 0.25)
    TabularPolicySet(table).save(tmp_path / "mine")
    study = changed(changed(SMALL, "targets", source="mine.safetensors"), "offline", source="logs")
    environment = {"gymnasium": {"id": "FrozenLake-v1", "horizon": 5}}
    study = type(study)("lake", "Lake", environment, study.params, root=tmp_path)
    run(targets.STAGE, study, tmp_path / "data")
    (tmp_path / "logs").mkdir()
    return study


def write_logs(path, rows=12, n_actions=4, **change):
    columns = {
        "episode": np.repeat(np.arange(rows // 2), 2),
        "t": np.tile([0, 1], rows // 2),
        "state": np.arange(rows)[:, None],
        "action": np.arange(rows) % 4,
        "reward": np.arange(rows, dtype=float),
        "next_state": np.arange(rows)[:, None],
        "terminated": np.tile([False, True], rows // 2),
        "truncated": np.zeros(rows, dtype=bool),
    }
    with Writer(path, About("theirs", 5, n_actions, 1, 0)) as writer:
        writer.write(columns | change)


def test_the_users_own_logs_are_imported(own, tmp_path):
    for name in ("a", "b"):
        write_logs(tmp_path / "logs" / f"{name}.parquet")
    out = run(STAGE, own, tmp_path / "data")
    found = Group(own, 0, tmp_path / "data").transitions()
    assert found.rows == 24
    (batch,) = found.batches(24, np.random.default_rng(0))
    assert batch.reward.sum() == 2 * sum(range(12))
    assert STAGE.describe(out) == [("group-00", "unknown", "24", "", "unknown")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_actions": 3, "action": np.zeros(12, dtype=int)}, "its n_actions is 3, expected 4"),
        ({"reward": np.full(12, np.nan)}, "column reward: NaN or infinity in row 0, expected finite numbers"),
        ({"t": np.full(12, 7)}, "column t: 7 in row 0, expected 0 to 4"),
        ({"state": np.full((12, 1), 99)}, r"column state: expected whole numbers \[N\] from 0 to 15, found"),
        ({"next_state": np.full((12, 1), 1.5)}, r"column next_state: expected whole numbers \[N\] from 0 to 15"),
    ],
)
def test_logs_that_do_not_fit_are_refused_and_leave_nothing(own, tmp_path, change, message):
    write_logs(tmp_path / "logs" / "a.parquet", **change)
    with pytest.raises(ValueError, match=message):
        run(STAGE, own, tmp_path / "data")
    assert not (tmp_path / "data" / "offline").exists()
    assert not list((tmp_path / "data" / ".work" / "offline").rglob("*.parquet"))


def test_logs_that_are_not_there_are_one_line(own, tmp_path):
    with pytest.raises(ValueError, match="logs: no Parquet files, expected logged transitions"):
        run(STAGE, own, tmp_path / "data")


def test_without_a_history_the_targets_log(tmp_path, own):
    study = changed(own, "offline", source="manyfold/data/offline.py", episodes=8)
    out = run(STAGE, study, tmp_path / "data")
    card = json.loads((out / "group-00" / "card.json").read_text())
    assert [logger["name"] for logger in card["loggers"]][:2] == ["policy 0, epsilon 0.1", "policy 1, epsilon 0.1"]
    assert card["episodes"] == 8
    assert 0 < card["coverage"] < 1
    assert torch.get_num_threads() == 1
