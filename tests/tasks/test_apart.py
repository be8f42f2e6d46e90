"""How far apart policies may be: every kind of panel, all small."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from manyfold import exact
from manyfold.estimate.collecting import collect
from manyfold.estimate.evaluation import pool
from manyfold.estimate.loggers import logging_of
from manyfold.estimate.methods import METHODS, pdis
from manyfold.streams import stream
from tasks import apart, studies
from tasks.apart import Amount, Training
from tasks.behavior import design
from tasks.groups import Group
from tests.tasks.conftest import ROBOT, ROBOT_FIT, SMALL, changed

TINY = replace(SMALL, params={**SMALL.params, "q": ROBOT_FIT, "q_hat": ROBOT_FIT})
PENDULUM = replace(ROBOT, name="inverted-pendulum", environment={"mujoco": {"robot": "inverted-pendulum"}})


@pytest.fixture
def small(monkeypatch):
    known = {"all": TINY, apart.GRIDWORLD: TINY, PENDULUM.name: PENDULUM}
    monkeypatch.setattr(studies, "read", lambda name: known[name])
    monkeypatch.setattr(apart, "WIDTHS", (1600, 600))
    monkeypatch.setattr(apart, "ROBOT_WIDTHS", (600,))
    monkeypatch.setattr(apart, "EXACT", Amount(2, 60, 60, 2, 1))
    monkeypatch.setattr(apart, "SAMPLED", Amount(2, 60, 60, 1, 1))


def table(path):
    """Header and rows of a Markdown table."""
    header, _, *rows = [line.strip("|\n ").split(" | ") for line in path.read_text().splitlines()]
    return header, rows


def times(folder, pattern):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob(pattern)) if path.is_file()}


def test_exact_variances_are_taken_where_they_are_known_and_nothing_is_run_twice(small, tmp_path, capsys):
    arguments = ["--study", apart.GRIDWORLD, "--workers", "1", "--data", str(tmp_path)]
    assert apart.main(arguments) == 0
    out = tmp_path / "apart" / f"{apart.GRIDWORLD}.md"
    header, rows = table(out)
    assert header == ["policies of", "training steps", *(e.label for e in apart.LINES.values())]
    assert [row[1] for row in rows] == ["600", "1,600"]
    assert {row[2] for row in rows} == {"1 (1)"}
    (point,) = (p for p in apart.widths_of(TINY, apart.WIDTHS, apart.EXACT, tmp_path).points if p.steps == 600)
    assert point.done() == 1
    found = apart.measure(point)
    for number in (0, 1):
        group = Group(point.study, number, point.data)
        (pi, q, q_hat), mu, odi = design(group).tables()
        known = exact.estimator_variances(group.environment().mdp(), pi, q_hat, q, (mu, odi))
        assert {"on_policy", "mpe", "mpe_baseline"} <= known.keys()
        for i, name in enumerate(METHODS):
            if name in known:
                np.testing.assert_array_equal(found[number, i], known[name])

    text, before = out.read_text(), times(tmp_path / ".work", "*")
    assert apart.main(arguments) == 0
    assert times(tmp_path / ".work", "*") == before
    shutil.rmtree(point.measured)  # the evaluation alone is repeated, with the same numbers
    assert apart.main(arguments) == 0
    for stage in ("targets", "offline", "q", "q_hat"):
        assert times(point.data / stage, "*").items() <= before.items()
    assert out.read_text() == text


def test_variances_are_the_pools_where_nothing_is_exact(small, tmp_path, capsys):
    assert apart.main(["--study", PENDULUM.name, "--workers", "1", "--data", str(tmp_path)]) == 0
    (point,) = apart.widths_of(PENDULUM, (600,), apart.SAMPLED, tmp_path).points
    found = apart.measure(point)
    for number in (0, 1):
        group = Group(point.study, number, point.data)
        logging = logging_of(group.environment(), design(group))
        rng = stream("apart", PENDULUM.name, number, "mu", 0)
        returns = np.concatenate([pdis(block) for block in logging.log("mu", 60, rng)], -1)
        rng = stream("apart", PENDULUM.name, number, "pool", 0)
        alone = pool(collect(group.environment(), group.policies(), 60, rng)).own_returns
        own = [3 * one.var(ddof=1) for one in alone]
        names = list(METHODS)
        np.testing.assert_allclose(found[number, names.index("on_policy")], own)
        np.testing.assert_allclose(found[number, names.index("mpe")], returns.var(-1, ddof=1))


def test_checkpoints_of_a_training_are_measured_beside_the_gridworld(small, tmp_path, capsys, monkeypatch):
    pytest.importorskip("stable_baselines3")
    monkeypatch.setattr(apart, "WIDTHS", (600,))
    monkeypatch.setattr(apart, "K", 2)
    monkeypatch.setattr(apart, "TRAININGS", {"CartPole": Training("CartPole-v1", 50, (4, 1), 5)})
    monkeypatch.setattr(apart, "TRAINED", Amount(1, 20, 20, 1, 2))
    assert apart.main(["--workers", "1", "--data", str(tmp_path)]) == 0
    _, rows = table(tmp_path / "apart" / "all.md")
    assert [row[1] for row in rows] == ["600", "205", "819"]
    assert (tmp_path / "apart" / "all.png").stat().st_size > 10_000
    files = times(tmp_path / ".work" / "apart" / "checkpoints", "*")
    assert len(files) == 2
    assert apart.main(["--workers", "1", "--data", str(tmp_path)]) == 0
    assert times(tmp_path / ".work" / "apart" / "checkpoints", "*") == files


def test_relative_variances_by_hand():
    """Two groups, two policies; one policy never varies: it is in the mean and has no ratio of its own."""
    found = np.array([[[1.0, 3.0], [2.0, 1.0]], [[2.0, 0.0], [1.0, 1.0]]])  # [G, E, K]
    mean, worst = apart.relative(found)
    np.testing.assert_allclose(mean, [1.0, (3 / 4 + 2 / 2) / 2])
    np.testing.assert_allclose(worst, [1.0, 2.0])


def test_another_estimator_repeats_the_evaluation_alone(tmp_path, monkeypatch):
    """And another network or parameter everything that depends on it."""
    stages = tuple(stage.name for stage in apart.STAGES)
    for name in ("manyfold", "tasks"):
        shutil.copytree(apart.ROOT / name, tmp_path / name)
    shutil.copy(apart.ROOT / "dvc.yaml", tmp_path)
    monkeypatch.setattr(apart, "ROOT", tmp_path)
    made, measured = apart.key_of(stages, 1), apart.key_of(("evaluate",), 1)
    assert apart.key_of(stages, 2) != made
    (tmp_path / "manyfold/estimate/pooled.py").write_text("")
    assert apart.key_of(stages, 1) == made
    assert apart.key_of(("evaluate",), 1) != measured
    (tmp_path / "manyfold/train/ppo.py").write_text("")
    assert apart.key_of(stages, 1) != made


def test_a_width_that_holds_too_few_checkpoints_is_refused_before_any_work(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(apart, "ROBOT_WIDTHS", (600, 100))
    assert apart.main(["--study", PENDULUM.name, "--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("apart: targets.width 100 holds")
    assert not list(tmp_path.iterdir())


def test_a_fault_ends_the_command(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(studies, "read", lambda name: changed(TINY, "offline", epsilons=[2.0]))
    assert apart.main(["--study", apart.GRIDWORLD, "--data", str(tmp_path)]) == 2
    assert "apart: offline.epsilons is 2.0" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["groups", "workers"])
def test_bad_arguments_are_refused(name, tmp_path, capsys):
    assert apart.main([f"--{name}", "0", "--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"apart: --{name} is 0, expected a whole number from 1 to 10,000")
    assert not list(tmp_path.iterdir())
