"""Stage `evaluate`: the online runs of all estimators for each group; then the metrics over all groups.

Per-run estimates are in data/evaluate/<study>/runs/<group>/runs.safetensors, what could be decided of the first run in
decisions.json beside it; what all say together in metrics.json and curves.csv of the study, with group 0's decisions.

Where the environment is a finite MDP, the runs are independent and the truth is exact. Elsewhere they are disjoint
parts of a pool of episodes if it is large enough; if not, each is drawn from it without replacement, and they overlap.
So variances and the check for bias are taken from the whole pool, with the standard error of every relative variance.
The truth then comes from on-policy episodes of its own, by pooled evaluation.
"""

import csv
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from manyfold import exact
from manyfold.arrays import Array, Ints
from manyfold.data.episodes import Padded
from manyfold.envs import Environment
from manyfold.estimate import coverage, intervals, ranking, runs, summary
from manyfold.estimate.loggers import logging_of
from manyfold.estimate.methods import LOGGERS, METHODS, Loggers
from manyfold.files import atomic, atomic_folder, load_tensors, save_tensors, write_json
from manyfold.mdp import FiniteMDP
from manyfold.streams import stream
from manyfold.tables import Rows
from tasks import stages
from tasks.behavior import design
from tasks.behavior import params as behavior_params
from tasks.executor import stage_main
from tasks.groups import Group
from tasks.params import check_names, check_numbers
from tasks.stages import earlier, reporter
from tasks.studies import Study, group_name

NEEDS = ("targets", "q", "q_hat", "behavior")
MOST = 10_000_000  # episodes
COVERED = ("on_policy", "mpe", "mpe_baseline", "pooled")  # estimators whose intervals are held against the truth
COVERED_RUNS, COVERED_ROUNDS = 4, 10  # of each group, and after so many rounds
DECIDED = "pooled"  # the estimator whose decisions are shown


class Protocol(NamedTuple):
    """How much is run."""

    runs: int
    episodes: int  # in total for each estimator of a run; no more than the pool where runs are drawn from one
    match: int  # on-policy episodes whose error is to be matched
    pool: int  # episodes of each set of loggers, from which runs are drawn where nothing is exact
    truth: int  # on-policy episodes of all targets together, for the truth alone, where nothing is exact


def read_protocol(study: Study) -> Protocol:
    """The stage's section."""
    params = study.section("evaluate")
    check_names("evaluate", params, set(Protocol._fields))
    bounds = {"runs": (2, 100_000), "episodes": (2, MOST), "match": (1, MOST), "pool": (2, MOST), "truth": (2, MOST)}
    check_numbers("evaluate", params, bounds)
    if params["match"] > params["episodes"]:
        raise ValueError(f"evaluate.match is {params['match']}, expected at most {params['episodes']} = episodes")
    if params["match"] > params["pool"]:
        raise ValueError(f"evaluate.pool is {params['pool']}, expected at least {params['match']} = match")
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
    return runs.check_points(x, policies)


def run_length(protocol: Protocol, policies: int) -> int:
    """Episodes of a run of a pool: as many as disjoint runs have, if that is enough to match; otherwise up to all."""
    disjoint = protocol.pool // protocol.runs // (5 * policies) * 5 * policies
    return min(protocol.episodes, disjoint if disjoint >= protocol.match else protocol.pool)


class Result(NamedTuple):
    """What the runs of one group gave."""

    estimates: Array  # [R, E, points, K]
    variances: Array  # n times the variance, as seen within each run, [R, E, K]; one row where it is the pool's
    truth: Array  # J, [K]
    exact: Array  # n times the exact variance, NaN where there is none, [E, K]
    points: Ints
    untrusted: Array  # 1 where an estimate of the first run, or of the whole pool, can't be trusted, [E, K]
    steps: Array  # of an episode, [E]
    pool: Array | None = None  # estimates from the whole pool and their standard errors, [2, E, K]
    truth_error: Array | None = None  # standard error of the truth where it is not exact, [K]
    variance_error: Array | None = None  # standard errors of the pool's variances, [E, K]
    relative_error: Array | None = None  # standard errors of the pool's relative variances, [E]
    coverage: Array | None = None  # share of the first runs' intervals that hold, [len(COVERED), len(coverage.KINDS)]

    def save(self, path: Path) -> None:
        """One file with a checksum."""
        arrays = {
            name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in self._asdict().items() if x is not None
        }
        save_tensors(path, arrays, "runs", 1, {"estimators": list(METHODS)})

    @classmethod
    def load(cls, path: Path) -> "Result":
        """What `save` wrote; anything else is refused with one line."""
        tensors, about = load_tensors(path, "runs", 1, finite=False)
        if about.get("estimators") != list(METHODS):
            raise ValueError(f"{path}: runs of other estimators; run the stage `evaluate` again")
        needed = {"estimates", "variances", "truth", "exact", "points", "untrusted", "steps"}
        if not needed <= tensors.keys() <= set(cls._fields):
            raise ValueError(f"{path}: has {sorted(tensors)!s:.80}, expected {', '.join(sorted(needed))}")
        return cls(**{name: x.numpy() for name, x in tensors.items()})


def evaluate_exact(group: Group, env: Environment, mdp: FiniteMDP, protocol: Protocol) -> tuple[Result, dict[str, Any]]:
    """Independent runs, the truth by dynamic programming, and the first run's decisions."""
    behavior = design(group)
    (targets, q, q_hat), mu, odi = behavior.tables()
    logging, at, name = logging_of(env, behavior), points(protocol, len(targets)), group.study.name
    found, covered, truth = [], [], exact.values(mdp, targets)

    def rng_of(loggers: Loggers, run: int) -> np.random.Generator:
        return stream("evaluate", name, group.number, loggers, run)

    for run in range(protocol.runs):

        def log(loggers: Loggers, run: int = run) -> Padded:
            (episodes,) = logging.log(loggers, protocol.episodes, rng_of(loggers, run))
            return episodes

        values = runs.logged(log)
        found.append(runs.estimates(values, at))
        if run < COVERED_RUNS:
            covered.append(values)
    first: runs.Values = {}
    for loggers in LOGGERS:
        first |= runs.returns(logging.log(loggers, protocol.episodes, rng_of(loggers, 0)), loggers, health=True)
    health = runs.health(first)
    known = exact.estimator_variances(mdp, targets, q_hat, q, (mu, odi))
    unknown = np.full(len(targets), np.nan)
    result = Result(
        np.stack([f.estimates for f in found]),
        np.stack([f.variances for f in found]),
        truth,
        np.stack([known.get(name, unknown) for name in METHODS]),
        at,
        health.untrusted.astype(np.float64),
        health.steps,
        coverage=covered_shares(covered, truth, protocol.episodes),
    )
    return result, decisions(covered[0], group.policies().names, protocol.episodes)


def covered_shares(covered: list[runs.Values], truth: Array, episodes: int) -> Array:
    """The share of the 95% intervals of these runs that hold, `[len(COVERED), len(coverage.KINDS)]`."""
    points = np.array([min(COVERED_ROUNDS * len(truth), episodes)])
    found = coverage.of_runs(COVERED, covered, truth, points, episodes)
    return np.array([coverage.shares(found[name])[0] for name in COVERED])


def decisions(values: runs.Values, names: tuple[str, ...], episodes: int, alpha: float = 0.05) -> dict[str, Any]:
    """What could be decided of one run at any time, look after look, and at its end."""
    k, seen = len(names), []
    for rounds in coverage.looks(episodes // k):
        found = coverage.sample_of(DECIDED, values, rounds * k, names)
        seen.append({"episodes": found.units} | decision_of(ranking.decide(found, alpha, anytime=True)))
    made, logger, fold = coverage.values_of(DECIDED, values, episodes)
    last = ranking.decide(intervals.sample(made, logger, fold, names), alpha)
    best, (rank_low, rank_high) = last.best, last.ranks
    final = {"episodes": episodes} | decision_of(last)
    final |= {
        "difference_low": rounded(last.difference.low),
        "difference_high": rounded(last.difference.high),
        "rank_low": rank_low.tolist(),
        "rank_high": rank_high.tolist(),
        "best": best,
        "verdict": last.verdict,
        "rows": [list(row) for row in last.rows()],
        "winner": {name: rounded(x) for name, x in ranking.winner(made, logger, fold)._asdict().items()},
    }
    return {"policies": list(names), "alpha": alpha, "estimator": DECIDED, "looks": seen, "final": final}


def decision_of(found: ranking.Decision) -> dict[str, Any]:
    """The numbers that every look has."""
    numbers = {
        "mean": found.sample.mean,
        "low": found.interval.low,
        "high": found.interval.high,
        "p_best": found.p_best,
    }
    return {name: rounded(x) for name, x in numbers.items()} | {"may_be_best": found.may_be_best.tolist()}


def rounded(x: Any, digits: int = 6) -> Any:
    """Numbers, arrays of them too, as JSON has them: none where there is none."""
    if isinstance(x, list | np.ndarray):
        return [rounded(one, digits) for one in x]
    return x if isinstance(x, int) else round(float(x), digits) if np.isfinite(x) else None


def evaluate_pool(
    group: Group, env: Environment, protocol: Protocol, work: Path, tick: Callable[[int], None]
) -> tuple[Result, dict[str, Any]]:
    """Runs drawn from a pool, the truth from other episodes, and the first run's decisions.

    Each set of episodes is cached in `work`.
    """
    logging, name, number = logging_of(env, design(group)), group.study.name, group.number
    values: runs.Values = {}
    for i, loggers in enumerate(LOGGERS):

        def pool(loggers: Loggers = loggers) -> dict[str, Array]:
            rng = stream("evaluate", name, number, loggers)
            found = runs.returns(logging.log(loggers, protocol.pool, rng), loggers, health=True)
            return {returns: x for (_, returns), x in found.items()}

        values |= {(loggers, returns): x for returns, x in cached(work / f"{loggers}.safetensors", pool).items()}
        tick(i + 1)

    def log_truth() -> dict[str, Array]:
        rng = stream("evaluate", name, number, "truth")
        return dict(
            zip(("truth", "error"), runs.pooled_truth(logging.log("targets", protocol.truth, rng)), strict=True)
        )

    truth = cached(work / "truth.safetensors", log_truth)
    policies = len(truth["truth"])
    protocol = protocol._replace(episodes=run_length(protocol, policies))
    at = points(protocol, policies)
    each = runs.draws(values, protocol.episodes, protocol.runs, stream("evaluate", name, number, "runs"))
    first = next(each)
    drawn = [runs.estimates(one, at) for one in itertools.chain([first], each)]
    whole_pool, health = runs.estimates(values, np.array([protocol.pool])), runs.health(values)
    result = Result(
        np.stack([run.estimates for run in drawn]),
        whole_pool.variances[None],
        truth["truth"],
        np.full(whole_pool.variances.shape, np.nan),
        at,
        health.untrusted.astype(np.float64),
        health.steps,
        np.stack([whole_pool.estimates[:, 0], np.sqrt(whole_pool.variances / protocol.pool)]),
        truth["error"],
        *variance_errors(values, policies),
    )
    return result, decisions(first, group.policies().names, protocol.episodes)


def variance_errors(values: runs.Values, policies: int, blocks: int = 20) -> tuple[Array, Array]:
    """Standard errors of a pool's variances `[E, K]` and relative variances `[E]`.

    By leaving out one block of rounds after the other.
    """
    pool = min(x.shape[-1] for x in values.values())
    block = np.arange(pool) // policies * blocks // (pool // policies)  # of whole rounds
    used = [b for b in range(blocks) if (block == b).any()]
    found = []
    for b in used:
        some = {key: x[..., :pool][..., block != b] for key, x in values.items()}
        found.append(runs.estimates(some, np.array([int((block != b).sum())])).variances)
    both = np.stack(found), summary.relative_variances(np.stack(found))
    own, relative = (np.std(x, axis=0) * np.sqrt(len(used) - 1) for x in both)
    return own, relative


def cached(path: Path, make: Callable[[], dict[str, Array]]) -> dict[str, Array]:
    """What an earlier call saved there, or what `make` gives, saved."""
    if not path.exists():
        arrays = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in make().items()}
        save_tensors(path, arrays, "cached", 1, {})
    return {name: x.numpy() for name, x in load_tensors(path, "cached", 1, finite=False)[0].items()}


class Evaluate:
    """The stage, for the executor."""

    name, unit, batched = "evaluate", "parts", False
    header = (
        "estimator",
        "relative variance",
        "median",
        "exact",
        "episodes to match",
        "untrusted",
        "mean error / its SE",
    )

    def prepare(self, study: Study, data: Path) -> tuple[int, Path]:
        protocol = read_protocol(study)
        groups, seen = earlier(NEEDS, study, data)
        policies = Group(study, 0, data).policies().n_policies
        for episodes in (protocol.episodes, run_length(protocol, policies)):
            points(protocol._replace(episodes=episodes), policies)
        return groups, stages.work_folder("evaluate", study, [protocol, behavior_params(study)[1], seen], data)

    def run(self, study: Study, groups: list[int], work: Path, data: Path) -> None:
        torch.set_num_threads(1)
        protocol = read_protocol(study)
        each = len(LOGGERS) + 1
        report = reporter(work, groups, each * len(groups))
        for i, number in enumerate(groups):
            out, text = work / group_name(number), ""
            if not self.is_whole(out):
                start, group = time.perf_counter(), Group(study, number, data)
                env = group.environment()
                mdp = env.mdp()
                if mdp is not None:
                    found, decided = evaluate_exact(group, env, mdp, protocol)
                    episodes = len(LOGGERS) * protocol.runs * protocol.episodes
                else:

                    def tick(done: int, before: int = i * each) -> None:
                        report(before + done, "")

                    found, decided = evaluate_pool(group, env, protocol, work / f"{out.name}.parts", tick)
                    episodes = len(LOGGERS) * protocol.pool + protocol.truth
                with atomic_folder(out) as folder:
                    found.save(folder / "runs.safetensors")
                    write_json(folder / "decisions.json", decided)
                text = f"{episodes / (time.perf_counter() - start):,.0f} episodes/s in each process"
            report((i + 1) * each, text)

    def is_whole(self, folder: Path) -> bool:
        """Whether a group's folder holds its runs and decisions, and they load."""
        try:
            Result.load(folder / "runs.safetensors")
            json.loads((folder / "decisions.json").read_text())
        except (ValueError, OSError):
            return False
        return True

    def collect(self, study: Study, groups: int, work: Path, data: Path) -> Path:
        """Writes metrics.json, curves.csv and group 0's decisions.json, then puts the runs in place.

        An interrupted call can be repeated.
        """
        out = data / "evaluate" / study.name
        names = [group_name(group) for group in range(groups)]
        folders = [work / name if self.is_whole(work / name) else work / "whole" / name for name in names]
        if all(map(self.is_whole, folders)):  # otherwise `stages.collect` says what is missing
            found = [Result.load(folder / "runs.safetensors") for folder in folders]
            write_metrics(study, read_protocol(study), found, out)
            write_json(out / "decisions.json", json.loads((folders[0] / "decisions.json").read_text()))
        stages.collect(out / "runs", groups, work, self.is_whole)
        return out

    def describe(self, out: Path) -> Rows:
        """The table of metrics.json."""
        metrics = json.loads((out / "metrics.json").read_text())
        rows = []
        for name in METHODS:
            variance, error = metrics["relative_variance"][name], metrics["relative_variance_se"][name]
            known, match = metrics["exact_relative_variance"][name], metrics["episodes_to_match_se"][name]
            rows.append(
                (
                    name,
                    f"{variance:.4f} +- {error:.4f}" if error is not None else f"{variance:.4f}",
                    f"{metrics['relative_variance_median'][name]:.4f}",
                    "" if known is None else f"{known:.4f}",
                    f"{metrics['episodes_to_match'][name]:,.0f}" + (f" +- {match:,.0f}" if match is not None else ""),
                    f"{metrics['not_to_be_trusted'][name]:.0%}",
                    f"{metrics['largest_mean_error'][name]:.1f}",
                )
            )
        return rows


def write_metrics(study: Study, protocol: Protocol, found: list[Result], out: Path) -> None:
    """What all groups say together."""
    at, policies = found[0].points, len(found[0].truth)
    estimates, truth = np.stack([g.estimates for g in found]), np.stack([g.truth for g in found])
    variances = np.stack([g.variances.mean(0) for g in found])  # [G, E, K]
    relative = summary.summarise(summary.relative_variances(variances))
    known = summary.summarise(summary.relative_variances(np.stack([g.exact for g in found])))
    errors, together = summary.relative_errors(estimates, truth)  # [G, E, points, K], [G, E, points]
    curve = summary.summarise(together)  # [E, points]
    match = summary.episodes_to_match(at, curve.mean, protocol.match)
    rng = stream("evaluate", study.name, "match")
    match_errors = summary.match_errors(at, together, protocol.match, rng)
    steps = np.stack([g.steps for g in found]).mean(0)
    mean, error = pool_bias(found) if found[0].pool is not None else summary.bias(estimates[:, :, :, -1], truth)

    def named(x: Array, digits: int = 6) -> dict[str, float | None]:
        return {
            name: None if not np.isfinite(v) else round(float(v), digits) for name, v in zip(METHODS, x, strict=True)
        }

    metrics = {
        "env": study.name,
        "groups": len(found),
        "runs": protocol.runs,
        "policies": policies,
        "episodes": protocol.match,
        "max_episodes": int(at[-1]),
        "relative_variance": named(relative.mean),
        "relative_variance_se": named(relative.standard_error),
        "relative_variance_median": named(relative.median),
        "exact_relative_variance": named(known.mean),
        "exact_relative_variance_median": named(known.median),
        "episodes_to_match": named(match, 1),
        "episodes_to_match_se": named(match_errors, 1),
        "steps_per_episode": named(steps, 2),
        "relative_variance_per_step": named(relative.mean * steps / steps[0]),
        "not_to_be_trusted": named(np.stack([g.untrusted for g in found]).mean((0, 2)), 4),  # share of the policies
        "largest_mean_error": named(np.abs(mean / error).max(-1), 2),  # in standard errors, over the policies
        "values": value_metrics(truth),
    }
    if found[0].truth_error is not None:
        metrics |= {"runs_from": "pool", "pool": protocol.pool, "truth": truth_metrics(found, protocol)}
        metrics["runs_disjoint"] = protocol.runs * int(at[-1]) <= protocol.pool
        own = np.stack([g.relative_error for g in found if g.relative_error is not None])  # [G, E]
        if len(own) == len(found):  # runs of an earlier version have none
            share = own / summary.relative_variances(variances)
            metrics["relative_variance_pool_se"] = named(np.sqrt((own**2).sum(0)) / len(own))
            metrics["relative_variance_pool_se_share"] = named(share.max(0), 4)  # of a group's own, the largest
    if found[0].coverage is not None:
        held = np.mean([g.coverage for g in found if g.coverage is not None], 0)
        metrics |= {
            "coverage": {
                name: dict(zip(coverage.KINDS, rounded(x), strict=True)) for name, x in zip(COVERED, held, strict=True)
            },
            "coverage_runs": len(found) * min(COVERED_RUNS, protocol.runs),
        }
    write_json(out / "metrics.json", metrics)
    with atomic(out / "curves.csv") as part, part.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["estimator", "policy", "episodes", "relative_error", "standard_error"])
        series = [("all", curve)] + [(str(k), summary.summarise(errors[..., k])) for k in range(policies)]
        for i, name in enumerate(METHODS):
            for policy, one in series:
                for j, n in enumerate(at):
                    table.writerow([name, policy, n, f"{one.mean[i, j]:.6g}", f"{one.standard_error[i, j]:.3g}"])


def pool_bias(found: list[Result]) -> tuple[Array, Array]:
    """The mean error of the pools' estimates over the groups and its standard error, truth's included; `[E, K]`."""
    pools = [(g.pool, g.truth, g.truth_error) for g in found if g.pool is not None and g.truth_error is not None]
    errors = np.stack([pool[0] - truth for pool, truth, _ in pools])
    squares = np.stack([pool[1] ** 2 + error**2 for pool, _, error in pools])
    return errors.mean(0), np.sqrt(squares.sum(0)) / len(pools)


def value_metrics(truth: Array) -> dict[str, float]:
    """J of all policies, lowest and highest, and how far apart they are in the median group; truth `[G, K]`."""
    numbers = {"lowest": truth.min(), "highest": truth.max(), "spread": np.median(np.ptp(truth, -1))}
    return {name: round(float(x), 6) for name, x in numbers.items()}


def truth_metrics(found: list[Result], protocol: Protocol) -> dict[str, float]:
    """Standard errors of the truth: the mean; as a share of on-policy MC's at `match` episodes, mean and worst; and of
    the best estimator's at 200 episodes, the mean over policies and groups.
    """
    error = np.stack([g.truth_error for g in found if g.truth_error is not None])  # [G, K]
    others = np.sqrt(np.stack([g.variances.mean(0) for g in found]))  # [G, E, K]
    share, best = error / (others[:, 0] / protocol.match**0.5), others.mean(-1).argmin(-1)
    least = np.stack([one[i] for one, i in zip(others, best, strict=True)]) / 200**0.5  # [G, K]
    numbers = {
        "standard_error": error.mean(),
        "share": share.mean(),
        "largest_share": share.max(),
        "share_of_best_at_200": (error / least).mean(),
    }
    return {"episodes": protocol.truth, **{name: round(float(x), 6) for name, x in numbers.items()}}


STAGE = Evaluate()

if __name__ == "__main__":
    sys.exit(stage_main("evaluate"))
