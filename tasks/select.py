"""Chooses the fits' hyperparameters as the paper does: `python -m tasks.select`.

Hidden units x learning rate, each fitted on the offline data's training rows and judged by the held-out ones; the same
choice for every environment. The smallest network, then the smallest rate, within 1% of the best error is taken and
written to params.yaml. On Gridworlds the error against the exact q is printed too, and takes no part in the choice.
"""

import dataclasses
import itertools
import json
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from manyfold import exact
from manyfold.files import atomic, write_json
from manyfold.fqe import Config, Diverged, fit, q_problem
from manyfold.streams import stream
from manyfold.tables import Rows, write_table
from tasks import commands, studies
from tasks.accuracy import relative_error, visits
from tasks.fits import read_config
from tasks.groups import Group
from tasks.params import ROOT
from tasks.stages import fingerprint, work_folder
from tasks.studies import Study

HIDDEN = (64, 128, 256)
RATES = (1e-5, 1e-4, 1e-3, 1e-2)
CLOSE = 1.01  # times the best error counts as equally good

Choice = tuple[int, float]
Result = tuple[float, float]  # held-out error; against the exact q, NaN where that is unknown


def measure(group: Group, choice: Choice, config: Config) -> Result:
    """Fits q of one group with these hyperparameters."""
    torch.set_num_threads(1)
    policies = group.policies()
    config = dataclasses.replace(config, hidden=choice[0], learning_rate=choice[1])
    rng = stream("select", group.study.name, group.number)
    try:
        found = fit(group.transitions(), *q_problem(policies), rng, config, policies.n_states)
    except Diverged:
        return float("inf"), float("nan")
    half = config.updates(policies.horizon) / 2
    held_out = min(check.held_out for check in found.curves if check.update > half)
    mdp = group.environment().mdp()
    if mdp is None:
        return held_out, float("nan")
    pi = policies.table()
    error = relative_error(found.nets.table(), exact.action_values(mdp, pi), visits(mdp, pi))
    return held_out, float(error.mean())


def choose(errors: dict[Choice, float]) -> Choice:
    """The smallest network, then the smallest rate, of those that are about as good as the best."""
    best = min(errors.values())
    return min(choice for choice, error in errors.items() if error <= CLOSE * best)


def scores(found: dict[tuple[str, int, Choice], Result]) -> dict[Choice, float]:
    """Held-out errors as multiples of the best one of the same data, geometric mean over environments and groups."""
    data = sorted({(env, group) for env, group, _ in found})
    choices = sorted({choice for _, _, choice in found})
    table = np.log([[found[(*key, choice)][0] for choice in choices] for key in data])
    return dict(zip(choices, np.exp((table - table.min(1, keepdims=True)).mean(0)).tolist(), strict=True))


def write(path: Path, choice: Choice) -> None:
    """Puts the choice into params.yaml's section `q` and the fits after it; comments stay."""
    text = path.read_text()
    head, section = re.split(r"(?m)^(?=q:)", text, maxsplit=1)
    for name, value in (("hidden", str(choice[0])), ("learning_rate", np.format_float_positional(choice[1]))):
        section, count = re.subn(rf"(?m)^( +{name}: )[^\s#]+", rf"\g<1>{value}", section)
        if not count:
            raise ValueError(f"{path}: no {name} in section q, expected a line `  {name}: ...`")
    with atomic(path) as part:
        part.write_text(head + section)


def run(jobs: list[tuple[Study, int, Choice]], config: Config, data: Path) -> dict[tuple[str, int, Choice], Result]:
    """All fits, one process for each core; those that an earlier run finished are kept."""
    found: dict[tuple[str, int, Choice], Result] = {}
    console = Console(stderr=True)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool, Progress(console=console) as progress:
        bar = progress.add_task("fits", total=len(jobs))
        waiting = {}
        for study, number, choice in jobs:
            group, job = Group(study, number, data), (study.name, number, choice)
            seen = [fingerprint(group.folder(stage)) for stage in ("targets", "offline")]
            key = [{**dataclasses.asdict(config), "hidden": choice[0], "learning_rate": choice[1]}, seen]
            path = work_folder("select", study, key, data) / f"{number}-{choice[0]}-{choice[1]:g}.json"
            if path.exists():
                held_out, error = json.loads(path.read_text())
                found[job] = held_out, error
                progress.advance(bar)
            else:
                waiting[pool.submit(measure, group, choice, config)] = job, path
        try:
            for future in as_completed(waiting):
                job, path = waiting[future]
                found[job] = future.result()
                write_json(path, found[job])
                progress.advance(bar)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return found


def rows(found: dict[tuple[str, int, Choice], Result], envs: list[str]) -> Rows:
    """One for each choice: score, and for each environment the held-out error and that against the exact q."""
    score = scores(found)
    chosen = choose(score)
    out = []
    for choice in score:
        cells = [str(choice[0]), f"{choice[1]:g}", f"{score[choice]:.3f}{'*' if choice == chosen else ''}"]
        for env in envs:
            results = [result for (e, _, c), result in found.items() if (e, c) == (env, choice)]
            held_out, error = np.mean(results, axis=0)
            cells += [f"{held_out:.4g}", f"{error:.4f}"]
        out.append(tuple(cells))
    return out


def main(arguments: list[str] | None = None) -> int:
    about = (
        "Fits q for every hidden x learning rate of the paper's grid, prints the held-out errors, writes the choice "
        "to params.yaml. An interrupted run resumes."
    )
    parser = commands.parser("select", about, study="gridworld-1000,gridworld-27000")
    parser.add_argument("--groups", type=int, default=2, help="groups of each study (default 2)")
    parser.add_argument("--params", type=Path, default=ROOT / "params.yaml", help="file that the choice is written to")
    args = parser.parse_args(arguments)

    def work() -> None:
        chosen_on = [studies.read(name) for name in args.study.split(",")]
        for study in chosen_on:
            for number in range(args.groups):
                folder = Group(study, number, args.data).folder("offline")
                if not folder.exists():
                    raise ValueError(f"{folder}: no such folder, expected the stage `offline` to have run")
        choices = list(itertools.product(reversed(HIDDEN), RATES))  # the longest first, so that no core waits long
        jobs = [(study, i, c) for study in reversed(chosen_on) for c in choices for i in range(args.groups)]
        found = run(jobs, read_config("q", chosen_on[0].section("q")), args.data)
        names = [study.name for study in chosen_on]
        header = (
            "hidden",
            "learning rate",
            "score",
            *(f"{name}: {what}" for name in names for what in ("held-out", "q's error")),
        )
        table = [header, *rows(found, names)]
        chosen = choose(scores(found))
        write(args.params, chosen)
        write_table(table, args.data / "select" / "grid", ("md",))
        commands.show(f"q, {args.groups} groups each; score: held-out error as a multiple of the best", table)
        print(f"Chosen: hidden {chosen[0]}, learning rate {chosen[1]:g}, written to {args.params}.")

    return commands.guarded("select", work)


if __name__ == "__main__":
    sys.exit(main())
