"""How good fits are where no exact value exists: `python -m tasks.accuracy --study hopper`.

For each group: q and q_hat against the rest of the return and its square, from the same (t, s, a), in on-policy
episodes of their own; how much of the return's variance is left there with q as a baseline, which is the part that no
choice of actions explains, and below a K-th of which sharing cannot get; and the variances that were predicted for
every policy beside those measured in the pool, with the ceiling that the measurement's own noise sets. A picture:
learning curves, q against returns, predicted against measured.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import norm

from manyfold.arrays import Array, Bools, Ints
from manyfold.design.pilot import pooled_variance
from manyfold.design.prediction import LABELS, Predicted
from manyfold.estimate.loggers import FittedLogging
from manyfold.estimate.registry import ESTIMATORS
from manyfold.fqe import Check, ValueNets
from manyfold.rollout import Steps, rollout
from manyfold.streams import stream
from tasks.behavior import design
from tasks.evaluate import Result
from tasks.figures import plt, save, style
from tasks.groups import Group

EPISODES = 300  # on-policy, of each group
CLASSES = 20  # of q in the picture


class Fit(NamedTuple):
    """A fitted function against what came of the same (t, s, a); `[K]` each."""

    correlation: Array
    bias: Array  # mean(fitted - found) over the spread of what was found
    slope: Array  # of what was found against the fitted: 1 where calibrated


class Promise(NamedTuple):
    """An estimator's variance of each policy as predicted and as measured; `[K]` each."""

    predicted: Array
    measured: Array
    error: Array  # relative standard error of what was measured
    unknown: Bools  # logged data could not tell


class Accuracy(NamedTuple):
    """What is measured of one group."""

    q: Fit
    q_hat: Fit
    curves: tuple[list[Check], list[Check]]
    left: Array  # variance of on-policy returns with q as a baseline over that of the plain ones, [K]
    visited: tuple[Array, Array]  # q of (t, s, a), and the rest of the return from there
    plan: tuple[Array, Array]  # measured and predicted relative variance, [K] each
    promises: dict[Predicted, Promise]
    recommended: Predicted | None
    pilot: Array  # n Var of pooled evaluation as measured in those on-policy episodes, [K]


def promises_of(about: dict[str, Any], result: Result) -> dict[Predicted, Promise]:
    """What behavior.json promised against the pool; on-policy MC's is that of one episode."""
    names, out = list(ESTIMATORS), {}
    for of in LABELS:
        measured, predicted = result.variances[0, names.index(of)], np.array(about[f"predicted_{of}"], dtype=float)
        nothing = np.full_like(measured, np.nan)
        error = nothing if result.variance_error is None else result.variance_error[names.index(of)] / measured
        each = len(measured) if of == "on_policy" else 1
        unknown = np.isin(np.arange(len(measured)), about["unknown"][of])
        out[of] = Promise(each * predicted, measured, error, unknown)
    return out


def within(promises: Sequence[Promise], most: float = 0.3) -> tuple[float, float, float, float]:
    """Over all policies: the median of predicted / measured; the share within `most`; among those known; the ceiling.

    The ceiling is the share that a perfect prediction would reach: the probability that noise alone leaves the measured
    variance m with |true / m - 1| <= most.
    """
    ratio, error, unknown = (
        np.concatenate(x) for x in zip(*((p.predicted / p.measured, p.error, p.unknown) for p in promises), strict=True)
    )
    near = np.abs(np.nan_to_num(ratio, nan=np.inf) - 1) <= most
    reach = norm.cdf((1 / (1 - most) - 1) / error) - norm.cdf((1 / (1 + most) - 1) / error)
    known = float(near[~unknown].mean()) if (~unknown).any() else float("nan")
    return float(np.nanmedian(ratio)), float(near.mean()), known, float(reach.mean())


def table_of(groups: "list[Accuracy]") -> list[tuple[str, ...]]:
    """Predicted against measured, a line for each estimator and one for the one that was recommended."""
    rows: list[tuple[str, ...]] = [
        ("variance of", "predicted over measured, median", "within 30%", "unknown", "of the known", "ceiling")
    ]
    every = {LABELS[of]: [group.promises[of] for group in groups] for of in LABELS}
    every["recommended"] = [group.promises[group.recommended] for group in groups if group.recommended]
    rounds = EPISODES // len(groups[0].pilot)
    every[f"pooled, after {rounds} rounds"] = [
        group.promises["pooled"]._replace(predicted=group.pilot, unknown=np.zeros(len(group.pilot), dtype=np.bool_))
        for group in groups
    ]
    for label, promises in every.items():
        if promises:
            median, near, known, ceiling = within(promises)
            unknown = np.mean([promise.unknown.mean() for promise in promises])
            shares = ("" if np.isnan(x) else f"{x:.0%}" for x in (near, float(unknown), known, ceiling))
            rows.append((label, f"{median:.2f}", *shares))
    return rows


def curves_of(group: Group, stage: str) -> list[Check]:
    """The learning curves of a fit."""
    return ValueNets.load(group.folder(stage) / f"{stage}.safetensors")[1]


def rests(rows: Steps) -> Array:
    """The rewards from each step to its episode's end, of whole episodes in order."""
    total = np.cumsum(rows.reward)
    last = np.flatnonzero(rows.terminated | rows.truncated)
    return np.asarray(np.repeat(total[last], np.diff(last, prepend=-1)) - total + rows.reward)


def against(fitted: Array, found: Array, policy: Ints, policies: int) -> Fit:
    """Of all steps `[n]` of each policy."""
    out = []
    for k in range(policies):
        x, y = fitted[policy == k], found[policy == k]
        covariance = np.cov(x, y)
        slope = covariance[0, 1] / covariance[0, 0]
        out.append((np.corrcoef(x, y)[0, 1], (x - y).mean() / y.std(), slope))
    return Fit(*np.array(out).T)


def left(rows: Steps, policy: Ints, q: Array, v: Array, policies: int) -> Array:
    """Of whole on-policy episodes of each policy: Var(sum_t r + v - q) / Var(sum_t r)."""
    _, first, number = np.unique(rows.episode, return_index=True, return_inverse=True)
    own = policy[first]
    plain, baseline = (np.bincount(number, weights=x) for x in (rows.reward, rows.reward + v - q))
    return np.array([baseline[own == k].var(ddof=1) / plain[own == k].var(ddof=1) for k in range(policies)])


def measure(group: Group) -> Accuracy:
    """One group's fits against on-policy episodes, and its plan against its pool."""
    logging = FittedLogging(group.environment(), design(group))
    policies = logging.behavior.policies.n_policies
    rng = stream("accuracy", group.study.name, group.number)
    found, steps, blocks = [], [], []
    for rows in rollout(logging.env, logging.choose("targets"), np.arange(EPISODES) % policies, rng):
        own = rows.episode % policies, np.arange(len(rows.t)), rows.action
        fitted = logging.behavior.fitted(rows.state, rows.t)
        v = (fitted.policies * fitted.q).sum(-1)[own[:2]]
        found.append((own[0], fitted.q[own], fitted.q_hat[own], rests(rows), v))
        steps.append(rows)
        blocks.append(logging.episodes(rows, "targets"))
    policy, q, q_hat, rest, v = (np.concatenate(x) for x in zip(*found, strict=True))
    whole_rows = Steps.join(steps)
    runs = group.data / "evaluate" / group.study.name / "runs" / group.folder("q").name / "runs.safetensors"
    result = Result.load(runs)
    measured = result.variances[0, list(ESTIMATORS).index("mpe")] / result.variances[0, 0]
    about = json.loads((group.folder("behavior") / "behavior.json").read_text())
    return Accuracy(
        against(q, rest, policy, policies),
        against(q_hat, rest**2, policy, policies),
        (curves_of(group, "q"), curves_of(group, "q_hat")),
        left(whole_rows, policy, q, v, policies),
        (q, rest),
        (measured, np.array(about["predicted_relative_variance"], dtype=float)),
        promises_of(about, result),
        about["recommended"],
        pooled_variance(blocks),
    )


def rows_of(groups: list[Accuracy]) -> dict[str, Array]:
    """The lines of the table; values of all groups and policies."""
    out = {}
    for name in ("q", "q_hat"):
        fits: list[Fit] = [getattr(group, name) for group in groups]
        of = "the rest of the return" if name == "q" else "its square"
        out[f"{name} and {of}: correlation"] = np.concatenate([fit.correlation for fit in fits])
        out[f"{name}: bias over spread"] = np.concatenate([fit.bias for fit in fits])
        out[f"{name}: slope (calibrated: 1)"] = np.concatenate([fit.slope for fit in fits])
        i = ("q", "q_hat").index(name)
        out[f"{name}: held-out Bellman error, scaled"] = np.array([group.curves[i][-1].held_out for group in groups])
    out["q as a baseline: variance left"] = np.concatenate([group.left for group in groups])
    out["MPE, measured"] = np.concatenate([group.plan[0] for group in groups])
    out["MPE, predicted"] = np.concatenate([group.plan[1] for group in groups])
    out["MPE, predicted over measured"] = out["MPE, predicted"] / out["MPE, measured"]
    return out


def off(plans: list[tuple[Array, Array]]) -> Array:
    """|predicted / measured - 1| of every group and policy; infinite where the prediction ran away."""
    return np.concatenate([np.abs(np.nan_to_num(found / known, nan=np.inf) - 1) for known, found in plans])


def draw(groups: list[Accuracy], path: Path) -> None:
    """Held-out errors of all groups, q of all groups against returns, predicted against measured variances."""
    with four_panels(groups, "measured relative variance", path) as axes:
        draw_returns(axes, groups)


@contextmanager
def four_panels(groups: Sequence[Any], truth: str, path: Path) -> Iterator[Any]:
    """Learning curves of q and q_hat, a panel for the caller, and predicted variances against `truth`."""
    style()
    figure, panels = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    panels = panels.ravel()
    for axes, i, name in ((panels[0], 0, "q"), (panels[1], 1, "q_hat")):
        for group in groups:
            checks = group.curves[i]
            axes.plot([c.update for c in checks], [c.held_out for c in checks], color="#0072B2", alpha=0.3, linewidth=1)
        axes.set_yscale("log")
        axes.set_xlabel("updates")
        axes.set_title(f"{name}: held-out Bellman error, {len(groups)} groups")
    yield panels[2]
    known, predicted = (np.concatenate([group.plan[i] for group in groups]) for i in (0, 1))
    panels[3].scatter(known, predicted, s=8, alpha=0.5, color="#009E73", linewidths=0)
    ends = [np.nanmin([known, predicted]), np.nanmax([known, predicted])]
    panels[3].plot(ends, ends, color="#000000", linewidth=0.8)
    panels[3].set_xscale("log")
    panels[3].set_yscale("log")
    panels[3].set_xlabel(truth)
    panels[3].set_ylabel("predicted before any episode")
    panels[3].set_title(f"MPE's relative variance, {len(known)} policies")
    save(figure, path, 120, ("png",))


def draw_returns(axes: Any, groups: list[Accuracy]) -> None:
    """Mean return of steps whose q is alike, a line for each group."""
    ends = []
    for group in groups:
        q, rest = group.visited
        classes = np.array_split(np.argsort(q), CLASSES)
        x, y = (np.array([v[some].mean() for some in classes]) for v in (q, rest))
        axes.plot(x, y, "o-", color="#D55E00", alpha=0.4, markersize=3, linewidth=0.8)
        ends += [x.min(), x.max()]
    axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color="#000000", linewidth=0.8)
    axes.set_xlabel("fitted q")
    axes.set_ylabel("mean return from the same (t, s, a)")
    axes.set_title(f"q in {CLASSES} classes, on-policy episodes of their own")
