"""Exact relative variance of every estimator on Gridworld, as a table and a figure: `python -m tasks.demo`.

The K target policies are checkpoints of exact natural policy gradient, pi <- pi exp(step * q): what PPO approximates,
without its noise. Nothing is sampled. It stands in until the pipeline runs the whole chain on PPO's checkpoints.
"""

import argparse
import sys
from pathlib import Path

import matplotlib
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from manyfold import exact
from manyfold.gridworld import Gridworld, check_size
from tasks.files import whole

matplotlib.use("Agg")
from matplotlib import pyplot as plt

STEP = 0.025  # of natural policy gradient
FIRST = 8  # steps before the first checkpoint
SPACINGS = (1, 2, 3, 4, 6, 8)  # steps between neighbouring checkpoints
SHOWN = 3  # the spacing of the table: there SON and SODI come nearest to the paper's columns

# name -> label, the paper's Gridworld 1,000 number, colour (Okabe-Ito: safe for the colour-blind)
ESTIMATORS = {
    "on_policy": ("On-policy MC", 1.000, "#000000"),
    "odi": ("ODI", 0.637, "#E69F00"),
    "son": ("SON", 1.289, "#56B4E9"),
    "sodi": ("SODI", 2.073, "#CC79A7"),
    "mpe": ("MPE (the paper's)", 0.125, "#0072B2"),
    "best": ("best shared mu", None, "#009E73"),
    "mpe_baseline": ("MPE + q baseline", None, "#D55E00"),
}


def checkpoints(mdp: exact.FiniteMDP, n_policies: int) -> np.ndarray:
    """The path of natural policy gradient from the uniform policy, `[steps, T, S, A]`."""
    logits = np.zeros((1, mdp.horizon, mdp.n_states, mdp.n_actions))
    path = []
    for _ in range(FIRST + (n_policies - 1) * max(SPACINGS) + 1):
        pi = np.exp(logits - logits.max(-1, keepdims=True))
        pi /= pi.sum(-1, keepdims=True)
        path.append(pi[0])
        logits = logits + STEP * exact.action_values(mdp, pi)
    return np.stack(path)


def relative_variances(m: int, n_policies: int, n_groups: int) -> dict[str, np.ndarray]:
    """Every estimator's relative variance by group and spacing: name -> `[groups, spacings]`."""
    found: dict[str, list[list[float]]] = {name: [] for name in ESTIMATORS}
    for group in track(range(n_groups), description="groups", console=Console(stderr=True)):
        mdp = Gridworld.draw(m, group).to_mdp()
        path = checkpoints(mdp, n_policies)
        for values in found.values():
            values.append([])
        for spacing in SPACINGS:
            policies = path[FIRST::spacing][:n_policies]
            variances = exact.estimator_variances(mdp, policies)
            variances["best"] = exact.pdis_variance(mdp, policies, exact.best_behavior(mdp, policies))
            for name, value in exact.relative_variances(variances).items():
                found[name][-1].append(value)
    return {name: np.array(values) for name, values in found.items()}


def table(found: dict[str, np.ndarray]) -> list[tuple[str, str, str, str, str]]:
    """Rows: estimator, median and mean over groups, episodes to match 1,000 on-policy ones, the paper's number."""
    rows = []
    for name, (label, paper, _) in ESTIMATORS.items():
        values = found[name][:, SPACINGS.index(SHOWN)]
        median = np.median(values)
        printed = "" if paper is None else f"{paper:.3f}"
        rows.append((label, f"{median:.3f}", f"{values.mean():.3f}", f"{1000 * median:.0f}", printed))
    return rows


HEADER = ("estimator", "median", "mean", "episodes to match", "paper")


def draw(found: dict[str, np.ndarray], n_policies: int, path: Path) -> None:
    """Left: every group at the table's spacing. Right: the median against the spacing of the checkpoints."""
    plt.rcParams.update({"font.size": 10, "svg.hashsalt": "manyfold"})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    shown = SPACINGS.index(SHOWN)
    for i, (name, (label, _, colour)) in enumerate(ESTIMATORS.items()):
        values = found[name][:, shown]
        jitter = np.linspace(-0.25, 0.25, len(values))
        left.scatter(values, i + jitter, s=9, color=colour, alpha=0.5, linewidths=0)
        left.plot([np.median(values)] * 2, [i - 0.38, i + 0.38], color=colour, linewidth=2.5)
        right.plot(SPACINGS, np.median(found[name], axis=0), color=colour, marker="o", markersize=4, label=label)
    left.set_yticks(range(len(ESTIMATORS)), [label for label, _, _ in ESTIMATORS.values()])
    left.invert_yaxis()
    left.set_xscale("log")
    left.set_xlabel("variance relative to on-policy MC (line: median, dots: groups)")
    left.set_title("Checkpoints close together")
    right.set_yscale("log")
    right.set_ylim(None, 1e3)
    right.set_xlabel("policy-gradient steps between neighbouring checkpoints")
    right.set_title("The further apart, the harder to share")
    right.legend(fontsize=8, frameon=False)
    for axes, line in ((left, left.axvline), (right, right.axhline)):
        line(1 / n_policies, color="#999999", linestyle=":", linewidth=1, zorder=0)
        axes.grid(alpha=0.25)
    right.annotate("1/K: perfect sharing", (5, 0.93 / n_policies), va="top", fontsize=8)
    for suffix in ("png", "svg"):
        with whole(path.with_suffix(f".{suffix}")) as part:
            figure.savefig(part, format=suffix, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.demo",
        description="Exact relative variance of every estimator of K policies on Gridworld: table and figure. "
        "Relative variance 0.1 means: a tenth of the episodes gives the accuracy of running every policy by itself.",
    )
    parser.add_argument("--m", type=int, default=10, help="width, height and horizon of Gridworld (default 10)")
    parser.add_argument("--policies", type=int, default=10, help="target policies K (default 10)")
    parser.add_argument("--groups", type=int, default=30, help="groups, each with its own rewards (default 30)")
    parser.add_argument("--out", type=Path, default=Path("data/demo"), help="folder of the results (default data/demo)")
    args = parser.parse_args(arguments)
    try:
        check_size(args.m)
        for name in ("policies", "groups"):
            if getattr(args, name) < 1:
                raise ValueError(f"--{name} is {getattr(args, name)}, expected a whole number of at least 1")
        found = relative_variances(args.m, args.policies, args.groups)
        rows = table(found)
        draw(found, args.policies, args.out / "relative_variance")
        lines = ["| " + " | ".join(row) + " |" for row in (HEADER, ["---"] * len(HEADER), *rows)]
        with whole(args.out / "relative_variance.md") as part:
            part.write_text("\n".join(lines) + "\n")
    except (ValueError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2

    title = f"Gridworld {args.m**3:,}: exact relative variance, K = {args.policies}, {args.groups} groups"
    printed = Table(title=title, caption="episodes to match: 1,000 on-policy episodes in total")
    for column in HEADER:
        printed.add_column(column, justify="left" if column == "estimator" else "right")
    for row in rows:
        printed.add_row(*row)
    Console().print(printed)
    mpe, baseline = (float(np.median(found[name][:, SPACINGS.index(SHOWN)])) for name in ("mpe", "mpe_baseline"))
    print(f"One shared behavior policy needs {mpe:.0%} of on-policy's episodes; with q as a baseline {baseline:.1%}.")
    print(f"Figure: {args.out / 'relative_variance.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
