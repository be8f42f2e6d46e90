"""How good the fits are, against exact values: `python -m tasks.accuracy --study gridworld-1000`.

For each group: the error of q where its targets go, relative to q's spread; the exact relative variance
of MPE with the fitted q_hat beside that with the exact one; and the variance that was predicted for every policy beside
the exact one of the same mu. A picture: learning curves, fitted against exact, predicted against exact.

Where no exact value exists, fits are measured against episodes instead, by tasks/accuracy_sampled.py.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from scipy.stats import spearmanr

from manyfold import exact
from manyfold.arrays import Array
from manyfold.fqe import Check
from manyfold.mdp import FiniteMDP
from manyfold.tables import write_table
from tasks import accuracy_sampled, commands, studies
from tasks.accuracy_sampled import curves_of
from tasks.behavior import design
from tasks.groups import Group
from tasks.studies import Study


class Accuracy(NamedTuple):
    """What is measured of one group."""

    q_error: Array  # [K], of the spread
    q_hat_error: Array  # [K]
    exact_mpe: float  # relative variance with the exact q_hat
    fitted_mpe: float  # with the fitted one
    exact_baseline: float
    fitted_baseline: float
    curves: tuple[list[Check], list[Check]]
    visited: tuple[Array, Array]  # exact and fitted q where the targets are, for the picture
    plan: tuple[Array, Array]  # exact and predicted relative variance of the fitted mu, [K] each


def visits(mdp: FiniteMDP, policies: Array) -> Array:
    """The share of its steps that each policy spends at (t, s, a); `[K, T, S, A]`."""
    share, at = np.zeros_like(policies), np.broadcast_to(mdp.initial, (len(policies), mdp.n_states))
    for t in range(mdp.horizon):
        share[:, t] = at[..., None] * policies[:, t]
        at = mdp.push(share[:, t])
    return share / mdp.horizon


def relative_error(fitted: Array, true: Array, share: Array) -> Array:
    """Root mean square error over the spread, both weighted by visits; `[K]`."""
    axes = (1, 2, 3)
    spread = (share * (true - (share * true).sum(axes, keepdims=True)) ** 2).sum(axes)
    return np.asarray(np.sqrt((share * (fitted - true) ** 2).sum(axes) / spread))


def measure(group: Group, mdp: FiniteMDP) -> Accuracy:
    """One group's fits against dynamic programming."""
    behavior = design(group)
    (policies, q, _), mu, odi = behavior.tables()
    true_q, true_q_hat = exact.action_values(mdp, policies), exact.second_moments(mdp, policies)
    share = visits(mdp, policies)
    ideal, found = (
        exact.estimator_variances(mdp, policies, true_q_hat, b, designed)
        for b, designed in ((true_q, None), (q, (mu, odi)))
    )
    relative = exact.pdis_variance(mdp, policies, mu) / found["on_policy"]
    predicted = json.loads((group.folder("behavior") / "behavior.json").read_text())["predicted_relative_variance"]
    ideal_mean, found_mean = exact.relative_variances(ideal), exact.relative_variances(found)
    often = share > np.quantile(share[share > 0], 0.5)
    return Accuracy(
        relative_error(q, true_q, share),
        relative_error(behavior.q_hat.table(), true_q_hat, share),
        ideal_mean["mpe"],
        found_mean["mpe"],
        ideal_mean["mpe_baseline"],
        found_mean["mpe_baseline"],
        (curves_of(group, "q"), curves_of(group, "q_hat")),
        (true_q[often], q[often]),
        (relative, np.array(predicted, dtype=float)),
    )


def draw(groups: list[Accuracy], path: Path) -> None:
    """Held-out errors of all groups, the first group's q against the exact one, predicted variances of all groups."""
    true, fitted = groups[0].visited
    with accuracy_sampled.four_panels(groups, "exact relative variance of the fitted mu", path) as axes:
        axes.scatter(true, fitted, s=4, alpha=0.3, color="#D55E00", linewidths=0)
        axes.plot([true.min(), true.max()], [true.min(), true.max()], color="#000000", linewidth=0.8)
        axes.set_xlabel("exact q")
        axes.set_ylabel("fitted q")
        axes.set_title("q of group 0, where its targets are")


def rows_of(groups: list[Accuracy]) -> dict[str, Array]:
    """The lines of the table."""
    return {
        "q: error over spread": np.concatenate([g.q_error for g in groups]),
        "q_hat: error over spread": np.concatenate([g.q_hat_error for g in groups]),
        "MPE, exact q_hat": np.array([g.exact_mpe for g in groups]),
        "MPE, fitted q_hat": np.array([g.fitted_mpe for g in groups]),
        "MPE, fitted over exact": np.array([g.fitted_mpe / g.exact_mpe for g in groups]),
        "MPE + q baseline, exact": np.array([g.exact_baseline for g in groups]),
        "MPE + q baseline, fitted": np.array([g.fitted_baseline for g in groups]),
    }


def main(arguments: list[str] | None = None) -> int:
    about = (
        "Compares the fitted q and q_hat with exact values, or with episodes where there are none: errors, their cost."
    )
    parser = commands.parser("accuracy", about, study="gridworld-1000")
    parser.add_argument("--groups", type=int, nargs="+", help="numbers of groups (default all)")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    return commands.guarded("accuracy", lambda: run(studies.read(args.study), args.data, args.groups))


def run(study: Study, data: Path, groups: list[int] | None = None) -> None:
    """Measures the groups of a study, all if left out, draws and prints."""
    exact_values = studies.make_environment(study, 0).mdp() is not None
    stage, truth = ("behavior", "exact") if exact_values else ("evaluate", "measured")
    count = len(list((data / stage / study.name / ("" if exact_values else "runs")).glob("group-*")))
    if not count:
        raise ValueError(f"{data / stage / study.name}: no groups, expected the stage `{stage}` to have run")
    every = [Group(study, number, data) for number in (groups or range(count))]
    count = len(every)
    path, progress = data / "accuracy" / study.name, track(every, description="groups", console=Console(stderr=True))
    columns: dict[str, Callable[[Array], Any]] = {"mean": np.mean, "median": np.median}
    if exact_values:
        found = [measure(group, mdp) for group in progress if (mdp := group.environment().mdp())]
        draw(found, path)
        rows, plans = rows_of(found), [one.plan for one in found]
        columns |= {"worst": np.max}
    else:
        sampled = [accuracy_sampled.measure(group) for group in progress]
        accuracy_sampled.draw(sampled, path)
        rows, plans = accuracy_sampled.rows_of(sampled), [one.plan for one in sampled]
        columns |= {"lowest": np.min, "highest": np.max}
        table = accuracy_sampled.table_of(sampled)
        commands.show(f"{study.name}: {count} groups, predicted before any episode against measured", table)
        write_table(table, path.with_name(f"{path.name}-predictions"), ("md",))
    off = accuracy_sampled.off(plans)
    rows |= {f"predicted over {truth}, off by": off}
    lines = [(label, *(f"{column(row):.4f}" for column in columns.values())) for label, row in rows.items()]
    header = ("", *columns)
    against = "exact values" if exact_values else "episodes"
    commands.show(f"{study.name}: {count} groups, fits against {against}", [header, *lines])
    write_table([header, *lines], path, ("md",))
    for most in (0.2, 0.3):
        share = f"{np.mean(off <= most):.1%} of {len(off)}"
        print(f"Predicted relative variance within {most:.0%} of the {truth} one: {share}.")
    ranks = spearmanr(*(np.concatenate([plan[i] for plan in plans]) for i in (0, 1)), nan_policy="omit")
    print(f"Their rank correlation: {ranks.statistic:.2f}.")
    print(f"Figure and table: {path}.png, .md")


if __name__ == "__main__":
    sys.exit(main())
