"""How all figures look, and files that appear atomically."""

from pathlib import Path

import matplotlib

from manyfold.files import atomic, with_ending

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

__all__ = ["plt", "save", "style"]


def style() -> None:
    """Sets what all figures share."""
    plt.rcParams.update({"font.size": 10, "svg.hashsalt": "manyfold", "axes.grid": True, "grid.alpha": 0.25})


def save(figure: Figure, path: Path, dpi: int = 130, forms: tuple[str, ...] = ("png", "svg")) -> None:
    """`path`.png and `path`.svg, the same bytes for the same numbers."""
    for suffix in forms:
        with atomic(with_ending(path, suffix)) as part:
            figure.savefig(part, format=suffix, dpi=dpi, metadata={"Date": None} if suffix == "svg" else None)
    plt.close(figure)
