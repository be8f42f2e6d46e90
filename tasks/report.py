"""Stage `report`: the paper's tables and figures for one study, its numbers beside ours where it has them.

`python -m tasks.report --study gridworld-1000` makes them and prints the result; `--all` joins all studies that have
been evaluated: one table over all, the paper's Figures 1 and 2, and its tables cell by cell.
"""

import csv
import json
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyfold.estimate.registry import ESTIMATORS
from manyfold.files import atomic_folder, write_text
from manyfold.tables import Rows, number, write_table
from tasks import commands, studies
from tasks.deciding import FIGURES, draw_decisions, read_decisions, sentences
from tasks.deciding import page as decision_page
from tasks.figures import plt, save, style
from tasks.page import Stages, page, read_fits
from tasks.pictures import draw_card, draw_plan
from tasks.processes import end_with_dvc
from tasks.studies import Study

PAGE = "page.html"


class Curve(NamedTuple):
    """Relative error against total episodes, mean and standard error over groups."""

    episodes: NDArray[np.float64]
    mean: NDArray[np.float64]
    error: NDArray[np.float64]


def paper(study: Study, column: int) -> dict[str, float]:
    """The paper's relative variances (column 0) or episodes to match (1), on-policy MC's included."""
    if study.paper is None:
        return {}
    found = {name: float(x[column]) for name, x in study.paper.items() if name in ESTIMATORS}
    return {"on_policy": (1.0, 1000.0)[column], **found}


def read_metrics(study: str, data: Path) -> dict[str, Any]:
    """What the stage `evaluate` found."""
    path = data / "evaluate" / study / "metrics.json"
    if not path.exists():
        raise ValueError(f"{path}: no such file, expected the stage `evaluate` to have run")
    found = dict(json.loads(path.read_text()))
    if "values" not in found:
        raise ValueError(f"{path}: no `values`, expected those of this version; run the stage `evaluate` again")
    return found


def read_curves(study: str, data: Path) -> dict[tuple[str, str], Curve]:
    """By estimator and policy ("all" for their mean)."""
    found: dict[tuple[str, str], list[list[float]]] = {}
    with (data / "evaluate" / study / "curves.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            numbers = [float(row[name]) for name in ("episodes", "relative_error", "standard_error")]
            found.setdefault((row["estimator"], row["policy"]), []).append(numbers)
    return {key: Curve(*np.array(rows).T) for key, rows in found.items()}


# --- tables -----------------------------------------------------------------------------------------------------------


def variance_rows(study: Study, metrics: dict[str, Any]) -> Rows:
    """Relative variance of every estimator, header first."""
    printed = paper(study, 0)
    header = (
        "estimator",
        "mean",
        "standard error",
        "median",
        "exact, same policies",
        "per step",
        "untrusted",
    )
    rows = [(*header, *(["paper"] if printed else []))]
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
        numbers.append(metrics.get("relative_variance_per_step", {}).get(name))  # results of an earlier version: none
        flagged = metrics.get("not_to_be_trusted", {}).get(name)
        cells = [number(printed.get(name))] if printed else []
        shares = "" if flagged is None else f"{flagged:.0%}"
        rows.append((estimator.label, *(number(x) for x in numbers), shares, *cells))
    return rows


def episode_rows(study: Study, metrics: dict[str, Any]) -> Rows:
    """Episodes to match on-policy MC, header first."""
    printed = paper(study, 1)
    rows = [("estimator", "episodes to match", "standard error", *(["paper"] if printed else []))]
    errors = metrics.get("episodes_to_match_se", {})  # results of an earlier version: none
    for name, estimator in ESTIMATORS.items():
        cells = [number(printed.get(name), 0)] if printed else []
        match, error = metrics["episodes_to_match"][name], errors.get(name)
        rows.append((estimator.label, f"{match:.0f}", number(error, 0), *cells))
    return rows


def cell_rows(found: list[tuple[Study, dict[str, Any]]]) -> Rows:
    """Every cell of the paper's two tables beside ours, header first."""
    header = ("environment", "estimator", "paper", "ours, mean", "median", "difference")
    rows = [(*header, "episodes, paper", "ours", "difference")]
    for study, metrics in found:
        episodes = paper(study, 1)
        for name, printed in paper(study, 0).items():
            if name == "on_policy":
                continue
            ours, match = metrics["relative_variance"][name], metrics["episodes_to_match"][name]
            variance = (
                number(printed),
                number(ours),
                number(metrics["relative_variance_median"][name]),
                f"{ours - printed:+.3f}",
            )
            count = (f"{episodes[name]:.0f}", f"{match:.0f}", f"{match - episodes[name]:+.0f}")
            rows.append((study.title, ESTIMATORS[name].label, *variance, *count))
    return rows


def policy_rows(found: list[tuple[Study, dict[str, Any]]], data: Path) -> Rows:
    """What the policies are worth, how well that is known, and whether the plans' promises were kept, header first."""
    rows = [("environment", "J", "apart in a group", "truth's error", "MPE expected", "found")]
    for study, metrics in found:
        values, share = metrics["values"], metrics.get("truth", {"share": 0})["share"]
        apart = f"{values['lowest']:.1f} to {values['highest']:.1f}", f"{values['spread']:.1f}"
        kept = expected(study, data), f"{metrics['relative_variance']['mpe']:.1%}"
        rows.append((study.title, *apart, f"{share:.0%}", *kept))
    return rows


# --- figures ----------------------------------------------------------------------------------------------------------


def plot_errors(axes: Any, curves: dict[tuple[str, str], Curve], policy: str, markers: bool = True) -> None:
    """One panel of Figure 1: every estimator's relative error."""
    for name, estimator in ESTIMATORS.items():
        if (name, policy) not in curves:  # results of an earlier version
            continue
        n, mean, error = curves[name, policy]
        every = np.unique(np.geomspace(1, len(n), 9).astype(int) - 1).tolist()
        look = {"marker": estimator.marker, "markevery": every, "markersize": 4} if markers else {}
        axes.plot(n, mean, color=estimator.colour, label=estimator.label, linewidth=1.4, **look)
        low = np.maximum(mean - error, 1e-6)
        axes.fill_between(n, low, mean + error, color=estimator.colour, alpha=0.2, linewidth=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(curves["on_policy", "all"].episodes[[0, -1]])


def draw_errors(shown: list[Study], data: Path, path: Path) -> None:
    """Figures 1 and 2: relative error against total episodes, a panel for each study."""
    style()
    columns = min(len(shown), 3)
    rows = -(-len(shown) // columns)
    size = (min(5.6, 14 / columns) * columns + 1.6, 4.6 * rows)
    figure, panels = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axes in panels.flat[len(shown) :]:
        axes.set_visible(False)
    for study, axes in zip(shown, panels.flat[: len(shown)], strict=True):
        metrics = read_metrics(study.name, data)
        plot_errors(axes, read_curves(study.name, data), "all")
        axes.set_title(f"{study.title}: {metrics['groups']} groups x {metrics['runs']} runs")
        axes.set_xlabel("total episodes")
        axes.set_ylabel("relative error")
    legend = panels.flat[len(shown) - 1].legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    legend.set_in_layout(len(shown) == panels.size)  # in an empty panel it needs no room of its own
    save(figure, path)


def draw_policies(study: Study, data: Path, path: Path) -> None:
    """The same for each target policy."""
    style()
    metrics, curves = read_metrics(study.name, data), read_curves(study.name, data)
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
    figure.suptitle(f"{study.title}: each target policy, from the earliest checkpoint to the latest")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    save(figure, path, 100)


# --- the stage --------------------------------------------------------------------------------------------------------


def plans(study: Study, data: Path) -> list[dict[str, Any]]:
    """What the stage `behavior` promised for each group."""
    folder = data / "behavior" / study.name
    return [json.loads(path.read_text()) for path in sorted(folder.glob("group-*/behavior.json"))]


def expected(study: Study, data: Path, of: str = "mpe") -> str:
    """An estimator's relative variance as predicted from logged data alone; nothing where the plans are not there."""
    promised = plans(study, data)
    foreseen = [plan["relative_variances"][of] for plan in promised]
    if not promised:
        return ""
    return f"{np.mean(foreseen):.1%}" if None not in foreseen else "something unknown in some groups"


def verdict(study: Study, data: Path) -> str:
    """What was expected before any online episode, and what was found."""
    found = read_metrics(study.name, data)
    variance, episodes = found["relative_variance"], found["episodes_to_match"]
    sentences = [
        f"Of on-policy's variance, logged data alone let expect {expected(study, data, of)} of {name}, found "
        f"{variance[of]:.1%}: {episodes[of]:.0f} {what} match {found['episodes']:,} on-policy ones"
        for of, name, what in (("pooled", "pooled", "episodes"), ("mpe", "MPE", "episodes of one behavior policy"))
    ]
    least = f"with q as a baseline {variance['mpe_baseline']:.1%}, {episodes['mpe_baseline']:.0f} episodes"
    advised = [plan["recommended"] for plan in plans(study, data)]
    counts = ", ".join(f"{x or 'a pilot'} in {advised.count(x)}" for x in dict.fromkeys(advised))
    return f"{'. '.join(sentences)}; {least}. Recommended before any of it: {counts} of {len(advised)} groups."


def read_card(study: Study, data: Path) -> dict[str, Any]:
    """Of group 0's logged data."""
    return dict(json.loads((data / "offline" / study.name / "group-00" / "card.json").read_text()))


def stages_of(study: Study, data: Path) -> Stages:
    """What the page says of the stages."""
    metrics = read_metrics(study.name, data)
    tables, curves = (variance_rows(study, metrics), episode_rows(study, metrics)), read_curves(study.name, data)
    card, fits = read_card(study, data), read_fits(study, data)
    return Stages(metrics, verdict(study, data), tables, curves, plans(study, data), card, fits)


def build(study: Study, data: Path) -> Path:
    """All tables and figures of one study, and its page, atomically."""
    metrics, decided = read_metrics(study.name, data), read_decisions(study.name, data)
    out = data / "report" / study.name
    with atomic_folder(out) as folder:
        write_table(variance_rows(study, metrics), folder / "relative_variance")
        write_table(episode_rows(study, metrics), folder / "episodes_to_match")
        draw_errors([study], data, folder / "relative_error")
        draw_policies(study, data, folder / "policies")
        draw_plan(plans(study, data)[0], folder / "behavior")
        card = read_card(study, data)
        if card["loggers"]:
            draw_card(card, folder / "card")
        (folder / "verdict.txt").write_text(verdict(study, data) + "\n")
        if decided:
            draw_decisions(decided, f"Group 0 of {study.title}", folder)
            (folder / "decision.md").write_text(decision_page(decided))
            (folder / "decision.txt").write_text(sentences(decided) + "\n")
        write_text(folder / PAGE, page(study, stages_of(study, data), decided))
    return out


def build_all(data: Path) -> Path:
    """Tables over all studies that have been evaluated, the paper's figures, and the first plan's picture."""
    every = [studies.read(name) for name in studies.names()]
    found = [(s, read_metrics(s.name, data)) for s in every if (data / "evaluate" / s.name / "metrics.json").exists()]
    if not found:
        raise ValueError(f"{data / 'evaluate'}: no metrics.json, expected the stage `evaluate` to have run")
    header = ("relative variance", *(e.label for e in ESTIMATORS.values()))
    rows, episodes = [header], [("episodes to match", *header[1:])]
    for study, metrics in found:
        for who, variance, match in (
            ("ours", metrics["relative_variance"], metrics["episodes_to_match"]),
            ("paper", paper(study, 0), paper(study, 1)),
        ):
            if variance:
                rows.append((f"{study.title}, {who}", *(number(variance.get(name)) for name in ESTIMATORS)))
                episodes.append((f"{study.title}, {who}", *(number(match.get(name), 0) for name in ESTIMATORS)))
    out = data / "report" / "all"
    with atomic_folder(out) as folder:
        write_table(rows, folder / "relative_variance")
        write_table(episodes, folder / "episodes_to_match")
        write_table(cell_rows(found), folder / "cells")
        if all(plans(study, data) for study, _ in found):
            write_table(policy_rows(found, data), folder / "policies")
        else:  # without the cached data of every study, what is there is kept
            for path in out.glob("policies.*"):
                shutil.copy(path, folder)
        for figure in sorted({study.paper["figure"] for study, _ in found if study.paper}):
            shown = [study for study, _ in found if study.paper and study.paper["figure"] == figure]
            draw_errors(shown, data, folder / f"figure_{figure}")
        picture = data / "report" / found[0][0].name / "behavior.png"
        if picture.exists():
            shutil.copyfile(picture, folder / "behavior.png")
    return out


def show(study: Study, data: Path) -> None:
    """The result, for a person."""
    metrics, out = read_metrics(study.name, data), data / "report" / study.name
    both = zip(variance_rows(study, metrics), episode_rows(study, metrics), strict=True)
    counts = f"{metrics['groups']} groups x {metrics['runs']} runs, {metrics['policies']} policies"
    commands.show(f"{study.title}: {counts}", [(*left, right[1], *right[3:]) for left, right in both], 140)
    print((out / "verdict.txt").read_text(), end="")
    if decided := read_decisions(study.name, data):
        about = f"{decided.estimator}, {decided.final.episodes:,} episodes: who is best"
        commands.show(f"Group 0 of {study.title}, {about}", decided.final.rows, 140)
        print(sentences(decided))
        print(f"As a figure: {out / FIGURES[0]}.png; every pair and every look beside it.")
    print(f"The page: {out / PAGE}. Figures: {out / 'relative_error.png'}, {out / 'policies.png'}; tables beside them.")


def main(arguments: list[str] | None = None) -> int:
    if arguments is None:
        end_with_dvc()
    about = "Writes the tables and figures of one study, the paper's numbers beside ours, and prints the result."
    parser = commands.parser("report", about, study="gridworld-1000")
    parser.add_argument("--all", action="store_true", help="join all studies in data/report/all instead")
    args = parser.parse_args(arguments)

    def work() -> None:
        if args.all:
            out = build_all(args.data)
            for name in ("relative_variance", "episodes_to_match", "policies"):
                if (out / f"{name}.md").exists():
                    print((out / f"{name}.md").read_text())
            print(f"Figures: {', '.join(str(path) for path in sorted(out.glob('figure_*.png')))}")
        else:
            study = studies.read(args.study)
            build(study, args.data)
            show(study, args.data)

    return commands.guarded("report", work)


if __name__ == "__main__":
    sys.exit(main())
