"""The page of a study says what the stages' files say, and nothing of it is computed again."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tasks import deciding, report
from tasks.page import page as whole_page
from tasks.page import shown
from tests.decisions import decisions
from tests.pages import number, read, rounding
from tests.tasks.conftest import GRID

SECTIONS = [
    "What each policy is worth",
    "Which policies are told apart",
    "When each decision fell",
    "What the estimators cost",
    "What the plan promised",
    "The logged data",
    "The fits",
    "Run it again",
]


@pytest.fixture(scope="module")
def page(data):
    return read(data / "report" / GRID.name / "page.html")


def of(data, stage, name):
    return json.loads((data / stage / GRID.name / name).read_text())


def test_it_has_group_0s_decisions_and_every_stage(page):
    assert [x.find("h2").text for x in page.main.iter("section")] == SECTIONS


def test_the_ranking_is_that_of_the_file(page, data):
    found = deciding.read_decisions(GRID.name, data)
    header, *rows = page.table("What each policy is worth")[:4]
    assert header[:2] == ["rank", "policy"]
    for row, expected in zip(rows, found.final.rows[1:], strict=True):
        assert (row[1], row[0], row[4]) == (expected[0], expected[3], expected[4])
        assert number(row[2]) == pytest.approx(float(expected[1]), abs=0.01)
    assert found.final.verdict in page.text


def test_the_last_decision_is_the_librarys_own_again():
    """What decisions.json keeps of `mf.decide` is enough for the page to say the same."""
    found = deciding.parse(decisions(6, spread=0.4))
    said = shown(GRID, found).decision
    assert said.rows() == [tuple(row) for row in found.final.rows]
    assert said.verdict == found.final.verdict


def test_ends_that_nobody_knows_are_infinite():
    given = decisions(3)
    for one in (*given["looks"], given["final"]):
        one |= {"low": [None] * 3, "high": [None] * 3}
    said = shown(GRID, deciding.parse(given))
    for decision in (said.decision, said.looks[0].decision):
        assert (decision.interval.low == -np.inf).all()
        assert (decision.interval.high == np.inf).all()


def test_a_best_policy_of_the_end_alone_was_not_known_before():
    """One decision at the end is surer than looks at any time: these may not know the best policy yet."""
    found = deciding.parse(decisions(3))
    found.may_be_best[:] = True
    said = shown(GRID, found)
    assert said.decision.best is not None
    assert said.looks[-1].decision.best is None


def test_estimators_and_predictions_are_those_of_the_metrics(page, data):
    metrics, plan = of(data, "evaluate", "metrics.json"), of(data, "behavior", "group-00/behavior.json")
    rows = {row[0]: row for row in page.table("What the estimators cost")[1:]}
    assert number(rows["Pooled"][1]) == round(metrics["episodes_to_match"]["pooled"])
    header, *each = page.table("What the plan promised")
    assert header == ["policy", "value", "on-policy", "MPE", "MPE + q baseline", "Pooled"]
    for k, row in enumerate(each):
        assert row[0] == plan["policies"][k]
        assert number(row[3]) == pytest.approx(plan["predicted_mpe"][k], abs=rounding(row[3]))


def test_logged_data_and_fits_are_those_of_the_stages(page, data):
    card, fit = of(data, "offline", "group-00/card.json"), of(data, "q", "group-00/q.json")
    assert f"{card['rows']:,} transitions of {card['episodes']:,} episodes" in page.text
    rows = page.table("The logged data")[1 : 1 + len(card["loggers"])]
    assert [row[0] for row in rows] == [logger["name"] for logger in card["loggers"]]
    assert [number(row[1]) for row in rows] == [logger["episodes"] for logger in card["loggers"]]
    q = page.table("The fits")[1]
    assert (q[0], number(q[2]), q[3]) == ("q, the values", fit["update"], f"{fit['held_out']:.3g}")


def test_it_is_the_same_bytes_each_time(data):
    again = whole_page(GRID, report.stages_of(GRID, data), deciding.read_decisions(GRID.name, data))
    assert (data / "report" / GRID.name / "page.html").read_text() == again


def test_without_decisions_it_has_the_stages(data, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(whole_page(GRID, report.stages_of(GRID, data), None))
    assert [x.find("h2").text for x in read(path).main.iter("section")] == SECTIONS[3:]


def test_a_users_own_logs_have_a_card_without_loggers(data, tmp_path):
    found = report.stages_of(GRID, data)
    card = {**found.card, "source": "<mine>.parquet", "episodes": None, "coverage": None, "loggers": []}
    path = tmp_path / "page.html"
    path.write_text(whole_page(GRID, replace(found, card=card), None))
    assert "<mine>.parquet" in read(path).text
