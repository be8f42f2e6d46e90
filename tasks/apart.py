"""How far apart may the policies be? `python -m tasks.apart` draws the relative variance of every estimator against it.

Gridworld 1,000: PPO's checkpoints from intervals of 3,000 to 150,000 training steps, with exact variances where they
are known. CartPole and Acrobot: checkpoints of one training by Stable-Baselines3 at three spacings. `--study hopper`
draws any one study of params.yaml instead. Targets, logged data and fits come from the stages themselves, for every
width in a folder of its own in data/.work/apart: what was cut off resumes, and another estimator repeats the evaluation
alone.
"""

import hashlib
import json
import sys
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rich.console import Console
from rich.progress import Progress

from manyfold import exact
from manyfold.arrays import Array, check_number
from manyfold.estimate import runs, summary
from manyfold.estimate.collecting import collect
from manyfold.estimate.evaluation import pool
from manyfold.estimate.loggers import logging_of
from manyfold.estimate.methods import LOGGERS, METHODS
from manyfold.estimate.registry import ESTIMATORS
from manyfold.streams import stream
from manyfold.tables import Rows, write_table
from tasks import checkpoints, commands, offline, q, q_hat, studies, targets
from tasks.behavior import design
from tasks.evaluate import cached
from tasks.figures import plt, save, style
from tasks.groups import Group
from tasks.params import ROOT
from tasks.studies import OURS, Study, group_name

LINES = ESTIMATORS | {"nothing_logged": replace(ESTIMATORS["pooled"], label="Pooled, nothing logged", marker="d")}
STAGES = (targets.STAGE, offline.STAGE, q.STAGE, q_hat.STAGE)
HIGHEST = 1e4  # of the figure; the table has everything


@dataclass(frozen=True)
class Amount:
    """How much is measured at each point."""

    groups: int
    logged: int | None  # offline episodes; None: as params.yaml says
    episodes: int  # online, of each set of loggers
    runs: int  # of that many episodes each
    pools: int  # the same, of pooled evaluation as the library has it


@dataclass(frozen=True)
class Training:
    """A training by Stable-Baselines3 and how far apart its checkpoints are taken, in epochs (204.8 steps each)."""

    env: str
    horizon: int
    spacings: tuple[int, ...]
    first: int  # the epoch at which sets begin that are not taken from the beginning on


GRIDWORLD = "gridworld-1000"
WIDTHS = (150_000, 80_000, 40_000, 20_000, 8_500, 3_000)  # the longest first, so that cores end at the same time
ROBOT_WIDTHS = (16_000, 8_500, 4_000, 2_500)
EXACT, SAMPLED, TRAINED = Amount(30, None, 2000, 10, 1), Amount(3, 600, 600, 1, 1), Amount(1, 400, 2000, 1, 5)
K = 8  # checkpoints of a training
# The widest set is a whole training from its first checkpoint on; the others begin with its third.
TRAININGS = {
    "CartPole": Training("CartPole-v1", 500, (20, 7, 2), 60),
    "Acrobot": Training("Acrobot-v1", 500, (40, 10, 2), 120),
}


@dataclass(frozen=True)
class Point:
    """One distance: a study with its targets, and where its results are."""

    steps: int
    study: Study
    amount: Amount
    data: Path  # of its stages
    measured: Path  # variances of this amount, by this code of the evaluation

    def done(self) -> float:
        """The share of the work that is finished: each stage counts as much as the evaluation."""
        stages = sum((self.data / stage.name / self.study.name).exists() for stage in STAGES)
        groups = len(list(self.measured.glob("group-*.safetensors"))) if stages == len(STAGES) else 0
        return (stages + groups / self.amount.groups) / (len(STAGES) + 1)


@dataclass(frozen=True)
class Panel:
    """One environment."""

    title: str
    axis: str  # what `steps` means
    points: list[Point]


def key_of(stages: tuple[str, ...], params: object) -> str:
    """A checksum of parameters and of the code that dvc.yaml says decides the numbers of these stages."""
    found = hashlib.sha256(json.dumps(params).encode())
    known = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    deps = {dep for stage in stages for dep in known[stage]["do"]["deps"] if dep.endswith(".py")}
    if "evaluate" in stages:
        deps |= {f"manyfold/estimate/{name}.py" for name in ("evaluation", "baselines", "shares")}  # of `library`
    for dep in sorted(deps | {OURS[stage] for stage in stages if stage in OURS}):
        found.update((ROOT / dep).read_bytes())
    return found.hexdigest()[:12]


def point_of(steps: int, study: Study, amount: Amount, data: Path) -> Point:
    """A study's point, with as much data as `amount` says."""
    logged = {} if amount.logged is None else {"episodes": amount.logged}
    study = replace(study, params={**study.params, "offline": {**study.params["offline"], **logged}})
    names = tuple(stage.name for stage in STAGES)
    key = key_of(names, [study.environment, *(study.params[name] for name in (*names, "behavior"))])
    folder = data / ".work" / "apart" / f"{study.name}-{steps}-{key}"
    return Point(steps, study, amount, folder, folder / f"evaluate-{key_of(('evaluate',), asdict(amount))}")


def widths_of(study: Study, widths: tuple[int, ...], amount: Amount, data: Path) -> Panel:
    """Targets from intervals of these widths; a width too small for K checkpoints is refused now, not after hours."""
    points = []
    for width in widths:
        rule = {**study.params["targets"], "width": width, "groups": amount.groups}
        narrowed = replace(study, params={**study.params, "targets": rule})
        targets.STAGE.prepare(narrowed, data)
        points.append(point_of(width, narrowed, amount, data))
    return Panel(study.title, "width of the interval (training steps)", points)


def checkpoints_of(title: str, training: Training, params: dict[str, Any], amount: Amount, data: Path) -> Panel:
    """Targets from one training by Stable-Baselines3, which is run here if its files are missing."""
    epochs = {spacing: [training.first + i * spacing for i in range(K)] for spacing in training.spacings}
    widest = max(training.spacings)
    epochs[widest] = [widest * (i + 1) for i in range(K)]
    files = {spacing: f".work/apart/checkpoints/{training.env}-{spacing}.safetensors" for spacing in epochs}
    checkpoints.save(training.env, training.horizon, {data / files[spacing]: epochs[spacing] for spacing in epochs})
    environment = {"gymnasium": {"id": training.env, "horizon": training.horizon}}
    points = []
    for spacing, file in files.items():
        own = {**params, "targets": {"source": file}}
        study = Study(f"{training.env}-{spacing}", title, environment, own, root=data.resolve())
        points.append(point_of(round(checkpoints.step_of(spacing)), study, amount, data))
    return Panel(title, "training steps between checkpoints", points)


def fit(point: Point) -> None:
    """Targets, logged data and fits, by the stages themselves, where they are missing."""
    study, data = point.study, point.data
    for stage in STAGES:
        if not (data / stage.name / study.name).exists():
            groups, work = stage.prepare(study, data)
            stage.run(study, list(range(groups)), work, data)
            stage.collect(study, groups, work, data)


def measure(point: Point) -> Array:
    """n times the variance of every estimator's estimate from n episodes; `[groups, E, K]`."""
    torch.set_num_threads(1)
    fit(point)
    study, data, found = point.study, point.data, []
    for number in range(point.amount.groups):
        file = point.measured / f"{group_name(number)}.safetensors"
        group = Group(study, number, data)
        one = cached(file, partial(variances, group, point.amount))
        one |= cached(point.measured / f"library-{number:02d}.safetensors", partial(library, group, point.amount))
        found.append(np.stack([one[name] for name in LINES]))
    return np.stack(found)


def variances(group: Group, amount: Amount) -> dict[str, Array]:
    """Of one group, by estimator, `[K]` each: exact where that can be computed, from the episodes elsewhere."""
    env, behavior, sampled = group.environment(), design(group), []
    logging = logging_of(env, behavior)
    for run in range(amount.runs):
        values: runs.Values = {}
        for loggers in LOGGERS:
            rng = stream("apart", group.study.name, group.number, loggers, run)
            values |= runs.returns(logging.log(loggers, amount.episodes, rng), loggers)
        sampled.append(runs.estimates(values, np.array([amount.episodes])).variances)
    found = dict(zip(METHODS, np.mean(sampled, 0), strict=True))
    mdp = env.mdp()
    if mdp is not None:
        (pi, fitted, moments), mu, odi = behavior.tables()
        found |= exact.estimator_variances(mdp, pi, moments, fitted, (mu, odi))
    return {name: found[name] for name in METHODS}


def library(group: Group, amount: Amount) -> dict[str, Array]:
    """The same of pooled evaluation as the library has it: with the fitted q, and with nothing logged.

    Where nothing is exact, on-policy MC's is that of the same episodes: with another sample's, a policy whose returns
    vary once in 250 episodes would have any ratio.
    """
    env, policies, q_nets, found = group.environment(), group.policies(), group.values("q"), []
    for run in range(amount.pools):
        rng = stream("apart", group.study.name, group.number, "pool", run)
        episodes = collect(env, policies, amount.episodes, rng)
        logged, alone = pool(episodes, q_nets), pool(episodes)
        found.append(
            {"pooled": logged.variance, "nothing_logged": alone.variance, "on_policy": alone.on_policy_variance}
        )
    names = [name for name in found[0] if env.mdp() is None or name != "on_policy"]
    return {name: np.mean([one[name] for one in found], 0) for name in names}


def relative(found: Array) -> tuple[Array, Array]:
    """The mean over groups, and the worst single policy of all groups, relative to on-policy MC; `[E]` each.

    A policy whose returns never vary has no relative variance of its own; it counts in the mean, where it adds to what
    is divided by all policies' variance together.
    """
    own = found[:, :1]
    each = np.where(own > 0, found / np.where(own > 0, own, 1.0), -np.inf)
    return summary.relative_variances(found).mean(0), each.max((0, 2))


def rows_of(found: dict[str, dict[int, Array]]) -> Rows:
    """Mean and worst policy of every estimator at every point, header first."""
    rows = [("policies of", "training steps", *(e.label for e in LINES.values()))]
    for title, points in found.items():
        for steps in sorted(points):
            both = zip(*relative(points[steps]), strict=True)
            rows.append(
                (title, f"{steps:,}", *(f"{number(a)} ({number(b)})" if not np.isnan(a) else "" for a, b in both))
            )
    return rows


def number(x: float) -> str:
    """Three digits, without e where it can be helped."""
    return f"{x:.3f}" if x < 1 else f"{x:.3g}" if x < 1000 else f"{x:.0f}" if x < HIGHEST else f"{x:.0e}"


def draw(panels: list[Panel], found: dict[str, dict[int, Array]], path: Path) -> None:
    """A line through the means of every estimator, a thin one through its worst policies."""
    style()
    size = (4.4 * len(panels) + (3 if len(panels) == 1 else 0), 5.2)
    figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for panel, ax in zip(panels, axes[0], strict=True):
        steps = sorted(found[panel.title])
        mean, worst = (np.stack(x) for x in zip(*(relative(found[panel.title][x]) for x in steps), strict=True))
        for i, (name, estimator) in enumerate(LINES.items()):
            if name == "on_policy":
                ax.axhline(1, color=estimator.colour, linewidth=1.5, label=estimator.label)
                continue
            ours = estimator.colour == ESTIMATORS["pooled"].colour  # in front, and thick
            look: dict[str, Any] = {"color": estimator.colour, "zorder": 3 if ours else 2}
            look["linestyle"] = "--" if name not in ESTIMATORS else "-"
            width = 2.6 if ours else 1.6
            ax.plot(steps, mean[:, i], marker=estimator.marker, label=estimator.label, linewidth=width, **look)
            ax.plot(steps, worst[:, i], linewidth=0.7, alpha=0.8, **look)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xticks(steps, [f"{x:,}" for x in steps], rotation=30 if len(steps) > 4 else 0)
        ax.minorticks_off()
        ax.set_xlabel(panel.axis)
        ax.set_title(panel.title)
    least = min(np.nanmin(relative(one)[0]) for points in found.values() for one in points.values())
    axes[0, 0].set_ylim(least / 2, HIGHEST)
    axes[0, 0].set_ylabel("variance relative to on-policy MC")
    columns = 5 if len(panels) > 1 else 3
    figure.legend(*axes[0, 0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=columns)
    figure.suptitle("Variance against how far apart the policies are (thick: all policies, thin: the worst one)")
    save(figure, path)


def run(panels: list[Panel], workers: int) -> dict[str, dict[int, Array]]:
    """Measures all points, several at once; title -> steps -> `[groups, E, K]`."""
    points = [point for panel in panels for point in panel.points]
    with ProcessPoolExecutor(workers) as pool, Progress(console=Console(stderr=True)) as progress:
        jobs: list[Future[Array]] = [pool.submit(measure, point) for point in points]
        bar = progress.add_task("apart", total=len(points))
        running = True
        try:
            while running:
                state = wait(jobs, 2, FIRST_EXCEPTION)
                running = bool(state.not_done) and not any(job.exception() for job in state.done)
                progress.update(bar, completed=sum(point.done() for point in points))
        finally:
            pool.shutdown(cancel_futures=True)
        numbers = iter(job.result() for job in jobs)
        return {panel.title: {point.steps: next(numbers) for point in panel.points} for panel in panels}


def main(arguments: list[str] | None = None) -> int:
    about = (
        "Draws the relative variance of every estimator against how far apart the policies are: on Gridworld 1,000, "
        "CartPole and Acrobot, or on one study alone."
    )
    parser = commands.parser("apart", about, study="all")
    parser.add_argument("--groups", type=int, help="groups of each width (default 30 with exact variances, else 3)")
    parser.add_argument("--workers", type=int, default=2, help="widths at once (default 2)")
    args = parser.parse_args(arguments)

    def work() -> None:
        for name in ("groups", "workers"):
            check_number(f"--{name}", 1 if getattr(args, name) is None else getattr(args, name), 1, 10_000)
        study = studies.read(GRIDWORLD if args.study == "all" else args.study)
        known = studies.make_environment(study, 0).mdp() is not None
        amount = EXACT if known else SAMPLED
        amount = replace(amount, groups=args.groups or amount.groups)
        panels = [widths_of(study, WIDTHS if known else ROBOT_WIDTHS, amount, args.data)]
        if args.study == "all":
            params = study.params
            panels += [checkpoints_of(name, one, params, TRAINED, args.data) for name, one in TRAININGS.items()]
        found = run(panels, args.workers)
        path = args.data / "apart" / args.study
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(panels, found, path)
        write_table(rows_of(found), path, ("md",))
        commands.show("Mean over groups (worst policy)", rows_of(found), 200)
        print(f"Figure and table: {path}.png, .svg, .md")

    return commands.guarded("apart", work)


if __name__ == "__main__":
    sys.exit(main())
