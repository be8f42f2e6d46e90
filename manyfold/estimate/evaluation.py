"""Evaluate K policies in any environment: their own episodes in turns, each of which serves all of them.

    episodes = collect(env, policies, 400, rng)         # nothing logged, nothing designed, nothing fitted beforehand
    print(pool(episodes))

`pool` makes an `Estimate` of episodes; `plan` says from a pilot which logger should run how many of the next ones, and
`combine` puts stages with different shares together. `manyfold.evaluate` does all of it in one call.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from manyfold.arrays import Array, Ints
from manyfold.data.episodes import Episodes
from manyfold.estimate import pooled
from manyfold.estimate.baselines import ActionValues, Regressions, predicted, taken_and_expected, weighted
from manyfold.estimate.diagnostics import Diagnosis, diagnose, hardly_vary, trust
from manyfold.estimate.intervals import Interval, Sample, bounded, sample
from manyfold.estimate.ranking import Decision, Winner, aligned, decide, winner
from manyfold.estimate.shares import cost_of
from manyfold.policies.base import PolicySet


@dataclass(frozen=True)
class Estimate:
    """What is known of each policy. An episode's value of policy k is an unbiased estimate of J(pi_k)."""

    names: tuple[str, ...]
    values: Array  # [K, N]
    logger: Ints  # who ran each episode, [N]
    fold: Ints  # a logger's episodes whose values were made by the same coefficients, [N]
    own_returns: tuple[Array, ...]  # of the policy's own episodes, one array for each policy
    log_weights: Array  # log W_T, [K, N]
    start_covariance: Array  # what other starts than the episodes' own add to the covariance of the means, [K, K]
    recipes: tuple[tuple[str, ...], ...]  # which one counted most, for each fold and policy
    steps: int  # that were run
    title: str = ""  # what was evaluated, the first line when printed
    notes: tuple[str, ...] = ()  # what else one should know, a line each
    alpha: float = 0.05  # the probability of a wrong claim, where nothing else is said

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
        found = trust(self.diagnosis, self.names), hardly_vary(self.own_returns, self.names)
        return [weights or returns for weights, returns in zip(*found, strict=True)]

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

    @cached_property
    def _decided(self) -> dict[tuple[float, bool], Decision]:
        """By alpha and `anytime`: the table, its verdict and the page ask for the same one."""
        return {}

    def decide(self, alpha: float | None = None, anytime: bool = False) -> Decision:
        """Who is best, who may be, who can't be told apart; `anytime`: for whoever looks again and again."""
        asked = (self.alpha if alpha is None else alpha, anytime)
        if asked not in self._decided:
            self._decided[asked] = decide(self.sample, *asked)
        return self._decided[asked]

    def bounded(self, low: float, high: float, alpha: float = 0.05) -> Interval:
        """Each policy's interval from its own episodes alone, exact for returns between `low` and `high`, `[K]`."""
        return bounded(self.own_returns, low, high, alpha)

    @property
    def best(self) -> int | None:
        """The best policy's number where it is known, with confidence 1 - alpha."""
        return self.decide().best

    def summary(self, alpha: float | None = None) -> dict[str, Any]:
        """For programs, as JSON takes it."""
        warned = {name: said for name, said in zip(self.names, self.warnings, strict=True) if said}
        spent = {"episodes": self.episodes, "steps": self.steps}
        notes = list(self.notes)
        found, decision = {"title": self.title, **self.decide(alpha).summary()}, self.decide(alpha)
        for k, one in zip(decision.order.tolist(), found["policies"], strict=True):
            on = self.on_policy_variance[k]
            one["own_episodes"] = len(self.own_returns[k])
            one["effective_episodes"] = float(self.diagnosis.effective_sample_size[k])
            one["relative_variance"] = float(self.variance[k] / on) if on > 0 else None
        return {**found, **spent, "warnings": warned, "notes": notes}

    def winner(self) -> Winner:
        """What the policy with the highest mean is worth on episodes that did not choose it."""
        return winner(self.values, self.logger, self.fold)

    def rows(self, alpha: float | None = None) -> list[tuple[str, ...]]:
        """The ranked table, header first: values and decisions, and what sharing is worth for each policy."""
        decision, ess = self.decide(alpha), self.diagnosis.effective_sample_size
        header, *rows = decision.rows()
        out: list[tuple[str, ...]] = [(*header[:5], "relative variance", "effective episodes", header[5])]
        for k, row in zip(decision.order, rows, strict=True):
            on = self.on_policy_variance[k]
            relative = f"{self.variance[k] / on:.3f}" if on > 0 else ""
            out.append((*row[:5], relative, f"{ess[k]:,.0f}", row[5]))
        return out

    def report(self, path: str | Path, alpha: float | None = None, **about: Any) -> Path:
        """Writes one HTML file for people; `about` is what else it says: command, environment, seconds, seed, ..."""
        from manyfold.report.page import Shown, write  # it shows looks of `stopping` as well

        found, weights = (self.decide(alpha), self.winner()), self.diagnosis.effective_sample_size
        spent = (self.episodes, self.steps)
        return write(path, Shown(self.title, *found, *spent, self.own_returns, self.warnings, weights, about=about))

    def __str__(self) -> str:
        verdict = self.decide().trusted(self.warnings)
        if len(self.names) > 1:
            verdict += f" {self.winner().describe(self.names)}"
        lines = [
            *([self.title] if self.title else []),
            aligned(self.rows()),
            verdict,
            f"{self.episodes:,} episodes, {self.steps:,} steps.",
        ]
        warned = zip(self.names, self.warnings, strict=True)
        return "\n".join(
            [*lines, *self.notes, *(f"{name}: not to be trusted: {said}" for name, said in warned if said)]
        )


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


def pool(
    episodes: Episodes,
    q: ActionValues | None = None,
    policies: PolicySet | None = None,
    starts: ArrayLike | None = None,
    folds: int = pooled.FOLDS,
) -> Estimate:
    """Pooled evaluation of all targets from all episodes.

    Args:
        q: of all targets, fitted on other data; a baseline beside those that the episodes themselves give.
        policies: the targets; needed with q and starts only.
        starts: first observations from elsewhere, `[m, width]`, of the same distribution as the episodes' own.
        folds: at most; of few episodes there are fewer.
    """
    n, m = len(episodes.lengths), 0 if starts is None else len(np.asarray(starts))
    fold, folds = pooled.folds_of(episodes.logger, folds)
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
            taken, mean = taken_and_expected(q, episodes, steps)
            given = [(block.pad_own(taken), block.pad_own(mean))]
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
    if policies.head is None:
        return np.asarray((policies.probs(states, begin) * predicted(q, states, begin)).sum(-1))
    w, mean = weighted(q, states, begin), policies.head.expected(policies.parameters(states, begin))
    return np.asarray(w[..., 0] + (w[..., 1:] * mean).sum(-1))
