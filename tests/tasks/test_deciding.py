"""Figures, words and the reading of what the stage `evaluate` decided."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from tasks import deciding, report
from tasks.figures import plt
from tests.decisions import decisions
from tests.tasks.conftest import GRID

TEN = decisions(10)


def drawn(found, folder):
    """The sizes of all three figures' files."""
    deciding.draw_decisions(deciding.parse(found), "Group 0 of Gridworld", folder)
    return [(folder / f"{name}.png").stat().st_size for name in deciding.FIGURES]


def texts(figure):
    """Every text of a figure as it is drawn."""
    FigureCanvasAgg(figure).draw()
    found = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    plt.close(figure)
    return found


@pytest.mark.parametrize("k", [1, 2, 10, 50])
def test_all_figures_are_drawn_for_any_number_of_policies(k, tmp_path):
    assert min(drawn(decisions(k), tmp_path)) > 5_000
    found = deciding.parse(decisions(k))
    for make in (deciding.forest, deciding.pairs, deciding.over_time):
        said = [text.get_text() for text in texts(make(found, "Group 0"))]
        assert {f"policy-{i}" for i in range(k)} <= set(said)


def test_the_figures_are_the_same_bytes_each_time(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for name in ("a", "b"):
        drawn(TEN, tmp_path / name)
    for name in deciding.FIGURES:
        assert (tmp_path / "a" / f"{name}.png").read_bytes() == (tmp_path / "b" / f"{name}.png").read_bytes()


def test_policies_that_are_all_the_same_are_drawn(tmp_path):
    found = decisions(3)
    for one in (*found["looks"], found["final"]):
        one |= {"mean": [0.5] * 3, "low": [0.5] * 3, "high": [0.5] * 3, "may_be_best": [True] * 3}
    found["final"] |= {"difference_low": np.zeros((3, 3)).tolist(), "difference_high": np.zeros((3, 3)).tolist()}
    assert min(drawn(found, tmp_path)) > 5_000
    said = [text.get_text() for text in texts(deciding.pairs(deciding.parse(found), "a"))]
    assert said.count("(+0)") == 6
    assert "pairs told apart: 0 of 3" in " ".join(said)


def test_infinite_intervals_are_drawn_without_a_warning(tmp_path):
    """Of early looks, of all looks, and of the last decision; one look alone too."""
    found = copy.deepcopy(TEN)
    for look in found["looks"][:4]:
        look |= {"low": [None] * 10, "high": [None] * 10}
    assert min(drawn(found, tmp_path)) > 5_000
    for one in (*found["looks"], found["final"]):
        one |= {"low": [None] * 10, "high": [None] * 10}
    found["final"] |= {"difference_low": [[None] * 10] * 10, "difference_high": [[None] * 10] * 10}
    assert min(drawn(found, tmp_path)) > 5_000
    assert not deciding.parse(found).final.told_apart.any()
    found["looks"] = found["looks"][:1]
    assert min(drawn(found, tmp_path)) > 5_000


def test_names_are_shown_as_they_are_and_long_ones_by_both_ends():
    names = ("$\\alpha_1$", "_hidden", "a_b^c$", f"runs/{'x' * 200}/step-1000", "two\nlines")
    found = deciding.parse(decisions(5, names=names))
    long = "runs/xxxxx.../step-1000"
    assert deciding.short(names[3]) == long
    for make in (deciding.forest, deciding.pairs, deciding.over_time):
        every = texts(make(found, "100 $ and 200 $"))
        said = [text._preprocess_math(text.get_text()) for text in every]
        assert not [text for text, math in said if math is True]
        assert {"$\\alpha_1$", "_hidden", "a_b^c$", long, "two lines"} <= {text for text, _ in said}
        assert any(text.startswith("100 $ and 200 $: ") for text, _ in said)
    legend = deciding.over_time(found, "a").axes[0].get_legend().get_texts()
    plt.close("all")
    assert len(legend) == 4


def test_a_figure_of_long_names_keeps_room_for_its_axes():
    found = deciding.parse(decisions(10, names=tuple(f"{'policy ' * 30}{i}" for i in range(10))))
    for make in (deciding.forest, deciding.pairs, deciding.over_time):
        figure = make(found, "Group 0")
        FigureCanvasAgg(figure).draw()
        assert min(axes.get_position().width for axes in figure.axes) > 0.3
        plt.close(figure)


def test_words():
    found = deciding.parse(TEN)
    assert found.final.verdict == "policy-6 is the best, with 0.95 confidence."
    assert deciding.sentences(found).startswith(f"{found.final.verdict} The highest mean is 0.98")
    lines = deciding.page(found).splitlines()
    assert lines[0] == "| policy | value | interval | rank | P(best) | not told apart from |"
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| policy-6", "| policy-8"]
    assert lines[-1] == deciding.sentences(found)
    unknown = replace(found.final, winner=found.final.winner._replace(fresh=np.nan))
    assert "too few episodes" in deciding.sentences(replace(found, final=unknown))


@pytest.mark.parametrize(
    ("may_be_best", "left", "known"),
    [
        ([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0]], [None, 2, 1], 2),
        ([[1, 1, 1], [1, 0, 1], [1, 1, 0], [1, 1, 0]], [None, None, 2], None),  # the second comes back
        ([[1, 0, 0], [1, 1, 0], [1, 0, 0]], [None, 2, 0], 2),  # known too early, then not, then again
        ([[0, 1, 0], [1, 0, 0]], [None, 1, 0], 1),  # another one: known from the last change on
        ([[0, 0, 1], [0, 0, 1]], [0, 0, None], 0),
        ([[1, 1, 1]], [None, None, None], None),
        ([[1], [1]], [None], None),  # one policy: nothing to know
    ],
)
def test_when_policies_leave_and_when_the_best_is_known(may_be_best, left, known):
    """By hand: a row for each look, a column for each policy."""
    inside = np.array(may_be_best, dtype=bool)
    found = replace(deciding.parse(TEN), names=tuple("abc"[: inside.shape[1]]), may_be_best=inside)
    assert deciding.left_at(found) == left
    assert deciding.known_at(found) == known


# --- the file ---------------------------------------------------------------------------------------------------------


def write(content, data):
    path = deciding.decisions_file("grid", data)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def test_a_study_of_an_earlier_version_has_no_decisions(tmp_path):
    assert deciding.read_decisions("grid", tmp_path) is None


def test_the_file_is_read(tmp_path):
    found = copy.deepcopy(TEN)
    found["looks"][0]["low"][3] = None
    found["final"]["winner"]["fresh"] = None
    write(found, tmp_path)
    read = deciding.read_decisions("grid", tmp_path)
    assert np.isnan(read.low[0, 3])
    assert np.isnan(read.final.winner.fresh)
    assert read.high.shape == (len(found["looks"]), 10)
    assert (read.final.best, read.estimator, read.alpha) == (6, "pooled", 0.05)
    assert read.final.order[0] == 6


def changed(**final):
    return TEN | {"final": TEN["final"] | final}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "Expecting property name"),
        ("[]", "list indices must be integers"),
        ({}, "no `policies`"),
        (TEN | {"looks": []}, "10 policies and 0 looks, expected at least one of each"),
        (TEN | {"policies": [*"abcdefghijk"]}, "11 rows of [6] cells, expected a header and 11"),
        (TEN | {"looks": [TEN["looks"][0] | {"mean": [0.0]}]}, "`mean` has shape (1,), expected (10,)"),
        (TEN | {"final": {}}, "no `best`"),
        (changed(mean=[None] * 10), "`mean` has 10 of 10 numbers missing"),
        (changed(rank_low=["x"] * 10), "could not convert string to float"),
        (changed(difference_low=[0.0] * 10), "`difference_low` has shape (10,), expected (10, 10)"),
        (changed(best=10), "policy 10 is the best or the winner, expected one of 0 to 9"),
        (changed(winner=TEN["final"]["winner"] | {"policy": -1}), "policy -1 is the best or the winner"),
        (changed(rows=TEN["final"]["rows"][:4]), "4 rows of [6] cells, expected a header and 10"),
        (changed(rows=[["a"], *TEN["final"]["rows"][1:]]), "11 rows of [1, 6] cells"),
    ],
)
def test_a_broken_file_is_one_clear_line(content, said, tmp_path):
    write(content, tmp_path)
    with pytest.raises(ValueError, match="run the stage `evaluate` again") as error:
        deciding.read_decisions("grid", tmp_path)
    line = str(error.value)
    assert line.startswith(f"{deciding.decisions_file('grid', tmp_path)}: {said}")
    assert line.endswith("; expected decisions of this version, run the stage `evaluate` again")
    assert "\n" not in line


# --- the report -------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(data, tmp_path):
    """The session's data by links, without its report and its decisions."""
    for stage in ("offline", "q", "q_hat", "behavior"):
        (tmp_path / stage).symlink_to(data / stage)
    folder = tmp_path / "evaluate" / GRID.name
    folder.mkdir(parents=True)
    for name in ("metrics.json", "curves.csv"):
        (folder / name).symlink_to(data / "evaluate" / GRID.name / name)
    return tmp_path


def test_the_report_of_the_stages_own_decisions(data, capsys):
    """With what the stage `evaluate` has written."""
    out, found = data / "report" / GRID.name, deciding.read_decisions(GRID.name, data)
    assert all((out / f"{name}.png").stat().st_size > 5_000 for name in deciding.FIGURES)
    assert (out / "decision.md").read_text() == deciding.page(found)
    assert (out / "decision.txt").read_text() == deciding.sentences(found) + "\n"
    report.show(GRID, data)
    said = capsys.readouterr().out
    title = f"Group 0 of {GRID.title}, pooled, {found.final.episodes:,} episodes: who is best"
    assert title in " ".join(said.split())
    assert deciding.sentences(found) in said
    assert "decision_forest.png" in said
    assert said.index("Recommended before any of it") < said.index("Group 0 of")


def test_the_report_of_a_study_without_decisions(data, copied, capsys):
    out = report.build(GRID, copied)
    names = {path.name for path in out.iterdir()}
    before = {path.name for path in (data / "report" / GRID.name).iterdir()}
    assert before - names == {"decision.md", "decision.txt", *(f"{name}.png" for name in deciding.FIGURES)}
    report.show(GRID, copied)
    assert "who is best" not in capsys.readouterr().out


def test_broken_decisions_leave_the_report_as_it_was(copied):
    out = report.build(GRID, copied)
    deciding.decisions_file(GRID.name, copied).write_text("{}")
    with pytest.raises(ValueError, match="no `policies`; expected decisions of this version"):
        report.build(GRID, copied)
    assert (out / "verdict.txt").exists()
