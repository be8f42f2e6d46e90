"""Where rounds of pooled evaluation come from: run now, or found in a store first."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from manyfold.arrays import Array, Ints
from manyfold.data.episodes import Episodes
from manyfold.draws import Seeds
from manyfold.envs.base import Environment
from manyfold.estimate.baselines import ActionValues, predicted, weighted
from manyfold.estimate.collecting import Job, spread, turns
from manyfold.estimate.evaluation import Estimate, combine, pool
from manyfold.estimate.stopping import Part
from manyfold.estimate.stored import LEAST, Stored, enough
from manyfold.estimate.workers import Crew, shards
from manyfold.policies.base import PolicySet
from manyfold.policies.modules import ChosenPolicySet

HELD = 2**28  # bytes of steps that are pooled together; of more, each such part is an estimate by itself
LEAST_ROUNDS = 6  # of such a part; of 10 are as good as all together, of 5 have a tenth more variance


class Pooling:
    """Rounds for `stopping.until`; the episodes of a segment are pooled anew at each look.

    Memory stays bounded: when a segment's steps have become many, they are pooled for the last time, and only each
    episode's values are kept.

    Args:
        rng: gives every episode its seed.
        q: fitted on other data.
        crew: who runs the episodes; this process if left out.
        stored: a store, whose episodes come first; new ones go there.
    """

    def __init__(
        self,
        env: Environment,
        policies: PolicySet,
        rng: np.random.Generator,
        q: ActionValues | None = None,
        crew: Crew | None = None,
        stored: Stored | None = None,
        progress: Callable[[str], None] = lambda said: None,
    ) -> None:
        self.names, self.env, self.policies, self.rng, self.q = policies.names, env, policies, rng, q
        self.crew, self.stored, self.progress = crew or Crew(), stored, progress
        self.job = stored.job if stored else Job(env, policies)
        self.which, self.run, self.closed = np.arange(policies.n_policies), list[Episodes](), list[Estimate]()
        old = stored.old() if stored else None
        some = old is not None and np.bincount(old.logger).max() >= LEAST  # otherwise there is nothing to look at yet
        self.known, self.selective = len(old.lengths) if old is not None and some else 0, stored is not None
        if old is not None:
            self.run.append(old)

    def begin(self, which: Ints) -> None:
        if len(which) == len(self.which):
            return  # the first segment, which the old episodes belong to
        self.which, self.run, self.closed = which, [], []
        self.job = Job(self.env, ChosenPolicySet(self.policies, which))

    def more(self, rounds: int, focus: Ints | None = None) -> Part:
        if rounds:
            running = np.arange(len(self.which)) if focus is None else np.searchsorted(self.which, focus)
            counts = np.zeros(len(self.which), dtype=np.int64)
            counts[running] = rounds
            self._add(counts)
            if self.crew.interrupted:
                raise KeyboardInterrupt  # what was known at the last look stands
        found = self.estimate()
        return Part(
            found.values, found.logger, found.fold, found.episodes, found.steps, found.own_returns, found.log_weights
        )

    def fixed(self, episodes: int, starts: ArrayLike | None = None) -> Estimate:
        """So many in all, of all policies together; those that are stored count."""
        k = len(self.names)
        counts = np.bincount(turns(np.full(k, 1 / k), episodes), minlength=k)
        if self.stored:
            counts = np.maximum(counts - self.stored.counts(), 0)
        if counts.any():
            self._add(counts)
        return self.estimate(starts)

    def estimate(self, starts: ArrayLike | None = None) -> Estimate:
        """Of all episodes of the segment."""
        parts = [*self.closed, *([self._pooled(starts)] if self.run else [])]
        return parts[0] if len(parts) == 1 else combine(parts)

    def _add(self, counts: Ints) -> None:
        """Runs so many more of each policy; `[K]`."""
        left, total, done = counts.copy(), int(counts.sum()), 0
        while left.any():
            size = self._size()
            waves = 1 if self.stored else max(1, -(-int(left.sum()) // size))
            now = -(-left // waves)

            def progress(ended: int, before: int = done) -> None:
                self.progress(f"{before + ended:,} of {total:,} episodes")

            self.run.append(self._execute(now, progress))
            done, left = done + int(now.sum()), left - now
            if self.crew.interrupted:
                left[:] = 0
            self.run = [Episodes.join(self.run)]
            if not self.stored and (left.any() or self._bytes() > HELD):
                self.closed.append(self._pooled())
                self.run = []

    def _execute(self, counts: Ints, progress: Callable[[int], None]) -> Episodes:
        if self.stored:
            return self.stored.run(self.job, self.which, counts, progress)
        who = spread(counts)
        seeds: Seeds = self.rng.integers(2**64, size=len(who), dtype=np.uint64)
        return self.crew.run(self.job, shards(self.job, who, seeds, self.crew.workers), progress=progress)

    def _pooled(self, starts: ArrayLike | None = None) -> Estimate:
        q = None if self.q is None else ChosenValues(self.q, self.which)
        return pool(enough(self.run[0]), q, self.job.policies, starts)

    def _bytes(self) -> int:
        return sum(self._a_step(part) * part.steps for part in self.run)

    @staticmethod
    def _a_step(part: Episodes) -> int:
        """Bytes of a step."""
        arrays = (part.states, part.log_targets, part.log_loggers, part.probs, part.features, part.expected)
        return sum(x.nbytes for x in arrays if x is not None) // max(part.steps, 1)

    def _size(self) -> int:
        """Episodes that may be held at once, by what is known of their lengths."""
        k, j = self.job.policies.n_policies, self.job.loggers.n_policies
        head = self.policies.head
        of_actions = 4 * head.n_features if head else 8 * self.policies.n_actions
        a_step = 8 * (self.env.width + j) + k * of_actions
        length = self.run[-1].steps / len(self.run[-1].lengths) if self.run else self.env.horizon
        return max(LEAST_ROUNDS * k, int(HELD / (a_step * length)))


class ChosenValues(NamedTuple):
    """q of some policies."""

    q: ActionValues
    which: Ints

    def predict(self, states: NDArray[Any], t: Ints) -> Array:
        return predicted(self.q, states, t)[self.which]

    def weights(self, states: NDArray[Any], t: Ints) -> Array:
        return weighted(self.q, states, t)[self.which]
