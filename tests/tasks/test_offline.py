import json

import numpy as np
import pytest

from manyfold.networks import NetworkPolicySet
from manyfold.offline import Rule
from manyfold.targets import Rule as TargetRule
from manyfold.transitions import Transitions
from tasks import offline, shards, targets

RULE = Rule(episodes=60, epsilons=(0.1, 0.5))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A data folder with two trained groups of Gridworld 1,000."""
    folder = tmp_path_factory.mktemp("data")
    rule = TargetRule(policies=3, start=(600, 900), width=700, history=3)
    work = targets.work_folder("gridworld-1000", rule, folder)
    targets.train_shard("gridworld-1000", [0, 1], rule, work)
    targets.collect("gridworld-1000", 2, work, folder)
    return folder


def logged(data, folder, group=0):
    with shards.whole_folder(folder) as part:
        offline.log_group(
            "gridworld-1000", group, RULE, data / "targets" / "gridworld-1000" / f"group-{group:02d}", part
        )
    return folder


def test_the_card_says_what_is_in_the_file(data, tmp_path):
    folder = logged(data, tmp_path / "group-00")
    assert offline.is_whole(folder)
    card = json.loads((folder / "card.json").read_text())
    assert (card["env"], card["episodes"], card["rows"]) == ("gridworld-1000", 60, 600)
    (rows,) = Transitions(folder / "transitions.parquet").batches(600, np.random.default_rng(0))
    seen = {(t, int(s), a) for t, s, a in zip(rows.t, rows.state[:, 0], rows.action, strict=True)}
    assert card["coverage"] == pytest.approx(len(seen) / (10 * 100 * 4))
    assert [logger["episodes"] for logger in card["loggers"]] == [10] * 6
    total = sum(logger["episodes"] * logger["mean_return"] for logger in card["loggers"])
    assert total == pytest.approx(rows.reward.sum(), rel=1e-5)
    history = NetworkPolicySet.load(data / "targets" / "gridworld-1000" / "group-00" / "history")
    assert card["loggers"][4]["name"] == f"{history.spec.names[1]}, epsilon 0.5"
    assert (folder / "card.png").read_bytes().startswith(b"\x89PNG")
    (row,) = offline.describe(tmp_path)
    assert row[:3] == ("group-00", "60", "600")


def test_the_same_group_is_logged_the_same_twice(data, tmp_path):
    first, again = (logged(data, tmp_path / name) for name in ("a", "b"))
    assert (first / "transitions.parquet").read_bytes() == (again / "transitions.parquet").read_bytes()


def test_a_damaged_group_is_not_whole(data, tmp_path):
    folder = logged(data, tmp_path / "group-00")
    content = (folder / "transitions.parquet").read_bytes()
    (folder / "transitions.parquet").write_bytes(content[:-30])
    assert not offline.is_whole(folder)
    (folder / "transitions.parquet").write_bytes(content)
    (folder / "card.json").write_text("{")
    assert not offline.is_whole(folder)
    assert not offline.is_whole(tmp_path / "nothing")


def test_without_targets_the_stage_says_what_to_run_first(tmp_path, capsys):
    assert offline.main(["--env", "ant", "--groups", "0-1", "--data", str(tmp_path)]) == 2
    line = capsys.readouterr().err
    assert line == f"offline: {tmp_path}/targets/ant: 0 groups of targets, expected the stage `targets` to have run\n"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"epsilons": None}, "offline.epsilons is None, expected a list"),
        ({"epsilons": 0.1}, "offline.epsilons is 0.1, expected a list of numbers from 0 to 1"),
        ({"episodes": -1}, "offline.episodes is -1, expected a whole number of at least 1"),
        ({"epsilons": [2]}, r"offline.epsilons is \[2\]"),
        ({"fewer": {"ant": 0}}, "offline.episodes is 0, expected a whole number of at least 1"),
        ({"fewer": {"aunt": 5}}, r"offline.fewer is \{'aunt': 5\}, expected numbers by environment"),
        ({"fewer": 5}, "offline.fewer is 5, expected numbers by environment"),
        ({"more": 5}, "offline.more"),
    ],
)
def test_bad_parameters_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        offline.read_rule({"episodes": 10, "fewer": {}, "epsilons": [0.1], **params}, "ant")


def test_slow_environments_may_have_fewer_episodes():
    params = {"episodes": 10, "fewer": {"ant": 5}, "epsilons": [0.1]}
    assert offline.read_rule(params, "ant").episodes == 5
    assert offline.read_rule(params, "hopper").episodes == 10
