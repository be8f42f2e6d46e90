"""When to stop: rounds are run in growing stages until what is asked for is known, or the budget is spent.

    found = until(Returns(names, play), stop="best")     # play(which, rounds) -> returns [len(which), rounds]
    print(found)

After each look the intervals hold at whatever time one stops (`ranking.decide(anytime=True)`). Who can no longer be the
best may be dropped: the others then begin a new segment by themselves. A segment is unbiased whatever earlier ones
decided about it, and segments are put together by their numbers of units, so that all of them together are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from manyfold.arrays import Array, Bools, Ints, check_number, check_shape
from manyfold.envs.base import Closable, Environment
from manyfold.estimate import intervals, ranking
from manyfold.estimate.diagnostics import borrowed, diagnose, hardly_vary, trust
from manyfold.estimate.intervals import AROUND, Interval, Sample
from manyfold.estimate.ranking import Decision, Winner, aligned
from manyfold.policies.actors import Act
from manyfold.streams import stream

BUDGET = 10_000  # episodes
FIRST = 5  # rounds before the first look
AGAIN = (
    10  # rounds of a later segment, or of a policy that a store does not know well, before they count: fewer do harm
)
SETTLED = 20  # rounds of a segment before it may end: its values are final then, and those of few rounds spread more
GROWTH = 1.25  # of the episodes from look to look


class Part(NamedTuple):
    """A segment so far: values `[k, N]` of the policies that it runs."""

    values: Array
    logger: Ints | None  # None: columns are rounds
    fold: Ints | None
    episodes: int
    steps: int
    own_returns: tuple[Array, ...] = ()  # of each policy's own episodes; none where they ran none
    log_weights: Array | None = None  # log W_T, [k, N]; None: plain returns


class Source(Protocol):
    """Where rounds come from.

    Attributes:
        known: episodes that were there before.
        selective: some policies may run more rounds than others.
    """

    names: tuple[str, ...]
    known: int
    selective: bool

    def begin(self, which: Ints) -> None:
        """A new segment of these policies alone."""

    def more(self, rounds: int, focus: Ints | None = None) -> Part:
        """Runs so many episodes of each of them, or of some, by number; the whole segment."""


class Look(NamedTuple):
    """What was known at some time."""

    episodes: int
    running: Ints  # policies that ran, by number
    decision: Decision

    def __str__(self) -> str:
        leader, may = int(self.decision.order[0]), int(self.decision.may_be_best.sum())
        value = f"{self.decision.sample.mean[leader]:.4g} +- {self.decision.half_width[leader]:.2g}"
        names = self.decision.names
        return f"{self.episodes:,} episodes: {may} of {len(names)} may be the best; {names[leader]} leads, {value}"


@dataclass(frozen=True)
class Stopped:
    """What is known at the end, and since when.

    Attributes:
        reason: why it ended, one sentence.
        decision: valid at whatever time it was made.
        winner: what the best-looking policy is worth on episodes that did not choose it.
        own_returns: plain returns of each policy's own episodes; empty where it ran none.
        warnings: for each policy "", or why its estimate can't be trusted and what to do.
        title: what was evaluated, the first line when printed.
        notes: what else one should know, a line each.
    """

    decision: Decision
    looks: tuple[Look, ...]
    episodes: int
    steps: int
    reason: str
    winner: Winner
    own_returns: tuple[Array, ...]
    warnings: list[str]
    title: str = ""
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.decision.names

    @property
    def mean(self) -> Array:
        """J(pi_k), `[K]`."""
        return self.decision.sample.mean

    @property
    def best(self) -> int | None:
        """The best policy's number where it is known."""
        return self.decision.best

    def summary(self) -> dict[str, Any]:
        """For programs, as JSON takes it."""
        warned = {name: said for name, said in zip(self.names, self.warnings, strict=True) if said}
        spent = {"episodes": self.episodes, "steps": self.steps, "reason": self.reason}
        found = {"title": self.title, **self.decision.summary()}
        for k, one in zip(self.decision.order.tolist(), found["policies"], strict=True):
            one["own_episodes"] = len(self.own_returns[k])
        return {**found, **spent, "warnings": warned, "notes": list(self.notes)}

    def bounded(self, low: float, high: float, alpha: float = 0.05) -> Interval:
        """Each policy's interval from its own episodes alone, exact for returns between `low` and `high`, `[K]`."""
        return intervals.bounded(self.own_returns, low, high, alpha)

    def report(self, path: str | Path, **about: Any) -> Path:
        """Writes one HTML file for people; `about` is what else it says: command, environment, seconds, seed, ..."""
        from manyfold.report.page import Shown, write  # it shows `Look`s

        found, spent = (self.title, self.decision, self.winner), (self.episodes, self.steps)
        shown = Shown(*found, *spent, self.own_returns, self.warnings, None, self.looks, self.reason, about)
        return write(path, shown)

    def __str__(self) -> str:
        spent = f"{self.episodes:,} episodes, {self.steps:,} steps. {self.reason}"
        warned = zip(self.names, self.warnings, strict=True)
        found = aligned(self.decision.rows()), self.decision.trusted(self.warnings)
        lines = [*([self.title] if self.title else []), *found, self.winner.describe(self.names), spent]
        return "\n".join(
            [*lines, *self.notes, *(f"{name}: not to be trusted: {said}" for name, said in warned if said)]
        )


def until(
    source: Source,
    stop: str | None = "best",
    precision: float | None = None,
    budget: int = BUDGET,
    alpha: float = 0.05,
    drop: bool = True,
    around: float = AROUND,
    progress: Callable[[Look], None] = lambda look: None,
) -> Stopped:
    """Runs rounds until everything that is asked for is known.

    Args:
        stop: "best": who is; "order": of all policies; None: nothing but the precision.
        precision: half the width of every policy's interval, all of them at once.
        budget: episodes at most, of all policies together.
        alpha: the probability that a wrong best policy, a wrong order or a wrong interval is ever claimed, of each.
        drop: with stop="best" and no precision, those that can't be the best run no more episodes, after SETTLED rounds
            (`benchmarks.dropping`).
        progress: sees every look.
    """
    k = len(source.names)
    intervals.check_alpha(alpha)
    check_number("budget", budget, 2 * k)
    if stop not in ("best", "order", None) or (stop is None and precision is None):
        raise ValueError(f'stop is {stop!r}, expected "best" or "order", or a precision with stop=None')
    if precision is not None and not precision > 0:
        raise ValueError(f"precision is {precision}, expected half the width of an interval, above 0")
    may, running = np.ones(k, dtype=np.bool_), np.arange(k)
    done: list[tuple[Ints, Part]] = []
    looks: list[Look] = []
    source.begin(running)
    rounds, focus = 0 if source.known else min(FIRST, budget // k), None
    while True:
        try:
            part = source.more(rounds, focus)
        except KeyboardInterrupt:
            if not looks:
                raise
            reason = "Interrupted: this is what was known by then."
            break
        everything = [*done, (running, part)]
        found = _joined(source.names, everything)
        decision, doubted = ranking.decide(found, alpha, True, around), _doubted(part)
        if not doubted.any():  # nobody is ruled out, for good, by values that aren't known yet
            still = may & decision.may_be_best
            may = still if still.any() else decision.may_be_best  # none left: the looks contradict each other
        decision = replace(decision, may_be_best=may)
        total = sum(part.episodes for _, part in everything)
        spent = total - source.known
        looks.append(Look(total, running, decision))
        progress(looks[-1])
        if source.selective:
            some = _unsure(decision, part, doubted, stop, precision)
            focus = None if some is None else running[some]
        reached = [
            said for said, known in _asked(decision, stop, precision) if known and (focus is None or not len(focus))
        ]
        if len(reached) == (stop is not None) + (precision is not None):
            reason = f"Stopped: {' and '.join(reached)}."
            break
        fewer = drop and stop == "best" and precision is None and part.episodes >= SETTLED * len(running)
        fewer = fewer and focus is None and 2 * int(may.sum()) <= len(running)
        width = int(may.sum()) if fewer else len(running) if focus is None else len(focus)
        rounds = max(AGAIN if fewer or source.known else 1, round((GROWTH - 1) * spent / width))
        if focus is not None and precision is not None:
            rounds = max(rounds, _ahead(decision, part, precision, focus))
        rounds = min(rounds, (budget - spent) // width)
        if rounds < (AGAIN if fewer else 1):
            reason = f"The budget of {budget:,} episodes is spent."
            break
        if fewer:
            done, running = everything, np.flatnonzero(may)
            source.begin(running)
    steps = sum(part.steps for _, part in everything)
    own = _own_returns(everything, k)
    warnings = _warnings(source.names, everything, own)
    return Stopped(decision, tuple(looks), total, steps, reason, _winner(everything), own, warnings)


def _doubted(part: Part) -> Bools:
    """Of whom others' episodes say too little, and who has none of its own: its value is not known yet, `[k]`."""
    if part.log_weights is None:
        return np.zeros(len(part.values), dtype=np.bool_)
    return np.array([bool(said) for said in borrowed(diagnose(part.log_weights, part.values), part.own_returns)])


def _unsure(decision: Decision, part: Part, doubted: Bools, stop: str | None, precision: float | None) -> Ints | None:
    """Who is to run next, by number; None: all of them.

    For a precision alone, those whose interval is too wide or whose estimate can't be trusted. For a decision all, but
    before anything is decided those without own episodes of whom the others' say too little.
    """
    if stop is not None:
        return np.flatnonzero(doubted) if doubted.any() else None
    unsure = doubted | (decision.half_width > (precision or np.inf))
    if part.log_weights is not None:
        unsure |= np.array([bool(said) for said in trust(diagnose(part.log_weights, part.values))])
    return np.flatnonzero(unsure)


def _ahead(decision: Decision, part: Part, precision: float, focus: Ints) -> int:
    """Rounds that everyone in `focus` surely needs before the next look, which takes long with many stored episodes.

    By themselves, m episodes of variance s^2 would narrow half a width h from a variance V to the precision X if
    1 / V + m / s^2 = (h / X)^2 / V. As others' episodes serve as well and h is too wide after few, half of these are
    run, and no more than there are.
    """
    variance, surely = decision.sample.standard_error**2, []
    for k in focus.tolist():
        own, h = part.own_returns[k], decision.half_width[k]
        if len(own) < FIRST or not precision < h < np.inf or not variance[k] > 0:
            return 0
        needed = own.var(ddof=1) * ((h / precision) ** 2 - 1) / variance[k]
        surely.append(min(needed / 2, len(own)))
    return round(min(surely))


def _asked(decision: Decision, stop: str | None, precision: float | None) -> list[tuple[str, bool]]:
    """What is asked for, in words, and whether it is known."""
    out = []
    if stop == "best":
        out.append(("the best policy is known", decision.best is not None))
    if stop == "order":
        out.append(("the whole order is known", decision.order_known))
    if precision is not None:
        out.append((f"every value is known to +- {precision:g}", bool(decision.half_width.max() <= precision)))
    return out


def _joined(names: tuple[str, ...], parts: Sequence[tuple[Ints, Part]]) -> Sample:
    """All segments together."""
    return intervals.join(
        [intervals.sample(part.values, part.logger, part.fold, tuple(names[i] for i in which)) for which, part in parts]
    )


def _winner(parts: Sequence[tuple[Ints, Part]]) -> Winner:
    """Among the policies that ran to the end, from all segments."""
    last, values, loggers, folds, first = parts[-1][0], [], [], [], 0
    for which, part in parts:
        n = part.values.shape[-1]
        values.append(part.values[np.searchsorted(which, last)])
        loggers.append(first + (np.zeros(n, dtype=np.int64) if part.logger is None else part.logger))
        first = int(loggers[-1].max()) + 1
        folds.append(np.zeros(n, dtype=np.int64) if part.fold is None else part.fold)
    found = ranking.winner(np.concatenate(values, -1), np.concatenate(loggers), np.concatenate(folds))
    return found._replace(policy=int(last[found.policy]))


def _own_returns(parts: Sequence[tuple[Ints, Part]], k: int) -> tuple[Array, ...]:
    """Of each policy, from all segments."""
    found: list[list[Array]] = [[np.empty(0)] for _ in range(k)]
    for which, part in parts:
        for i, x in zip(which, part.own_returns, strict=False):
            found[i].append(x)
    return tuple(np.concatenate(every) for every in found)


def _warnings(names: tuple[str, ...], parts: Sequence[tuple[Ints, Part]], own_returns: Sequence[Array]) -> list[str]:
    """Of each policy, from all segments that it ran in: first of their weights, then of its own returns."""
    out = hardly_vary(own_returns, names)
    for k, name in enumerate(names):
        seen = [
            (part.log_weights[which == k], part.values[which == k])
            for which, part in parts
            if part.log_weights is not None and k in which
        ]
        if seen:
            log_w, values = (np.concatenate(x, -1) for x in zip(*seen, strict=True))
            found = diagnose(log_w, values)
            out[k] = borrowed(found, [own_returns[k]], [name])[0] or trust(found, [name])[0] or out[k]
    return out


class Returns:
    """Plain returns, for policies without densities: a robot's operator, a diffusion policy, a deterministic actor.

    Args:
        run: (numbers of the policies, rounds) -> their returns `[len(which), rounds]`; column i of all of them began
            alike where that can be done.
    """

    def __init__(self, names: Sequence[str], run: Callable[[Ints, int], "Played"]) -> None:
        self.names, self.run = tuple(names), run
        self.known, self.selective = 0, False
        self.begin(np.arange(len(self.names)))

    def begin(self, which: Ints) -> None:
        self.which, self.returns, self.steps = which, np.empty((len(which), 0)), 0

    def more(self, rounds: int, focus: Ints | None = None) -> Part:
        found = self.run(self.which, rounds)
        check_shape("returns", found.returns, (len(self.which), rounds), "[policies, rounds]")
        self.returns = np.concatenate([self.returns, found.returns], -1)
        self.steps += found.steps
        return Part(self.returns, None, None, self.returns.size, self.steps, tuple(self.returns))


class Played(NamedTuple):
    """Plain returns `[K, R]`, and the steps they took."""

    returns: Array
    steps: int = 0


def play(
    env: Environment,
    actors: Sequence[Act],
    rounds: int,
    seed: int | np.random.Generator = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> Played:
    """Plain returns of policies that only act: `sample(play(...).returns)` compares them.

    Round i begins alike for all of them, and what the environment draws later is the same as long as they act alike
    (common random numbers): differences are surer than values.
    """
    check_number("rounds", rounds, 1)
    rng = seed if isinstance(seed, np.random.Generator) else stream("play", env.name, seed)
    size = min(rounds, env.slots or rounds)
    out, steps, done = np.zeros((len(actors), rounds)), 0, 0
    for first in range(0, rounds, size):
        same, n = int(rng.integers(2**63)), min(size, rounds - first)
        for k, act in enumerate(actors):
            running = env.open(n, np.random.default_rng(same))
            obs = running.reset(np.arange(n))
            while not running.done.all():
                steps += int((~running.done).sum())
                obs, rewards, _, _ = running.step(_actions(act, obs, running.t, env))
                out[k, first : first + n] += rewards
            if isinstance(running, Closable):
                running.close()
            done += n
            progress(done)
    return Played(out, steps)


def _actions(act: Act, obs: NDArray[Any], t: Ints, env: Environment) -> NDArray[Any]:
    """Asked for at ended slots too, at the last step: it is not taken."""
    actions = np.asarray(act(obs, np.minimum(t, env.horizon - 1)))
    counted = isinstance(env.action_space, spaces.Discrete)
    shape = t.shape if counted else (*t.shape, *(env.action_space.shape or ()))
    kind, said = (np.integer, "whole") if counted else (np.number, "finite")
    if actions.shape != shape or not np.issubdtype(actions.dtype, kind) or not np.isfinite(actions).all():
        raise ValueError(
            f"an actor returned {actions.dtype} {actions.shape}, expected {said} numbers {shape}: an action each"
        )
    return actions
