"""How far apart may the policies be? `python -m tasks.sensitivity --env hopper`.

The whole chain for some groups of a robot at several widths of the interval of training steps that targets are drawn
from, all else as in params.yaml but with fewer episodes: the relative variance of every estimator against the width.
A width that was cut off goes on where it stopped.
"""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from manyfold import environments, evaluation, stats
from manyfold.evaluation import ESTIMATORS
from manyfold.mdp import Array
from manyfold.targets import draw as draw_plan
from tasks import offline, q, q_hat, targets
from tasks.evaluate import kept, log_pool, read_protocol, read_robot
from tasks.figures import COLOURS, MARKERS, plt, save, style
from tasks.files import whole
from tasks.fits import Inputs
from tasks.params import ROOT, section
from tasks.report import PAPER_VARIANCE, markdown, title
from tasks.shards import group_name, whole_folder, work_folder

WIDTHS = (16_000, 8_500, 4_000, 2_500)  # the longest first, so that cores end at the same time
EPISODES = 600  # offline, and of each set of loggers online


def measure(env: str, width: int, groups: int, data: Path) -> Array:
    """Relative variances of the estimators at one width; `[groups, E]`."""
    torch.set_num_threads(1)
    _, rule = targets.read_rule(section("targets"))
    logging = replace(offline.read_rule(section("offline"), env), episodes=EPISODES)
    protocol = read_protocol(env)._replace(pool=EPISODES)
    rule, every = replace(rule, width=width), list(range(groups))
    if not (data / "targets" / env).exists():
        work = targets.work_folder(env, rule, data)
        targets.train_shard(env, every, rule, work)
        targets.collect(env, groups, work, data)
    for group in every:
        name = group_name(group)
        if not offline.is_whole(data / "offline" / env / name):
            with whole_folder(data / "offline" / env / name) as folder:
                offline.log_group(env, group, logging, data / "targets" / env / name, folder)
    for stage in (q, q_hat):
        if not (data / stage.STAGE.name / env).exists():
            stage.collect(env, groups, stage.run(env, every, data), data)
    found = []
    for group in every:
        robot, values = read_robot(Inputs(env, group, data)), {}
        for loggers in evaluation.LOGGERS:
            path = data / "pools" / group_name(group) / f"{loggers}.safetensors"
            pool = kept(path, lambda r=robot, g=group, x=loggers: log_pool(r, g, x, protocol))
            values |= {
                (loggers, e.returns): pool[e.returns.__name__] for e in ESTIMATORS.values() if e.loggers == loggers
            }
        found.append(evaluation.estimates(values, np.array([EPISODES])).variances)
    return stats.relative_variances(np.stack(found))


def rows_of(found: dict[int, Array]) -> list[tuple[str, ...]]:
    """Medians and the largest over the groups, header first."""
    rows = [("width", *(e.label for e in ESTIMATORS.values()))]
    for width in sorted(found):
        middle, most = np.median(found[width], 0), found[width].max(0)
        rows.append((f"{width:,}", *(f"{a:.3f} ({b:.3f})" for a, b in zip(middle, most, strict=True))))
    return rows


def draw(env: str, found: dict[int, Array], chosen: int, path: Path) -> None:
    """A line through the medians of every estimator, a dot for every group."""
    style()
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    widths = sorted(found)
    for i, (name, estimator) in enumerate(ESTIMATORS.items()):
        values = np.stack([found[width][:, i] for width in widths])
        look = {"color": COLOURS[name], "marker": MARKERS[name]}
        axes.plot(widths, np.median(values, 1), label=estimator.label, markersize=5, **look)
        if name != "on_policy":
            axes.plot(widths, values, linestyle="", alpha=0.3, markersize=3, **look)
        if name in PAPER_VARIANCE[env] and name != "on_policy":
            axes.axhline(PAPER_VARIANCE[env][name], color=COLOURS[name], linestyle="--", linewidth=0.8)
    axes.axvline(chosen, color="#666666", linestyle=":", linewidth=1.5)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(widths, [f"{width:,}" for width in widths])
    axes.minorticks_off()
    axes.set_xlabel("width of the interval of training steps (dotted: the rule's)")
    axes.set_ylabel("variance relative to on-policy MC")
    axes.set_title(f"{title(env)}: medians and each of {len(values[0])} groups; dashed: the paper's")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save(figure, path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.sensitivity",
        description="Measures the relative variance of every estimator on a robot against how far apart its policies "
        f"are: widths of {', '.join(f'{width:,}' for width in WIDTHS)} training steps.",
    )
    parser.add_argument("--env", default="hopper", help=f"one of {', '.join(environments.ROBOTS)} (default hopper)")
    parser.add_argument("--groups", type=int, default=3, help="groups of each width (default 3)")
    parser.add_argument("--workers", type=int, default=2, help="widths at once (default 2)")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of all data (default data)")
    args = parser.parse_args(arguments)
    try:
        if args.env not in environments.ROBOTS:
            raise ValueError(f"--env is {args.env!r}, expected one of {', '.join(environments.ROBOTS)}")
        for name in ("groups", "workers"):
            if getattr(args, name) < 1:
                raise ValueError(f"--{name} is {getattr(args, name)}, expected a whole number of at least 1")
        _, rule = targets.read_rule(section("targets"))
        for width in WIDTHS:  # one that is too small for K checkpoints is refused now, not after hours
            draw_plan(replace(rule, width=width), args.env, 0)
        seen = [section(stage) for stage in ("targets", "offline", "q", "q_hat", "behavior", "evaluate")]
        with ProcessPoolExecutor(args.workers) as workers:
            folders = {w: work_folder("sensitivity", args.env, [w, args.groups, seen], args.data) for w in WIDTHS}
            jobs = {w: workers.submit(measure, args.env, w, args.groups, folder) for w, folder in folders.items()}
            progress = track(jobs, description="widths", console=Console(stderr=True))
            found = {width: jobs[width].result() for width in progress}
        path = args.data / "sensitivity" / args.env
        draw(args.env, found, rule.width, path)
        with whole(path.with_suffix(".md")) as part:
            part.write_text(markdown(rows_of(found)))
    except (ValueError, OSError) as error:
        print(f"sensitivity: {error}", file=sys.stderr)
        return 2
    header, *rows = rows_of(found)
    table = Table(title=f"{title(args.env)}: median over {args.groups} groups (largest)")
    for column in header:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)
    print(f"Figure and table: {path}.png, .svg, .md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
