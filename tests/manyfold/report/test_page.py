"""A page says what the result says: its tables are read back."""

import re

import numpy as np
import pytest

import manyfold as mf
from manyfold.estimate.ranking import probability
from manyfold.report import page
from manyfold.report.parts import duration, fixed, shortest
from tests.pages import number, pooled, read, rounding, shown, stopped

WORTH, PAIRS, WHEN = "What each policy is worth", "Which policies are told apart", "When each decision fell"
RETURNS, BASIS, COST = "The policies' own returns", "What each estimate rests on", "What it cost"
MINUS = "\N{MINUS SIGN}"


def near(text, value):
    return number(text) == pytest.approx(value, abs=rounding(text), rel=0)


def test_the_ranking_is_the_decisions(tmp_path):
    result = pooled()
    header, *rows = read(result.report(tmp_path / "a.html")).table(WORTH)
    found = result.decide()
    assert header == ["rank", "policy", "value", "95% interval", "P(best)"]
    assert [row[1] for row in rows] == [result.names[k] for k in found.order]
    for k, (rank, _, value, between, chance) in zip(found.order, rows, strict=True):
        low, high = between.split(" to ")
        assert near(value, result.mean[k])
        assert near(low, found.interval.low[k])
        assert near(high, found.interval.high[k])
        assert rounding(value) < found.half_width[k] / 5  # enough digits to tell
        span = [int(x) for x in rank.split(" to ")]
        assert (span[0], span[-1]) == (found.ranks[0][k], found.ranks[1][k])
        assert chance == probability(found.p_best[k])


def test_pictures_show_the_intervals(tmp_path):
    """Positions are linear in the values, the same for all rows."""
    result = pooled()
    found, tracks = result.decide(), read(result.report(tmp_path / "a.html")).marks(WORTH)
    places, values = [], []
    for k, track in zip(found.order, tracks, strict=True):
        (bar,) = (x for x in track if x.get("class", "").startswith("bar"))
        places += [float(bar.get(x).rstrip("%")) for x in ("x1", "x2")]
        values += [found.interval.low[k], found.interval.high[k]]
        assert (len(track.findall("circle")) == 1) == found.may_be_best[k]
    slope, offset = np.polyfit(values, places, 1)
    np.testing.assert_allclose(np.multiply(values, slope) + offset, places, atol=0.02)
    assert 0 < min(places) < max(places) < 100


@pytest.mark.parametrize("k", [3, 14])
def test_pairs_are_the_differences_of_the_decision(tmp_path, k):
    result = stopped(k, 60 * k, stop="order")
    found = result.decision
    header, *rows = read(result.report(tmp_path / "a.html")).table(PAIRS)
    assert header == ["", *(str(i + 1) for i in range(k))]
    for a, i in enumerate(found.order):
        assert rows[a][0] == f"{a + 1} {result.names[i]}"
        for b, j in enumerate(found.order):
            text = rows[a][b + 1]
            if i == j:
                assert text == ""
                continue
            assert near(text, result.mean[i] - result.mean[j])
            assert text.startswith("(") == (not found.told_apart[i, j])
            assert text.strip("()")[0] == ("+" if result.mean[i] >= result.mean[j] else MINUS)


def test_many_pairs_are_signs(tmp_path):
    given = shown(0.4 * np.arange(15)[:, None] + np.random.default_rng(0).standard_normal((15, 30)))
    found, (_, *rows) = given.decision, read(page.write(tmp_path / "a.html", given)).table(PAIRS)
    assert found.told_apart.any()
    assert not found.order_known
    signs = {(True, False): "+", (False, True): MINUS, (False, False): ""}
    for a, i in enumerate(found.order):
        assert rows[a][1:] == [signs[found.better[i, j], found.better[j, i]] for j in found.order]


def test_what_an_estimate_rests_on(tmp_path):
    result = pooled()
    header, *rows = read(result.report(tmp_path / "a.html")).table(BASIS)
    assert header == ["policy", "own episodes", "as good as", "effective episodes", "standard error", "trust"]
    good = result.on_policy_variance / result.variance * result.episodes / len(result.names)
    for k, row in zip(result.decide().order, rows, strict=True):
        assert row[:2] == [result.names[k], "20"]
        assert near(row[2], good[k])
        assert near(row[3], result.diagnosis.effective_sample_size[k])
        assert near(row[4], result.standard_error[k])
        assert row[5] == "yes"


def test_the_cost_beside_on_policy(tmp_path):
    result = pooled()
    found = read(result.report(tmp_path / "a.html", seconds=90.04))
    _, here, there = found.table(COST)
    assert here == ["this evaluation", "80", f"{result.steps:,}", "90.0 s"]
    total = (result.on_policy_variance / result.variance).sum() * result.episodes / len(result.names)
    assert near(there[1].removeprefix("about "), total)
    assert near(there[2].removeprefix("about "), total * result.steps / result.episodes)
    assert f"about {total / 80:.1f} times as many episodes on-policy Monte Carlo would take" in found.text


def test_on_policy_episodes_by_hand():
    """Own returns 0, 4 have variance 8; values 1, 1, 3, 3 a squared error of (4 / 3) / 4 = 1 / 3."""
    found = shown([[1, 1, 3, 3], [5, 5, 5, 5.0]], own_returns=[[0, 4], [5, 5, 5]])
    np.testing.assert_allclose(found.on_policy, [24, np.nan])
    assert found.on_policy_total == pytest.approx(27)  # where it is unknown, what was run


def test_plain_returns_are_on_policy_monte_carlo(tmp_path):
    found = read(page.write(tmp_path / "a.html", shown([[1, 2, 4], [2, 3, 3]])))
    assert len(found.table(COST)) == 2
    assert "as good as" not in found.table(BASIS)[0]
    assert "times as many" not in found.text
    assert "This is on-policy Monte Carlo itself" in found.text


def test_returns_are_described(tmp_path):
    rows = read(page.write(tmp_path / "a.html", shown([[1, 2, 4], [-7, 0, 30]]))).table(RETURNS)
    assert rows[1:3] == [["p1", "3", f"{MINUS}7", "0", "30"], ["p0", "3", "1", "2", "4"]]


def test_when_each_policy_left_and_each_rank_was_known(tmp_path):
    result = stopped(4, 2000, stop="order")
    _, *rows = read(result.report(tmp_path / "a.html")).table(WHEN)
    assert len(result.looks) > 2
    seen = set()
    for k, row in zip(result.decision.order, rows, strict=True):
        left = known = None  # from the end, as long as nothing changes
        for look in reversed(result.looks):
            if look.decision.may_be_best[k]:
                break
            left = look.episodes
        for look in reversed(result.looks):
            low, high = look.decision.ranks
            if (low[k], high[k]) != (4 - k, 4 - k):
                break
            known = look.episodes
        assert row == [f"p{k}", "to the end" if left is None else f"until {left}", str(known)]
        seen |= {left, known}
    assert len(seen) > 2


def test_a_decision_made_once_says_so(tmp_path):
    found = read(pooled().report(tmp_path / "a.html"))
    assert "decided once, after the last of 80 episodes" in found.text
    assert not found.marks(WHEN)


def test_the_top_says_what_was_evaluated_why_it_ended_and_who_is_best(tmp_path):
    result = stopped()
    found = read(result.report(tmp_path / "a.html"))
    assert result.decision.verdict in found.text
    assert result.reason in found.text
    assert result.winner.describe(result.names).replace("+-", "\N{PLUS-MINUS SIGN}") in found.text
    assert read(page.write(tmp_path / "b.html", shown([[1, 2]], title="X: 1 policy, greedy"))).main.find("h1").text == (
        "X: 1 policy, greedy"
    )


def test_settings_are_exact(tmp_path):
    about = {"command": "manyfold evaluate --env 'A B'", "seed": 3, "data": "", "environment": "A-v1", "budget": None}
    path = pooled().report(tmp_path / "a.html", alpha=0.123, **about)
    found = read(path)
    rows = dict(found.table("Run it again"))
    assert rows == {
        "seed": "3",
        "environment": "A-v1",
        "alpha": "0.123",
        "intervals": "of one decision, after the last episode",
        "manyfold": mf.__version__,
    }
    assert found.section("Run it again").find("pre").find("code").text == about["command"]
    assert "87.7% interval" in found.table(WORTH)[0]
    assert dict(read(stopped().report(path)).table("How it was run"))["intervals"] == "whenever one stops (anytime)"


HOSTILE = """<script>alert(1)</script>"><img src=x onerror='alert(2)'>&amp;"""


def test_what_people_write_is_text(tmp_path):
    for k in (2, 15):  # numbers and signs
        values = np.random.default_rng(0).standard_normal((k, 20))
        about = {"command": HOSTILE, HOSTILE: HOSTILE}
        names = [f"{HOSTILE}{i}" for i in range(k)]
        given = shown(values, names=names, title=HOSTILE, warnings=[HOSTILE] * k, reason=HOSTILE, about=about)
        path = page.write(tmp_path / "a.html", given)
        found = read(path)
        assert not {"script", "img"} & {x.tag for x in found.main.iter()}
        assert not [x for x in found.main.iter() if any(name.startswith("on") for name in x.attrib)]
        assert found.main.find("h1").text == HOSTILE
        assert found.section("Run it again").find("pre").find("code").text == HOSTILE
        assert {row[1] for row in found.table(WORTH)[1:]} == {f"{name} \N{WARNING SIGN}" for name in names}
        assert "<script" not in path.read_text()


def test_names_that_are_no_unicode_do_not_lose_the_page(tmp_path):
    assert "a?" in read(page.write(tmp_path / "a.html", shown([[1, 2]], names=["a\udcff"]))).text


def test_warnings_stand_at_the_top_at_the_name_and_in_the_table(tmp_path):
    given = shown([[1, 2, 4], [2, 3, 3]], names=["a", "b"], warnings=["", "run more"])
    found = read(page.write(tmp_path / "a.html", given))
    assert " ".join(found.main.find("header").find("aside").itertext()).split("\N{WARNING SIGN} ")[1] == (
        "1 estimate is not to be trusted b : run more"
    )
    assert sorted(row[-1] for row in found.table(BASIS)[1:]) == ["yes", "\N{WARNING SIGN} no: run more"]
    assert [row[1] for row in found.table(WORTH)[1:]] == ["b \N{WARNING SIGN}", "a"]
    assert read(page.write(tmp_path / "b.html", shown([[1, 2, 4]]))).main.find("header").find("aside") is None


def test_infinite_intervals(tmp_path):
    result = stopped(2, 4)
    assert np.isinf(result.decision.interval.high).all()
    found = read(result.report(tmp_path / "a.html"))
    assert {row[3] for row in found.table(WORTH)[1:]} == {f"{MINUS}\N{INFINITY} to \N{INFINITY}"}
    assert "too few episodes for an interval with ends" in found.text
    assert not re.search(r"\b(nan|inf)\b", found.text)


def test_one_policy_is_compared_with_none(tmp_path):
    for result in (pooled(1), stopped(1, 40, stop=None, precision=1.0)):
        found = read(result.report(tmp_path / "a.html"))
        assert found.table(WORTH)[0] == ["policy", "value", "95% interval"]
        assert found.section(PAIRS) is None
        assert near(found.table(WORTH)[1][1], result.mean[0])


def test_no_variance(tmp_path):
    given = shown([[2.5, 2.5, 2.5], [0, 0, 0]], own_returns=[[1, 5], [0, 0]])
    found = read(page.write(tmp_path / "a.html", given))
    assert [row[2:4] for row in found.table(WORTH)[1:]] == [["2.500", "2.500 to 2.500"], ["0.000", "0.000 to 0.000"]]
    assert [row[2] for row in found.table(BASIS)[1:]] == ["not known", "not known"]
    assert "For 2 of the policies it is unknown" in found.text
    assert not re.search(r"\b(nan|inf)\b", found.text)


def test_a_policy_that_ran_nothing_itself(tmp_path):
    found = read(page.write(tmp_path / "a.html", shown([[1, 2, 4], [2, 3, 3]], own_returns=[[1, 2, 4], []])))
    assert ["p1", "0", "", "", ""] in found.table(RETURNS)
    nothing = read(page.write(tmp_path / "b.html", shown([[1, 2, 4]], own_returns=[[]], episodes=3)))
    assert nothing.section(RETURNS) is None


def test_it_stands_alone_and_is_the_same_again(tmp_path):
    first, again = (stopped(20, 400).report(tmp_path / name, seconds=1.0).read_bytes() for name in ("a", "b"))
    assert first == again
    assert not re.search(rb"https?:|<script|@import|url\(|<link(?! rel=\"icon\" href=\"data:,\")", first)


@pytest.mark.parametrize(
    ("show", "x", "text"),
    [
        (fixed(2), -1234.567, f"{MINUS}1,234.57"),
        (fixed(1), -0.04, "0.0"),
        (fixed(1, signed=True), 3, "+3.0"),
        (fixed(9), 1.5e-9, f"1.5e{MINUS}09"),
        (fixed(0), -np.inf, f"{MINUS}\N{INFINITY}"),
        (shortest(np.array([1.0, 200.0])), 200, "200"),
        (shortest(np.array([0.5, 20.0])), 0.5, "0.50"),
        (shortest(np.zeros(2)), 0, "0"),
        (duration, 119, "119.0 s"),
        (duration, 150, "2.5 min"),
        (duration, 9000, "2.5 h"),
    ],
)
def test_numbers_as_people_read_them(show, x, text):
    assert show(x) == text
