"""Online evaluation runs: every estimator of all K policies from the same total number n of episodes.

An estimator is one entry of `ESTIMATORS`: which behavior policies log its n episodes (in turns, so that each of K
loggers has n / K after every K episodes), whether a policy uses all of them or its own logger's only, and which return.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from manyfold import estimators
from manyfold.mdp import Array, Ints
from manyfold.rollout import World, rollout

Loggers = Literal["targets", "mu", "odi"]


@dataclass(frozen=True)
class Logged:
    """N episodes of J loggers in turns, with all that a return needs; what few need is computed when asked for."""

    rewards: Array  # [N, T]
    target_probs: Array  # of the actions taken, [K, N, T]
    own_probs: Array  # the same of the logger that ran the episode, [N, T]
    logger_probs: Callable[[], Array]  # the same of every logger, [J, N, T]
    b: Callable[[], tuple[Array, Array]]  # the baseline at the actions taken, and its expectation, [K, N, T] each
    counts: Ints  # episodes of each logger, [J]
    lengths: Ints | None = None  # [N]; None: all of the horizon

    @cached_property
    def log_rho(self) -> Array:
        """Of each target to the logger that ran the episode; `[K, N, T]`."""
        return estimators.log_ratios(self.target_probs, self.own_probs, self.lengths)


def pdis(logged: Logged) -> Array:
    """Per-decision importance sampling; the plain Monte Carlo return of a target's own episodes; `[K, N]`."""
    return estimators.pdis(logged.rewards, logged.log_rho, logged.lengths)


def baseline(logged: Logged) -> Array:
    """The baseline (doubly robust) return; `[K, N]`."""
    return estimators.baseline_return(logged.rewards, logged.log_rho, *logged.b(), logged.lengths)


def balanced(logged: Logged) -> Array:
    """Pooling by the prefix balance heuristic; `[K, N]`."""
    return estimators.balanced(
        logged.rewards, logged.target_probs, logged.logger_probs(), logged.counts, logged.lengths
    )


def balanced_baseline(logged: Logged) -> Array:
    """The same with a baseline; `[K, N]`."""
    return estimators.balanced(
        logged.rewards, logged.target_probs, logged.logger_probs(), logged.counts, logged.lengths, logged.b()
    )


@dataclass(frozen=True)
class Estimator:
    label: str
    loggers: Loggers
    own: bool  # policy k uses the n / K episodes of logger k; otherwise all n
    returns: Callable[[Logged], Array]


ESTIMATORS = {
    "on_policy": Estimator("On-policy MC", "targets", True, pdis),
    "mpe": Estimator("MPE", "mu", False, pdis),
    "odi": Estimator("ODI", "odi", True, pdis),
    "son": Estimator("SON", "targets", False, pdis),
    "sodi": Estimator("SODI", "odi", False, pdis),
    "mpe_baseline": Estimator("MPE + q baseline", "mu", False, baseline),
    "son_balanced": Estimator("SON, balanced", "targets", False, balanced),
}
LOGGERS = tuple(dict.fromkeys(e.loggers for e in ESTIMATORS.values()))


Values = dict[tuple[Loggers, Callable[[Logged], Array]], Array]  # a return of every episode, [K, N]


class Run(NamedTuple):
    """One run of every estimator, in the order of `ESTIMATORS`."""

    estimates: Array  # of J after each number of episodes, [E, points, K]
    variances: Array  # n times the variance of the estimate from n episodes, as seen in this run, [E, K]


def run(log: Callable[[Loggers], Logged], points: Ints) -> Run:
    """One independent run.

    Args:
        log: runs the episodes of these loggers, as many as the last point says.
        points: total episodes at which estimates are wanted, multiples of the number of targets.
    """
    values: Values = {}
    for loggers in LOGGERS:
        values |= returns(log(loggers), loggers)
    return estimates(values, points)


def returns(logged: Logged, loggers: Loggers) -> Values:
    """Every return that some estimator takes from these loggers' episodes."""
    wanted = dict.fromkeys(e.returns for e in ESTIMATORS.values() if e.loggers == loggers)
    return {(loggers, function): function(logged) for function in wanted}


def estimates(values: Values, points: Ints) -> Run:
    """What each estimator makes of the returns; episode i is of logger i mod J."""
    found = []
    for estimator in ESTIMATORS.values():
        x = values[estimator.loggers, estimator.returns]
        many = n_loggers(estimator.loggers, len(x))
        found.append(own_estimates(x, points) if estimator.own else pooled_estimates(x, points, many))
    return Run(*(np.stack(x) for x in zip(*found, strict=True)))


def n_loggers(loggers: Loggers, policies: int) -> int:
    """J: one mu, or one logger for each target."""
    return 1 if loggers == "mu" else policies


def draw(values: Values, episodes: int, rng: np.random.Generator) -> Values:
    """A run of a pool: so many of its episodes in random order, none twice, the loggers still in turns.

    Returns of the same loggers are those of the same episodes, so that estimators share their data as in `run`. Draws
    from one pool overlap, so their spread says too little: a variance or a mean's error is to be taken from the pool.
    """
    order: dict[Loggers, Ints] = {}
    drawn = {}
    for (loggers, function), x in values.items():
        many, pool = n_loggers(loggers, len(x)), x.shape[-1]
        if episodes > pool or episodes % many or pool % many:
            raise ValueError(
                f"{episodes} episodes of a pool of {pool}, expected at most all, both multiples of {many} loggers"
            )
        if loggers not in order:
            rounds = np.tile(np.arange(pool // many), (many, 1))
            picked = rng.permuted(rounds, axis=1)[:, : episodes // many]  # [J, rounds]
            order[loggers] = (picked * many + np.arange(many)[:, None]).T.ravel()
        drawn[loggers, function] = x[:, order[loggers]]
    return drawn


def own_estimates(values: Array, points: Ints) -> tuple[Array, Array]:
    """Target k from the episodes k, k + K, k + 2K, ... of `values [K, N]`: estimates `[points, K]`, variances `[K]`."""
    k = len(values)
    own = np.stack([values[i, i::k] for i in range(k)])  # [K, N / K]
    return _means(own, points // k), k * own.var(-1, ddof=1)


def pooled_estimates(values: Array, points: Ints, loggers: int) -> tuple[Array, Array]:
    """Every target from all episodes; the variance is that of a stratified sample, within loggers."""
    by_logger = values.reshape(len(values), -1, loggers)
    return _means(values, points), by_logger.var(1, ddof=1).mean(-1)


def _means(values: Array, counts: Ints) -> Array:
    """Means of the first `counts` values, `[K, N]` -> `[points, K]`."""
    return (np.cumsum(values, axis=-1)[:, counts - 1] / counts).T


class Tables(NamedTuple):
    """A group whose states can be counted: everything as tables `[.., T, S, A]`."""

    targets: Array
    mu: Array
    odi: Array
    b: Array  # the baseline, fitted q


def log_tabular(world: World, tables: Tables, loggers: Loggers, episodes: int, rng: np.random.Generator) -> Logged:
    """Episodes of a world with counted states."""
    table = {"targets": tables.targets, "mu": tables.mu[None], "odi": tables.odi}[loggers]
    found = rollout(world, table, episodes, rng)
    target_probs = found.probs(tables.targets)
    return Logged(
        found.rewards,
        target_probs,
        found.own_probs(table),
        lambda: target_probs if loggers == "targets" else found.probs(table),
        lambda: (found.probs(tables.b), found.at((tables.targets * tables.b).sum(-1))),
        np.bincount(np.arange(episodes) % len(table)),
    )


def check_points(points: ArrayLike, policies: int) -> Ints:
    """Refuses numbers of episodes at which some target would have had none, or fewer than another."""
    x: Ints = np.asarray(points)
    if x.ndim != 1 or not len(x) or not np.issubdtype(x.dtype, np.integer) or (x % policies).any() or x.min() < 1:
        raise ValueError(f"points are {x.tolist()!s:.80}, expected multiples of the {policies} targets")
    if (np.diff(x) <= 0).any() or x[-1] < 2 * policies:
        raise ValueError(f"points are {x.tolist()!s:.80}, expected increasing, the last at least {2 * policies}")
    return x
