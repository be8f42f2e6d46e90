"""Stage `report`: the paper's tables and figures for one environment, its numbers beside ours.

`python -m tasks.report --env gridworld-1000` prints what the stage made; `python -m tasks.report --all` joins all
environments that have been evaluated: one table over all, Figure 1 with both Gridworlds, Figure 2 with the robots, and
the paper's tables cell by cell.
"""

import argparse
import csv
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from manyfold import environments
from manyfold.evaluation import ESTIMATORS
from tasks.figures import COLOURS, MARKERS, plt, save, style
from tasks.files import whole
from tasks.params import ROOT
from tasks.shards import whole_folder

# The paper's tables: relative variance, and episodes to match 1,000 on-policy ones
PAPER_VARIANCE = {
    "gridworld-1000": {"on_policy": 1.0, "mpe": 0.125, "odi": 0.637, "son": 1.289, "sodi": 2.073},
    "gridworld-27000": {"on_policy": 1.0, "mpe": 0.129, "odi": 0.601, "son": 1.561, "sodi": 3.532},
    "ant": {"on_policy": 1.0, "mpe": 0.115, "odi": 0.606, "son": 1.144, "sodi": 1.548},
    "hopper": {"on_policy": 1.0, "mpe": 0.114, "odi": 0.580, "son": 1.287, "sodi": 1.413},
    "inverted-double-pendulum": {"on_policy": 1.0, "mpe": 0.111, "odi": 0.494, "son": 0.882, "sodi": 1.582},
    "inverted-pendulum": {"on_policy": 1.0, "mpe": 0.124, "odi": 0.565, "son": 0.889, "sodi": 1.250},
    "walker": {"on_policy": 1.0, "mpe": 0.094, "odi": 0.590, "son": 0.759, "sodi": 1.056},
}
PAPER_EPISODES = {
    "gridworld-1000": {"on_policy": 1000, "mpe": 126, "odi": 632, "son": 1264, "sodi": 2046},
    "gridworld-27000": {"on_policy": 1000, "mpe": 131, "odi": 629, "son": 1568, "sodi": 3501},
    "ant": {"on_policy": 1000, "mpe": 125, "odi": 626, "son": 1171, "sodi": 1701},
    "hopper": {"on_policy": 1000, "mpe": 115, "odi": 583, "son": 1253, "sodi": 1413},
    "inverted-double-pendulum": {"on_policy": 1000, "mpe": 103, "odi": 464, "son": 835, "sodi": 1547},
    "inverted-pendulum": {"on_policy": 1000, "mpe": 111, "odi": 530, "son": 916, "sodi": 1166},
    "walker": {"on_policy": 1000, "mpe": 97, "odi": 542, "son": 749, "sodi": 1033},
}
TITLES = {"gridworld-1000": "Gridworld 1,000", "gridworld-27000": "Gridworld 27,000"}


class Curve(NamedTuple):
    """Relative error against total episodes, mean and standard error over groups."""

    episodes: np.ndarray
    mean: np.ndarray
    error: np.ndarray


def title(env: str) -> str:
    return TITLES.get(env, env.replace("-", " ").title())


def read_metrics(env: str, data: Path) -> dict[str, Any]:
    """What the stage `evaluate` found."""
    path = data / "evaluate" / env / "metrics.json"
    if not path.exists():
        raise ValueError(f"{path}: no such file, expected the stage `evaluate` to have run")
    found = dict(json.loads(path.read_text()))
    if "values" not in found:
        raise ValueError(f"{path}: no `values`, expected those of this version; run the stage `evaluate` again")
    return found


def read_curves(env: str, data: Path) -> dict[tuple[str, str], Curve]:
    """By estimator and policy ("all" for their mean)."""
    found: dict[tuple[str, str], list[list[float]]] = {}
    with (data / "evaluate" / env / "curves.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            numbers = [float(row[name]) for name in ("episodes", "relative_error", "standard_error")]
            found.setdefault((row["estimator"], row["policy"]), []).append(numbers)
    return {key: Curve(*np.array(rows).T) for key, rows in found.items()}


# --- tables -----------------------------------------------------------------------------------------------------------


def variance_rows(metrics: dict[str, Any]) -> list[tuple[str, ...]]:
    """Relative variance of every estimator, header first."""
    paper = PAPER_VARIANCE[metrics["env"]]
    rows = [("estimator", "mean", "standard error", "median", "exact, same policies", "paper")]
    for name, estimator in ESTIMATORS.items():
        numbers = [
            metrics[key][name]
            for key in (
                "relative_variance",
                "relative_variance_se",
                "relative_variance_median",
                "exact_relative_variance",
            )
        ]
        rows.append((estimator.label, *(text(x) for x in numbers), text(paper.get(name))))
    return rows


def episode_rows(metrics: dict[str, Any]) -> list[tuple[str, ...]]:
    """Episodes to match on-policy MC, header first."""
    paper = PAPER_EPISODES[metrics["env"]]
    rows = [("estimator", "episodes to match", "paper")]
    for name, estimator in ESTIMATORS.items():
        rows.append((estimator.label, f"{metrics['episodes_to_match'][name]:.0f}", text(paper.get(name), 0)))
    return rows


def cell_rows(found: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Every cell of the paper's two tables beside ours, header first."""
    header = ("environment", "estimator", "paper", "ours, mean", "median", "difference")
    rows = [(*header, "episodes, paper", "ours", "difference")]
    for metrics in found:
        env = metrics["env"]
        for name in PAPER_VARIANCE[env]:
            if name == "on_policy":
                continue
            paper, ours = PAPER_VARIANCE[env][name], metrics["relative_variance"][name]
            episodes, match = PAPER_EPISODES[env][name], metrics["episodes_to_match"][name]
            variance = (
                text(paper),
                text(ours),
                text(metrics["relative_variance_median"][name]),
                f"{ours - paper:+.3f}",
            )
            count = (f"{episodes}", f"{match:.0f}", f"{match - episodes:+.0f}")
            rows.append((title(env), ESTIMATORS[name].label, *variance, *count))
    return rows


def policy_rows(found: list[dict[str, Any]], data: Path) -> list[tuple[str, ...]]:
    """What the policies are worth, how well that is known, and whether the plans' promises were kept, header first."""
    rows = [("environment", "J", "apart in a group", "truth's error", "MPE expected", "found")]
    for metrics in found:
        values, share = metrics["values"], metrics.get("truth", {"share": 0})["share"]
        apart = f"{values['lowest']:.1f} to {values['highest']:.1f}", f"{values['spread']:.1f}"
        kept = expected(metrics["env"], data), f"{metrics['relative_variance']['mpe']:.1%}"
        rows.append((title(metrics["env"]), *apart, f"{share:.0%}", *kept))
    return rows


def text(x: float | None, digits: int = 3) -> str:
    return "" if x is None else f"{x:.{digits}f}"


def markdown(rows: list[tuple[str, ...]]) -> str:
    lines = [rows[0], ("---",) * len(rows[0]), *rows[1:]]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def latex(rows: list[tuple[str, ...]]) -> str:
    body = [" & ".join(cell.replace("%", r"\%") for cell in row) + r" \\" for row in rows]
    columns = "l" + "r" * (len(rows[0]) - 1)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\hline", body[0], r"\hline", *body[1:], r"\hline", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def comma_separated(rows: list[tuple[str, ...]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def write_table(rows: list[tuple[str, ...]], path: Path) -> None:
    for suffix, form in ((".md", markdown), (".csv", comma_separated), (".tex", latex)):
        with whole(path.with_suffix(suffix)) as part:
            part.write_text(form(rows))


# --- figures ----------------------------------------------------------------------------------------------------------


def plot_errors(axes: Any, curves: dict[tuple[str, str], Curve], policy: str, markers: bool = True) -> None:
    """One panel of Figure 1: every estimator's relative error."""
    for name, estimator in ESTIMATORS.items():
        n, mean, error = curves[name, policy]
        every = np.unique(np.geomspace(1, len(n), 9).astype(int) - 1).tolist()
        look = {"marker": MARKERS[name], "markevery": every, "markersize": 4} if markers else {}
        axes.plot(n, mean, color=COLOURS[name], label=estimator.label, linewidth=1.4, **look)
        axes.fill_between(n, np.maximum(mean - error, 1e-6), mean + error, color=COLOURS[name], alpha=0.2, linewidth=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(curves["on_policy", "all"].episodes[[0, -1]])


def draw_errors(envs: list[str], data: Path, path: Path) -> None:
    """Figures 1 and 2: relative error against total episodes, a panel for each environment."""
    style()
    columns = min(len(envs), 3)
    rows = -(-len(envs) // columns)
    size = (min(5.6, 14 / columns) * columns + 1.6, 4.6 * rows)
    figure, panels = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axes in panels.flat[len(envs) :]:
        axes.set_visible(False)
    for env, axes in zip(envs, panels.flat[: len(envs)], strict=True):
        metrics = read_metrics(env, data)
        plot_errors(axes, read_curves(env, data), "all")
        axes.set_title(f"{title(env)}: {metrics['groups']} groups x {metrics['runs']} runs")
        axes.set_xlabel("total episodes")
        axes.set_ylabel("relative error")
    legend = panels.flat[len(envs) - 1].legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    legend.set_in_layout(len(envs) == panels.size)  # in an empty panel it needs no room of its own
    save(figure, path)


def draw_policies(env: str, data: Path, path: Path) -> None:
    """The same for each target policy."""
    style()
    metrics, curves = read_metrics(env, data), read_curves(env, data)
    columns = min(5, metrics["policies"])
    rows = -(-metrics["policies"] // columns)
    size = (3.1 * columns, 2.9 * rows + 0.8)
    figure, panels = plt.subplots(
        rows, columns, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for k, axes in enumerate(panels.flat):
        if k < metrics["policies"]:
            plot_errors(axes, curves, str(k), markers=False)
            axes.set_title(f"policy {k}", fontsize=10)
            axes.set_xlabel("total episodes" if k + columns >= metrics["policies"] else "")
        else:
            axes.set_visible(False)
    figure.supylabel("relative error")
    figure.suptitle(f"{title(env)}: each target policy, from the earliest checkpoint to the latest")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    save(figure, path, 100)


# --- the stage --------------------------------------------------------------------------------------------------------


def expected(env: str, data: Path) -> str:
    """MPE's relative variance as predicted from logged data alone."""
    plans = [json.loads(path.read_text()) for path in sorted((data / "behavior" / env).glob("group-*/behavior.json"))]
    foreseen = [plan["relative_variance"] for plan in plans if plan["relative_variance"] is not None]
    return f"{np.mean(foreseen):.1%}" if len(foreseen) == len(plans) else "an explosion in some groups instead"


def verdict(env: str, data: Path) -> str:
    """What was expected before any online episode, and what was found."""
    found = read_metrics(env, data)
    mpe, baseline = (found["relative_variance"][name] for name in ("mpe", "mpe_baseline"))
    episodes = found["episodes_to_match"]
    return (
        f"Expected {expected(env, data)} of on-policy's variance from logged data alone, found {mpe:.1%}: "
        f"{episodes['mpe']:.0f} episodes of one behavior policy match {found['episodes']:,} on-policy ones; "
        f"with q as a baseline {baseline:.1%}, {episodes['mpe_baseline']:.0f} episodes."
    )


def build(env: str, data: Path) -> Path:
    """All tables and figures of one environment, whole or not at all."""
    metrics = read_metrics(env, data)
    out = data / "report" / env
    with whole_folder(out) as folder:
        write_table(variance_rows(metrics), folder / "relative_variance")
        write_table(episode_rows(metrics), folder / "episodes_to_match")
        draw_errors([env], data, folder / "relative_error")
        draw_policies(env, data, folder / "policies")
        (folder / "verdict.txt").write_text(verdict(env, data) + "\n")
    return out


def build_all(data: Path) -> Path:
    """Tables over all environments that have been evaluated, Figures 1 and 2, and the first plan's picture."""
    envs = [env for env in environments.ENVS if (data / "evaluate" / env / "metrics.json").exists()]
    if not envs:
        raise ValueError(f"{data / 'evaluate'}: no metrics.json, expected the stage `evaluate` to have run")
    found = [read_metrics(env, data) for env in envs]
    header = ("relative variance", *(e.label for e in ESTIMATORS.values()))
    rows, episodes = [header], [("episodes to match", *header[1:])]
    for env, metrics in zip(envs, found, strict=True):
        for who, variance, match in (
            ("ours", metrics["relative_variance"], metrics["episodes_to_match"]),
            ("paper", PAPER_VARIANCE[env], PAPER_EPISODES[env]),
        ):
            rows.append((f"{title(env)}, {who}", *(text(variance.get(name)) for name in ESTIMATORS)))
            episodes.append((f"{title(env)}, {who}", *(text(match.get(name), 0) for name in ESTIMATORS)))
    out = data / "report" / "all"
    with whole_folder(out) as folder:
        write_table(rows, folder / "relative_variance")
        write_table(episodes, folder / "episodes_to_match")
        write_table(cell_rows(found), folder / "cells")
        write_table(policy_rows(found, data), folder / "policies")
        for name, some in (("figure_1", environments.GRIDWORLDS), ("figure_2", environments.ROBOTS)):
            if shown := [env for env in envs if env in some]:
                draw_errors(shown, data, folder / name)
        shutil.copyfile(data / "behavior" / envs[0] / "group-00" / "behavior.png", folder / "behavior.png")
    return out


def show(env: str, data: Path) -> None:
    """The result, for a person."""
    metrics, out = read_metrics(env, data), data / "report" / env
    variance, episodes = variance_rows(metrics), episode_rows(metrics)
    counts = f"{metrics['groups']} groups x {metrics['runs']} runs, {metrics['policies']} policies"
    table = Table(title=f"{title(env)}: {counts}")
    for column in (*(f"{name}" for name in variance[0]), *episodes[0][1:]):
        table.add_column(column, justify="right" if table.columns else "left")
    for left, right in zip(variance[1:], episodes[1:], strict=True):
        table.add_row(*left, *right[1:])
    Console(width=120).print(table)
    print((out / "verdict.txt").read_text(), end="")
    print(f"Figures: {out / 'relative_error.png'}, {out / 'policies.png'}; tables beside them.")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.report",
        description="Prints the tables of the stage `report` for one environment, or joins all of them.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--env", help=f"one of {', '.join(environments.ENVS)}")
    what.add_argument("--all", action="store_true", help="join all environments in data/report/all")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of all data (default data)")
    args = parser.parse_args(arguments)
    try:
        if args.all:
            out = build_all(args.data)
            for name in ("relative_variance", "episodes_to_match", "policies"):
                print((out / f"{name}.md").read_text())
            print(f"Figures: {', '.join(str(path) for path in sorted(out.glob('figure_*.png')))}")
        else:
            environments.check_env(args.env)
            show(args.env, args.data)
    except (ValueError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
