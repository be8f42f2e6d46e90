"""Stage `evaluate`: the online runs of all estimators, for a shard of groups; then the metrics over all groups.

`python -m tasks.evaluate` runs one shard; `python -m flows.evaluate` runs them all. Per-run estimates are in
data/evaluate/<env>/runs/<group>/runs.safetensors, what they say together in metrics.json and curves.csv beside them.

On a Gridworld the runs are independent and the truth is exact. A robot's runs are drawn from a pool of episodes, each
run without replacement; so they overlap, and variances and the check for bias are taken from the whole pool instead.
Its truth comes from on-policy episodes of its own.
"""

import csv
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from manyfold import environments, evaluation, exact, stats
from manyfold.evaluation import ESTIMATORS, Tables
from manyfold.gridworld import Gridworld
from manyfold.mdp import Array, Ints
from manyfold.networks import NetworkPolicySet
from manyfold.robots import Robot
from manyfold.streams import stream
from tasks import shards
from tasks.behavior import design
from tasks.behavior import params as behavior_params
from tasks.files import whole
from tasks.fits import Inputs, earlier
from tasks.params import check_names, section
from tasks.shards import Report, group_name, reporter, shard_main, whole_folder

HEADER = ("estimator", "relative variance", "median", "exact", "episodes to match", "largest mean error / its SE")
NEEDS = ("targets", "q", "q_hat", "behavior")


class Protocol(NamedTuple):
    runs: int
    episodes: int  # in total for each estimator of a run
    match: int  # on-policy episodes whose error is to be matched
    pool: int  # a robot's episodes of each set of loggers, from which its runs are drawn
    truth: int  # a robot's on-policy episodes of all targets together, for the truth alone


def read_protocol(env: str) -> Protocol:
    """The stage's section of params.yaml; a robot's runs are no longer than its pool."""
    params = section("evaluate")
    check_names("evaluate", params, {*Protocol._fields, "more"})
    more = params["more"]
    fits = isinstance(more, dict) and more.keys() <= set(environments.ROBOTS)
    if not fits or not all(isinstance(x, dict) and x.keys() <= {"pool", "truth"} for x in more.values()):
        raise ValueError(
            f"evaluate.more is {more!r}, expected pool and truth by robot, such as {{ant: {{truth: 3000}}}}"
        )
    params = {**{name: params[name] for name in Protocol._fields}, **more.get(env, {})}
    for name, least in (("runs", 2), ("episodes", 2), ("match", 1), ("pool", 2), ("truth", 2)):
        value = params[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"evaluate.{name} is {value!r}, expected a whole number of at least {least}")
    if params["match"] > params["episodes"]:
        raise ValueError(f"evaluate.match is {params['match']}, expected at most {params['episodes']} = episodes")
    if params["match"] > params["pool"]:
        raise ValueError(f"evaluate.pool is {params['pool']}, expected at least {params['match']} = match")
    if env in environments.ROBOTS:
        params["episodes"] = min(params["episodes"], params["pool"])
    return Protocol(**params)


def points(protocol: Protocol, policies: int) -> Ints:
    """Episodes at which estimates are taken: dense at first, where the best estimators already match on-policy MC."""
    wanted = {*range(1, 11), *range(15, protocol.episodes // policies + 1, 5), protocol.episodes // policies}
    x = np.array(sorted(i for i in wanted if i * policies <= protocol.episodes)) * policies
    if protocol.match not in x or x[-1] != protocol.episodes:
        raise ValueError(
            f"evaluate.match and evaluate.episodes are {protocol.match} and {protocol.episodes}, expected multiples of "
            f"{5 * policies}: five episodes for each of {policies} policies"
        )
    for name in ("pool", "truth"):
        value = getattr(protocol, name)
        if value % policies or value < 2 * policies:
            raise ValueError(f"evaluate.{name} is {value}, expected a multiple of {policies} policies, 2 each or more")
    return evaluation.check_points(x, policies)


def prepare(env: str, data: Path) -> tuple[int, Path]:
    """The number of groups and the work folder."""
    protocol = read_protocol(env)
    groups, seen = earlier(NEEDS, env, data)
    points(protocol, Inputs(env, 0, data).policies().n_policies)
    return groups, shards.work_folder("evaluate", env, [protocol, behavior_params()[1], seen], data)


class Group(NamedTuple):
    """What the runs of one group gave."""

    estimates: Array  # [R, E, points, K]
    variances: Array  # n times the variance, as seen within each run, [R, E, K]
    truth: Array  # J, [K]
    exact: Array  # n times the exact variance, NaN where there is none, [E, K]
    points: Ints
    pool: Array | None = None  # estimates from a robot's whole pool and their standard errors, [2, E, K]
    truth_error: Array | None = None  # standard error of a robot's truth, [K]

    def save(self, path: Path) -> None:
        arrays = {name: np.ascontiguousarray(x) for name, x in self._asdict().items() if x is not None}
        save_file(arrays, path, metadata={"estimators": json.dumps(list(ESTIMATORS))})

    @classmethod
    def load(cls, path: Path) -> "Group":
        try:
            with safe_open(path, "numpy") as file:
                if json.loads((file.metadata() or {}).get("estimators", "null")) != list(ESTIMATORS):
                    raise ValueError(f"{path}: runs of other estimators; run the stage `evaluate` again")
                return cls(**{name: file.get_tensor(name) for name in cls._fields if name in file.keys()})  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path}: not a whole file of runs ({error}); was it cut off?") from None


def evaluate_gridworld(env: str, group: int, protocol: Protocol, data: Path) -> Group:
    """All runs of one group, and the truth."""
    (targets, q, q_hat), mu, odi = design(Inputs(env, group, data)).tables()
    world = Gridworld.draw(environments.GRIDWORLDS[env], group)
    tables, at = Tables(targets, mu, odi, q), points(protocol, len(targets))
    found = []
    for run in range(protocol.runs):

        def log(loggers: evaluation.Loggers, run: int = run) -> evaluation.Logged:
            rng = stream("evaluate", env, group, loggers, run)
            return evaluation.log_tabular(world, tables, loggers, protocol.episodes, rng)

        found.append(evaluation.run(log, at))
    mdp = world.to_mdp()
    known = exact.estimator_variances(mdp, targets, q_hat, q, (mu, odi))
    unknown = np.full(len(targets), np.nan)
    return Group(
        np.stack([f.estimates for f in found]),
        np.stack([f.variances for f in found]),
        exact.values(mdp, targets),
        np.stack([known.get(name, unknown) for name in ESTIMATORS]),
        at,
    )


def read_robot(inputs: Inputs) -> Robot:
    """A group's policies, from the earlier stages."""
    return Robot(inputs.env, NetworkPolicySet.load(inputs.folder("targets") / "companion"), design(inputs))


def log_pool(robot: Robot, group: int, loggers: evaluation.Loggers, protocol: Protocol) -> dict[str, Array]:
    """The returns of these loggers' pool, by name; `[K, pool]` each."""
    logged = robot.log(loggers, protocol.pool, stream("evaluate", robot.env, group, loggers))
    parts = [evaluation.returns(block, loggers) for block in logged]
    return {key[1].__name__: np.concatenate([part[key] for part in parts], -1) for key in parts[0]}


def log_truth(robot: Robot, group: int, protocol: Protocol) -> dict[str, Array]:
    """J and its standard error, `[K]` each, from on-policy episodes that no estimator sees.

    All targets' episodes serve each target, by the balance heuristic with q as a baseline: unbiased whatever q is, with
    bounded weights, and as exact as several times as many plain returns.
    """
    logged = robot.log("targets", protocol.truth, stream("evaluate", robot.env, group, "truth"))
    values = np.concatenate([evaluation.balanced_baseline(block) for block in logged], -1)
    mean, variance = evaluation.pooled_estimates(values, np.array([protocol.truth]), len(values))
    return {"truth": mean[0], "truth_error": np.sqrt(variance / protocol.truth)}


def evaluate_robot(
    env: str, group: int, protocol: Protocol, data: Path, work: Path, tick: Callable[[int], None]
) -> Group:
    """All runs of one group, and the truth; each set of episodes is kept in `work` as soon as it is there."""
    robot = read_robot(Inputs(env, group, data))
    values: evaluation.Values = {}
    for i, loggers in enumerate(evaluation.LOGGERS):
        found = kept(work / f"{loggers}.safetensors", lambda x=loggers: log_pool(robot, group, x, protocol))
        known = {e.returns.__name__: e.returns for e in ESTIMATORS.values()}
        values |= {(loggers, known[name]): x for name, x in found.items()}
        tick(i + 1)
    truth = kept(work / "truth.safetensors", lambda: log_truth(robot, group, protocol))
    at = points(protocol, len(truth["truth"]))
    rng = stream("evaluate", env, group, "runs")
    runs = [evaluation.estimates(evaluation.draw(values, protocol.episodes, rng), at) for _ in range(protocol.runs)]
    whole_pool = evaluation.estimates(values, np.array([protocol.pool]))
    return Group(
        np.stack([run.estimates for run in runs]),
        whole_pool.variances[None],
        truth["truth"],
        np.full(whole_pool.variances.shape, np.nan),
        at,
        np.stack([whole_pool.estimates[:, 0], np.sqrt(whole_pool.variances / protocol.pool)]),
        truth["truth_error"],
    )


def kept(path: Path, make: Callable[[], dict[str, Array]]) -> dict[str, Array]:
    """What an earlier call saved there, or what `make` gives, saved."""
    if not path.exists():
        with whole(path) as part:
            save_file({name: np.ascontiguousarray(x) for name, x in make().items()}, part)
    return load_file(path)


def tick(report: Report, before: int, done: int) -> None:
    """Reports what is done of a group, after the groups before it."""
    report(before + done, "")


def run(env: str, groups: list[int], data: Path) -> Path:
    """One shard's groups; those that are there already are kept."""
    torch.set_num_threads(1)
    protocol = read_protocol(env)
    _, work = prepare(env, data)
    robot = env in environments.ROBOTS
    each = len(evaluation.LOGGERS) + 1 if robot else protocol.runs
    report = reporter(work, groups, each * len(groups))
    for i, group in enumerate(groups):
        out = work / group_name(group)
        if not is_whole(out):
            start = time.perf_counter()
            if robot:
                parts = work / f"{out.name}.parts"
                found = evaluate_robot(env, group, protocol, data, parts, partial(tick, report, i * each))
                episodes = 3 * protocol.pool + protocol.truth
            else:
                found = evaluate_gridworld(env, group, protocol, data)
                episodes = 3 * protocol.runs * protocol.episodes
            with whole_folder(out) as folder:
                found.save(folder / "runs.safetensors")
            rate = episodes / (time.perf_counter() - start)
            report((i + 1) * each, f"{rate:,.0f} episodes/s in each process")
        report((i + 1) * each, "")
    return work


def is_whole(folder: Path) -> bool:
    """Whether a group's folder holds its runs, and they load."""
    try:
        Group.load(folder / "runs.safetensors")
    except (ValueError, OSError):
        return False
    return True


def collect(env: str, groups: int, work: Path, data: Path) -> Path:
    """Writes metrics.json and curves.csv, then puts the runs in place: an interrupted call can be repeated."""
    out = data / "evaluate" / env
    names = [group_name(group) for group in range(groups)]
    folders = [work / name if is_whole(work / name) else work / "whole" / name for name in names]
    if all(map(is_whole, folders)):  # otherwise `shards.collect` says what is missing
        found = [Group.load(folder / "runs.safetensors") for folder in folders]
        write_metrics(env, read_protocol(env), len(found[0].truth), found, out)
    shards.collect(out / "runs", groups, work, is_whole)
    return out


def write_metrics(env: str, protocol: Protocol, policies: int, found: list[Group], out: Path) -> None:
    """What all groups say together."""
    at = found[0].points
    estimates, truth = np.stack([g.estimates for g in found]), np.stack([g.truth for g in found])
    variances = np.stack([g.variances.mean(0) for g in found])  # [G, E, K]
    relative = stats.summarise(stats.relative_variances(variances))
    known = stats.summarise(stats.relative_variances(np.stack([g.exact for g in found])))
    errors = stats.relative_errors(estimates, truth)  # [G, E, points, K]
    curve = stats.summarise(errors.mean(-1))  # [E, points]
    match = stats.episodes_to_match(at, curve.mean, protocol.match)
    mean, error = pool_bias(found) if found[0].pool is not None else stats.bias(estimates[:, :, :, -1], truth)

    def named(x: Array, digits: int = 6) -> dict[str, float | None]:
        return {
            name: None if not np.isfinite(v) else round(float(v), digits) for name, v in zip(ESTIMATORS, x, strict=True)
        }

    metrics = {
        "env": env,
        "groups": len(found),
        "runs": protocol.runs,
        "policies": policies,
        "episodes": protocol.match,
        "max_episodes": protocol.episodes,
        "relative_variance": named(relative.mean),
        "relative_variance_se": named(relative.standard_error),
        "relative_variance_median": named(relative.median),
        "exact_relative_variance": named(known.mean),
        "exact_relative_variance_median": named(known.median),
        "episodes_to_match": named(match, 1),
        "largest_mean_error": named(np.abs(mean / error).max(-1), 2),  # in standard errors, over the policies
        "values": value_metrics(truth),
    }
    if found[0].truth_error is not None:
        metrics |= {"runs_from": "pool", "pool": protocol.pool, "truth": truth_metrics(found, protocol)}
    with whole(out / "metrics.json") as part:
        part.write_text(json.dumps(metrics, indent=1) + "\n")
    with whole(out / "curves.csv") as part, part.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["estimator", "policy", "episodes", "relative_error", "standard_error"])
        series = [("all", curve)] + [(str(k), stats.summarise(errors[..., k])) for k in range(policies)]
        for i, name in enumerate(ESTIMATORS):
            for policy, summary in series:
                for j, n in enumerate(at):
                    numbers = (f"{summary.mean[i, j]:.6g}", f"{summary.standard_error[i, j]:.3g}")
                    table.writerow([name, policy, n, *numbers])


def pool_bias(found: list[Group]) -> tuple[Array, Array]:
    """The mean error of the pools' estimates over the groups and its standard error, truth's included; `[E, K]`."""
    errors = np.stack([g.pool[0] - g.truth for g in found])
    squares = np.stack([g.pool[1] ** 2 + g.truth_error**2 for g in found])
    return errors.mean(0), np.sqrt(squares.sum(0)) / len(found)


def value_metrics(truth: Array) -> dict[str, float]:
    """J of all policies, lowest and highest, and how far apart they are in the median group; truth `[G, K]`."""
    numbers = {"lowest": truth.min(), "highest": truth.max(), "spread": np.median(np.ptp(truth, -1))}
    return {name: round(float(x), 6) for name, x in numbers.items()}


def truth_metrics(found: list[Group], protocol: Protocol) -> dict[str, float]:
    """Standard errors of the truth: the mean, and as a share of on-policy MC's at `match` episodes, mean and worst."""
    error = np.stack([g.truth_error for g in found])  # [G, K]
    share = error / np.sqrt(np.stack([g.variances[:, 0].mean(0) for g in found]) / protocol.match)
    numbers = {"standard_error": error.mean(), "share": share.mean(), "largest_share": share.max()}
    return {"episodes": protocol.truth, **{name: round(float(x), 6) for name, x in numbers.items()}}


def describe(out: Path) -> list[tuple[str, ...]]:
    """The table of metrics.json."""
    metrics = json.loads((out / "metrics.json").read_text())
    rows = []
    for name, estimator in ESTIMATORS.items():
        variance, error = metrics["relative_variance"][name], metrics["relative_variance_se"][name]
        known = metrics["exact_relative_variance"][name]
        rows.append(
            (
                estimator.label,
                f"{variance:.4f} +- {error:.4f}" if error is not None else f"{variance:.4f}",
                f"{metrics['relative_variance_median'][name]:.4f}",
                "" if known is None else f"{known:.4f}",
                f"{metrics['episodes_to_match'][name]:,.0f}",
                f"{metrics['largest_mean_error'][name]:.1f}",
            )
        )
    return rows


if __name__ == "__main__":
    sys.exit(shard_main("evaluate", "Runs all estimators for some groups of one environment under data/.work.", run))
