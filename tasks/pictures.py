"""The pictures of one group that the report shows: its data card, and what its plan promises."""

from pathlib import Path
from typing import Any

import numpy as np

from tasks.figures import plt, save, style


def draw_card(card: dict[str, Any], path: Path) -> None:
    """The spread of returns of every logger: the median, the middle half, and from 5% to 95%."""
    style()
    loggers = card["loggers"]
    figure, axes = plt.subplots(figsize=(7, 1.0 + 0.24 * len(loggers)), layout="constrained")
    for i, logger in enumerate(loggers):
        low, first, median, third, high = logger["quantiles"]
        axes.plot([low, high], [i, i], color="#0072B2", linewidth=1)
        axes.plot([first, third], [i, i], color="#0072B2", linewidth=5, solid_capstyle="butt")
        axes.plot([median], [i], "|", color="#D55E00", markersize=9, markeredgewidth=2)
    axes.set_yticks(range(len(loggers)), [logger["name"] for logger in loggers], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("return of an episode (5%, 25%, 50%, 75%, 95%)")
    seen = "" if card["coverage"] is None else f", {card['coverage']:.0%} of (t, s, a) seen"
    axes.set_title(f"{card['env']}, group {card['seed']}: {card['rows']:,} transitions{seen}", fontsize=9)
    save(figure, path, 110, ("png",))


def draw_plan(plan: dict[str, Any], path: Path) -> None:
    """Similarity over the horizon, and what is predicted for every policy."""
    style()
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    steps = np.arange(len(plan["eta_spread"][0]))
    spread = np.array(plan["eta_spread"], dtype=float)
    left.plot(steps, spread.T, color="#0072B2", alpha=0.35, linewidth=1)
    left.plot(steps, np.median(spread, 0), color="#0072B2", linewidth=2, label="median policy")
    left.set_ylabel("sqrt(eta_max / eta_min), median state")
    left.set_title("How unlike the policies are (1: equal)")
    left.legend(frameon=False)
    for name, label, colour in (("theorem_3", "Theorem 3 (equal n)", "#009E73"), ("theorem_4", "Theorem 4", "#D55E00")):
        middle.plot(steps, np.mean(np.array(plan[name], dtype=float), 0), color=colour, label=label, linewidth=2)
    middle.set_ylim(-0.02, 1.02)
    middle.set_ylabel("share of logged states")
    middle.set_title("Where sharing is promised to pay")
    middle.legend(frameon=False)
    for axes in (left, middle):
        axes.set_xlabel("t")
    relative = np.array(plan["predicted_relative_variance"], dtype=float)
    right.plot(range(len(relative)), relative, "o", color="#0072B2", markersize=8)
    right.axhline(1, color="#000000", linewidth=0.8)
    right.axhline(plan["relative_variance"] or np.nan, color="#D55E00", linestyle="--", label="all policies together")
    right.set_yscale("log")
    right.set_xticks(range(len(relative)))
    right.set_xlabel("policy")
    right.set_ylabel("predicted variance / on-policy MC's")
    known = relative[np.isfinite(relative)]
    right.set_ylim(min(0.05, 0.8 * known.min(initial=1)), max(3.0, 2 * known.max(initial=1)))
    right.set_title("What MPE will give at equal cost")
    right.legend(frameon=False, loc="upper center")
    figure.suptitle(plan["verdict"], fontsize=11)
    save(figure, path, 100, ("png",))
