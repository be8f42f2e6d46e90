"""Where rounds of pooled evaluation come from: run now, or found in a store first."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from manyfold.arrays import Array, Ints
from manyfold.data.episodes import Episodes
from manyfold.draws import Seeds
from manyfold.envs.base import Environment
from manyfold.estimate.baselines import ActionValues, bytes_of, predicted, weighted
from manyfold.estimate.collecting import Job, spread, turns
from manyfold.estimate.evaluation import Estimate, combine, pool
from manyfold.estimate.parts import HELD, LEAST, LEAST_ROUNDS, Parts, divided, enough, estimated
from manyfold.estimate.pooled import FOLDS
from manyfold.estimate.stopping import Part
from manyfold.estimate.stored import Stored
from manyfold.estimate.workers import Crew, shards
from manyfold.policies.base import PolicySet
from manyfold.policies.modules import ChosenPolicySet


class Pooling:
    """Rounds for `stopping.until`; the episodes of a segment are pooled anew at each look.

    Memory stays bounded: when a segment's steps have become many, they are pooled for the last time, and only each
    episode's values are kept. Of a store, whose policies need not run in turns, all parts are read and pooled anew.

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
        self.known, self.selective, self.growing = 0, stored is not None, stored is not None
        self.parts: Parts | None = None  # of what is known of a store; None: it is in `run`
        if stored and len(known := stored.contents.policy):
            self.known = len(known) if np.bincount(known).max() >= LEAST else 0  # 0: nothing to look at yet
            self._divide()
            if not self.parts:
                self.run.append(stored.episodes(np.arange(len(known))))

    def begin(self, which: Ints) -> None:
        if len(which) == len(self.which):
            return  # the first segment, which the old episodes belong to
        self.which, self.run, self.closed, self.parts, self.growing = which, [], [], None, False
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
        if self.stored and self.parts:
            read, logger = self.stored.episodes, self.stored.contents.policy

            def pooled(episodes: Episodes, folds: int) -> Estimate:
                return self._pooled(episodes, starts, folds)

            return estimated(self.parts, logger, read, pooled, self.progress)
        parts = [*self.closed, *([self._pooled(enough(self.run[0]), starts)] if self.run else [])]
        return parts[0] if len(parts) == 1 else combine(parts)

    def _add(self, counts: Ints) -> None:
        """Runs so many more of each policy; `[K]`."""
        left, total, done = counts.copy(), int(counts.sum()), 0
        while left.any():
            waves = max(1, -(-int(left.sum()) // self._size()))
            now = -(-left // waves)

            def progress(ended: int, before: int = done) -> None:
                self.progress(f"{before + ended:,} of {total:,} episodes")

            try:
                found = self._execute(now, progress)
            except KeyboardInterrupt:
                if not done:
                    raise
                return  # what was run before stands
            done, left = done + int(now.sum()), left - now
            if self.crew.interrupted:
                left[:] = 0
            elif self.growing:
                self._divide()
            self.run = [] if self.parts else [Episodes.join([*self.run, found])]  # [] if the store has them
            del found  # many policies' steps should not be in memory while the next ones are run
            if self.run and not self.growing and (left.any() or self._bytes() > HELD):
                self.closed.append(self._pooled(enough(self.run[0])))
                self.run = []

    def _divide(self) -> None:
        """In as many parts as what is known of the store needs by now."""
        if self.stored:
            known, k = self.stored.contents, self.job.policies.n_policies
            actions = self.policies.head.n_features if self.policies.head else self.policies.n_actions
            an_episode = k * bytes_of(self.env.width, self.env.horizon, self.policies.n_states, actions)
            found = divided(known.policy, known.steps, k, self._step_bytes(), an_episode, HELD)
            self.parts = found if self.parts or len(found.each) > 1 else None

    def _execute(self, counts: Ints, progress: Callable[[int], None]) -> Episodes:
        if self.stored:
            return self.stored.run(self.job, self.which, counts, progress)
        who = spread(counts)
        seeds: Seeds = self.rng.integers(2**64, size=len(who), dtype=np.uint64)
        return self.crew.run(self.job, shards(self.job, who, seeds, self.crew.workers), progress=progress)

    def _pooled(self, episodes: Episodes, starts: ArrayLike | None = None, folds: int = FOLDS) -> Estimate:
        q = None if self.q is None else ChosenValues(self.q, self.which)
        return pool(episodes, q, self.job.policies, starts, folds)

    def _bytes(self) -> int:
        return sum(self._a_step(part) * part.steps for part in self.run)

    @staticmethod
    def _a_step(part: Episodes) -> int:
        """Bytes of a step."""
        arrays = (part.states, part.log_targets, part.log_loggers, part.probs, part.features, part.expected)
        return sum(x.nbytes for x in arrays if x is not None) // max(part.steps, 1)

    def _size(self) -> int:
        """Episodes that may be held at once, by what is known of their lengths."""
        length = self.run[-1].steps / len(self.run[-1].lengths) if self.run else self.env.horizon
        if self.stored and self.parts:
            length = float(self.stored.contents.steps.mean())
        return max(LEAST_ROUNDS * self.job.policies.n_policies, int(HELD / (self._step_bytes() * length)))

    def _step_bytes(self) -> int:
        """Of a step, as far as it is known before there are any."""
        k, j, head = self.job.policies.n_policies, self.job.loggers.n_policies, self.policies.head
        return 8 * (self.env.width + j) + k * (4 * head.n_features if head else 8 * self.policies.n_actions)


class ChosenValues(NamedTuple):
    """q of some policies."""

    q: ActionValues
    which: Ints

    def predict(self, states: NDArray[Any], t: Ints) -> Array:
        return predicted(self.q, states, t)[self.which]

    def weights(self, states: NDArray[Any], t: Ints) -> Array:
        return weighted(self.q, states, t)[self.which]
