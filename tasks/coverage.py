"""Do the intervals hold? `python -m tasks.coverage` counts it, where the truth is known.

Sets of policies: those of a study with exact values (Gridworld 1,000), the same with the best policy twice, random MDPs
with policies far apart (heavy tails), and CartPole's checkpoints as `tasks.apart` takes them furthest apart. Every set
is run many times; counted is how often the 95% intervals hold after fixed numbers of episodes and at all looks of a
path, and how often a claimed best policy is not the best. Each set's counts are in data/.work/coverage: what was cut
off resumes.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from manyfold import exact
from manyfold.arrays import Array, Ints, check_number
from manyfold.design.behavior import Fitted
from manyfold.envs import Finite
from manyfold.estimate import coverage, intervals, runs
from manyfold.estimate.loggers import Logging, TabularLogging, logging_of
from manyfold.estimate.methods import Loggers
from manyfold.estimate.registry import ESTIMATORS
from manyfold.files import write_json
from manyfold.mdp import FiniteMDP
from manyfold.streams import stream
from manyfold.tables import Rows, write_table
from tasks import apart, commands, studies
from tasks.behavior import design
from tasks.evaluate import COVERED, NEEDS, cached
from tasks.figures import plt, save, style
from tasks.groups import Group
from tasks.params import ROOT
from tasks.stages import earlier
from tasks.studies import Study

NEEDED: tuple[Loggers, ...] = ("targets", "mu")  # who logs for COVERED
POINTS = (50, 100, 200, 500, 1000)  # episodes; rounded up to whole rounds of all policies
BATCH = 20  # runs at once
ALPHA = 0.05
SURE = ("on_policy", "pooled")  # the estimators that the aims are for
WAYS = ("Bounded", *(ESTIMATORS[name].label for name in SURE))  # intervals that are compared where returns are bounded
BAND = (0.94, 0.97)  # aim: single and simultaneous intervals of SURE from FROM episodes on
FROM = 100
NEAR = 0.9  # a panel whose shares are all above begins there, others at 0
TRAINING = "CartPole"
POOL = 30_000  # episodes that its runs are drawn from (of mu a third), and as many others for its truth
CODE = ("coverage", "diagnostics", "estimators", "intervals", "loggers", "methods", "pooled", "ranking", "runs")


class World(NamedTuple):
    """A set of policies whose truth is known."""

    truth: Array  # [K]
    run: Callable[[int], runs.Values]  # one run of as many episodes as the last point says, by its number
    truth_error: Array | None = None  # where the truth is not exact, [K]
    bounds: tuple[float, float] | None = None  # of returns, where there are any that say something


@dataclass(frozen=True)
class Job:
    """One set of policies, all of its runs."""

    title: str  # of the kind of set
    kind: str  # a name in KINDS
    number: int
    runs: int
    study: Study
    data: Path
    work: Path

    @property
    def file(self) -> Path:
        return self.work / f"{self.kind}-{self.number:03d}.safetensors"


# --- sets of policies -------------------------------------------------------------------------------------------------


def points_of(policies: int) -> list[int]:
    """POINTS as whole rounds."""
    return [-(-n // policies) * policies for n in POINTS]


def independent(job: Job, logging: Logging, truth: Array) -> World:
    """Every run has episodes of its own."""
    last = points_of(len(truth))[-1]

    def run(number: int) -> runs.Values:
        values: runs.Values = {}
        for loggers in NEEDED:
            rng = stream("coverage", job.kind, job.study.name, job.number, loggers, number)
            values |= runs.returns(logging.log(loggers, last, rng), loggers, health=True)
        return values

    return World(truth, run)


def study_group(job: Job, tied: bool = False) -> World:
    """A group of the study; tied: its worst policy is replaced by a copy of its best."""
    group = Group(job.study, job.number, job.data)
    env, behavior = group.environment(), design(group)
    mdp = env.mdp()
    if mdp is None:
        raise ValueError(f"study {job.study.name} has no exact values, expected a finite MDP")
    tables, mu, odi = behavior.tables()
    truth = exact.values(mdp, tables.policies)
    if tied:
        which = np.arange(len(truth))
        which[truth.argmin()] = truth.argmax()
        truth, tables = truth[which], Fitted._make(x[which] for x in tables)
        mu = np.stack([behavior.design(Fitted._make(x[:, t] for x in tables)) for t in range(mdp.horizon)])
    return independent(job, TabularLogging(env, tables.policies, mu, odi, tables.q), truth)


def random_set(job: Job) -> World:
    """Five policies that have next to nothing in common, 20 steps, q with errors of 30%: MPE's weights are heavy."""
    rng = stream("coverage", job.kind, job.number)
    states, actions, horizon, k = 5, 3, 20, 5
    transitions = rng.dirichlet(np.full(states, 0.3), size=(states, actions))
    mdp = FiniteMDP(transitions, rng.standard_normal((states, actions)), rng.dirichlet(np.ones(states)), horizon)
    pi = np.repeat(rng.dirichlet(np.full(actions, 0.3), size=(k, 1, states)), horizon, 1)
    pi = 0.95 * pi + 0.05 / actions
    q = exact.action_values(mdp, pi)
    mu = exact.shared_behavior(pi, exact.second_moments(mdp, pi))
    b = q + 0.3 * q.std() * rng.standard_normal(q.shape)
    return independent(job, TabularLogging(Finite(mdp), pi, mu, pi, b), exact.values(mdp, pi))


def checkpoints(job: Job) -> World:
    """CartPole's, furthest apart: runs are drawn from a pool, the truth is pooled evaluation of other episodes."""
    training = apart.TRAININGS[TRAINING]
    panel = apart.checkpoints_of(TRAINING, training, job.study.params, apart.TRAINED, job.data)
    point = max(panel.points, key=lambda one: one.steps)
    apart.fit(point)
    group = Group(point.study, 0, point.data)
    logging, k = logging_of(group.environment(), design(group)), group.policies().n_policies
    size, last = -(-POOL // k) * k, points_of(k)[-1]

    def logged(loggers: Loggers, name: str) -> dict[str, Array]:
        rng = stream("coverage", job.kind, loggers, name)
        many = size if loggers == "targets" else size // (3 * k) * k
        found = runs.returns(logging.log(loggers, many, rng), loggers, health=True)
        return {returns: x for (_, returns), x in found.items()}

    def truth() -> dict[str, Array]:
        values: runs.Values = {("targets", name): x for name, x in logged("targets", "truth").items()}
        found = coverage.sample_of("pooled", values, size)
        return {"truth": found.mean, "error": found.standard_error}

    pool: runs.Values = {}
    for loggers in NEEDED:
        made = cached(job.work / f"pool-{loggers}.safetensors", partial(logged, loggers, "pool"))
        pool |= {(loggers, name): x for name, x in made.items()}
    known = cached(job.work / "pool-truth.safetensors", truth)

    def run(number: int) -> runs.Values:
        return runs.draw(pool, last, stream("coverage", job.kind, "draw", number))

    bounds = 0.0, float(training.horizon)  # a reward of 1 for every step
    return World(np.clip(known["truth"], *bounds), run, known["error"], bounds)


KINDS: dict[str, Callable[[Job], World]] = {
    "study": study_group,
    "tied": partial(study_group, tied=True),
    "random": random_set,
    "checkpoints": checkpoints,
}


# --- counting ---------------------------------------------------------------------------------------------------------


def measure(job: Job) -> dict[str, Array]:
    """The shares of one set of policies, by estimator E, point P, and kind; from the cache where it is done."""
    torch.set_num_threads(1)
    return cached(job.file, partial(count, job))


def count(job: Job) -> dict[str, Array]:
    """Runs the set and counts.

    fixed  `[E, P, 5]`: single, simultaneous, differences hold, best known, best wrong
    path   `[E, 3]`: anytime intervals of all policies hold at all looks, best known at some look, wrong at some look
    trust  `[E, P, 3]`: of all intervals of single policies: missed, flagged, missed and flagged
    truth_error: the largest error of the truth over that of the estimate after the last point, `[E]`
    bounded `[WAYS, P, 3]`: single, simultaneous hold, half the width of single ones; where returns have known bounds
    """
    world = KINDS[job.kind](job)
    points = np.array(points_of(len(world.truth)))
    fixed, path, flagged, bounded = [], [], [], []
    errors: list[float] = []
    for first in range(0, job.runs, BATCH):
        some = [world.run(number) for number in range(first, min(first + BATCH, job.runs))]
        found = coverage.of_runs(COVERED, some, world.truth, points, int(points[-1]))
        for i, values in enumerate(some):
            each = [found[name][i] for name in COVERED]
            fixed.append([[row(held, world.truth) for held in one.fixed] for one in each])
            path.append([[one.path.held, one.path.best is not None, one.path.wrong] for one in each])
            flagged.append([flags(name, values, points, one.fixed) for name, one in zip(COVERED, each, strict=True)])
            if world.bounds is not None:
                bounded.append(by_bounds(values, points, world.truth, world.bounds))
            if world.truth_error is not None and not errors:
                last = [coverage.sample_of(name, values, int(points[-1])) for name in COVERED]
                with np.errstate(divide="ignore"):
                    errors = [float((world.truth_error / one.standard_error).max()) for one in last]
    counted = {
        "fixed": np.mean(fixed, 0),
        "path": np.mean(path, 0),
        "trust": np.mean(flagged, 0),
        "truth_error": np.array(errors or [0.0] * len(COVERED)),
    }
    return counted | ({"bounded": np.mean(bounded, 0)} if bounded else {})


def row(held: coverage.Held, truth: Array) -> list[float]:
    """The five numbers of `fixed`."""
    wrong = coverage.is_wrong(held.best, truth)
    return [float(held.single.mean()), held.simultaneous, held.difference, held.best is not None, wrong]


def flags(name: str, values: runs.Values, points: Ints, fixed: list[coverage.Held]) -> list[list[float]]:
    """The three numbers of `trust`, of each point."""
    out = []
    for n, held in zip(points.tolist(), fixed, strict=True):
        untrusted, missed = coverage.untrusted_of(name, values, n), ~held.single
        out.append([float(x.mean()) for x in (missed, untrusted, missed & untrusted)])
    return out


def by_bounds(values: runs.Values, points: Ints, truth: Array, bounds: tuple[float, float]) -> list[list[list[float]]]:
    """The three numbers of `bounded`, of each way and point: from the bounds of returns, and from the sample alone.

    Of several policies at once, bounded intervals have alpha / K each.
    """
    k, plain = len(truth), values["targets", "pdis"]
    out: list[list[list[float]]] = [[] for _ in WAYS]
    for n in points.tolist():
        own = [x[i:n:k] for i, x in enumerate(plain)]
        made = [(intervals.bounded(own, *bounds), intervals.bounded(own, *bounds, ALPHA / k))]
        for name in SURE:
            found = coverage.sample_of(name, values, n)
            made.append((intervals.single(found), intervals.simultaneous(found)))
        for way, (single, every) in zip(out, made, strict=True):
            hold = [coverage.holds(x, truth) for x in (single, every)]
            way.append([float(hold[0].mean()), float(hold[1].all()), float((single.high - single.low).mean() / 2)])
    return out


def jobs_of(study: Study, groups: int, repeats: int, data: Path, only: str | None = None) -> list[Job]:
    """All sets, or one kind; the work folder's name changes with the code and the data that decide the numbers."""
    there, seen = earlier(NEEDS, study, data)
    if groups > there:
        raise ValueError(f"--groups is {groups}, expected at most the {there} groups of {study.name}")
    key = hashlib.sha256(json.dumps([seen, study.params, repeats, POINTS, POOL]).encode())
    for name in CODE:
        key.update((ROOT / "manyfold" / "estimate" / f"{name}.py").read_bytes())
    work = data / ".work" / "coverage" / key.hexdigest()[:12]
    wanted = [
        (study.title, "study", groups),
        (f"{study.title}, best policy twice", "tied", max(1, groups // 3)),
        ("Random MDPs, heavy tails", "random", max(1, groups // 2)),
        (f"{TRAINING}'s checkpoints", "checkpoints", 1),
    ]
    return [
        Job(title, kind, number, repeats, study, data, work)
        for title, kind, many in wanted
        if only in (None, kind)
        for number in range(many)
    ]


def run(jobs: list[Job], workers: int) -> dict[str, list[dict[str, Array]]]:
    """Measures all sets, several at once; by title."""
    with ProcessPoolExecutor(workers) as pool, Progress(console=Console(stderr=True)) as progress:
        running = [pool.submit(measure, job) for job in jobs]
        bar = progress.add_task("coverage", total=len(jobs))
        try:
            for one in as_completed(running):
                one.result()
                progress.advance(bar)
        finally:
            pool.shutdown(cancel_futures=True)
    found: dict[str, list[dict[str, Array]]] = {}
    for job, one in zip(jobs, running, strict=True):
        found.setdefault(job.title, []).append(one.result())
    return found


# --- what is shown ----------------------------------------------------------------------------------------------------

FIXED = ("single", "simultaneous", "differences", "best known", "best wrong")
PATH = ("anytime", "best known", "best wrong")
TRUST = ("missed", "flagged", "missed and flagged")
BOUNDED = ("single", "simultaneous", "half-width")


def means(found: dict[str, list[dict[str, Array]]]) -> dict[str, dict[str, Array]]:
    """Over the sets of each title; all have as many runs."""
    return {title: {key: np.mean([one[key] for one in sets], 0) for key in sets[0]} for title, sets in found.items()}


def numbers(found: dict[str, list[dict[str, Array]]], repeats: int) -> dict[str, Any]:
    """Everything, for JSON: title -> estimator -> numbers of each point and of the path."""
    out: dict[str, Any] = {"alpha": ALPHA, "points": list(POINTS), "runs_of_each_set": repeats, "sets": {}}
    for title, mean in means(found).items():
        one: dict[str, Any] = {"sets": len(found[title])}
        for e, name in enumerate(COVERED):
            fixed, trust = mean["fixed"][e], mean["trust"][e]
            one[name] = {kind: [round(float(x), 5) for x in fixed[:, i]] for i, kind in enumerate(FIXED)}
            one[name] |= {kind: [round(float(x), 5) for x in trust[:, i]] for i, kind in enumerate(TRUST)}
            one[name]["path"] = {kind: round(float(x), 5) for kind, x in zip(PATH, mean["path"][e], strict=True)}
            off = float(mean["truth_error"][e])  # infinite where the estimate's own is 0
            one[name]["truth's error over the estimate's"] = round(off, 3) if np.isfinite(off) else None
        if "bounded" in mean:
            one["bounded"] = {
                way: {kind: [round(float(x), 5) for x in row] for kind, row in zip(BOUNDED, rows.T, strict=True)}
                for way, rows in zip(WAYS, mean["bounded"], strict=True)
            }
        out["sets"][title] = one
    return out


def percent(x: float) -> str:
    return f"{100 * x:.1f}"


def rows_of(found: dict[str, list[dict[str, Array]]], repeats: int) -> Rows:
    """Percentages after 100 and 1,000 episodes and along the path, header first."""
    at = [POINTS.index(n) for n in (FROM, POINTS[-1])]
    head = (*FIXED, *(f"{x}, any look" if "best" in x else x for x in PATH))
    rows: list[tuple[str, ...]] = [("policies of", "runs", "estimator", *head)]
    for title, mean in means(found).items():
        for e, name in enumerate(COVERED):
            fixed = (" / ".join(percent(mean["fixed"][e, p, i]) for p in at) for i in range(len(FIXED)))
            count = f"{len(found[title])} x {repeats}"
            rows.append((title, count, ESTIMATORS[name].label, *fixed, *(percent(x) for x in mean["path"][e])))
    return rows


def trust_rows(found: dict[str, list[dict[str, Array]]]) -> Rows:
    """Whether the diagnosis saw the misses, over all points from FROM on: percentages, header first."""
    at = POINTS.index(FROM)
    head = ("intervals that miss", "estimates flagged", "of the misses, flagged", "of the rest, miss")
    rows: list[tuple[str, ...]] = [("policies of", "estimator", *head)]
    for title, mean in means(found).items():
        for e, name in enumerate(COVERED):
            miss, flag, both = mean["trust"][e, at:].mean(0)
            caught, rest = both / miss if miss else 0.0, (miss - both) / (1 - flag) if flag < 1 else 0.0
            rows.append((title, ESTIMATORS[name].label, *(percent(x) for x in (miss, flag, caught, rest))))
    return rows


def bounded_rows(found: dict[str, list[dict[str, Array]]]) -> Rows:
    """Where returns are bounded: percentages that hold, single / simultaneous, and half-widths; header first."""
    rows: list[tuple[str, ...]] = [("policies of", "intervals", *(f"{n:,} episodes" for n in POINTS))]
    for title, mean in means(found).items():
        for way, each in zip(WAYS, mean.get("bounded", ()), strict=False):
            columns = (f"{percent(one)} / {percent(every)}, +- {wide:.3g}" for one, every, wide in each)
            rows.append((title, way, *columns))
    return rows


def aims(found: dict[str, list[dict[str, Array]]]) -> Rows:
    """What was aimed at and what was found, of SURE, header first."""
    at, mean = POINTS.index(FROM), means(found)
    rows: list[tuple[str, ...]] = [("of", "aim", *mean)]
    for name in SURE:
        e, label = COVERED.index(name), ESTIMATORS[name].label

        def spread(kind: int, e: int = e) -> tuple[str, ...]:
            each = [one["fixed"][e, at:, kind] for one in mean.values()]
            return tuple(f"{percent(x.min())} to {percent(x.max())}" for x in each)

        band = f"{percent(BAND[0])} to {percent(BAND[1])}"
        rows.append((f"{label}, single, from {FROM} episodes on", band, *spread(0)))
        rows.append((f"{label}, simultaneous, from {FROM} on", band, *spread(1)))
        rows.append(
            (f"{label}, anytime, at all looks", "95.0 or more", *(percent(x["path"][e, 0]) for x in mean.values()))
        )
        worst = (max(one["fixed"][e, :, 4].max(), one["path"][e, 2]) for one in mean.values())
        rows.append((f"{label}, wrong best, at most", "5.0 or less", *(percent(x) for x in worst)))
    return rows


def draw(found: dict[str, list[dict[str, Array]]], path: Path) -> None:
    """Coverage against episodes: a row of each kind of interval, a column of each kind of set."""
    style()
    mean = means(found)
    figure, axes = plt.subplots(2, len(mean), figsize=(3.5 * len(mean), 6.6), squeeze=False, layout="constrained")
    for column, (title, one) in enumerate(mean.items()):
        for i in (0, 1):  # single, simultaneous
            ax = axes[i, column]
            ax.axhspan(*(100 * x for x in BAND), color="#BBBBBB", alpha=0.4, linewidth=0, label="aim: 94 to 97%")
            ax.axhline(95, color="#707070", linewidth=0.8, linestyle=":")
            for e, name in enumerate(COVERED):
                look = ESTIMATORS[name]
                ax.plot(
                    POINTS,
                    100 * one["fixed"][e, :, i],
                    color=look.colour,
                    marker=look.marker,
                    label=look.label,
                    linewidth=1.6,
                )
            ax.set_xscale("log")
            ax.set_xticks(POINTS, [f"{n:,}" for n in POINTS])
            ax.minorticks_off()
            near = one["fixed"][..., :2].min() > NEAR
            ax.set_ylim(100 * NEAR if near else -2, 100.5 if near else 102)
            if not i:
                ax.set_title(title, fontsize=10)
            else:
                ax.set_xlabel("episodes")
            if not column:
                ax.set_ylabel("each policy's own (%)" if not i else "all policies at once (%)")
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, loc="outside lower center", ncols=len(COVERED) + 1)
    figure.suptitle("How often 95% intervals hold the truth (mind the scales)")
    save(figure, path)


def tables(found: dict[str, list[dict[str, Array]]], repeats: int) -> Iterator[tuple[str, str, Rows]]:
    """File name, title and rows."""
    yield "all", "Held, % (after 100 / 1,000 episodes)", rows_of(found, repeats)
    yield "trust", "Misses that the diagnosis flags, %", trust_rows(found)
    yield "aims", "Aims, %", aims(found)
    if len(rows := bounded_rows(found)) > 1:
        yield "bounded", "Where returns are bounded: held, % (single / simultaneous), and half-width", rows


def main(arguments: list[str] | None = None) -> int:
    about = (
        "Counts how often 95% intervals hold the truth and how often a claimed best policy is not the best, on a study "
        "with exact values, on random MDPs and on CartPole's checkpoints."
    )
    parser = commands.parser("coverage", about, study=apart.GRIDWORLD)
    parser.add_argument("--runs", type=int, default=300, help="of each set of policies (default 300)")
    parser.add_argument(
        "--groups", type=int, default=30, help="of the study (default 30); of the other sets a half or a third of that"
    )
    parser.add_argument("--only", choices=tuple(KINDS), help="one kind of set; its results go to data/coverage/<kind>")
    parser.add_argument("--workers", type=int, default=2, help="sets at once (default 2)")
    args = parser.parse_args(arguments)

    def work() -> None:
        for name in ("runs", "groups", "workers"):
            check_number(f"--{name}", getattr(args, name), 1, 10_000)
        found = run(jobs_of(studies.read(args.study), args.groups, args.runs, args.data, args.only), args.workers)
        folder = args.data / "coverage" / (args.only or "")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "all.json", numbers(found, args.runs))
        draw(found, folder / "all")
        for name, title, rows in tables(found, args.runs):
            write_table(rows, folder / name, ("md",))
            commands.show(title, rows, 200)
        print(f"Figure, tables and numbers: {folder}")

    return commands.guarded("coverage", work)


if __name__ == "__main__":
    sys.exit(main())
