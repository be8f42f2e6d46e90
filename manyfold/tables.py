"""The one writer of tables: rows of text, header first, as Markdown, LaTeX and CSV."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from manyfold.files import atomic, with_ending

Rows = Sequence[Sequence[str]]


def markdown(rows: Rows) -> str:
    """A Markdown table."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |\n" for line in lines)


def latex(rows: Rows) -> str:
    """A LaTeX tabular, the first column to the left."""
    body = [" & ".join(cell.replace("%", r"\%") for cell in row) + r" \\" for row in rows]
    columns = "l" + "r" * (len(rows[0]) - 1)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\hline", body[0], r"\hline", *body[1:], r"\hline", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def comma_separated(rows: Rows) -> str:
    """CSV with Unix line ends."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def write_table(rows: Rows, path: Path, forms: Sequence[str] = ("md", "csv", "tex")) -> None:
    """`path`.md, .csv and .tex, each atomically."""
    written = {"md": markdown, "csv": comma_separated, "tex": latex}
    for suffix in forms:
        with atomic(with_ending(path, suffix)) as part:
            part.write_text(written[suffix](rows))


def number(x: float | None, digits: int = 3) -> str:
    """A cell; empty where there is no number."""
    return "" if x is None else f"{x:.{digits}f}"
