"""Positions in pictures, by hand."""

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from manyfold.report import svg
from manyfold.report.svg import Scale


def marks(text):
    return list(ET.fromstring(f"<svg>{text}</svg>"))


def percent(mark, name):
    return float(mark.get(name).rstrip("%"))


def test_a_scale_is_linear_or_logarithmic_and_ends_at_its_ends():
    assert [Scale(10, 20).at(x) for x in (10, 12.5, 20, 25, -np.inf)] == [0, 25, 100, 100, 0]
    assert Scale(1, 10_000, log=True).at(100) == pytest.approx(50)


def test_ticks_are_round_numbers_inside():
    assert Scale(0, 10).ticks() == [0, 2, 4, 6, 8, 10]
    assert Scale(-0.31, 0.29).ticks() == pytest.approx([-0.3, -0.2, -0.1, 0, 0.1, 0.2])
    assert [svg.label(x) for x in Scale(-0.31, 0.29).ticks()][3] == "0"
    assert Scale(40, 1100, log=True).ticks() == [50, 100, 200, 500, 1000]
    assert Scale(0, 1_000_000).ticks() == [0, 500_000, 1_000_000]  # longer labels are fewer
    assert svg.label(-12_000.0) == "\N{MINUS SIGN}12,000"


def test_labels_at_the_ends_stay_inside():
    (axis,) = marks(svg.axis(Scale(0, 10)))
    assert [x.get("text-anchor") for x in axis] == ["start", *["middle"] * 4, "end"]
    assert [(percent(x, "x"), x.text) for x in axis][1] == (20, "2")


def test_a_scale_holds_what_is_finite_and_has_room():
    found = svg.around([1, 3, np.inf, np.nan])
    assert found == Scale(pytest.approx(1 - 0.06), pytest.approx(3 + 0.06))
    assert svg.around([7, 7]).at(7) == pytest.approx(50)
    assert svg.around([]).ticks()


def test_an_interval_by_hand():
    reference, bar, disc = marks(svg.interval(Scale(0, 40), 10, 30, 18, True, 36))
    assert (percent(reference, "x1"), percent(bar, "x1"), percent(bar, "x2"), percent(disc, "cx")) == (90, 25, 75, 45)
    assert bar.get("class") == "bar may"
    bar, square = marks(svg.interval(Scale(0, 40), 10, 30, 18, False))
    assert (square.tag, percent(square, "x"), bar.get("class")) == ("rect", 45, "bar not")


@pytest.mark.parametrize(
    ("low", "high", "ends"), [(-np.inf, np.inf, (0, 100)), (-np.inf, 3, (0, 75)), (1, np.inf, (25, 100))]
)
def test_infinite_ends_are_dotted_and_go_to_the_edge(low, high, ends):
    bar, _ = marks(svg.interval(Scale(0, 4), low, high, 2, True))
    assert (percent(bar, "x1"), percent(bar, "x2")) == ends
    assert bar.get("class") == "bar may open"


def test_a_histogram_by_hand():
    """Two at 0.5, one at 29.5: in the first and the last of 30 bins of width 1, and half as high."""
    first, last, mean = marks(svg.histogram(Scale(0, 30), np.array([0.5, 0.5, 29.5])))
    assert (percent(first, "x"), percent(first, "height"), percent(first, "y")) == (0, 90, 10)
    assert percent(last, "x") == pytest.approx(100 * 29 / 30, abs=0.01)
    assert (percent(last, "height"), percent(last, "y")) == (45, 55)
    assert percent(mean, "x1") == pytest.approx(100 * 30.5 / 3 / 30, abs=0.01)
    assert svg.histogram(Scale(0, 30), np.empty(0)) == ""


def test_a_bar_ends_with_a_cross_or_goes_on_with_a_disc():
    ended, goes_on = (marks(svg.until(Scale(0, 200), 50, x)) for x in (True, False))
    assert [mark.tag for mark in ended] == ["line", "svg"]
    assert [mark.tag for mark in goes_on] == ["line", "circle"]
    assert percent(ended[0], "x2") == percent(ended[1], "x") == percent(goes_on[1], "cx") == 25


def test_a_chart_by_hand():
    """x from 0 to 10, y from 0 to 4; at the first look the interval is infinite."""
    band = (np.array([-np.inf, 1.0, 1.0]), np.array([2.0, 2.0, 3.0]), np.array([np.inf, 4.0, 3.0]))
    found = ET.fromstring(svg.chart(Scale(0, 10), Scale(0, 4), [0, 5, 10], [band], np.array([[0.0, 1.0, 2.0]])))
    thin, line = (x.get("points") for x in found.iter("polyline"))
    assert line == "0.00,50.00 50.00,50.00 100.00,25.00"
    assert thin == "0.00,100.00 50.00,75.00 100.00,50.00"
    assert next(found.iter("polygon")).get("points") == "50.00,75.00 100.00,75.00 100.00,25.00 50.00,0.00"


def test_lines_of_a_chart_differ_in_more_than_colour():
    assert len({svg.DASHES[i] for i in range(4)}) == 4
