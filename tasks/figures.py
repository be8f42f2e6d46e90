"""How all figures look: colours that the colour-blind can tell apart, and files that appear whole."""

from pathlib import Path

import matplotlib

from tasks.files import whole

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

__all__ = ["COLOURS", "MARKERS", "plt", "save", "style"]

# Okabe-Ito
COLOURS = {
    "on_policy": "#000000",
    "mpe": "#0072B2",
    "odi": "#E69F00",
    "son": "#56B4E9",
    "sodi": "#CC79A7",
    "mpe_baseline": "#D55E00",
    "son_balanced": "#009E73",
}
MARKERS = {"on_policy": "o", "mpe": "s", "odi": "^", "son": "v", "sodi": "D", "mpe_baseline": "P", "son_balanced": "X"}


def style() -> None:
    plt.rcParams.update({"font.size": 10, "svg.hashsalt": "manyfold", "axes.grid": True, "grid.alpha": 0.25})


def save(figure: Figure, path: Path, dpi: int = 130) -> None:
    """`path`.png and `path`.svg, the same bytes for the same numbers."""
    for suffix in ("png", "svg"):
        with whole(path.with_suffix(f".{suffix}")) as part:
            figure.savefig(part, format=suffix, dpi=dpi, metadata={"Date": None} if suffix == "svg" else None)
    plt.close(figure)
