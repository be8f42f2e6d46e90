"""Online evaluation runs: every estimator of all K policies from the same total number n of episodes."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from manyfold.arrays import Array, Bools, Ints
from manyfold.data.episodes import Padded
from manyfold.estimate import pooled
from manyfold.estimate.diagnostics import diagnose, trust
from manyfold.estimate.methods import HEALTH, LOGGERS, METHODS, RETURNS, Loggers, n_loggers, pooled_columns

Values = dict[tuple[Loggers, str], Array]  # (loggers, name of a return) -> the return of every episode, [..., K, N]


class Run(NamedTuple):
    """One run of every estimator, in the order of `METHODS`."""

    estimates: Array  # of J after each number of episodes, [E, points, K]
    variances: Array  # n times the variance of the estimate from n episodes, as seen in this run, [E, K]


def run(log: Callable[[Loggers], Padded], points: Ints) -> Run:
    """One independent run.

    Args:
        log: runs the episodes of these loggers, as many as the last point says.
        points: total episodes at which estimates are wanted, multiples of the number of targets.
    """
    return estimates(logged(log), points)


def logged(log: Callable[[Loggers], Padded]) -> Values:
    """Every return that some estimator takes from the episodes of a run."""
    values: Values = {}
    for loggers in LOGGERS:
        values |= returns([log(loggers)], loggers)
    return values


def returns(blocks: Iterable[Padded], loggers: Loggers, health: bool = False) -> Values:
    """Every return that some estimator takes from these loggers' episodes, block after block.

    Args:
        health: what `health` needs as well.
    """
    methods = [e for e in METHODS.values() if e.loggers == loggers]
    wanted = {e.returns: RETURNS[e.returns] for e in methods}
    if health:
        wanted |= {name: HEALTH[name] for name in ("steps", *(e.weights for e in methods))}
    parts = [{name: make(block) for name, make in wanted.items()} for block in blocks]
    return {(loggers, name): np.concatenate([part[name] for part in parts], -1) for name in wanted}


def estimates(values: Values, points: Ints) -> Run:
    """What each estimator makes of the returns; episode i is of logger i mod J."""
    found = []
    for method in METHODS.values():
        x = values[method.loggers, method.returns]
        many = n_loggers(method.loggers, x.shape[-2])
        if method.returns == "pooled":
            found.append(pooled.at_points(columns_of(x), points))
        else:
            found.append(own_estimates(x, points) if method.own else pooled_estimates(x, points, many))
    return Run(*(np.stack(x) for x in zip(*found, strict=True)))


class Health(NamedTuple):
    """Of one run, in the order of `METHODS`."""

    untrusted: Bools  # estimates that can't be trusted, [E, K]
    steps: Array  # of an episode, on average, [E]


def health(values: Values) -> Health:
    """Which estimates of a run can't be trusted, by their own episodes, and what those cost."""
    untrusted, cost = [], []
    for method in METHODS.values():
        x, log_w = values[method.loggers, method.returns], values[method.loggers, method.weights]
        if method.returns == "pooled":
            x = pooled.in_turns(columns_of(x))
        if method.own:
            k = len(x)
            x, log_w = (np.stack([y[i, i::k] for i in range(k)]) for y in (x, log_w))
        untrusted.append([bool(said) for said in trust(diagnose(log_w, x))])
        cost.append(values[method.loggers, "steps"].mean())
    return Health(np.array(untrusted), np.array(cost))


def columns_of(x: Array) -> pooled.Columns:
    """What `methods.pooled_columns` stacked."""
    return pooled.Columns(x[0], x[1], x[2], x[3][None, None], x[4:, 0])


def pooled_truth(blocks: Iterable[Padded]) -> tuple[Array, Array]:
    """J and its standard error, `[K]` each, from on-policy episodes of all targets in turns.

    By pooled evaluation: every episode serves each target, coefficients come from the other fold; unbiased whatever q
    is, and as exact as many times as many plain returns.
    """
    columns = np.concatenate([pooled_columns(block) for block in blocks], -1)
    episodes = columns.shape[-1]
    mean, variance = pooled.at_points(columns_of(columns), np.array([episodes]))
    return mean[0], np.sqrt(variance / episodes)


def draw(values: Values, episodes: int, rng: np.random.Generator) -> Values:
    """A run of a pool: so many of its episodes in random order, none twice, the loggers still in turns.

    Returns of the same loggers are those of the same episodes, so that estimators share their data as in `run`. Draws
    from one pool overlap, so their spread says too little: a variance or a mean's error is to be taken from the pool.
    """
    order: dict[Loggers, Ints] = {}
    drawn = {}
    for (loggers, name), x in values.items():
        many, pool = n_loggers(loggers, x.shape[-2]), x.shape[-1]
        if episodes > pool or episodes % many or pool % many:
            raise ValueError(
                f"{episodes} episodes of a pool of {pool}, expected at most all, both multiples of {many} loggers"
            )
        if loggers not in order:
            rounds = np.tile(np.arange(pool // many), (many, 1))
            picked = rng.permuted(rounds, axis=1)[:, : episodes // many]  # [J, rounds]
            order[loggers] = (picked * many + np.arange(many)[:, None]).T.ravel()
        drawn[loggers, name] = x[..., order[loggers]]
    return drawn


def draws(values: Values, episodes: int, many: int, rng: np.random.Generator) -> Iterator[Values]:
    """Many runs of a pool: disjoint parts of it where it is large enough, each a `draw` of its own elsewhere."""
    if many * episodes > min(x.shape[-1] for x in values.values()):
        yield from (draw(values, episodes, rng) for _ in range(many))
        return
    shuffled = draw(values, many * episodes, rng)
    for first in range(0, many * episodes, episodes):
        yield {key: x[..., first : first + episodes] for key, x in shuffled.items()}


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


def check_points(points: ArrayLike, policies: int) -> Ints:
    """Refuses numbers of episodes at which some target would have had none, or fewer than another."""
    x: Ints = np.asarray(points)
    if x.ndim != 1 or not len(x) or not np.issubdtype(x.dtype, np.integer) or (x % policies).any() or x.min() < 1:
        raise ValueError(f"points are {x.tolist()!s:.80}, expected multiples of the {policies} targets")
    if (np.diff(x) <= 0).any() or x[-1] < 2 * policies:
        raise ValueError(f"points are {x.tolist()!s:.80}, expected increasing, the last at least {2 * policies}")
    return x
