"""Which interval of training steps puts Gridworld 1,000 where the paper is: `python -m tasks.calibrate`.

Everything depends on how far apart the target policies are, and the paper does not say. So the rule is chosen by the
baselines alone: the start and width whose median ODI, SON and SODI come nearest to the paper's, on a log scale. MPE's
column is computed for the figure, and takes no part in the choice.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from manyfold import exact
from manyfold.arrays import Array, check_number
from manyfold.envs import Gridworld
from manyfold.estimate.registry import ESTIMATORS
from manyfold.files import atomic
from manyfold.tables import Rows, markdown
from manyfold.train import ppo, targets
from manyfold.train.ppo import Position
from manyfold.train.targets import Plan, Rule, Training
from tasks import commands, studies
from tasks.figures import plt, save, style
from tasks.targets import read_rule

STUDY, M = "gridworld-1000", 10
STARTS = ((0, 2000), (1000, 5000), (2000, 6000), (3000, 7000), (4000, 8000), (6000, 10000))
WIDTHS = (3000, 4000, 5000, 6000, 7000, 7500, 8000, 8500, 9000, 10000, 12000)
PAPER = {"odi": 0.637, "son": 1.289, "sodi": 2.073}  # the baselines; MPE's number must not be here
LABELS = {"odi": "ODI", "son": "SON", "sodi": "SODI", "mpe": "MPE", "mpe_baseline": "MPE + exact q baseline"}


def tables(groups: list[int], last_step: float) -> list[dict[Position, Array]]:
    """Every checkpoint of every group's training as a table: position -> `[T, S, A]`."""
    torch.set_num_threads(1)
    env = Gridworld.draw(M, 0)
    config = targets.config(env)
    updates = int(last_step // config.batch) + 1
    every = tuple(Position(u, e) for u in range(1, updates + 1) for e in range(1, config.epochs + 1))
    plan = Plan((0.0, last_step), every, Position(0, 0), (Position(0, 0),))
    training = Training(env, STUDY, groups, [plan] * len(groups))
    console = Console(stderr=True)
    for _ in track(range(-(-updates // config.segment)), description="train", console=console):
        training.run_segment()
    found = []
    for drawn in training.results():
        initial = drawn.companion.table()[0]
        found.append({Position(0, 0): initial} | dict(zip(every, drawn.targets.table(), strict=True)))
    return found


def scan(policies: int, history: int, groups: int) -> dict[str, Array]:
    """Exact relative variances of every estimator; name -> `[starts, widths, groups]`."""
    trained = tables(list(range(groups)), max(high for _, high in STARTS) + max(WIDTHS))
    found = {name: np.empty((len(STARTS), len(WIDTHS), groups)) for name in LABELS}
    for group in track(range(groups), description="scan ", console=Console(stderr=True)):
        mdp = Gridworld.draw(M, group).mdp()
        for i, start in enumerate(STARTS):
            for j, width in enumerate(WIDTHS):
                plan = targets.draw(Rule(policies, start, width, history), ppo.DISCRETE, STUDY, group)
                drawn = np.stack([trained[group][position] for position in plan.targets])
                relative = exact.relative_variances(exact.estimator_variances(mdp, drawn))
                for name, values in found.items():
                    values[i, j, group] = relative[name]
    return found


def distance(baselines: dict[str, Array]) -> Array:
    """How far the baselines' medians are from the paper's: root mean square of the log ratios, `[starts, widths]`."""
    logs = [np.log(np.median(baselines[name], axis=-1) / paper) for name, paper in PAPER.items()]
    return np.sqrt(np.mean(np.square(logs), axis=0))


def choose(baselines: dict[str, Array]) -> tuple[int, int]:
    """The start and width (as indices) that come nearest."""
    far = distance(baselines)
    i, j = np.unravel_index(int(far.argmin()), far.shape)
    return int(i), int(j)


def rows(found: dict[str, Array]) -> Rows:
    """Start, width, the medians of the baselines, and their distance from the paper's; a star at the choice."""
    baselines = {name: found[name] for name in PAPER}
    chosen, far = choose(baselines), distance(baselines)
    out = []
    for i, start in enumerate(STARTS):
        for j, width in enumerate(WIDTHS):
            medians = [f"{np.median(baselines[name][i, j]):.3f}" for name in PAPER]
            star = "*" if (i, j) == chosen else ""
            out.append((f"{start[0]:,} to {start[1]:,}", f"{width:,}", *medians, f"{far[i, j]:.2f}{star}"))
    return out


HEADER = ("start", "width", *(LABELS[name] for name in PAPER), "distance")


def draw(found: dict[str, Array], path: Path) -> None:
    """Medians and quartiles over groups against the interval's width, a panel for each start."""
    style()
    chosen = choose({name: found[name] for name in PAPER})
    figure, panels = plt.subplots(2, len(STARTS) // 2, figsize=(13, 8), sharex=True, sharey=True, layout="constrained")
    for i, (start, axes) in enumerate(zip(STARTS, panels.flat, strict=True)):
        for name, label in LABELS.items():
            low, median, high = np.percentile(found[name][i], [25, 50, 75], axis=-1)
            axes.plot(WIDTHS, median, color=ESTIMATORS[name].colour, marker="o", markersize=3.5, label=label)
            axes.fill_between(WIDTHS, low, high, color=ESTIMATORS[name].colour, alpha=0.15, linewidth=0)
            if name in PAPER:
                axes.axhline(PAPER[name], color=ESTIMATORS[name].colour, linestyle="--", linewidth=0.8)
        axes.axhline(1, color="#000000", linewidth=0.8)
        axes.set_yscale("log")
        axes.set_ylim(2e-3, 3e3)
        axes.set_title(f"starts at {start[0]:,} to {start[1]:,}")
        if i == chosen[0]:
            axes.axvline(WIDTHS[chosen[1]], color="#666666", linestyle=":", linewidth=1.5)
            axes.annotate("chosen", (WIDTHS[chosen[1]], 1.2e3), fontsize=9, ha="center")
    figure.supxlabel("width (training steps)")
    figure.supylabel("variance relative to on-policy MC")
    panels[0, 0].legend(fontsize=8, frameon=False, loc="upper left")
    figure.suptitle("Median and quartiles over groups; dashed: the paper's ODI, SON and SODI; black: on-policy MC")
    save(figure, path)


def main(arguments: list[str] | None = None) -> int:
    about = (
        "Exact relative variance on Gridworld 1,000 against the start and width of the interval that targets are drawn "
        "from; says which of them comes nearest to the paper's baselines (MPE is not looked at)."
    )
    parser = commands.parser("calibrate", about, study=STUDY)
    parser.add_argument("--groups", type=int, default=30, help="groups (default 30)")
    args = parser.parse_args(arguments)

    def work() -> None:
        check_number("--groups", args.groups, 1, 10_000)
        _, rule = read_rule(studies.read(args.study))
        out = args.data / "calibrate"
        out.mkdir(parents=True, exist_ok=True)  # before the work, not after it
        found = scan(rule.policies, rule.history, args.groups)
        with atomic(out / "calibration.md") as part:
            part.write_text(markdown([HEADER, *rows(found)]))
        draw(found, out / "calibration")
        printed = ", ".join(map(str, PAPER.values()))
        commands.show(f"Medians over {args.groups} groups; the paper's: {printed}", [HEADER, *rows(found)])
        i, j = choose({name: found[name] for name in PAPER})
        print(f"Nearest to the paper's baselines: start {list(STARTS[i])}, width {WIDTHS[j]}.")
        print(f"params.yaml has start {list(rule.start)}, width {rule.width}. Figure: {out / 'calibration.png'}")

    return commands.guarded("calibrate", work)


if __name__ == "__main__":
    sys.exit(main())
