"""When to stop: rounds are run in growing stages until what is asked for is known, or the budget is spent.

    found = until(Returns(names, play), stop="best")     # play(which, rounds) -> returns [len(which), rounds]
    print(found)

After each look the intervals hold at whatever time one stops (`ranking.decide(anytime=True)`). Who can no longer be the
best may be dropped: the others then begin a new segment by themselves. A segment is unbiased whatever earlier ones
decided about it, and segments are put together by their numbers of units, so that all of them together are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from manyfold.arrays import Array, Ints, check_number, check_shape
from manyfold.envs.base import Environment
from manyfold.estimate import intervals, ranking
from manyfold.estimate.intervals import AROUND, Sample
from manyfold.estimate.ranking import Decision, Winner
from manyfold.streams import stream

BUDGET = 10_000  # episodes
FIRST = 5  # rounds before the first look
AGAIN = 10  # rounds of a later segment before it counts: before that it can be worse than what it is added to
GROWTH = 1.25  # of the episodes from look to look
Act = Callable[[NDArray[Any], Ints], ArrayLike]  # (observations [N, width], t [N]) -> actions [N]


class Part(NamedTuple):
    """A segment so far: values `[k, N]` of the policies that it runs."""

    values: Array
    logger: Ints | None  # None: columns are rounds
    fold: Ints | None
    episodes: int
    steps: int


class Source(Protocol):
    """Where rounds come from."""

    names: tuple[str, ...]

    def begin(self, which: Ints) -> None:
        """A new segment of these policies alone."""

    def more(self, rounds: int) -> Part:
        """Runs so many episodes of each of them; the whole segment."""


class Look(NamedTuple):
    """What was known at some time."""

    episodes: int
    running: Ints  # policies that ran, by number
    decision: Decision


@dataclass(frozen=True)
class Stopped:
    """What is known at the end, and since when.

    Attributes:
        reason: why it ended, one sentence.
        decision: valid at whatever time it was made.
        winner: what the best-looking policy is worth on episodes that did not choose it.
    """

    decision: Decision
    looks: tuple[Look, ...]
    episodes: int
    steps: int
    reason: str
    winner: Winner

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

    def __str__(self) -> str:
        spent = f"{self.episodes:,} episodes, {self.steps:,} steps. {self.reason}"
        return "\n".join([str(self.decision), self.winner.describe(self.names), spent])


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
        drop: with stop="best" and no precision, those that can't be the best run no more episodes.
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
    spent = steps = 0
    source.begin(running)
    rounds = min(FIRST, budget // k)
    while True:
        part = source.more(rounds)
        found = _joined(source.names, [*done, (running, part)])
        decision = ranking.decide(found, alpha, True, around)
        still = may & decision.may_be_best
        may = still if still.any() else may  # none left: a wrong claim was made, the last set that had some stands
        decision = replace(decision, may_be_best=may)
        total = spent + part.episodes
        looks.append(Look(total, running, decision))
        progress(looks[-1])
        reached = [said for said, known in _asked(decision, stop, precision) if known]
        if len(reached) == (stop is not None) + (precision is not None):
            reason = f"Stopped: {' and '.join(reached)}."
            break
        fewer = drop and stop == "best" and precision is None and 2 * int(may.sum()) <= len(running)
        width = int(may.sum()) if fewer else len(running)
        rounds = max(AGAIN if fewer else 1, round((GROWTH - 1) * total / width))
        rounds = min(rounds, (budget - total) // width)
        if rounds < (AGAIN if fewer else 1):
            reason = f"The budget of {budget:,} episodes is spent."
            break
        if fewer:
            done.append((running, part))
            spent, steps, running = total, steps + part.steps, np.flatnonzero(may)
            source.begin(running)
    everything = [*done, (running, part)]
    return Stopped(decision, tuple(looks), total, steps + part.steps, reason, _winner(everything, k))


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


def _winner(parts: Sequence[tuple[Ints, Part]], k: int) -> Winner:
    """Among the policies that ran to the end, from all segments."""
    last, values, loggers, folds = parts[-1][0], [], [], []
    for i, (which, part) in enumerate(parts):
        n = part.values.shape[-1]
        values.append(part.values[np.searchsorted(which, last)])
        loggers.append(i * k + (np.zeros(n, dtype=np.int64) if part.logger is None else part.logger))
        folds.append(np.zeros(n, dtype=np.int64) if part.fold is None else part.fold)
    found = ranking.winner(np.concatenate(values, -1), np.concatenate(loggers), np.concatenate(folds))
    return found._replace(policy=int(last[found.policy]))


class Returns:
    """Plain returns, for policies without densities: a robot's operator, a diffusion policy, a deterministic actor.

    Args:
        run: (numbers of the policies, rounds) -> their returns `[len(which), rounds]`; column i of all of them began
            alike where that can be done.
    """

    def __init__(self, names: Sequence[str], run: Callable[[Ints, int], "Played"]) -> None:
        self.names, self.run = tuple(names), run
        self.begin(np.arange(len(self.names)))

    def begin(self, which: Ints) -> None:
        self.which, self.returns, self.steps = which, np.empty((len(which), 0)), 0

    def more(self, rounds: int) -> Part:
        found = self.run(self.which, rounds)
        check_shape("returns", found.returns, (len(self.which), rounds), "[policies, rounds]")
        self.returns = np.concatenate([self.returns, found.returns], -1)
        self.steps += found.steps
        return Part(self.returns, None, None, self.returns.size, self.steps)


class Played(NamedTuple):
    """Plain returns `[K, R]`, and the steps they took."""

    returns: Array
    steps: int = 0


def play(env: Environment, actors: Sequence[Act], rounds: int, seed: int | np.random.Generator = 0) -> Played:
    """Plain returns of policies that only act: `sample(play(...).returns)` compares them.

    Round i begins alike for all of them, and what the environment draws later is the same as long as they act alike
    (common random numbers): differences are surer than values.
    """
    check_number("rounds", rounds, 1)
    rng = seed if isinstance(seed, np.random.Generator) else stream("play", env.name, seed)
    size = min(rounds, env.slots or rounds)
    out, steps = np.zeros((len(actors), rounds)), 0
    for first in range(0, rounds, size):
        same, n = int(rng.integers(2**63)), min(size, rounds - first)
        for k, act in enumerate(actors):
            running = env.open(n, np.random.default_rng(same))
            obs = running.reset(np.arange(n))
            while not running.done.all():
                steps += int((~running.done).sum())
                obs, rewards, _, _ = running.step(_actions(act, obs, running.t, env))
                out[k, first : first + n] += rewards
    return Played(out, steps)


def _actions(act: Act, obs: NDArray[Any], t: Ints, env: Environment) -> Ints:
    """Asked for at ended slots too, at the last step: it is not taken."""
    actions = np.asarray(act(obs, np.minimum(t, env.horizon - 1)))
    if actions.shape != t.shape or not np.issubdtype(actions.dtype, np.integer):
        raise ValueError(
            f"an actor returned {actions.dtype} {actions.shape}, expected whole numbers ({len(t)},): an action each"
        )
    return actions
