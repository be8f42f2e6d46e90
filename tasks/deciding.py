"""Who is the best policy, for a person: what the stage `evaluate` decided for the first group, as a table and figures.

The last decision is made once, with all episodes. Looks may be repeated after every episode (`anytime`), so they are
wider and surer. Nothing is told by colour alone.
"""

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from manyfold.arrays import Array, Bools, Ints
from manyfold.estimate.ranking import Winner, probability
from manyfold.tables import markdown
from tasks.figures import plt, save, style

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#707070"  # Okabe and Ito's blue and vermillion
COLOURS = (BLUE, ORANGE, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito's, without yellow
STYLES = ("-", "--", "-.", ":")
NUMBERED = 14  # policies up to which every pair's difference is a number; of more it is a sign
FIGURES = ("decision_forest", "decision_pairs", "decision_episodes")


@dataclass(frozen=True)
class Decisions:
    """The stage's file, looks as arrays."""

    names: tuple[str, ...]
    alpha: float
    episodes: Ints  # of each look, `[L]`
    mean: Array  # `[L, K]`, as are the next four
    low: Array
    high: Array
    p_best: Array
    may_be_best: Bools
    final: "Final"


@dataclass(frozen=True)
class Final:
    """The last decision, with all episodes."""

    episodes: int
    mean: Array  # `[K]`
    low: Array
    high: Array
    difference_low: Array  # `[K, K]`
    difference_high: Array
    rank_low: Ints  # `[K]`
    rank_high: Ints
    p_best: Array
    may_be_best: Bools
    best: int | None
    verdict: str
    rows: list[list[str]]
    winner: Winner

    @property
    def order(self) -> Ints:
        """Policies from the highest to the lowest mean, `[K]`."""
        return np.argsort(-self.mean, kind="stable")

    @property
    def told_apart(self) -> Bools:
        """`[K, K]`."""
        return (self.difference_low > 0) | (self.difference_high < 0)


def decisions_file(study: str, data: Path) -> Path:
    return data / "evaluate" / study / "decisions.json"


def read_decisions(study: str, data: Path) -> Decisions | None:
    """What the stage `evaluate` decided; None where an earlier version computed the study."""
    path = decisions_file(study, data)
    if not path.exists():
        return None
    try:
        return parse(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"no `{error.args[0]}`" if isinstance(error, KeyError) else " ".join(str(error).split())[:120]
        raise ValueError(
            f"{path}: {what}; expected decisions of this version, run the stage `evaluate` again"
        ) from None


def parse(found: dict[str, Any]) -> Decisions:
    """Of the file's content; ValueError, KeyError or TypeError where it has another shape."""
    names = tuple(str(name) for name in found["policies"])
    k, looks, final = len(names), found["looks"], found["final"]

    def numbers(of: dict[str, Any], key: str, *shape: int) -> Array:
        x = np.array(of[key], dtype=np.float64)  # null, where something is unknown, is NaN
        if x.shape != shape:
            raise ValueError(f"`{key}` has shape {x.shape}, expected {shape}")
        return x

    def every(key: str) -> Array:
        return np.stack([numbers(look, key, k) for look in looks])

    if not k or not looks:
        raise ValueError(f"{k} policies and {len(looks)} looks, expected at least one of each")
    best, rows = final["best"], [[str(x) for x in row] for row in final["rows"]]
    if (best is not None and not 0 <= int(best) < k) or len(rows) != k + 1:
        raise ValueError(f"best is {best} and there are {len(rows) - 1} rows, expected one of {k} policies, a row each")
    corrected = {key: np.nan if x is None else x for key, x in final["winner"].items()}
    return Decisions(
        names,
        float(found["alpha"]),
        np.array([look["episodes"] for look in looks], dtype=np.int64),
        *(every(key) for key in ("mean", "low", "high", "p_best")),
        every("may_be_best") > 0,
        Final(
            int(final["episodes"]),
            *(numbers(final, key, k) for key in ("mean", "low", "high")),
            *(numbers(final, key, k, k) for key in ("difference_low", "difference_high")),
            *(numbers(final, key, k).astype(np.int64) for key in ("rank_low", "rank_high")),
            numbers(final, "p_best", k),
            numbers(final, "may_be_best", k) > 0,
            None if best is None else int(best),
            str(final["verdict"]),
            rows,
            Winner(**corrected),
        ),
    )


# --- words ------------------------------------------------------------------------------------------------------------


def sentences(found: Decisions) -> str:
    """Who is best and how sure that is, and what the best-looking one is worth without the luck of being chosen."""
    return f"{found.final.verdict} {found.final.winner.describe(found.names)}"


def page(found: Decisions) -> str:
    """The ranked table and the sentences, as Markdown."""
    return f"{markdown(found.final.rows)}\n{sentences(found)}\n"


def left_at(found: Decisions) -> list[int | None]:
    """By policy, the number of the look at which it left the set of possible bests for good; None: it still may be."""
    out: list[int | None] = []
    for inside in found.may_be_best.T:
        after = int(np.flatnonzero(inside)[-1]) + 1 if inside.any() else 0
        out.append(after if after < len(inside) else None)
    return out


def known_at(found: Decisions) -> int | None:
    """The number of the look from which on one policy alone may be the best."""
    alone = found.may_be_best.sum(1) == 1
    same = alone & (found.may_be_best == found.may_be_best[-1]).all(1)
    if not same[-1] or len(found.names) == 1:
        return None
    others = np.flatnonzero(~same)
    return int(others[-1]) + 1 if len(others) else 0


# --- figures ----------------------------------------------------------------------------------------------------------


def draw_decisions(found: Decisions, title: str, folder: Path) -> None:
    """All three, as PNG."""
    style()
    for name, figure in zip(FIGURES, (forest(found, title), pairs(found, title), over_time(found, title)), strict=True):
        save(figure, folder / name, 110, ("png",))


def letters(k: int) -> float:
    """Font size of K labels."""
    return 9 if k <= 20 else 7


def short(name: str, most: int = 24) -> str:
    """A name that leaves room for the figure."""
    return name if len(name) <= most else f"{name[: most - 3]}..."


def heading(title: str, text: str, width: int) -> str:
    """A figure's title: what it shows, and what that means."""
    return "\n".join([title, *textwrap.wrap(text, width)])


def forest(found: Decisions, title: str) -> Figure:
    """Every policy's value and interval, the highest on top; filled: may be the best."""
    final, k = found.final, len(found.names)
    figure, axes = plt.subplots(figsize=(8.6, 2.3 + (0.3 if k <= 20 else 0.2) * k), layout="constrained")
    size = letters(k)
    for row, i in enumerate(final.order):
        may = bool(final.may_be_best[i])
        colour = BLUE if may else GREY
        axes.plot([final.low[i], final.high[i]], [row, row], color=colour, linewidth=2.4 if may else 1.2, zorder=2)
        face = colour if may else "white"
        axes.plot(final.mean[i], row, "o" if may else "s", color=colour, markerfacecolor=face, markersize=6, zorder=3)
        low, high = final.rank_low[i], final.rank_high[i]
        where = axes.get_yaxis_transform()
        axes.text(1.09, row, probability(final.p_best[i]), transform=where, fontsize=size, va="center", ha="right")
        rank = f"{low}" if low == high else f"{low} to {high}"
        axes.text(1.21, row, rank, transform=where, fontsize=size, va="center", ha="right")
    for x, head in ((1.09, "P(best)"), (1.21, "rank")):
        axes.text(x, -0.9, head, transform=axes.get_yaxis_transform(), fontsize=size, va="center", ha="right")
    axes.axvline(final.mean.max(), color="#000000", linewidth=0.8, linestyle=":", zorder=1)
    axes.set_yticks(range(k), [short(found.names[i]) for i in final.order], fontsize=size)
    axes.set_ylim(k - 0.4, -1.4)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(
        f"value of a policy; the bars hold all {k} true values at once with {1 - found.alpha:.4g} confidence"
    )
    axes.set_ylabel("policy")
    about = f"{title}: what each policy is worth, after {final.episodes:,} episodes"
    axes.set_title(heading(about, final.verdict, 95), fontsize=10)
    marks = [
        Line2D([], [], color=BLUE, marker="o", linewidth=2.4, label="may be the best"),
        Line2D([], [], color=GREY, marker="s", markerfacecolor="white", linewidth=1.2, label="is not the best"),
        Line2D([], [], color="#000000", linestyle=":", linewidth=0.8, label="highest estimate"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def pairs(found: Decisions, title: str) -> Figure:
    """Every pair's difference, the highest policy first; shaded with a sign where they are told apart."""
    final, k, order = found.final, len(found.names), found.final.order
    difference = final.mean[order][:, None] - final.mean[order]
    apart = final.told_apart[np.ix_(order, order)]
    side = max(6.0, (0.52 if k <= NUMBERED else 0.19) * k + 2.2)
    figure, axes = plt.subplots(figsize=(side, side + 0.9), layout="constrained")
    shades = LinearSegmentedColormap.from_list("signed", ["#7FB8DA", "#E3F0F8", "#FFFFFF", "#FCE7DB", "#EBA77A"])
    most = max(np.abs(difference).max(), 1e-12)
    tone = np.where(apart, np.sign(difference) * (0.35 + 0.65 * np.abs(difference) / most), 0.0)
    axes.imshow(tone, cmap=shades, vmin=-1, vmax=1, aspect="equal")
    size = letters(k)
    for a in range(k):
        for b in range(k):
            if a == b:
                said = ""
            elif k <= NUMBERED:
                said = f"{difference[a, b]:+.2g}" if apart[a, b] else f"({difference[a, b]:+.2g})"
            else:
                said = ("+" if difference[a, b] > 0 else "\N{MINUS SIGN}") if apart[a, b] else ""
            weight = "bold" if apart[a, b] else "normal"
            colour = "#000000" if apart[a, b] else GREY
            axes.text(b, a, said, ha="center", va="center", fontsize=min(8, size + 1), weight=weight, color=colour)
    axes.plot([-0.5, k - 0.5], [-0.5, k - 0.5], color="#000000", linewidth=0.8)
    called = [short(found.names[i]) for i in order]
    axes.set_xticks(range(k), called, fontsize=size, rotation=90)
    axes.set_yticks(range(k), called, fontsize=size)
    axes.set_xticks(np.arange(k + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(k + 1) - 0.5, minor=True)
    axes.grid(visible=False)
    axes.grid(which="minor", alpha=0.4, linewidth=0.5)
    axes.tick_params(which="minor", length=0)
    axes.set_xlabel("policy of the column")
    axes.set_ylabel("policy of the row")
    known = int(apart.sum()) // 2
    numbers, signs = (
        "bold and shaded: told apart; (in brackets): not",
        "+ better, \N{MINUS SIGN} worse, empty: not told apart",
    )
    sign = numbers if k <= NUMBERED else signs
    count = f"pairs told apart: {known} of {k * (k - 1) // 2}, with {1 - found.alpha:.4g} confidence in all at once"
    head = f"{title}: value of the row's policy minus the column's"
    axes.set_title("\n".join([head, count, sign]), fontsize=9)
    return figure


def over_time(found: Decisions, title: str) -> Figure:
    """Intervals after more and more episodes, and until when each policy might be the best."""
    k, n, order = len(found.names), found.episodes, found.final.order
    left, known = left_at(found), known_at(found)
    last = [len(n) if x is None else x for x in left]
    front = sorted(order, key=lambda i: -last[i])[: len(COLOURS)]  # the last to leave; of equal ones the highest
    step, size = (0.26 if k <= 20 else 0.17), letters(k)
    heights = (3.6, 0.9 + step * k)
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9.2, sum(heights) + 1.6), height_ratios=heights, sharex=True, layout="constrained"
    )
    for i in order:
        if i in front:
            place = front.index(i)
            colour, line = COLOURS[place], STYLES[place % len(STYLES)]
            above.fill_between(n, found.low[:, i], found.high[:, i], color=colour, alpha=0.1, linewidth=0)
            for end in (found.low[:, i], found.high[:, i]):
                above.plot(n, np.where(np.isfinite(end), end, np.nan), color=colour, linestyle=line, linewidth=0.6)
            above.plot(n, found.mean[:, i], color=colour, linestyle=line, linewidth=1.8, label=short(found.names[i]))
        else:
            above.plot(n, found.mean[:, i], color=GREY, linewidth=0.6, alpha=0.6, zorder=1)
    late = np.stack([found.low, found.high, found.mean])[:, len(n) // 3 :, front]  # early ones fill any picture
    ends = late[np.isfinite(late)]
    if len(ends) and np.ptp(ends) > 0:
        above.set_ylim(ends.min() - 0.03 * np.ptp(ends), ends.max() + 0.03 * np.ptp(ends))
    above.set_ylabel("value: estimate and interval")
    rest = f"; grey: estimates of the {k - len(front)} others" if k > len(front) else ""
    above.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for row, i in enumerate(order):
        end, colour = left[i], COLOURS[front.index(i)] if i in front else GREY
        until = n[-1] if end is None else n[end]
        below.plot([n[0], until], [row, row], color=colour, linewidth=3 if k <= 20 else 2, solid_capstyle="butt")
        if end is None:
            below.plot(until, row, "o", color=colour, markersize=5, clip_on=False, zorder=3)
        else:
            below.plot(until, row, "x", color="#000000", markersize=5, markeredgewidth=1.4, clip_on=False, zorder=3)
    below.set_yticks(range(k), [short(found.names[i]) for i in order], fontsize=size)
    below.set_ylim(k - 0.4, -0.6)
    below.grid(axis="y", visible=False)
    below.set_ylabel("might be the best")
    if known is not None:
        for axes in (above, below):
            axes.axvline(n[known], color="#000000", linestyle="--", linewidth=1)
    if n[-1] > 8 * n[0]:
        below.set_xscale("log")
        below.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        below.xaxis.set_minor_formatter(NullFormatter())
    below.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    below.set_xlabel("episodes in all (bar: may still be the best; x: known not to be from here on; dot: still may be)")
    if k == 1:
        said = "One policy: nothing to compare."
    elif known is None:
        said = f"{int(found.may_be_best[-1].sum())} of {k} policies may be the best after {n[-1]:,} episodes."
    else:
        best = found.names[int(found.may_be_best[-1].argmax())]
        said = f"{best} is known to be the best from {n[known]:,} episodes on (dashed line)."
    about = f"{title}: intervals that may be looked at after every episode, {1 - found.alpha:.4g} confidence{rest}"
    above.set_title(heading(about, said, 100), fontsize=10)
    return figure
