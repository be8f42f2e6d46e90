"""Which interval of training steps puts a study where the paper is: `python -m tasks.regime hopper`.

Everything depends on how far apart the target policies are, and the paper does not say. So the interval's start and
width are chosen by the baselines: means over groups of the relative variances of ODI, SON and SODI, as they are found
in runs of the paper's size, nothing trimmed, in log distance from the paper's three numbers. MPE and pooled evaluation
take no part: no episode of mu is run, and nothing is pooled. The groups are others than the report's.

Successive halving: every start and width with one group and few episodes, the nearest with two, those left with the
study's own protocol and more groups. What is finished is cached in data/.work/regime, so that a search resumes.
"""

import math
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from matplotlib.lines import Line2D
from rich.console import Console
from rich.progress import Progress

from manyfold import policies as policy_sets
from manyfold.arrays import Array, check_number
from manyfold.estimate import loggers, methods, runs
from manyfold.estimate.loggers import FittedLogging
from manyfold.estimate.methods import Loggers
from manyfold.estimate.registry import ESTIMATORS
from manyfold.files import atomic, sha256, write_json
from manyfold.policies.mlp import MlpPolicySet
from manyfold.streams import stream
from manyfold.tables import Rows, write_table
from manyfold.train import targets
from manyfold.train.ppo import Config, Position
from manyfold.train.targets import Plan, Rule
from tasks import commands, offline, q, q_hat, studies
from tasks import targets as targets_stage
from tasks.apart import key_of
from tasks.behavior import design
from tasks.evaluate import cached, rounded
from tasks.figures import plt, save, style
from tasks.groups import Group
from tasks.params import ROOT, parse
from tasks.processes import begin_worker
from tasks.studies import Study, group_name, make_environment

BASELINES = ("odi", "son", "sodi")  # what a choice is judged by; MPE's number must not be here
FIRST = 1000  # seed of the first group: none of the report's
STARTS = (1_000, 5_000, 20_000, 100_000)
RANGE = 4_000  # training steps from which a group's first one is drawn, from the start on
WIDTHS = (1_500, 2_500, 4_000, 6_000, 8_500, 12_000, 16_000)
CLOSE = 1.3  # times the paper's number, or one part of that, counts as near
DRAWS = 2_000  # of the bootstrap
TIED = 0.1  # share of draws in which a choice that is equally near is at least as near as the nearest


@dataclass(frozen=True)
class Amount:
    """How much is measured of each choice that is left."""

    groups: int
    keep: int  # choices that go on
    episodes: int  # of the targets, and of ODI's policies
    logged: int | None = None  # offline episodes; None: the study's own
    updates: int | None = None  # most of a fit; None: the study's own


RUNGS = (Amount(1, 12, 400, 3000, 1500), Amount(2, 4, 400, 3000, 1500), Amount(4, 2, 1000), Amount(8, 2, 1000))


class Choice(NamedTuple):
    """An interval of training steps."""

    start: int
    width: int

    def of(self, study: Study, amount: Amount) -> Study:
        """The study with this interval, and with no more data than the amount says."""
        changed: dict[str, dict[str, Any]] = {"targets": {"start": [self.start, self.start + RANGE]}, "offline": {}}
        changed["targets"]["width"] = self.width
        if amount.logged is not None:
            changed["offline"] = {"episodes": min(amount.logged, study.params["offline"]["episodes"])}
        if amount.updates is not None:
            for fit in ("q", "q_hat"):
                changed[fit] = {"most_updates": min(amount.updates, study.params[fit]["most_updates"])}
        params = {stage: section | changed.get(stage, {}) for stage, section in study.params.items()}
        return replace(study, params=params)


@dataclass(frozen=True, eq=False)
class Measured:
    """A choice with what was found last; `[G]` each."""

    choice: Choice
    amount: Amount
    relative: dict[str, Array]  # variances of the baselines
    apart: Array  # standard deviation of the policies' values over on-policy MC's standard error

    def means(self) -> dict[str, float]:
        return {name: float(x.mean()) for name, x in self.relative.items()}


# --- what is measured -------------------------------------------------------------------------------------------------


def plan_of(study: Study, number: int) -> Plan:
    """What the stage `targets` would take for this group."""
    rule: Rule = targets_stage.read_rule(study)[1]
    return targets.draw(rule, targets.config(make_environment(study, number)), study.name, number)


def choices_of(study: Study) -> list[Choice]:
    """The grid without intervals that hold too few checkpoints, or end after the training."""
    found = []
    for choice in (Choice(start, width) for start in STARTS for width in WIDTHS):
        try:
            for number in range(FIRST, FIRST + RUNGS[-1].groups):
                plan_of(choice.of(study, RUNGS[0]), number)
            found.append(choice)
        except ValueError:
            continue
    if not found:
        raise ValueError(f"no interval of the grid holds {study.params['targets']['policies']} checkpoints")
    return found


def train(study: Study, choices: list[Choice], numbers: list[int], work: Path) -> None:
    """Trains the groups once and keeps every checkpoint that some choice takes."""
    config, missing, plans = targets.config(make_environment(study, FIRST)), [], []
    for number in numbers:
        taken: set[Position] = set()
        for plan in (plan_of(choice.of(study, RUNGS[0]), number) for choice in choices):
            taken |= {*plan.targets, plan.companion, *plan.history}
        inside, folder = tuple(sorted(taken)), work / group_name(number)
        known = policy_sets.load(folder / "targets").names if folder.exists() else ()
        if not {name_of(position, config) for position in inside} <= set(known):  # as of a wider grid
            missing.append(number)
            plans.append(Plan((0.0, targets.step_of(inside[-1], config)), inside, inside[0], (inside[0],)))
    if missing:
        targets_stage.train(study, missing, plans, work)


def name_of(position: Position, config: Config) -> str:
    """Of a checkpoint among those of a training."""
    return f"step {targets.step_of(position, config):g}"


def place(study: Study, number: int, work: Path, data: Path) -> Group:
    """The group with its targets, companion and history, as the stage `targets` would have left them."""
    group, plan = Group(study, number, data), plan_of(study, number)
    config = targets.config(make_environment(study, number))
    known = policy_sets.load(work / group_name(number) / "targets")
    if not isinstance(known, MlpPolicySet):
        raise ValueError(f"{work / group_name(number)}: expected networks, found a table")
    folder = group.folder("targets")
    folder.mkdir(parents=True)
    for name, wanted in (("targets", plan.targets), ("companion", (plan.companion,)), ("history", plan.history)):
        which = [known.names.index(name_of(position, config)) for position in wanted]
        known.pick(which).save(folder / name)
    return group


def measure(study: Study, choice: Choice, amount: Amount, number: int, work: Path) -> dict[str, Array]:
    """One group of a choice: each baseline's relative variance, and how far apart the policies' values are."""
    torch.set_num_threads(1)
    name = "-".join(map(str, (choice.start, choice.width, amount.episodes, amount.logged, amount.updates, number)))
    return cached(work / f"{name}.safetensors", partial(_measure, choice.of(study, amount), amount, number, work))


def _measure(study: Study, amount: Amount, number: int, work: Path) -> dict[str, Array]:
    with tempfile.TemporaryDirectory(dir=work) as folder:
        group = place(study, number, work, Path(folder))
        group.folder("offline").mkdir(parents=True)
        offline.log_group(study, group, offline.read_rule(study), group.folder("offline"))
        for stage in (q.STAGE, q_hat.STAGE):
            fits = group.folder(stage.name).parent
            fits.mkdir(parents=True)
            stage.fit_group(group, stage.params(study)[0], fits, lambda check, of: None)
        return baselines(group, amount.episodes)


def baselines(group: Group, episodes: int) -> dict[str, Array]:
    """ODI's, SON's and SODI's variances relative to on-policy MC's, from one run of so many episodes of each."""
    logging = FittedLogging(group.environment(), design(group))
    at, found = np.array([episodes]), {}
    shares: tuple[tuple[Loggers, str, str], ...] = (("targets", "on_policy", "son"), ("odi", "odi", "sodi"))
    for by, own, shared in shares:
        blocks = logging.log(by, episodes, stream("regime", group.study.name, group.number, by))
        returns = np.concatenate([methods.pdis(block) for block in blocks], -1)  # [K, N]
        found[own] = runs.own_estimates(returns, at)
        found[shared] = runs.pooled_estimates(returns, at, len(returns))
    (values, variance), total = found["on_policy"], {name: one[1].sum() for name, one in found.items()}
    if not total["on_policy"]:  # every episode had the same return: nothing is left to be compared, or matched
        return {"apart": np.zeros(1)} | {name: np.full(1, np.inf) for name in BASELINES}
    spread = max(float(values[0].var(ddof=1) - variance.mean() / episodes), 0.0)  # without the estimates' own errors
    error = variance.mean() / group.study.params["evaluate"]["match"]
    relative = {name: np.array([total[name] / total["on_policy"]]) for name in BASELINES}
    return {"apart": np.array([math.sqrt(spread / error)])} | relative


# --- the choice -------------------------------------------------------------------------------------------------------


def paper_of(study: Study) -> dict[str, float]:
    """The paper's relative variances of the baselines."""
    paper = study.paper or {}
    if missing := [name for name in BASELINES if name not in paper]:
        raise ValueError(f"studies.{study.name}.paper has no {', '.join(missing)}, expected the paper's numbers")
    return {name: float(paper[name][0]) for name in BASELINES}


def distance(found: dict[str, Any], paper: dict[str, float]) -> Array:
    """Root mean square of the log ratios to the paper's numbers."""
    logs = [np.log(np.asarray(found[name]) / paper[name]) for name in paper]
    return np.asarray(np.sqrt(np.mean(np.square(logs), axis=0)))


def resampled(left: list[Measured], paper: dict[str, float]) -> Array:
    """Distances of the choices over bootstrap samples of their groups, the same for all of them; `[choices, draws]`."""
    groups = len(left[0].apart)
    which = stream("regime", "bootstrap").integers(groups, size=(DRAWS, groups))
    return np.stack([distance({name: one.relative[name][which].mean(-1) for name in paper}, paper) for one in left])


def near(one: Measured, paper: dict[str, float]) -> bool:
    """Whether every mean is within 30% of the paper's."""
    return all(paper[name] / CLOSE <= mean <= paper[name] * CLOSE for name, mean in one.means().items())


class Decision(NamedTuple):
    """Which of the choices that are left is taken, and how sure that is."""

    chosen: int
    nearest: int
    tied: list[int]  # equally near as the nearest
    sure: Array  # share of the bootstrap's draws in which each is the nearest


def decide(left: list[Measured], paper: dict[str, float]) -> Decision:
    """The nearest; of those that are equally near, the one whose policies differ most in value."""
    far = np.array([distance(one.means(), paper) for one in left])
    draws, nearest = resampled(left, paper), int(far.argmin())
    tied = np.flatnonzero(((draws <= draws[nearest]).mean(1) >= TIED) & (far < np.inf)).tolist() or [nearest]
    chosen = max(tied, key=lambda i: float(left[i].apart.mean()))
    return Decision(chosen, nearest, tied, np.bincount(draws.argmin(0), minlength=len(left)) / DRAWS)


def search(study: Study, work: Path, workers: int) -> list[Measured]:
    """All choices with what was measured of each last, those that went furthest first, and of these the nearest."""
    paper, left = paper_of(study), choices_of(study)
    done: list[Measured] = []
    for amount in RUNGS:
        numbers = list(range(FIRST, FIRST + amount.groups))
        train(study, left, numbers, work)
        found = measured(study, left, amount, numbers, work, workers)
        found.sort(key=lambda one: float(distance(one.means(), paper)))
        left = [one.choice for one in found[: amount.keep]]
        done = found + [one for one in done if one.choice not in {new.choice for new in found}]
    return done


def measured(
    study: Study, choices: list[Choice], amount: Amount, numbers: list[int], work: Path, workers: int
) -> list[Measured]:
    """Every choice by all groups, one process for each worker."""
    found: dict[tuple[Choice, int], dict[str, Array]] = {}
    with (
        ProcessPoolExecutor(workers, initializer=begin_worker, initargs=(os.getpid(),)) as pool,  # they end with us
        Progress(console=Console(stderr=True)) as progress,
    ):
        jobs = {pool.submit(measure, study, c, amount, n, work): (c, n) for n in numbers for c in choices}
        bar = progress.add_task(f"{len(choices)} intervals, {len(numbers)} groups", total=len(jobs))
        try:
            for job in as_completed(jobs):
                found[jobs[job]] = job.result()
                progress.advance(bar)
        finally:
            pool.shutdown(cancel_futures=True)

    def over_groups(choice: Choice, name: str) -> Array:
        return np.concatenate([found[choice, number][name] for number in numbers])

    return [
        Measured(c, amount, {name: over_groups(c, name) for name in BASELINES}, over_groups(c, "apart"))
        for c in choices
    ]


# --- what is written --------------------------------------------------------------------------------------------------

HEADER = ("start", "width", "groups", "episodes", "ODI", "SON", "SODI", "distance", "nearest in", "values apart")


def finalists(found: list[Measured]) -> list[Measured]:
    """Those that were measured with the last amount."""
    return [one for one in found if one.amount == RUNGS[-1]]


def rows(found: list[Measured], paper: dict[str, float]) -> Rows:
    """Means over groups (medians in brackets), in the order of `search`; a star at the choice."""
    last = finalists(found)
    decision = decide(last, paper)
    out = []
    for i, one in enumerate(found):
        star = "*" if one is last[decision.chosen] else ""
        means = [f"{one.relative[name].mean():.3f} ({np.median(one.relative[name]):.3f})" for name in BASELINES]
        sure = f"{decision.sure[i]:.0%}" if one in last else ""
        steps = f"{one.choice.start:,} to {one.choice.start + RANGE:,}", f"{one.choice.width:,}"
        size = str(len(one.apart)), f"{one.amount.episodes:,}"
        far = f"{distance(one.means(), paper):.2f}{star}"
        out.append((*steps, *size, *means, far, sure, f"{one.apart.mean():.1f}"))
    return out


def as_json(study: Study, found: list[Measured]) -> dict[str, Any]:
    """Everything that was measured, and the choice."""
    paper, last = paper_of(study), finalists(found)
    decision = decide(last, paper)
    every = [
        {
            **one.choice._asdict(),
            **asdict(one.amount),
            "mean": {name: rounded(x) for name, x in one.means().items()},
            "distance": rounded(float(distance(one.means(), paper))),  # null: infinite
            "values_apart": rounded(one.apart.mean()),
            "by_group": {name: rounded(x) for name, x in one.relative.items()},
        }
        for one in found
    ]
    chosen = last[decision.chosen]
    return {
        "study": study.name,
        "environment": study.environment,
        "paper": paper,
        "first_group": FIRST,
        "range": RANGE,
        "trimmed": False,
        "chosen": chosen.choice._asdict(),
        "within_30_percent": near(chosen, paper),
        "nearest": last[decision.nearest].choice._asdict(),
        "equally_near": [last[i].choice._asdict() for i in decision.tied],
        "nearest_in_draws": [round(float(x), 4) for x in decision.sure],
        "choices": every,
    }


def sentence(found: list[Measured], paper: dict[str, float]) -> str:
    """What was chosen, how sure that is, and whether it is near."""
    last = finalists(found)
    decision = decide(last, paper)

    def said(one: Measured) -> str:
        means = ", ".join(f"{x:.3f}" for x in one.means().values())
        interval = f"start {one.choice.start:,} to {one.choice.start + RANGE:,}, width {one.choice.width:,}"
        return f"{interval}: ODI, SON and SODI {means} (the paper's: {', '.join(map(str, paper.values()))})"

    chosen = last[decision.chosen]
    text = f"Chosen: {said(chosen)}; nearest in {decision.sure[decision.chosen]:.0%} of the bootstrap's draws."
    if len(decision.tied) > 1:
        text += f" {len(decision.tied)} intervals are equally near; of these its policies differ most in value."
    if not any(near(one, paper) for one in last):
        text += f" No interval is within 30% of all three; the nearest has {said(last[decision.nearest])}."
    return text


def draw(study: Study, found: list[Measured], path: Path) -> None:
    """Means over groups against the interval's width, a panel for each start."""
    style()
    paper, last = paper_of(study), finalists(found)
    chosen = last[decide(last, paper).chosen].choice
    figure, panels = plt.subplots(1, len(STARTS), figsize=(13, 4.4), sharex=True, sharey=True, layout="constrained")
    for start, axes in zip(STARTS, panels, strict=True):
        some = sorted((one for one in found if one.choice.start == start), key=lambda one: one.choice.width)
        widths = [one.choice.width for one in some]
        for name in BASELINES:
            look = ESTIMATORS[name]
            axes.plot(widths, [one.relative[name].mean() for one in some], color=look.colour, linewidth=1, alpha=0.6)
            for one in some:
                many = one in last
                size, face = (7, look.colour) if many else (5, "white")
                axes.plot(one.choice.width, one.relative[name].mean(), look.marker, color=look.colour,
                          markersize=size, markerfacecolor=face)  # fmt: skip
            axes.axhline(paper[name], color=look.colour, linestyle="--", linewidth=0.8)
        if start == chosen.start:
            axes.axvline(chosen.width, color="#666666", linestyle=":", linewidth=1.5)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(WIDTHS, [f"{x:,}" for x in WIDTHS], rotation=40)
        axes.minorticks_off()
        axes.set_title(f"starts at {start:,} to {start + RANGE:,}")
    figure.supxlabel("width (training steps)")
    figure.supylabel("variance relative to on-policy MC")
    marks = [Line2D([], [], color=ESTIMATORS[n].colour, marker=ESTIMATORS[n].marker, label=ESTIMATORS[n].label)
             for n in BASELINES]  # fmt: skip
    panels[0].legend(handles=marks, loc="upper left", frameon=False)
    figure.suptitle(
        f"{study.title}: means over groups from {FIRST} on (filled: measured most); dashed: the paper's; dotted: chosen"
    )
    save(figure, path)


def write(path: Path, name: str, choice: Choice) -> None:
    """Puts the choice into the study's line `targets: {...}` of params.yaml; all else stays, comments too."""
    text = path.read_text()
    lines, expected = text.splitlines(keepends=True), parse(text, path.name)
    rule = {"start": [choice.start, choice.start + RANGE], "width": choice.width}
    expected["studies"][name]["targets"] |= rule
    inside = False
    for i, line in enumerate(lines):
        if line.startswith("  ") and not line.startswith("   "):
            inside = line.strip().startswith(f"{name}:")
        if inside and line.startswith("    targets: {") and "}" in line:
            head, _, tail = line.partition("}")
            own = yaml.safe_load(head.partition(":")[2] + "}") | rule
            said = ", ".join(f"{key}: {value}" for key, value in own.items())
            lines[i] = f"    targets: {{{said}}}{tail}"
    changed = "".join(lines)
    if parse(changed, path.name) != expected:
        raise ValueError(f"{path}: expected a line `    targets: {{...}}` in the section of {name}")
    with atomic(path) as part:
        part.write_text(changed)


def work_of(study: Study, data: Path) -> Path:
    """Where this search's finished parts are: another study, grid or code has another folder."""
    sections = {stage: {n: x for n, x in study.params[stage].items() if n not in ("start", "width")}
                for stage in ("targets", "offline", "q", "q_hat", "behavior")}  # fmt: skip
    code = [sha256(Path(str(module.__file__))) for module in (loggers, methods, runs)]
    key = key_of(("targets", "offline", "q", "q_hat", "behavior"), [study.environment, sections, code, RANGE, FIRST])
    return data / ".work" / "regime" / f"{study.name}-{key}"


def main(arguments: list[str] | None = None) -> int:
    about = (
        "Chooses the interval of training steps whose sampled baselines (ODI, SON, SODI) come nearest to the paper's, "
        "on groups that the report does not use, and writes it to params.yaml. An interrupted search resumes."
    )
    parser = commands.parser("regime", about, positional=True)
    parser.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--params", type=Path, default=ROOT / "params.yaml", help="file that the choice is written to")
    args = parser.parse_args(arguments)

    def work() -> None:
        check_number("--workers", args.workers, 1, 10_000)
        study = studies.read(args.study, args.params)
        paper, folder, out = paper_of(study), work_of(study, args.data), args.data / "regime"
        for made in (folder, out):
            made.mkdir(parents=True, exist_ok=True)
        found = search(study, folder, args.workers)
        table = [HEADER, *rows(found, paper)]
        write_json(out / f"{study.name}.json", as_json(study, found))
        write_table(table, out / study.name, ("md",))
        draw(study, found, out / study.name)
        write(args.params, study.name, finalists(found)[decide(finalists(found), paper).chosen].choice)
        commands.show(f"{study.title}: means over groups (medians)", table, 160)
        print(f"{sentence(found, paper)}\nFigure and table: {out / study.name}.png, .svg, .md, .json")

    return commands.guarded("regime", work)


if __name__ == "__main__":
    sys.exit(main())
