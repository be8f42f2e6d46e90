"""The sensitivity study of a robot, all small."""

import numpy as np
import pytest

from manyfold.estimate.registry import ESTIMATORS
from tasks import sensitivity, studies
from tasks.evaluate import cached
from tests.tasks.conftest import ROBOT

ENV = "inverted-pendulum"
STUDY = type(ROBOT)(ENV, "Inverted Pendulum", {"mujoco": {"robot": ENV}}, ROBOT.params, ROBOT.paper)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(studies, "read", lambda name: STUDY)
    monkeypatch.setattr(sensitivity, "EPISODES", 60)
    monkeypatch.setattr(sensitivity, "WIDTHS", (1600, 600))


def returns(folder, group, loggers):
    return cached(folder / "pools" / f"group-{group:02d}" / f"{loggers}.safetensors", pytest.fail)["pdis"]


def test_every_estimator_is_measured_at_every_width(small, tmp_path, capsys):
    arguments = ["--study", ENV, "--groups", "2", "--data", str(tmp_path)]
    assert sensitivity.main(arguments) == 0
    table = (tmp_path / "sensitivity" / f"{ENV}.md").read_text()
    header, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    assert header == ["width", *(e.label for e in ESTIMATORS.values())]
    assert [row[0] for row in rows] == ["600", "1,600"]
    assert {row[1] for row in rows} == {"1.000 (1.000)"}
    pools = sorted((tmp_path / ".work" / "sensitivity").rglob("mu.safetensors"))
    assert len(pools) == 4
    times = [path.stat().st_mtime_ns for path in pools]
    assert sensitivity.main(arguments) == 0  # nothing is run again
    assert [path.stat().st_mtime_ns for path in pools] == times
    assert (tmp_path / "sensitivity" / f"{ENV}.md").read_text() == table
    folder = pools[0].parents[2]
    width = 600 if "600" in next((folder / "targets" / ENV).glob("*/plan.json")).read_text() else 1600
    found = sensitivity.measure(sensitivity.narrowed(STUDY, width, 2), folder)
    mpe = list(ESTIMATORS).index("mpe")
    own, mu = ([returns(folder, g, name) for g in (0, 1)] for name in ("targets", "mu"))
    for group in (0, 1):
        alone = [3 * own[group][k, k::3].var(ddof=1) for k in range(3)]
        shared = mu[group].var(axis=1, ddof=1)
        assert found[group, mpe] == pytest.approx(shared.sum() / np.sum(alone))


def test_a_width_that_holds_too_few_checkpoints_is_refused_before_any_work(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sensitivity, "WIDTHS", (1600, 100))
    assert sensitivity.main(["--study", ENV, "--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("sensitivity: targets.width 100 holds")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--study", "gridworld-1000"], "sensitivity: --study gridworld-1000 has exact variances (tasks.calibrate)"),
        (["--groups", "0"], "sensitivity: --groups is 0, expected a whole number from 1 to 10,000"),
    ],
)
def test_bad_arguments_are_refused(arguments, line, tmp_path, capsys):
    assert sensitivity.main([*arguments, "--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(line)
    assert not list(tmp_path.iterdir())
