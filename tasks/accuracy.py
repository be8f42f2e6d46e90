"""How good the fits of a Gridworld are, against exact values: `python -m tasks.accuracy --env gridworld-1000`.

For each group: the error of q where its targets go, relative to q's spread; the exact relative variance
of MPE with the fitted q_hat beside that with the exact one; and the variance that was predicted for every policy beside
the exact one of the same mu. A picture: learning curves, fitted against exact, predicted against exact.

A robot's fits are measured against episodes instead, by tasks/accuracy_robots.py.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.stats import spearmanr

from manyfold import environments, exact
from manyfold.gridworld import Gridworld
from manyfold.mdp import Array, FiniteMDP
from manyfold.values import Check, ValueNets
from tasks import accuracy_robots
from tasks.behavior import design
from tasks.files import whole
from tasks.fits import Inputs
from tasks.params import ROOT


class Group(NamedTuple):
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


def measure(env: str, group: int, data: Path) -> Group:
    """One group's fits against dynamic programming."""
    inputs = Inputs(env, group, data)
    mdp = Gridworld.draw(environments.GRIDWORLDS[env], group).to_mdp()
    behavior = design(inputs)
    (policies, q, _), mu, odi = behavior.tables()
    true_q, true_q_hat = exact.action_values(mdp, policies), exact.second_moments(mdp, policies)
    share = visits(mdp, policies)
    ideal, found = (
        exact.estimator_variances(mdp, policies, true_q_hat, b, designed)
        for b, designed in ((true_q, None), (q, (mu, odi)))
    )
    relative = exact.pdis_variance(mdp, policies, mu) / found["on_policy"]
    predicted = json.loads((inputs.folder("behavior") / "behavior.json").read_text())["predicted_relative_variance"]
    ideal_mean, found_mean = exact.relative_variances(ideal), exact.relative_variances(found)
    often = share > np.quantile(share[share > 0], 0.5)
    return Group(
        relative_error(q, true_q, share),
        relative_error(behavior.q_hat.table(), true_q_hat, share),
        ideal_mean["mpe"],
        found_mean["mpe"],
        ideal_mean["mpe_baseline"],
        found_mean["mpe_baseline"],
        tuple(ValueNets.load(inputs.folder(stage) / f"{stage}.safetensors")[1] for stage in ("q", "q_hat")),
        (true_q[often], q[often]),
        (relative, np.array(predicted, dtype=float)),
    )


def draw(groups: list[Group], path: Path) -> None:
    """Held-out errors of all groups, the first group's q against the exact one, predicted variances of all groups."""
    true, fitted = groups[0].visited
    with accuracy_robots.four_panels(groups, "exact relative variance of the fitted mu", path) as axes:
        axes.scatter(true, fitted, s=4, alpha=0.3, color="#D55E00", linewidths=0)
        axes.plot([true.min(), true.max()], [true.min(), true.max()], color="#000000", linewidth=0.8)
        axes.set_xlabel("exact q")
        axes.set_ylabel("fitted q")
        axes.set_title("q of group 0, where its targets are")


def rows_of(groups: list[Group]) -> dict[str, Array]:
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
    parser = argparse.ArgumentParser(
        prog="python -m tasks.accuracy",
        description="Compares the fitted q and q_hat with exact values, a robot's with episodes: errors, their cost.",
    )
    parser.add_argument("--env", default="gridworld-1000", help=f"one of {', '.join(environments.ENVS)}")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of all data (default data)")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        environments.check_env(args.env)
        robot = args.env in environments.ROBOTS
        stage, truth = ("evaluate", "measured") if robot else ("behavior", "exact")
        folder = args.data / stage / args.env / ("runs" if robot else "")
        count = len(list(folder.glob("group-*")))
        if not count:
            raise ValueError(f"{args.data / stage / args.env}: no groups, expected the stage `{stage}` to have run")
        progress = track(range(count), description="groups", console=Console(stderr=True))
        path = args.data / "accuracy" / f"{args.env}.png"
        module = accuracy_robots if robot else sys.modules[__name__]
        groups = [module.measure(args.env, group, args.data) for group in progress]
        module.draw(groups, path)
        off = accuracy_robots.off(groups)
        rows = module.rows_of(groups) | {f"predicted over {truth}, off by": off}
    except (ValueError, OSError) as error:
        print(f"accuracy: {error}", file=sys.stderr)
        return 2
    columns = {"mean": np.mean, "median": np.median, **({"lowest": np.min} if robot else {})}
    columns |= {"highest" if robot else "worst": np.max}
    lines = [(label, *(f"{column(row):.4f}" for column in columns.values())) for label, row in rows.items()]
    header = ("", *columns)
    table = Table(title=f"{args.env}: {count} groups, fits against {'episodes' if robot else 'exact values'}")
    for column in header:
        table.add_column(column, justify="right" if column else "left")
    for line in lines:
        table.add_row(*line)
    Console().print(table)
    with whole(path.with_suffix(".md")) as part:
        part.write_text("".join("| " + " | ".join(line) + " |\n" for line in (header, ("---",) * len(header), *lines)))
    for most in (0.2, 0.3):
        share = f"{np.mean(off <= most):.1%} of {len(off)}"
        print(f"Predicted relative variance within {most:.0%} of the {truth} one: {share}.")
    ranks = spearmanr(*(np.concatenate([group.plan[i] for group in groups]) for i in (0, 1)), nan_policy="omit")
    print(f"Their rank correlation: {ranks.statistic:.2f}.")
    print(f"Figure and table: {path.with_suffix('')}.png, .md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
