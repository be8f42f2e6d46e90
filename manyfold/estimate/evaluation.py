"""Evaluate K policies in any environment: their own episodes in turns, each of which serves all of them.

    policies = ...
    result = evaluate(env, policies, episodes=400)      # nothing logged, nothing designed, nothing fitted beforehand
    print(result)
    print(evaluate(env, policies, stop="best"))         # rounds of them until the best one is known

`collect` runs the episodes, `pool` makes an `Estimate` of them; `plan` says from a pilot which logger should run how
many of the next ones, and `combine` puts stages with different shares together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from manyfold.arrays import Array, Ints, check_number
from manyfold.data.episodes import Episodes
from manyfold.envs.base import Environment
from manyfold.estimate import pooled
from manyfold.estimate.baselines import ActionValues, Regressions
from manyfold.estimate.diagnostics import Diagnosis, diagnose, trust
from manyfold.estimate.intervals import Sample, sample
from manyfold.estimate.ranking import Decision, Winner, aligned, decide, winner
from manyfold.estimate.shares import cost_of
from manyfold.estimate.stopping import BUDGET, Look, Part, Stopped, until
from manyfold.policies.base import PolicySet
from manyfold.policies.modules import ChosenPolicySet, JoinedPolicySet
from manyfold.rollout import Choice, Noted, Steps, rollout
from manyfold.streams import stream


@dataclass(frozen=True)
class Estimate:
    """What is known of each policy. An episode's value of policy k is an unbiased estimate of J(pi_k)."""

    names: tuple[str, ...]
    values: Array  # [K, N]
    logger: Ints  # who ran each episode, [N]
    fold: Ints  # episodes whose values were made by the same coefficients, [N]
    own_returns: tuple[Array, ...]  # of the policy's own episodes, one array for each policy
    log_weights: Array  # log W_T, [K, N]
    start_covariance: Array  # what other starts than the episodes' own add to the covariance of the means, [K, K]
    recipes: tuple[tuple[str, ...], ...]  # which one counted most, for each fold and policy
    steps: int  # that were run

    @property
    def episodes(self) -> int:
        """N."""
        return self.values.shape[-1]

    @property
    def mean(self) -> Array:
        """J(pi_k), `[K]`."""
        return self.values.mean(-1)

    @cached_property
    def variance(self) -> Array:
        """n times the variance of the mean, `[K]`."""
        starts = self.episodes * np.diagonal(self.start_covariance)
        return pooled.within(self.values, self.logger, self.fold) + starts

    @property
    def standard_error(self) -> Array:
        """Of the mean, `[K]`."""
        return np.sqrt(self.variance / self.episodes)

    @cached_property
    def on_policy_variance(self) -> Array:
        """n times the variance that on-policy MC would have with as many episodes, K in turns; NaN where unknown."""
        k = len(self.names)
        return np.array([k * x.var(ddof=1) if len(x) > 1 else np.nan for x in self.own_returns])

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """Effective sample sizes, the largest weight, the mean weight, tail indices."""
        return diagnose(self.log_weights, self.values)

    @property
    def warnings(self) -> list[str]:
        """For each policy "", or why its estimate can't be trusted and what to do."""
        out = trust(self.diagnosis, self.names)
        for k, error in enumerate(self.standard_error):
            if not error and not out[k]:
                few = f"what is rarer than 1 in {max(1, len(self.own_returns[k]) // 3):,} may not have been seen"
                out[k] = f"all returns of {self.names[k]} were equal: {few}"
        return out

    def cost(self, precision: float) -> tuple[int, int]:
        """Episodes and steps in all after which every policy's standard error is at most `precision`."""
        return cost_of(self.variance, self.steps / self.episodes, precision)

    @cached_property
    def sample(self) -> Sample:
        """What the values say of all policies together, for intervals and decisions."""
        found = sample(self.values, self.logger, self.fold, self.names)
        if not self.start_covariance.any():
            return found
        parts, freedom = np.concatenate([found.parts, self.start_covariance[None]]), np.append(found.freedom, np.inf)
        return replace(found, parts=parts, freedom=freedom)

    def decide(self, alpha: float = 0.05, anytime: bool = False) -> Decision:
        """Who is best, who may be, who can't be told apart; `anytime`: for whoever looks again and again."""
        return decide(self.sample, alpha, anytime)

    def winner(self) -> Winner:
        """What the policy with the highest mean is worth on episodes that did not choose it."""
        return winner(self.values, self.logger, self.fold)

    def rows(self, alpha: float = 0.05) -> list[tuple[str, ...]]:
        """The ranked table, header first: values and decisions, and what sharing is worth for each policy."""
        decision, ess = self.decide(alpha), self.diagnosis.effective_sample_size
        header, *rows = decision.rows()
        out: list[tuple[str, ...]] = [(*header[:5], "relative variance", "effective episodes", header[5])]
        for k, row in zip(decision.order, rows, strict=True):
            on = self.on_policy_variance[k]
            relative = f"{self.variance[k] / on:.3f}" if on > 0 else ""
            out.append((*row[:5], relative, f"{ess[k]:,.0f}", row[5]))
        return out

    def __str__(self) -> str:
        verdict = self.decide().verdict
        if len(self.names) > 1:
            verdict += f" {self.winner().describe(self.names)}"
        lines = [aligned(self.rows()), verdict, f"{self.episodes:,} episodes, {self.steps:,} steps."]
        warned = zip(self.names, self.warnings, strict=True)
        return "\n".join([*lines, *(f"{name}: not to be trusted: {said}" for name, said in warned if said)])


def combine(stages: Sequence[Estimate]) -> Estimate:
    """Several stages with shares of their own, put together by their numbers of episodes.

    Each is unbiased whatever the earlier ones decided about it, so all of them together are.
    """
    if not stages or any(stage.names != stages[0].names for stage in stages):
        raise ValueError("stages are of different policies or none, expected estimates of the same ones")
    n = sum(stage.episodes for stage in stages)
    loggers, folds = (np.cumsum([0, *(getattr(s, x).max() + 1 for s in stages)]) for x in ("logger", "fold"))
    return Estimate(
        stages[0].names,
        np.concatenate([stage.values for stage in stages], -1),
        np.concatenate([stage.logger + first for stage, first in zip(stages, loggers, strict=False)]),
        np.concatenate([stage.fold + first for stage, first in zip(stages, folds, strict=False)]),
        tuple(np.concatenate(own) for own in zip(*(stage.own_returns for stage in stages), strict=True)),
        np.concatenate([stage.log_weights for stage in stages], -1),
        np.sum([stage.start_covariance * (stage.episodes / n) ** 2 for stage in stages], 0),
        tuple(recipe for stage in stages for recipe in stage.recipes),
        sum(stage.steps for stage in stages),
    )


@overload
def evaluate(
    env: Environment,
    policies: PolicySet,
    episodes: int,
    seed: int = ...,
    q: ActionValues | None = ...,
    starts: ArrayLike | None = ...,
) -> Estimate: ...
@overload
def evaluate(
    env: Environment,
    policies: PolicySet,
    episodes: int | None = ...,
    seed: int = ...,
    q: ActionValues | None = ...,
    starts: None = ...,
    *,
    stop: str,
    precision: float | None = ...,
    alpha: float = ...,
    progress: Callable[[Look], None] = ...,
) -> Stopped: ...
@overload
def evaluate(
    env: Environment,
    policies: PolicySet,
    episodes: int | None = ...,
    seed: int = ...,
    q: ActionValues | None = ...,
    starts: None = ...,
    *,
    stop: None = ...,
    precision: float,
    alpha: float = ...,
    progress: Callable[[Look], None] = ...,
) -> Stopped: ...
def evaluate(
    env: Environment,
    policies: PolicySet,
    episodes: int | None = None,
    seed: int = 0,
    q: ActionValues | None = None,
    starts: ArrayLike | None = None,
    *,
    stop: str | None = None,
    precision: float | None = None,
    alpha: float = 0.05,
    progress: Callable[[Look], None] = lambda look: None,
) -> Estimate | Stopped:
    """Runs the policies in turns and estimates all of them from all episodes.

    Args:
        episodes: in all, of all policies together; with `stop` or `precision` at most so many, 10,000 if left out.
        q: fitted from logged data, if there are any; without it, baselines come from the episodes themselves.
        starts: first observations from elsewhere, `[m, width]`, of the SAME distribution of starts; see `first_states`.
        stop: "best" or "order": as soon as it is known; see `stopping.until` for this and the next three.
        precision: as soon as every value is known to +- so much.
        alpha: the probability of a wrong claim.
        progress: sees every look.
    """
    rng = stream("evaluate", env.name, seed)
    if stop is None and precision is None:
        if episodes is None:
            raise ValueError('nothing says when to stop, expected episodes=200, precision=0.5 or stop="best"')
        check_number("episodes", episodes, 2 * policies.n_policies)
        return pool(collect(env, policies, episodes, rng), q, policies, starts)
    if starts is not None:
        raise ValueError("starts are of a fixed number of episodes, expected none with stop or precision")
    budget = BUDGET if episodes is None else episodes
    return until(Pooling(env, policies, rng, q), stop, precision, budget, alpha, progress=progress)


class Pooling:
    """Rounds of pooled evaluation for `stopping.until`; the episodes of a segment are pooled anew at each look."""

    def __init__(
        self, env: Environment, policies: PolicySet, rng: np.random.Generator, q: ActionValues | None = None
    ) -> None:
        self.names, self.env, self.policies, self.rng, self.q = policies.names, env, policies, rng, q
        self.begin(np.arange(policies.n_policies))

    def begin(self, which: Ints) -> None:
        every = len(which) == self.policies.n_policies
        self.which, self.running = which, self.policies if every else ChosenPolicySet(self.policies, which)
        self.run: list[Episodes] = []

    def more(self, rounds: int) -> Part:
        self.run = [Episodes.join([*self.run, collect(self.env, self.running, rounds * len(self.which), self.rng)])]
        found = pool(self.run[0], None if self.q is None else ChosenValues(self.q, self.which), self.running)
        return Part(found.values, found.logger, found.fold, found.episodes, found.steps)


class ChosenValues(NamedTuple):
    """q of some policies."""

    q: ActionValues
    which: Ints

    def predict(self, states: NDArray[Any], t: Ints) -> Array:
        return self.q.predict(states, t)[self.which]


def collect(
    env: Environment,
    policies: PolicySet,
    episodes: int,
    rng: np.random.Generator,
    others: PolicySet | None = None,
    alpha: ArrayLike | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Episodes:
    """Runs the episodes of an evaluation.

    Args:
        others: loggers beside the targets themselves, for example mu; they come after the targets.
        alpha: the share of every logger, targets first, `[J]`; equal ones if left out.
        progress: sees how many episodes have ended.
    """
    loggers = policies if others is None else JoinedPolicySet([policies, others])
    k, j = policies.n_policies, loggers.n_policies
    who = turns(np.full(j, 1 / j) if alpha is None else np.asarray(alpha, dtype=np.float64), episodes)

    def choose(obs: NDArray[Any], t: Ints, which: Ints) -> Choice:
        probs, rows = loggers.probs(obs, t), np.arange(len(t))

        def note(actions: Ints) -> Noted:
            with np.errstate(divide="ignore"):
                taken = np.log(probs[:, rows, actions])
            return {"log_probs": taken.T, "probs": np.moveaxis(probs[:k], 0, 1)}

        return Choice(probs[which, rows], note)

    parts, done = [], 0
    for block in rollout(env, choose, who, rng):
        parts.append(block)
        done += len(block.lengths)
        progress(done)
    steps = Steps.join(parts)
    every = np.ascontiguousarray(steps.noted["log_probs"].T)
    return Episodes(
        steps.state,
        steps.t,
        steps.action,
        steps.reward,
        steps.lengths,
        who,
        every[:k],
        every,
        np.where(np.bincount(who, minlength=j)[:k] > 0, np.arange(k), -1),
        policies.names,
        policies.horizon,
        policies.n_states,
        np.ascontiguousarray(np.moveaxis(steps.noted["probs"], 1, 0)),
    )


def turns(alpha: Array, episodes: int) -> Ints:
    """Who runs each episode, `[N]`: after any number of episodes, every logger has had its share, to within one."""
    if alpha.ndim != 1 or not (alpha >= 0).all() or abs(alpha.sum() - 1) > 1e-6:
        raise ValueError(f"alpha is {alpha.tolist()!s:.60}, expected shares of the loggers that sum to 1")
    check_number("episodes", episodes, 1, 10**9)
    counts, left = np.floor(alpha * episodes + 1e-9).astype(np.int64), alpha * episodes
    counts[np.argsort(counts - left, kind="stable")[: episodes - counts.sum()]] += 1
    due = [(np.arange(c) + 0.5) / c for c in np.maximum(counts, 0)]  # evenly spread over the whole
    order = np.argsort(np.concatenate(due), kind="stable")
    return np.repeat(np.arange(len(alpha)), counts)[order]


def first_states(env: Environment, number: int, rng: np.random.Generator) -> NDArray[Any]:
    """First observations of episodes that are not run, `[number, width]`."""
    size = min(number, env.slots or number)
    running, every = env.open(size, rng), np.arange(size)
    rounds = []
    for _ in range(-(-number // size)):
        running.done[:] = True
        rounds.append(running.reset(every).copy())
    return np.concatenate(rounds)[:number]


def pool(
    episodes: Episodes,
    q: ActionValues | None = None,
    policies: PolicySet | None = None,
    starts: ArrayLike | None = None,
) -> Estimate:
    """Pooled evaluation of all targets from all episodes.

    Args:
        q: of all targets, fitted on other data; a baseline beside those that the episodes themselves give.
        policies: the targets; needed with q and starts only.
        starts: first observations from elsewhere, `[m, width]`, of the same distribution as the episodes' own.
    """
    n, m = len(episodes.lengths), 0 if starts is None else len(np.asarray(starts))
    fold, folds = pooled.folds_of(episodes.logger)
    found, log_w, start_values = _columns(episodes, fold, folds, starts, q, policies)
    result = pooled.combine(found, episodes.logger, fold, folds, _starts(len(found.baselines), q is not None))
    extra = np.zeros((len(episodes.names), len(episodes.names)))
    if m > 1:
        size = np.bincount(fold) / n
        moved = np.einsum("f,fkb,bfkm->km", size, result.coefficients, start_values) * m / (n + m)
        extra = np.atleast_2d(np.cov(moved)) / m
    returns = episodes.returns
    own = tuple(returns[episodes.logger == j] if j >= 0 else np.empty(0) for j in episodes.own)
    return Estimate(
        episodes.names, result.values, episodes.logger, fold, own, log_w, extra, result.recipes, episodes.steps
    )


def _starts(controls: int, with_q: bool) -> list[pooled.Start]:
    """The baselines by name: by t, on (s, t), on (s, t, a), and a fitted q if there is one."""
    own = [("by t", (0,)), ("regression", (1,)), ("regression with actions", (1, 2))][: controls - with_q]
    return [pooled.Start(*x) for x in own] + ([pooled.Start("q", (controls - 1,))] if with_q else [])


def _columns(
    episodes: Episodes,
    fold: Ints,
    folds: int,
    starts: ArrayLike | None,
    q: ActionValues | None,
    policies: PolicySet | None,
) -> tuple[pooled.Columns, Array, Array]:
    """All columns, log W_T `[K, N]`, and the baselines at other starts `[B, F, K, m]`; one pass over the episodes."""
    first = np.empty((0, episodes.states.shape[-1])) if starts is None else np.asarray(starts, dtype=np.float64)
    m, k, j, n = len(first), len(episodes.names), episodes.n_loggers, len(episodes.lengths)
    share = pooled.shares_of(episodes.logger, fold, j)
    regressions = Regressions(episodes, fold, folds, first) if folds else None
    v_start = _expected(q, policies, first) if q is not None and m else np.zeros((k, m))
    table, d_q, log_w_end, loggers = np.empty((3, k, n)), np.empty((k, n)), np.empty((k, n)), np.empty((j, n))
    for block in episodes.blocks(k + j + (regressions.size if regressions else 0)):
        here, steps = block.episodes, block.steps
        log_w, log_w_loggers = pooled.log_weights(
            block.pad(episodes.log_targets), block.pad(episodes.log_loggers), share[:, here]
        )
        rewards, given = block.pad(episodes.rewards), []
        if q is not None:
            found, pi = q.predict(episodes.states[steps], episodes.t[steps]), episodes.all_probs[:, steps]
            taken = found[:, np.arange(found.shape[1]), episodes.actions[steps]]
            given = [(block.pad_own(taken), block.pad_own((pi * found).sum(-1)))]
        part = pooled.columns(rewards, log_w, log_w_loggers, episodes.logger[here], episodes.own, share[:, here], given)
        table[:, :, here], loggers[:, here], log_w_end[:, here] = part[:3], part.loggers, log_w[..., -1]
        for _, expected in given:
            d_q[:, here] = part.baselines[0, 0]
            d_q[:, here] += m / (n + m) * (v_start.sum(-1, keepdims=True) / max(m, 1) - expected[..., 0])
        if regressions:
            regressions.add(block, log_w, rewards)
    d, values = regressions.controls() if regressions else (np.empty((0, 1, k, n)), np.empty((0, 1, k, m)))
    if q is not None:
        shape = 1, max(folds, 1), k
        d = np.concatenate([d, np.broadcast_to(d_q, (*shape, n))])
        values = np.concatenate([values, np.broadcast_to(v_start, (*shape, m))])
    return pooled.Columns(table[0], table[1], table[2], d, loggers), log_w_end, values


def _expected(q: ActionValues, policies: PolicySet | None, states: NDArray[Any]) -> Array:
    """v_0 = sum_a pi q, `[K, m]`."""
    if policies is None:
        raise ValueError("policies is None, expected the targets: q at other starts is averaged over their actions")
    begin = np.zeros(len(states), dtype=np.int64)
    return np.asarray((policies.probs(states, begin) * q.predict(states, begin)).sum(-1))
