"""How far apart may the policies be? `python -m tasks.sensitivity --study hopper`.

The whole chain for some groups of a study at several widths of the interval of training steps that targets are drawn
from, all else as in params.yaml but with fewer episodes: the relative variance of every estimator against the width.
A width that was cut off resumes where it stopped.
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from manyfold.arrays import Array, check_number
from manyfold.estimate import summary
from manyfold.estimate.registry import ESTIMATORS
from manyfold.tables import Rows, write_table
from tasks import commands, offline, q, q_hat, studies, targets
from tasks.evaluate import evaluate_pool, read_protocol
from tasks.figures import plt, save, style
from tasks.groups import Group
from tasks.report import paper
from tasks.stages import work_folder
from tasks.studies import Study, group_name

WIDTHS = (16_000, 8_500, 4_000, 2_500)  # the longest first, so that cores end at the same time
EPISODES = 600  # offline, and of each set of loggers online


def narrowed(study: Study, width: int, groups: int) -> Study:
    """The same study with another width, few groups and few episodes."""
    changes = {
        "targets": {"width": width, "groups": groups},
        "offline": {"episodes": EPISODES},
        "evaluate": {"pool": EPISODES, "match": min(study.params["evaluate"]["match"], EPISODES)},
    }
    params = {stage: {**section, **changes.get(stage, {})} for stage, section in study.params.items()}
    return replace(study, params=params)


def measure(study: Study, data: Path) -> Array:
    """Relative variances of the estimators at one width; `[groups, E]`."""
    torch.set_num_threads(1)
    for stage in (targets.STAGE, offline.STAGE, q.STAGE, q_hat.STAGE):
        if not (data / stage.name / study.name).exists():
            groups, work = stage.prepare(study, data)
            stage.run(study, list(range(groups)), work, data)
            stage.collect(study, groups, work, data)
    found = []
    for number in range(groups_of(study)):
        group = Group(study, number, data)
        work = data / "pools" / group_name(number)
        found.append(evaluate_pool(group, group.environment(), read_protocol(study), work, lambda done: None))
    return summary.relative_variances(np.stack([one.variances[0] for one in found]))


def groups_of(study: Study) -> int:
    """How many groups a study has."""
    return targets.read_rule(study)[0]


def rows_of(found: dict[int, Array]) -> Rows:
    """Medians and the largest over the groups, header first."""
    rows = [("width", *(e.label for e in ESTIMATORS.values()))]
    for width in sorted(found):
        middle, most = np.median(found[width], 0), found[width].max(0)
        rows.append((f"{width:,}", *(f"{a:.3f} ({b:.3f})" for a, b in zip(middle, most, strict=True))))
    return rows


def draw(study: Study, found: dict[int, Array], chosen: int, path: Path) -> None:
    """A line through the medians of every estimator, a dot for every group."""
    style()
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    widths, printed = sorted(found), paper(study, 0)
    for i, (name, estimator) in enumerate(ESTIMATORS.items()):
        values = np.stack([found[width][:, i] for width in widths])
        look: dict[str, Any] = {"color": estimator.colour, "marker": estimator.marker}
        axes.plot(widths, np.median(values, 1), label=estimator.label, markersize=5, **look)
        if name != "on_policy":
            axes.plot(widths, values, linestyle="", alpha=0.3, markersize=3, **look)
        if name in printed and name != "on_policy":
            axes.axhline(printed[name], color=estimator.colour, linestyle="--", linewidth=0.8)
    axes.axvline(chosen, color="#666666", linestyle=":", linewidth=1.5)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(widths, [f"{width:,}" for width in widths])
    axes.minorticks_off()
    axes.set_xlabel("width of the interval of training steps (dotted: the rule's)")
    axes.set_ylabel("variance relative to on-policy MC")
    axes.set_title(f"{study.title}: medians and each of {len(values[0])} groups; dashed: the paper's")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save(figure, path)


def main(arguments: list[str] | None = None) -> int:
    about = (
        "Measures the relative variance of every estimator against how far apart the policies are: widths of "
        f"{', '.join(f'{width:,}' for width in WIDTHS)} training steps."
    )
    parser = commands.parser("sensitivity", about, study="hopper")
    parser.add_argument("--groups", type=int, default=3, help="groups of each width (default 3)")
    parser.add_argument("--workers", type=int, default=2, help="widths at once (default 2)")
    args = parser.parse_args(arguments)

    def work() -> None:
        study = studies.read(args.study)
        for name in ("groups", "workers"):
            check_number(f"--{name}", getattr(args, name), 1, 10_000)
        if studies.make_environment(study, 0).mdp() is not None:
            raise ValueError(f"--study {study.name} has exact variances (tasks.calibrate), expected one without")
        parts = {width: narrowed(study, width, args.groups) for width in WIDTHS}
        for part in parts.values():  # a width that is too small for K checkpoints is refused now, not after hours
            targets.STAGE.prepare(part, args.data)
        with ProcessPoolExecutor(args.workers) as workers:
            jobs = {}
            for width, part in parts.items():
                folder = work_folder("sensitivity", study, [width, args.groups, part.params], args.data)
                jobs[width] = workers.submit(measure, part, folder)
            progress = track(jobs, description="widths", console=Console(stderr=True))
            found = {width: jobs[width].result() for width in progress}
        path = args.data / "sensitivity" / study.name
        draw(study, found, study.params["targets"]["width"], path)
        write_table(rows_of(found), path, ("md",))
        commands.show(f"{study.title}: median over {args.groups} groups (largest)", rows_of(found), 140)
        print(f"Figure and table: {path}.png, .svg, .md")

    return commands.guarded("sensitivity", work)


if __name__ == "__main__":
    sys.exit(main())
