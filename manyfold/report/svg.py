"""Pictures as text: inline SVG that needs neither scripts nor a library, and fits any width.

What stands across is in percent of the picture's width, so that lines and letters keep their sizes on a phone. Colours
come from the page's classes; what they say is said by shapes or words as well.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from manyfold.arrays import Array, Bools

PADDING = 0.03  # of the width, on both sides: marks at the ends are not cut off
BINS = 30
LETTERS = 38  # of an axis' labels with two spaces each: what fits 320 pixels
DASHES = ("", "7 4", "2 3", "9 3 2 3")  # of lines that share a chart


class Scale(NamedTuple):
    """From values to percent of the width."""

    low: float
    high: float
    log: bool = False

    def at(self, x: float) -> float:
        """100 (x - low) / (high - low), of logarithms if `log`; at most the ends."""
        low, high, x = np.log([self.low, self.high, max(x, 1e-300)]) if self.log else (self.low, self.high, x)
        return float(np.clip(100 * (x - low) / (high - low), 0, 100))

    def ticks(self) -> list[float]:
        """Round numbers inside, 1, 2 or 5 times powers of ten: at most six, and no more than a phone has room for."""
        for most in (6, 5, 4, 3, 2):
            found = self._powers(most) if self.log else self._steps(most)
            if sum(len(label(x)) + 2 for x in found) <= LETTERS:
                break
        return found

    def _steps(self, most: int) -> list[float]:
        raw = (self.high - self.low) / most
        power = 10.0 ** np.floor(np.log10(raw))
        step = next(float(power * m) for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
        first, last = np.ceil(self.low / step - 1e-9), np.floor(self.high / step + 1e-9)
        return [float(i * step) + 0.0 for i in np.arange(first, last + 1)]  # no -0

    def _powers(self, most: int) -> list[float]:
        powers = 10.0 ** np.arange(np.floor(np.log10(self.low)), np.ceil(np.log10(self.high)) + 1)
        found = [float(p * m) for p in powers for m in (1, 2, 5) if self.low <= p * m <= self.high]
        return found[:: -(-len(found) // most)] if found else [self.high]


def around(values: ArrayLike) -> Scale:
    """Holds every finite one of these, with some room; of a single value, or none, something around it."""
    x = np.asarray(values, dtype=np.float64).ravel()
    x = x[np.isfinite(x)]
    low, high = (float(x.min()), float(x.max())) if len(x) else (0.0, 1.0)
    room = PADDING * (high - low) if high - low > 1e-12 * abs(high) else max(0.5, 0.05 * abs(high))
    return Scale(low - room, high + room)


def label(x: float) -> str:
    """Of a tick."""
    said = f"{x:,.0f}" if abs(x) >= 1000 and x == round(x) else f"{x:.6g}"
    return said.replace("-", "\N{MINUS SIGN}")


def track(scale: Scale, marks: str, said: str, height: int) -> str:
    """A row's picture: its marks over the lines of the axis. `said` is for those who don't see it, escaped."""
    lines = "".join(f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="100%"/>' for x in _places(scale))
    return f'<svg class="track" height="{height}" role="img" aria-label="{said}">{lines}{marks}</svg>'


def axis(scale: Scale) -> str:
    """The numbers under (or over) tracks."""
    ticks = [(scale.at(x), label(x)) for x in scale.ticks()]
    texts = "".join(f'<text x="{at:.2f}%" y="14" text-anchor="{_anchor(at)}">{said}</text>' for at, said in ticks)
    return f'<svg class="axis" height="20" aria-hidden="true">{texts}</svg>'


def interval(scale: Scale, low: float, high: float, value: float, strong: bool, reference: float | None = None) -> str:
    """A bar from low to high, dotted if an end is infinite; the value is a disc, or a hollow square if not strong."""
    line = "" if reference is None else _upright("reference", scale.at(reference))
    kind = ("may" if strong else "not") + ("" if np.isfinite([low, high]).all() else " open")
    bar = f'<line class="bar {kind}" x1="{scale.at(low):.2f}%" x2="{scale.at(high):.2f}%" y1="50%" y2="50%"/>'
    return f"{line}{bar}{disc(scale.at(value)) if strong else square(scale.at(value))}"


def until(scale: Scale, end: float, ended: bool) -> str:
    """A bar from the left to `end`: with a cross if something ended there, with a disc if it goes on."""
    at = scale.at(end)
    bar = f'<line class="bar {"not" if ended else "may"}" x1="0%" x2="{at:.2f}%" y1="50%" y2="50%"/>'
    return bar + (cross(at) if ended else disc(at))


def histogram(scale: Scale, values: Array) -> str:
    """How often values were in each of the bins, the tallest as tall as the picture; an upright line at the mean."""
    counts, edges = np.histogram(values, BINS, (scale.low, scale.high))
    width = 100 / BINS
    bars = "".join(
        f'<rect class="count" x="{scale.at(left):.2f}%" y="{100 - 90 * n / counts.max():.1f}%" width="{width:.2f}%" '
        f'height="{90 * n / counts.max():.1f}%"/>'
        for n, left in zip(counts, edges[:-1], strict=True)
        if n
    )
    return bars + (_upright("mean", scale.at(values.mean())) if len(values) else "")


def disc(at: float) -> str:
    return f'<circle class="may" cx="{at:.2f}%" cy="50%" r="5"/>'


def square(at: float) -> str:
    return f'<rect class="not" x="{at:.2f}%" y="50%" width="8" height="8" transform="translate(-4 -4)"/>'


def cross(at: float) -> str:
    arms = '<path d="M-4-4L4 4M-4 4L4-4"/>'
    return f'<svg class="cross" x="{at:.2f}%" y="50%" width="1" height="1" overflow="visible">{arms}</svg>'


def sample(marks: str, width: int = 28) -> str:
    """A mark, for a legend."""
    return f'<svg class="sample" width="{width}" height="14" aria-hidden="true">{marks}</svg>'


def stroke(i: int) -> str:
    """The i-th line's look, for a legend."""
    return f'<line class="line c{i}" x1="0" x2="100%" y1="50%" y2="50%" stroke-dasharray="{DASHES[i]}"/>'


def chart(across: Scale, up: Scale, x: ArrayLike, bands: Sequence[tuple[Array, Array, Array]], others: Array) -> str:
    """Lines with their bands over x.

    Args:
        x: `[L]`.
        bands: (low, value, high) `[L]` of each of at most four; ends that are infinite are left out.
        others: values of those that are only drawn thin, `[n, L]`.
    """
    places = np.array([across.at(float(value)) for value in np.asarray(x)])

    def points(y: Array, which: Bools) -> list[str]:
        return [f"{places[i]:.2f},{_height(up, y[i]):.2f}" for i in np.flatnonzero(which)]

    def line(kind: str, y: Array, dash: str = "") -> str:
        return f'<polyline class="{kind}" stroke-dasharray="{dash}" points="{" ".join(points(y, np.isfinite(y)))}"/>'

    grid = [f'<line class="grid" x1="{at}" x2="{at}" y1="0" y2="100"/>' for at in map(across.at, across.ticks())]
    grid += [f'<line class="grid" x1="0" x2="100" y1="{y}" y2="{y}"/>' for y in (100 - up.at(t) for t in up.ticks())]
    thin, areas, lines = [line("thin", y) for y in others], [], []
    for i, (low, value, high) in enumerate(bands):
        known = np.isfinite(low) & np.isfinite(high)
        areas.append(f'<polygon class="c{i}" points="{" ".join(points(low, known) + points(high, known)[::-1])}"/>')
        lines.append(line(f"line c{i}", value, DASHES[i]))
    inside = "".join([*grid, *thin, *areas, *lines])
    beside = "".join(
        f'<text x="100%" y="{100 - up.at(t):.2f}%" dy="4" text-anchor="end">{label(t)}</text>' for t in up.ticks()
    )
    return (
        f'<div class="chart"><svg class="axis beside" aria-hidden="true">{beside}</svg>'
        f'<svg class="plot" viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">{inside}</svg>'
        f"{axis(across)}</div>"
    )


def _height(up: Scale, y: float) -> float:
    """From the top, not clipped: lines leave the picture in the right direction."""
    low, high, y = np.log([up.low, up.high, max(y, 1e-300)]) if up.log else (up.low, up.high, y)
    return float(np.clip(100 - 100 * (y - low) / (high - low), -1e4, 1e4))


def _upright(kind: str, at: float) -> str:
    return f'<line class="{kind}" x1="{at:.2f}%" x2="{at:.2f}%" y1="0" y2="100%"/>'


def _places(scale: Scale) -> list[str]:
    return [f"{scale.at(x):.2f}%" for x in scale.ticks()]


def _anchor(at: float) -> str:
    """Labels at the ends stay inside."""
    return "start" if at < 4 else "end" if at > 96 else "middle"
