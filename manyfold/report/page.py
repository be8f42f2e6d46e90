"""The page of a result: who is best and how sure that is, when it was known, what it rests on and what it cost.

Shown(...)               what is to be shown
sections(shown)          HTML, one string for each section
document(title, parts)   one file: no scripts, nothing from the network, for paper and phones, in light and dark
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

import manyfold
from manyfold.arrays import Ints
from manyfold.estimate.ranking import probability
from manyfold.files import write_text
from manyfold.report import svg
from manyfold.report.parts import MINUS, duration, legend, plotted, section, shortest, table, words
from manyfold.report.shown import Shown

__all__ = ["Shown", "document", "sections", "write"]

NUMBERED = 14  # policies up to which every pair's difference is a number; of more it is a sign
MAY = ((True, "may be the best"), (False, "is not the best"))  # marks and their words
STYLE = Path(__file__).with_name("page.css")


def write(path: str | Path, shown: Shown) -> Path:
    """The page, atomically; where it is."""
    where = Path(path)
    page = document(shown.title or "Evaluation of policies", sections(shown))
    write_text(where, page.encode("utf-8", "replace").decode())  # names of files may be no Unicode
    return where


def document(title: str, parts: Sequence[str]) -> str:
    """One file of everything; the first part follows the title."""
    safe = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{safe}">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{STYLE.read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{"".join(parts)}<footer>manyfold {manyfold.__version__}</footer>
</main>
</body>
</html>
"""


def sections(shown: Shown) -> list[str]:
    """Everything below the title."""
    several = len(shown.names) > 1
    return [
        verdict(shown),
        ranking(shown),
        *([pairs(shown), when(shown)] if several else []),
        returns(shown),
        basis(shown),
        cost(shown),
        again(shown),
    ]


def verdict(shown: Shown) -> str:
    """Who is best, in one sentence, what that cost, and who isn't to be trusted."""
    names = shown.decision.names
    out = [f'<p class="verdict">{escape(shown.decision.verdict)}</p>']
    if len(names) > 1:
        out.append(f"<p>{words(shown.winner.describe(names))}</p>")
    spent = [(f"{shown.episodes:,}", "episodes"), (f"{shown.steps:,}", "steps")]
    if "seconds" in shown.about:
        spent.append((duration(shown.about["seconds"]), "from start to end"))
    times = shown.on_policy_total / shown.episodes
    if not shown.plain:
        many = f"{times:.1f}" if times < 10 else f"{times:,.0f}"
        spent.append((f"about {many} times", "as many episodes on-policy Monte Carlo would take"))
    out.append('<ul class="spent">' + "".join(f"<li><b>{x}</b> {of}</li>" for x, of in spent) + "</ul>")
    if shown.reason:
        out.append(f"<p>{words(shown.reason)}</p>")
    warned = [(name, said) for name, said in zip(shown.names, shown.warnings, strict=True) if said]
    if warned:
        one = "1 estimate is" if len(warned) == 1 else f"{len(warned)} estimates are"
        items = "".join(f"<li><b>{name}</b>: {escape(said)}</li>" for name, said in warned)
        out.append(
            f'<aside class="warning"><p><b>\N{WARNING SIGN} {one} not to be trusted</b></p><ul>{items}</ul></aside>'
        )
    return f"<header>{''.join(out)}</header>\n"


def ranking(shown: Shown) -> str:
    """Values and intervals, the highest on top."""
    found, names, show, several = shown.decision, shown.names, shown.digits(), len(shown.names) > 1
    (low, high), (first, last), mean = found.interval, found.ranks, found.sample.mean
    scale, rows = svg.around([low, high, mean]), []
    for k in found.order:
        rank = f"{first[k]}" if first[k] == last[k] else f"{first[k]} to {last[k]}"
        value, between = show(mean[k]), f"{show(low[k])} to {show(high[k])}"
        top = float(mean.max()) if several else None
        marks = svg.interval(scale, low[k], high[k], mean[k], bool(found.may_be_best[k]), top)
        picture = svg.track(scale, marks, f"{names[k]}: {value}, {between}", shown.height)
        chance = [escape(probability(found.p_best[k]))] if several else []
        rows.append((rank if several else "", shown.name(k), picture, value, between, *chance))
    heads = ["rank" if several else "", "policy", "return of an episode, mean", "value", f"{shown.sure} interval"]
    whenever = f"with {shown.sure} confidence{', whenever one stops' if found.anytime else ''}"
    if not several:
        said, entries = f"The bar holds the true value, {whenever}.", []
    else:
        said = (
            f"The bars hold all {len(names)} true values at once, {whenever}. A rank such as 1 to 3: not told apart "
            "from its neighbours."
        )
        if found.best is not None and last[found.best] > 1:
            said += " To know the best one takes less than to know all differences, which is where ranks come from."
        entries = [(svg.interval(svg.Scale(0, 1), 0.1, 0.9, 0.5, strong), mark) for strong, mark in MAY]
        entries.append(('<line class="reference" x1="50%" x2="50%" y1="0" y2="100%"/>', "highest estimate"))
        heads.append("P(best)")
    if not np.isfinite([low, high]).all():
        dotted = '<line class="bar not open" x1="0" x2="100%" y1="50%" y2="50%"/>'
        entries.append((dotted, "too few episodes for an interval with ends"))
    return section("What each policy is worth", f"<p>{said}</p>", legend(entries), plotted(heads, rows, scale))


def pairs(shown: Shown) -> str:
    """Every difference, the highest policy first."""
    found, names, show = shown.decision, shown.names, shown.digits(signed=True)
    k, many = len(names), len(names) > NUMBERED
    rows = []
    for a, i in enumerate(found.order):
        line = []
        for j in found.order:
            kind = "same" if i == j else "up" if found.better[i, j] else "down" if found.better[j, i] else "unknown"
            said = show(found.sample.mean[i] - found.sample.mean[j])
            line.append(f'<td class="{kind}">{_entry(kind, said, many)}</td>')
        rows.append(f'<tr><th scope="row"><i>{a + 1}</i> {names[i]}</th>{"".join(line)}</tr>')
    head = "".join(f'<th scope="col" title="{names[i]}">{a + 1}</th>' for a, i in enumerate(found.order))
    known = int(found.told_apart.sum()) // 2
    numbers = "the difference of their values. Bold and shaded: told apart; (in brackets): not."
    signs = f"+ is better, {MINUS} is worse, and an empty square is not told apart."
    return section(
        "Which policies are told apart",
        "<p>The policy of the row against that of the column, by its place in the ranking: "
        f"{signs if many else numbers} {known:,} of {k * (k - 1) // 2:,} pairs are told apart, with {shown.sure} "
        "confidence in all at once.</p>",
        f'<div class="wide" tabindex="0"><table class="pairs{" many" if many else ""}"><thead><tr><th></th>{head}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>",
    )


def _entry(kind: str, said: str, many: bool) -> str:
    if kind == "same":
        return ""
    if many:
        return {"up": "+", "down": MINUS, "unknown": ""}[kind]
    return f"({said})" if kind == "unknown" else f"<b>{said}</b>"


def when(shown: Shown) -> str:
    """Intervals over episodes, and until when each policy might have been the best."""
    title, found, looks, names = "When each decision fell", shown.decision, shown.looks, shown.names
    if not looks:
        said = f"once, after the last of {shown.episodes:,} episodes: their number was fixed beforehand"
        return section(title, f"<p>All of it was decided {said}.</p>")
    n = np.array([look.episodes for look in looks])
    left = [_since(x, False) for x in zip(*(look.decision.may_be_best for look in looks), strict=True)]
    ranked = []  # from how many episodes on each rank is known, in words
    for spans in zip(*(zip(*look.decision.ranks, strict=True) for look in looks), strict=True):
        since = _since([low if low == high else None for low, high in spans], spans[-1][0])
        ranked.append("" if since is None else f"{n[since]:,}")
    wide = n[-1] > 8 * n[0]
    across = svg.Scale(n[0] / 1.25, n[-1] * 1.05, True) if wide else svg.Scale(0, n[-1] * 1.03)
    rows = []
    for k in found.order:
        end = n[-1] if left[k] is None else n[left[k]]
        said = "to the end" if left[k] is None else f"until {end:,}"
        picture = svg.track(across, svg.until(across, end, left[k] is not None), f"{names[k]}: {said}", shown.height)
        rows.append(("", shown.name(k), picture, said, *([ranked[k]] if any(ranked) else [])))
    alone = [look.decision.best for look in looks]
    best = (
        ""
        if found.best is None
        else f" One policy alone is left from {n[_since(alone, found.best) or 0]:,} episodes on."
    )
    many = (
        f"{len(looks)} times, after {n[0]:,} to {n[-1]:,} episodes"
        if len(looks) > 1
        else f"once, after {n[0]:,} episodes"
    )
    bar = svg.Scale(0, 1)
    legends = [
        (svg.until(bar, 0.7, True), "known not to be the best from the cross on"),
        (svg.until(bar, 0.7, False), MAY[0][1]),
    ]
    heads = ["", "policy", "episodes in all, of all policies", "may be the best"]
    heads += ["rank known from"] if any(ranked) else []
    return section(
        title,
        f"<p>The intervals were looked at {many}; they hold at all looks together.{best}</p>",
        _over_time(shown, across, n, left) if len(looks) > 1 else "",
        legend(legends),
        plotted(heads, rows, across),
    )


def _over_time(shown: Shown, across: svg.Scale, n: Ints, left: Sequence[int | None]) -> str:
    """Of at most four policies, the last that might have been the best; of the others only their values."""
    order = shown.decision.order
    last = [len(n) if at is None else at for at in left]
    front = sorted(order, key=lambda k: -last[k])[: len(svg.DASHES)]
    found = [(d.interval.low, d.sample.mean, d.interval.high) for d in (look.decision for look in shown.looks)]
    low, value, high = np.array(found).transpose(1, 2, 0)  # [K, L] each
    late = len(n) // 3  # the first intervals would fill any picture
    up = svg.around([x[front, late:] for x in (low, value, high)])
    others = np.array([value[k] for k in order if k not in front])
    picture = svg.chart(across, up, n, [(low[k], value[k], high[k]) for k in front], others)
    entries = [(svg.stroke(i), shown.names[k]) for i, k in enumerate(front)]
    thin = '<line class="thin" x1="0" x2="100%" y1="50%" y2="50%"/>'
    entries += [(thin, f"values of the other {len(others)}")] if len(others) else []
    said = "<figcaption>Value and interval (return of an episode) against episodes in all.</figcaption>"
    return f"<figure>{legend(entries)}{picture}{said}</figure>"


def _since(history: Sequence[Any], state: Any) -> int | None:
    """From which one on all are `state`; None if the last one isn't."""
    other = [i for i, x in enumerate(history) if x != state]
    first = other[-1] + 1 if other else 0
    return first if first < len(history) else None


def returns(shown: Shown) -> str:
    """The distribution of every policy's own returns."""
    every = np.concatenate(shown.own_returns) if shown.own_returns else np.empty(0)
    if not len(every):
        return ""
    scale, show, rows = svg.around(every), shortest(every), []
    why = "are these means" if shown.plain else "use all episodes, with baselines, and differ from these means"
    for k in shown.decision.order:
        x = shown.own_returns[k]
        few, middle, most = (show(y) for y in np.quantile(x, (0, 0.5, 1))) if len(x) else ("", "", "")
        picture = svg.track(scale, svg.histogram(scale, x), f"{shown.names[k]}: {few} to {most}", shown.height + 8)
        rows.append(("", shown.name(k), picture, f"{len(x):,}", few, middle, most))
    marks = [('<line class="mean" x1="50%" x2="50%" y1="0" y2="100%"/>', "mean of these returns")]
    return section(
        "The policies' own returns",
        "<p>How often each return came up in the episodes that the policy ran itself; every row's tallest bar has the "
        f"same height. The values above {why}.</p>",
        legend(marks),
        plotted(("", "policy", "return of an episode", "episodes", "lowest", "median", "highest"), rows, scale),
    )


def basis(shown: Shown) -> str:
    """What each estimate rests on: own episodes, what all are worth, effective sample sizes, warnings."""
    show, order = shown.digits(), shown.decision.order
    columns = {"policy": shown.names, "own episodes": [f"{len(x):,}" for x in shown.own_returns]}
    said = "Plain returns: each policy rests on its own episodes alone."
    if not shown.plain:
        columns["as good as"] = ["not known" if np.isnan(x) else f"{x:,.0f}" for x in shown.on_policy]
        said = (
            "<b>Own episodes</b> are those that the policy ran. The others' count as far as it might have run them, "
            "and baselines lessen the variance. <b>As good as</b>: so many own episodes alone would have the same "
            "standard error."
        )
        if shown.effective is not None:
            columns["effective episodes"] = [f"{x:,.0f}" for x in shown.effective]
            said += f" <b>Effective episodes</b>: the effective sample size of the weights, out of {shown.episodes:,}."
    columns["standard error"] = [show(x) for x in shown.decision.sample.standard_error]
    columns["trust"] = [f"\N{WARNING SIGN} no: {escape(x)}" if x else "yes" for x in shown.warnings]
    rows = [[column[k] for column in columns.values()] for k in order]
    return section("What each estimate rests on", f"<p>{said}</p>", table(list(columns), rows, "words"))


def cost(shown: Shown) -> str:
    """Beside what on-policy Monte Carlo would have cost."""
    seconds = duration(shown.about["seconds"]) if "seconds" in shown.about else "not measured"
    rows = [["this evaluation", f"{shown.episodes:,}", f"{shown.steps:,}", seconds]]
    said = (
        "This is on-policy Monte Carlo itself: no policy used another one's episodes. Those that tell "
        "the probabilities of their actions may share them."
    )
    if not shown.plain:
        total, length = shown.on_policy_total, shown.steps / shown.episodes
        amounts = [f"about {total:,.0f}", f"about {total * length:,.0f}", "was not run"]
        rows.append(["on-policy Monte Carlo", *amounts])
        unknown = int(np.isnan(shown.on_policy).sum())
        said = (
            "On-policy Monte Carlo runs every policy by itself, here until its standard error is the one above: the "
            "variance of the policy's own returns, divided by the squared error. Both come from these episodes, so it "
            "is an estimate. Steps are at the same average length."
            f"{f' For {unknown} of the policies it is unknown, and their own episodes are counted.' if unknown else ''}"
        )
    return section("What it cost", table(["", "episodes", "steps", "time"], rows), f"<p>{said}</p>")


def again(shown: Shown) -> str:
    """The command, and exact settings."""
    about = {
        key: value
        for key, value in shown.about.items()
        if key not in ("command", "seconds") and value not in ("", None)
    }
    kind = "whenever one stops (anytime)" if shown.decision.anytime else "of one decision, after the last episode"
    fixed = {"alpha": f"{shown.decision.alpha:g}", "intervals": kind, "manyfold": manyfold.__version__}
    rows = "".join(
        f'<tr><th scope="row">{escape(str(key).replace("_", " "))}</th><td>{escape(str(value))}</td></tr>'
        for key, value in {**about, **fixed}.items()
    )
    command = shown.about.get("command")
    run = f"<pre><code>{escape(str(command))}</code></pre>" if command else ""
    return section(
        "Run it again" if command else "How it was run", run, f'<table class="settings"><tbody>{rows}</tbody></table>'
    )
