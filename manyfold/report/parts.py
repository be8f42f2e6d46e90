"""Pieces of a page: sections, tables, legends, and numbers as people read them.

All text that comes in is HTML already; `escape` or `words` make it so.
"""

from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from manyfold.arrays import Array
from manyfold.report import svg

MINUS = "\N{MINUS SIGN}"
ROOMY = 20  # rows up to which they are high
Row = tuple[str, ...]


def section(title: str, *parts: str) -> str:
    return f"<section><h2>{title}</h2>{''.join(parts)}</section>\n"


def words(text: str) -> str:
    """Of one of our sentences."""
    return escape(text).replace("+-", "\N{PLUS-MINUS SIGN}")


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Marks with their words; nothing of none."""
    if not entries:
        return ""
    return '<ul class="legend">' + "".join(f"<li>{svg.sample(mark)} {said}</li>" for mark, said in entries) + "</ul>"


def plotted(heads: Sequence[str], rows: Sequence[Row], scale: svg.Scale) -> str:
    """A table whose third column is a picture; on a phone a row becomes a few lines, and heads stand beside numbers.

    Args:
        heads: of the rank ("": there is none), the name, the picture (what its axis says) and the numbers.
        rows: the same of each policy.
    """
    rank, who, across, *numbers = heads
    many, ranked = len(rows) > ROOMY, rank != ""
    top = [f'<th scope="col" class="rank">{rank}</th>'] if ranked else []
    top += [f'<th scope="col" class="name">{who}</th>', f'<td class="picture">{svg.axis(scale) if many else ""}</td>']
    top += [f'<th scope="col" class="number">{head}</th>' for head in numbers]
    body = []
    for place, called, picture, *rest in rows:
        line = [f'<td class="rank" data-head="{rank}">{place}</td>'] if ranked else []
        line += [f'<th scope="row" class="name">{called}</th>', f'<td class="picture">{picture}</td>']
        line += [f'<td class="number" data-head="{head}">{x}</td>' for head, x in zip(numbers, rest, strict=True)]
        body.append(f"<tr>{''.join(line)}</tr>")
    under = f'<td class="picture">{svg.axis(scale)}<p>{across}</p></td>'
    foot = f'<tr><td colspan="{1 + ranked}"></td>{under}<td colspan="{len(numbers)}"></td></tr>'
    return (
        f'<table class="plotted{" many" if many else ""}"><thead><tr>{"".join(top)}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody><tfoot>{foot}</tfoot></table>"
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], last: str = "number") -> str:
    """Names to the left, numbers to the right, in the last column maybe "words"; it scrolls where it is too wide."""
    kinds = [*["number"] * (len(heads) - 2), last]
    head = f'<th scope="col">{heads[0]}</th>'
    head += "".join(f'<th scope="col" class="{kind}">{x}</th>' for kind, x in zip(kinds, heads[1:], strict=True))
    body = []
    for called, *rest in rows:
        line = "".join(f'<td class="{kind}">{x}</td>' for kind, x in zip(kinds, rest, strict=True))
        body.append(f'<tr><th scope="row">{called}</th>{line}</tr>')
    return (
        f'<div class="wide" tabindex="0"><table class="numbers"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def shortest(values: Array, signed: bool = False) -> Callable[[float], str]:
    """Writes values with four digits of the largest one, whole numbers as such."""
    most = float(np.abs(values).max(initial=0))
    whole = bool((values == np.round(values)).all())
    return fixed(0 if whole else int(np.clip(3 - np.floor(np.log10(most)), 0, 12)), signed)


def fixed(after: int, signed: bool = False) -> Callable[[float], str]:
    """Numbers with so many digits after the point; what is far too small or too large for that with an exponent."""

    def show(x: float) -> str:
        if np.isinf(x):
            return f"{MINUS if x < 0 else ''}\N{INFINITY}"
        y = round(float(x), after) + 0.0  # no -0.00
        sign = "+" if signed else ""
        return (f"{x:{sign}.4g}" if after > 6 or abs(x) >= 1e9 else f"{y:{sign},.{after}f}").replace("-", MINUS)

    return show


def duration(seconds: float) -> str:
    """In the unit that people use."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
