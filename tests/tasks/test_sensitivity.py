"""The sensitivity study of a robot, all small."""

import numpy as np
import pytest

from manyfold.evaluation import ESTIMATORS
from tasks import behavior, evaluate, fits, sensitivity
from tests.tasks.conftest import ROBOT_EVALUATE, ROBOT_FIT

ENV = "inverted-pendulum"
PARAMS = {
    "targets": {"groups": 30, "policies": 3, "start": [1000, 1400], "width": 900, "history": 3},
    "offline": {"episodes": 10, "fewer": {}, "epsilons": [0.1, 0.5]},
    "q": ROBOT_FIT,
    "q_hat": ROBOT_FIT,
    "behavior": {"alpha": 0.0, "fit": ROBOT_FIT},
    "evaluate": ROBOT_EVALUATE,
}


@pytest.fixture
def small(monkeypatch):
    for module in (sensitivity, fits, behavior, evaluate):
        monkeypatch.setattr(module, "section", PARAMS.__getitem__)
    monkeypatch.setattr(sensitivity, "EPISODES", 60)
    monkeypatch.setattr(sensitivity, "WIDTHS", (1600, 600))


def test_every_estimator_is_measured_at_every_width(small, tmp_path, capsys):
    arguments = ["--env", ENV, "--groups", "2", "--data", str(tmp_path)]
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
    found = sensitivity.measure(ENV, width, 2, folder)
    mpe = list(ESTIMATORS).index("mpe")
    own = [evaluate.load_file(folder / "pools" / f"group-{g:02d}" / "targets.safetensors")["pdis"] for g in (0, 1)]
    mu = [evaluate.load_file(folder / "pools" / f"group-{g:02d}" / "mu.safetensors")["pdis"] for g in (0, 1)]
    for group in (0, 1):
        alone = [3 * own[group][k, k::3].var(ddof=1) for k in range(3)]
        shared = mu[group].var(axis=1, ddof=1)
        assert found[group, mpe] == pytest.approx(shared.sum() / np.sum(alone))


def test_a_width_that_holds_too_few_checkpoints_is_refused_before_any_work(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sensitivity, "WIDTHS", (1600, 100))
    assert sensitivity.main(["--env", ENV, "--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("sensitivity: targets.width 100 holds")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--env", "gridworld-1000"], "sensitivity: --env is 'gridworld-1000', expected one of ant"),
        (["--groups", "0"], "sensitivity: --groups is 0, expected a whole number of at least 1"),
    ],
)
def test_bad_arguments_are_refused(arguments, line, tmp_path, capsys):
    assert sensitivity.main([*arguments, "--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(line)
    assert not list(tmp_path.iterdir())
