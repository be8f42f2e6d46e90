"""The search for the interval that puts a study where the paper is."""

import json
from dataclasses import replace

import numpy as np
import pytest

from manyfold import exact, policies
from manyfold.design.behavior import Behavior
from manyfold.estimate import pooled
from tasks import regime, studies, targets
from tasks.behavior import design
from tasks.groups import Group
from tasks.regime import Amount, Choice, Measured
from tests.tasks.conftest import GRID, PAPER, ROBOT_FIT, SMALL, changed, run

NUMBERS = {"odi": 0.5, "son": 1.0, "sodi": 2.0}
LAST = Amount(4, 2, 60)
TINY = replace(SMALL, params={**SMALL.params, "q": ROBOT_FIT, "q_hat": ROBOT_FIT}, paper=PAPER)
PARAMS = """# of all
studies:
  other:
    targets: {source: manyfold/train/ppo.py, width: 7}
  mine:  # comment
    title: Mine
    targets: {source: manyfold/train/ppo.py, width: 5}  # stays
    offline: {source: x}
"""


def found(choice, factors, apart=1.0, amount=LAST):
    """A choice whose groups have these multiples of the paper's numbers."""
    relative = {name: paper * np.asarray(factors) for name, paper in NUMBERS.items()}
    return Measured(choice, amount, relative, np.full(len(factors), apart))


A, B, C = Choice(1000, 4000), Choice(1000, 8500), Choice(5000, 4000)


def test_the_nearest_in_log_distance_is_chosen_and_nothing_is_trimmed():
    """By the mean: groups at the paper's numbers and a quarter of them far above are no match."""
    heavy, light = found(A, [1.0, 1.0, 1.0, 37.0] * 5), found(B, [1.5, 1.6, 1.5, 1.4] * 5)
    decision = regime.decide([heavy, light], NUMBERS)
    assert (decision.nearest, decision.chosen) == (1, 1)
    np.testing.assert_allclose(regime.distance(heavy.means(), NUMBERS), np.log(10))
    twice = {name: 2 * x for name, x in NUMBERS.items()}
    half = {name: x / 2 for name, x in NUMBERS.items()}
    assert regime.distance(twice, NUMBERS) == pytest.approx(regime.distance(half, NUMBERS)) == pytest.approx(np.log(2))


def test_of_equally_near_choices_the_one_whose_policies_differ_most_is_taken():
    same, clear = [0.8, 1.1, 1.3, 0.9], [3.0, 3.1, 2.9, 3.0]
    tied = [found(A, same, 1.0), found(B, same[::-1], 5.0), found(C, clear, 9.0)]
    decision = regime.decide(tied, NUMBERS)
    assert decision.tied == [0, 1]
    assert decision.chosen == 1
    assert decision.sure[2] == 0
    assert decision.sure.sum() == pytest.approx(1)


def test_how_sure_the_choice_is_follows_from_the_groups():
    """Of two groups, one near and one far, a bootstrap sample has no near one in a quarter of the draws."""
    mixed, steady = found(A, [1.0, 16.0]), found(B, [10.0, 10.0])
    sure = regime.decide([mixed, steady], NUMBERS).sure
    assert sure[1] == pytest.approx(0.25, abs=0.04)  # only where both draws are the far group


def test_within_30_percent_means_all_three():
    assert regime.near(found(A, [1.29, 1.29]), NUMBERS)
    one = found(A, [1.0, 1.0])
    assert not regime.near(replace(one, relative=one.relative | {"son": np.full(2, 1.31)}), NUMBERS)


def test_it_is_said_when_no_interval_is_near(monkeypatch):
    monkeypatch.setattr(regime, "RUNGS", (LAST,))
    far, near = [found(A, [3.0] * 4), found(B, [4.0] * 4)], [found(A, [1.1] * 4)]
    said = regime.sentence(far, NUMBERS)
    assert "No interval is within 30% of all three; the nearest has start 1,000 to 5,000, width 4,000" in said
    assert "No interval" not in regime.sentence(near, NUMBERS)
    assert [row[7] for row in regime.rows(far, NUMBERS)] == [f"{np.log(3):.2f}*", f"{np.log(4):.2f}"]


def test_the_choice_is_written_and_comments_stay(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text(PARAMS)
    regime.write(path, "mine", A)
    new = "targets: {source: manyfold/train/ppo.py, width: 4000, start: [1000, 5000]}  # stays"
    assert path.read_text() == PARAMS.replace("targets: {source: manyfold/train/ppo.py, width: 5}  # stays", new)
    regime.write(path, "mine", C)
    assert "width: 4000, start: [5000, 9000]}  # stays" in path.read_text()
    path.write_text(PARAMS.replace("targets: {source: manyfold/train/ppo.py, width: 5}", "targets:\n      width: 5"))
    with pytest.raises(ValueError, match="expected a line `    targets: {...}` in the section of mine"):
        regime.write(path, "mine", A)


def test_params_yaml_can_take_a_choice_of_every_study(tmp_path):
    for name in studies.names():
        path = tmp_path / f"{name}.yaml"
        path.write_text((regime.ROOT / "params.yaml").read_text())
        regime.write(path, name, B)
        rule = studies.read(name, path).section("targets")
        assert (rule["start"], rule["width"]) == ([1000, 5000], 8500)


def test_an_interval_with_too_few_checkpoints_is_left_out(monkeypatch):
    assert Choice(1000, 1500) in regime.choices_of(changed(GRID, "targets", policies=10))  # one every 128 steps
    pendulum = studies.read("inverted-pendulum")
    assert {choice.width for choice in regime.choices_of(pendulum)} == set(regime.WIDTHS) - {1500}  # every 204.8
    with pytest.raises(ValueError, match="no interval of the grid holds 1000 checkpoints"):
        regime.choices_of(changed(GRID, "targets", policies=1000))


@pytest.fixture
def small(monkeypatch):
    """A grid of two intervals with next to nothing to compute; MPE's design and pooling would fail, in workers too."""

    def refuse(*arguments):
        raise AssertionError("MPE and pooled evaluation take no part")

    monkeypatch.setattr(studies, "read", lambda name, *path: TINY)
    monkeypatch.setattr(regime, "STARTS", (200, 500))
    monkeypatch.setattr(regime, "RANGE", 100)
    monkeypatch.setattr(regime, "WIDTHS", (100, 700))
    monkeypatch.setattr(regime, "RUNGS", (Amount(1, 1, 30, 40, 100), Amount(2, 1, 60)))
    for where, name in ((Behavior, "design"), (pooled, "columns"), (pooled, "combine")):
        monkeypatch.setattr(where, name, refuse)


def test_a_search_writes_table_figure_and_choice_without_mpe_and_resumes(small, tmp_path, capsys):
    params = tmp_path / "params.yaml"
    params.write_text((regime.ROOT / "params.yaml").read_text())
    arguments = ["gridworld-1000", "--params", str(params), "--data", str(tmp_path)]
    assert regime.main(arguments) == 0, capsys.readouterr().err
    printed, out = capsys.readouterr().out, tmp_path / "regime"
    assert {path.name for path in out.iterdir()} == {f"gridworld-1000.{x}" for x in ("json", "md", "png", "svg")}
    about = json.loads((out / "gridworld-1000.json").read_text())
    assert [one["width"] for one in about["choices"]] == [700, 700]  # 100 steps hold no three checkpoints
    assert [len(one["by_group"]["odi"]) for one in about["choices"]] == [2, 1]
    assert about["trimmed"] is False
    assert about["first_group"] == 1000
    start = about["chosen"]["start"]
    assert f"Chosen: start {start:,} to {start + 100:,}, width 700" in printed
    chosen = studies.study_of(regime.parse(params.read_text(), "params.yaml"), "gridworld-1000").section("targets")
    assert (chosen["start"], chosen["width"]) == ([start, start + 100], 700)
    cells = {path: path.stat().st_mtime_ns for path in (tmp_path / ".work").rglob("*.safetensors")}
    assert len([path for path in cells if path.parent.name.startswith("gridworld-1000-")]) == 2 + 2
    assert regime.main(arguments) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / ".work").rglob("*.safetensors")} == cells
    assert json.loads((out / "gridworld-1000.json").read_text()) == about


def test_a_group_has_the_policies_that_the_stage_would_draw(tmp_path, monkeypatch):
    """Taken out of one training for all choices; group 1's seed, so that the stage itself can be run."""
    choices = [Choice(200, 700), Choice(500, 700)]
    monkeypatch.setattr(regime, "RANGE", 100)
    regime.train(TINY, choices, [0, 1], tmp_path / "work")
    for i, choice in enumerate(choices):
        study = choice.of(TINY, LAST)
        run(targets.STAGE, study, tmp_path / str(i))
        group = regime.place(study, 1, tmp_path / "work", tmp_path / f"placed-{i}")
        for name in ("targets", "companion", "history"):
            expected = policies.load(Group(study, 1, tmp_path / str(i)).folder("targets") / name)
            np.testing.assert_allclose(
                policies.load(group.folder("targets") / name).table(), expected.table(), atol=1e-6
            )


def test_a_wider_grid_trains_again_and_a_narrower_one_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(regime, "RANGE", 100)
    narrow, wide = [Choice(200, 700)], [Choice(200, 700), Choice(500, 900)]
    times = []
    for choices in (narrow, wide, wide, narrow):
        regime.train(TINY, choices, [0], tmp_path)
        times.append((tmp_path / "group-00" / "targets.safetensors").stat().st_mtime_ns)
    assert times[0] < times[1] == times[2] == times[3]


def test_where_returns_never_vary_nothing_is_near():
    """As on a pendulum that never falls: every relative variance is infinite, and so is the distance."""
    never, other = found(A, [np.inf, 1.0]), found(B, [5.0, 5.0])
    decision = regime.decide([never, other], NUMBERS)
    assert (decision.nearest, decision.chosen) == (1, 1)
    assert regime.distance(never.means(), NUMBERS) == np.inf


def test_the_baselines_are_the_exact_ones(data):
    """From many episodes of a group with the stages' own fits."""
    group = Group(GRID, 0, data)
    mdp = group.environment().mdp()
    (pi, fitted, moments), mu, odi = design(group).tables()
    known = exact.relative_variances(exact.estimator_variances(mdp, pi, moments, fitted, (mu, odi)))
    found = regime.baselines(group, 30_000)
    for name in regime.BASELINES:
        assert found[name][0] == pytest.approx(known[name], rel=0.1)
    values = exact.values(mdp, pi)
    error = exact.estimator_variances(mdp, pi)["on_policy"].mean() / 300
    assert found["apart"][0] == pytest.approx(values.std(ddof=1) / np.sqrt(error), rel=0.1)
