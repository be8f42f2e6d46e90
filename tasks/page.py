"""The page of a study: what its policies are worth, what the estimators cost, and every stage that it rests on.

The first part is the page of `manyfold evaluate`, made of the decisions of group 0's first run; then the pipeline's
stages. One file without scripts, the same bytes for the same numbers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from manyfold.arrays import Array, Bools, Ints
from manyfold.estimate.intervals import Interval, Sample
from manyfold.estimate.ranking import Decision
from manyfold.estimate.registry import ESTIMATORS
from manyfold.estimate.stopping import Look
from manyfold.report import svg
from manyfold.report.page import document, pairs, ranking, when
from manyfold.report.parts import fixed, legend, plotted, section, table, words
from manyfold.report.shown import Shown
from manyfold.tables import Rows
from tasks.deciding import Decisions
from tasks.studies import Study

DRAWN = ("on_policy", "mpe", "mpe_baseline", "pooled")  # with bands; more of them hide each other
FITS = {"q": "q, the values", "q_hat": "q_hat, the second moments"}


@dataclass(frozen=True)
class Told(Decision):
    """A decision as a file has it: what was computed from the episodes then isn't computed again."""

    chances: Array
    places: tuple[Ints, Ints]

    @cached_property
    def p_best(self) -> Array:
        return self.chances

    @property
    def ranks(self) -> tuple[Ints, Ints]:
        return self.places


@dataclass(frozen=True)
class Stages:
    """What the stages have left for the page.

    Attributes:
        metrics: metrics.json.
        verdict: what was expected and found, in words.
        tables: rows of the tables, header first.
        curves: (estimator, policy) -> total episodes, mean error and its standard error.
        plans: behavior.json of each group.
        card: card.json of group 0.
        fits: how each group's fit ended, by stage.
    """

    metrics: dict[str, Any]
    verdict: str
    tables: Sequence[Rows]
    curves: Mapping[tuple[str, str], tuple[Array, Array, Array]]
    plans: Sequence[dict[str, Any]]
    card: dict[str, Any]
    fits: Mapping[str, Sequence[dict[str, Any]]]


def read_fits(study: Study, data: Path) -> dict[str, list[dict[str, Any]]]:
    """q.json and q_hat.json of every group."""
    return {
        stage: [
            json.loads(path.read_text()) for path in sorted((data / stage / study.name).glob(f"group-*/{stage}.json"))
        ]
        for stage in FITS
    }


def page(study: Study, found: Stages, decided: Decisions | None) -> str:
    """The whole page."""
    parts = [header(study, found, decided)]
    if decided:
        said = shown(study, decided)
        parts.append(ranking(said))
        if len(decided.names) > 1:
            parts += [pairs(said), when(replace(said, decision=said.looks[-1].decision))]
    parts += [estimators(found), predictions(found), logged(found.card), fits(found), stages(study)]
    return document(study.title, parts)


# --- who is best ------------------------------------------------------------------------------------------------------


def shown(study: Study, found: Decisions) -> Shown:
    """What the sections about policies need: the last decision, and all looks on the way."""
    k, final = len(found.names), found.final
    unknown = np.full((k, k), np.nan)
    nowhere = np.ones(k, dtype=np.int64), np.full(k, k)  # ranks: the file has those of the end only
    last = told(
        found,
        (final.mean, final.low, final.high),
        (final.difference_low, final.difference_high),
        (final.may_be_best, final.p_best, (final.rank_low, final.rank_high)),
        False,
    )
    looks = []
    for i, episodes in enumerate(found.episodes):
        seen = (found.mean[i], found.low[i], found.high[i])
        decision = told(found, seen, (unknown, unknown), (found.may_be_best[i], found.p_best[i], nowhere), True)
        looks.append(Look(int(episodes), np.arange(k), decision))
    return Shown(study.title, last, final.winner, final.episodes, 0, (), [""] * k, looks=tuple(looks))


def told(
    found: Decisions,
    values: tuple[Array, Array, Array],
    differences: tuple[Array, Array],
    who: tuple[Bools, Array, tuple[Ints, Ints]],
    anytime: bool,
) -> Told:
    """One decision; NaN, an end that nobody knows, is infinite."""
    mean, low, high = values
    may, chances, places = who
    sample = Sample(found.names, mean, np.zeros((1, len(mean), len(mean))), np.ones(1), 0)
    return Told(
        sample, found.alpha, anytime, _interval(low, high), _interval(*differences), may, chances=chances, places=places
    )


def _interval(low: Array, high: Array) -> Interval:
    return Interval(np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high))


def header(study: Study, found: Stages, decided: Decisions | None) -> str:
    """Who is best, and what the estimators cost."""
    metrics, out = found.metrics, []
    if decided:
        out.append(f'<p class="verdict">{escape(decided.final.verdict)}</p>')
        how, corrected = ESTIMATORS[decided.estimator].label.lower(), decided.final.winner.describe(decided.names)
        out.append(
            f"<p>This, and the ranking, are of group 0: {decided.final.episodes:,} episodes of {how} evaluation. "
            f"{words(corrected)}</p>"
        )
    spent = [
        (f"{metrics['groups']} x {metrics['policies']}", "groups of policies"),
        (
            f"{metrics['episodes_to_match']['pooled']:,.0f}",
            f"pooled episodes match {metrics['episodes']:,} on-policy ones",
        ),
        (f"{metrics['runs']}", "runs of every estimator in each group"),
    ]
    out.append('<ul class="spent">' + "".join(f"<li><b>{x}</b> {of}</li>" for x, of in spent) + "</ul>")
    out.append(f"<p>{words(found.verdict)}</p>")
    return f"<header>{''.join(out)}</header>\n"


# --- the stages -------------------------------------------------------------------------------------------------------


def estimators(found: Stages) -> str:
    """Tables of all estimators, and their errors over episodes."""
    drawn = [(name, *found.curves[name, "all"]) for name in DRAWN if (name, "all") in found.curves]
    rest = [found.curves[name, "all"][1] for name in ESTIMATORS if name not in DRAWN and (name, "all") in found.curves]
    n, every = drawn[0][1], np.array([mean for _, _, mean, _ in drawn])
    least = max(float(every.min()), 1e-9) / 1.2
    across, up = svg.Scale(float(n[0]), float(n[-1]), True), svg.Scale(least, 1.2 * float(every.max()), True)
    bands = []
    for _, _, mean, error in drawn:
        width = np.nan_to_num(error)  # of one group there is none
        bands.append((np.maximum(mean - width, least), mean, mean + width))
    entries = [(svg.stroke(i), ESTIMATORS[name].label) for i, (name, *_) in enumerate(drawn)]
    entries.append(('<line class="thin" x1="0" x2="100%" y1="50%" y2="50%"/>', "the others"))
    said = "<figcaption>Relative error, mean and standard error over groups, against episodes in all.</figcaption>"
    chart = f"<figure>{legend(entries)}{svg.chart(across, up, n, bands, np.array(rest))}{said}</figure>"
    first, second = map(_table, found.tables)
    matched = f"<p>Episodes in all with the error of {found.metrics['episodes']:,} on-policy ones:</p>"
    variance = "<p>Variance, where that of on-policy Monte Carlo is 1:</p>"
    return section("What the estimators cost", variance, first, matched, second, chart)


def predictions(found: Stages) -> str:
    """What logged data let expect before any online episode, beside what was found; by policy of group 0."""
    rows = []
    for name in DRAWN[1:]:
        expected = [plan["relative_variances"][name] for plan in found.plans]
        known = [x for x in expected if x is not None]
        mean = f"{np.mean(known):.1%}" if len(known) == len(expected) else "unknown in some groups"
        rows.append([ESTIMATORS[name].label, mean, f"{found.metrics['relative_variance'][name]:.1%}"])
    first = found.plans[0]
    show, each = fixed(3), []
    for k, policy in enumerate(first["policies"]):
        numbers = (first[f"predicted_{of}"][k] for of in ("values", "on_policy", *DRAWN[1:]))
        each.append([escape(policy), *("unknown" if x is None else show(x) for x in numbers)])
    heads = ["policy", "value", "on-policy", *(ESTIMATORS[name].label for name in DRAWN[1:])]
    return section(
        "What the plan promised",
        f"<p>{words(first['verdict'])} (Group 0.)</p>",
        table(["estimator", "variance expected", "found"], rows),
        "<p>Expected of each policy of group 0: its value, and the variance of one episode.</p>",
        table(heads, each),
    )


def logged(card: dict[str, Any]) -> str:
    """The data card of group 0."""
    seen = "" if card["coverage"] is None else f", {card['coverage']:.0%} of all (t, s, a)"
    episodes = "" if card["episodes"] is None else f" of {card['episodes']:,} episodes"
    about = f"<p>Group 0: {card['rows']:,} transitions{episodes}{seen}. No estimate rests on them, only designs do.</p>"
    if not card["loggers"]:
        return section("The logged data", about, f"<p>The user's own: {escape(str(card['source']))}.</p>")
    every = np.array([logger["quantiles"] for logger in card["loggers"]])
    scale, show, rows = svg.around(every), fixed(2), []
    for logger in card["loggers"]:
        low, _, median, _, high = logger["quantiles"]
        name, mean = escape(logger["name"]), show(logger["mean_return"])
        picture = svg.track(scale, svg.interval(scale, low, high, median, True), f"{name}: {mean}", 18)
        rows.append(("", name, picture, f"{logger['episodes']:,}", mean))
    said = [(svg.interval(svg.Scale(0, 1), 0.1, 0.9, 0.5, True), "the median, and from 5% to 95% of its returns")]
    heads = ("", "logger", "return of an episode", "episodes", "mean")
    return section("The logged data", about, legend(said), plotted(heads, rows, scale))


def fits(found: Stages) -> str:
    """How the fits of all groups ended."""
    show, rows = "{:.3g}".format, []
    for stage, every in found.fits.items():
        held_out = np.array([fit["held_out"] for fit in every])
        updates = np.array([fit["update"] for fit in every])
        errors = [show(x) for x in (np.median(held_out), held_out.min(), held_out.max())]
        rows.append([FITS[stage], f"{len(every)}", f"{np.median(updates):,.0f}", *errors])
    return section(
        "The fits",
        "<p>Mean squared Bellman errors on held-out rows, in units of each policy's scale, over groups.</p>",
        table(["fit", "groups", "updates, median", "held-out error, median", "lowest", "highest"], rows),
    )


def stages(study: Study) -> str:
    """What the study's section says of each stage, and how to run it again."""
    said = {"environment": study.environment, **study.own}
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(_words(value) or "as all studies")}</td></tr>'
        for name, value in said.items()
    )
    return section(
        "Run it again",
        f"<pre><code>dvc repro report@{escape(study.name)}</code></pre>",
        "<p>What the study's section of params.yaml says; everything else is the defaults above it.</p>",
        f'<table class="settings"><tbody>{rows}</tbody></table>',
    )


def _words(value: object) -> str:
    """Settings on one line: `name: value`, those inside in brackets."""
    if isinstance(value, Mapping):
        return ", ".join(
            f"{key}: {f'({_words(x)})' if isinstance(x, Mapping) else _words(x)}" for key, x in value.items()
        )
    return str(value)


def _table(rows: Rows) -> str:
    return table([escape(x) for x in rows[0]], [[escape(x) for x in row] for row in rows[1:]])
