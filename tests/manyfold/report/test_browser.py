"""Pages in a real Chromium, on a phone, on a desk and on paper."""

from itertools import pairwise

import numpy as np
import pytest

from manyfold.report import page
from tests.browser import Browser, required
from tests.pages import pooled, shown, stopped

LONG = "checkpoints/" + 12 * "0123456789"
LETTERS = """[...document.querySelectorAll('svg text')].map(x => x.getBoundingClientRect().toJSON())"""
COLOURS = """['body', 'section > p'].map(x => getComputedStyle(document.querySelector(x)).color).concat(
    getComputedStyle(document.body).backgroundColor)"""
MARKS = """(section => {
    const middle = x => (r => (r.left + r.right) / 2)(x.getBoundingClientRect());
    const mark = x => [middle(x.querySelector('circle, rect.not')), x.querySelector('.number').textContent];
    return [[...section.querySelectorAll('tbody tr')].map(mark),
            [...section.querySelectorAll('.axis text[text-anchor=middle]')].map(x => [middle(x), x.textContent])];
})(document.querySelector('section'))"""


@pytest.fixture(scope="module")
def browser():
    found = Browser(required())
    yield found
    found.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Of 1, 2, 10 and 50 policies, one that was decided once, and one where all words are long."""
    folder = tmp_path_factory.mktemp("pages")
    found = {k: stopped(k, 40 * k, stop=None, precision=0.7) for k in (1, 2, 10, 50)}
    about = {"command": f"manyfold evaluate --policies {'checkpoints/' * 20}", "seconds": 3.0}
    paths = {k: x.report(folder / f"{k}.html", **about) for k, x in {**found, "pooled": pooled(6, 240)}.items()}
    long = {"title": LONG, "warnings": [LONG] * 3, "reason": LONG, "about": {"command": LONG, "data": LONG}}
    values = np.array([[0], [-60_000], [1e6]]) + np.random.default_rng(0).standard_normal((3, 20))
    names = [f"{LONG}{i}" for i in range(3)]
    return {**paths, "long": page.write(folder / "long.html", shown(values, names=names, **long))}


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("which", [1, 2, 10, 50, "pooled"])
def test_nothing_is_complained_of_and_nothing_asked_of_the_network(browser, pages, which, dark):
    browser.open(pages[which], dark=dark)
    assert browser.complaints == []
    assert browser.requests == [pages[which].as_uri()]


def test_the_check_sees_complaints_and_requests(browser, tmp_path):
    path = tmp_path / "bad.html"
    path.write_text("<script>console.error('no'); nothing()</script><img src='http://127.0.0.1:9/a.png'>")
    browser.open(path)
    assert len(browser.complaints) >= 2
    assert "http://127.0.0.1:9/a.png" in browser.requests


@pytest.mark.parametrize("width", [320, 360, 768, 1400])
@pytest.mark.parametrize("which", [1, 2, 10, 50, "pooled", "long"])
def test_the_page_is_no_wider_than_the_screen(browser, pages, which, width):
    browser.open(pages[which], width)
    assert browser.ask("document.documentElement.scrollWidth") == width


def test_wide_tables_scroll_by_themselves(browser, pages):
    browser.open(pages[50], 360)
    inside, outside = browser.ask("(x => [x.scrollWidth, x.clientWidth])(document.querySelector('.pairs').parentNode)")
    assert inside > outside


@pytest.mark.parametrize("which", [2, 50, "pooled", "long"])
def test_labels_can_be_read_on_a_phone(browser, pages, which):
    browser.open(pages[which], 320)
    letters = [x for x in browser.ask(LETTERS) if x["width"]]
    assert letters
    assert min(x["height"] for x in letters) >= 11
    assert all(x["left"] >= 0 and x["right"] <= 320 for x in letters)
    for one, other in pairwise(letters):
        if abs(one["top"] - other["top"]) < 1:  # of one axis
            assert one["right"] < other["left"]


def test_marks_stand_where_the_axis_says(browser, pages):
    """The discs' pixels, read by the axis under them, are the values of the table."""
    browser.open(pages["pooled"])
    marks, ticks = ([(x, float(text)) for x, text in found] for found in browser.ask(MARKS))
    slope, offset = np.polyfit(*zip(*ticks, strict=True), 1)
    assert len(ticks) >= 2
    assert len(marks) == 6
    for x, value in marks:
        assert slope * x + offset == pytest.approx(value, abs=1.5 * slope)  # pixels and a half


def luminance(colour):
    x = np.array([int(c) for c in colour.removeprefix("rgb(").rstrip(")").split(",")]) / 255
    return np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]


def test_letters_stand_out_in_light_and_dark(browser, pages):
    papers = []
    for dark in (False, True):
        browser.open(pages[2], dark=dark)
        *letters, paper = map(luminance, browser.ask(COLOURS))
        for ink in letters:
            assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= 4.5  # WCAG AA
        papers.append(paper)
    assert papers[0] > 0.9
    assert papers[1] < 0.1


def test_it_can_be_photographed_and_printed(browser, pages, tmp_path):
    browser.open(pages[10], 390)
    browser.screenshot(tmp_path / "a.png")
    browser.paper(tmp_path / "a.pdf")
    picture = (tmp_path / "a.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert int.from_bytes(picture[16:20], "big") == 390
    assert int.from_bytes(picture[20:24], "big") == browser.ask("document.documentElement.scrollHeight")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
