"""Runs the episodes of an evaluation, and notes how likely every action was under every policy.

`collect` runs them here, by one generator. `run_shard` runs a part of them by seeds of their own, so that parts may run
anywhere, in any order, and be resumed: what an episode does follows from its seed and its policy alone.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from manyfold.arrays import Array, Ints, check_number
from manyfold.data.episodes import Episodes
from manyfold.draws import Draws, Seeds
from manyfold.envs.base import Environment
from manyfold.policies.base import PolicySet
from manyfold.policies.modules import JoinedPolicySet
from manyfold.rollout import Choice, Choose, Drawn, Noted, Steps, play, rollout

SAVE_EVERY = 2.0  # seconds after which episodes that have ended are kept, at the earliest


def turns(alpha: Array, episodes: int) -> Ints:
    """Who runs each episode, `[N]`: after any number of episodes, every logger has had its share, to within one."""
    if alpha.ndim != 1 or not (alpha >= 0).all() or abs(alpha.sum() - 1) > 1e-6:
        raise ValueError(f"alpha is {alpha.tolist()!s:.60}, expected shares of the loggers that sum to 1")
    check_number("episodes", episodes, 1, 10**9)
    counts, left = np.floor(alpha * episodes + 1e-9).astype(np.int64), alpha * episodes
    counts[np.argsort(counts - left, kind="stable")[: episodes - counts.sum()]] += 1
    return spread(counts)


def spread(counts: Ints) -> Ints:
    """Who runs each episode, given how many each logger runs: evenly spread over the whole; `[N]`."""
    due = [(np.arange(c) + 0.5) / c for c in np.maximum(counts, 0)]
    order = np.argsort(np.concatenate(due), kind="stable")
    return np.repeat(np.arange(len(counts)), counts)[order]


def first_states(env: Environment, number: int, rng: np.random.Generator) -> NDArray[Any]:
    """First observations of episodes that are not run, `[number, width]`."""
    size = min(number, env.slots or number)
    running, every = env.open(size, rng), np.arange(size)
    rounds = []
    for _ in range(-(-number // size)):
        running.done[:] = True
        rounds.append(running.reset(every).copy())
    return np.concatenate(rounds)[:number]


class Job(NamedTuple):
    """What all episodes of an evaluation share: K targets, and other loggers behind them."""

    env: Environment
    policies: PolicySet
    others: PolicySet | None = None

    @property
    def loggers(self) -> PolicySet:
        """Targets first."""
        return self.policies if self.others is None else JoinedPolicySet([self.policies, self.others])


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
    job = Job(env, policies, others)
    j = job.loggers.n_policies
    who = turns(np.full(j, 1 / j) if alpha is None else np.asarray(alpha, dtype=np.float64), episodes)
    parts, done = [], 0
    for block in rollout(env, _chooser(job, rng), who, rng):
        parts.append(block)
        done += len(block.lengths)
        progress(done)
    return _episodes(job, Steps.join(parts), who)


class Shard(NamedTuple):
    """Some episodes that run side by side."""

    number: int
    who: Ints  # the logger of each, [n]
    seeds: Seeds  # [n]


Keep = Callable[[Shard, Ints, Episodes], None]  # a shard, which of its episodes have ended, and these


def run_shard(job: Job, shard: Shard, keep: Keep | None = None) -> Episodes:
    """Runs a shard to its end, in one thread: the networks are small.

    Args:
        keep: sees episodes soon after they have ended; those of environments that take no seeds at the end of all.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        draws, rng = Draws(), np.random.default_rng(int(shard.seeds[0]))
        steps = play(job.env, _chooser(job, draws), shard.who, rng, (draws, shard.seeds))
        every = SAVE_EVERY if keep and job.env.seeded else np.inf
        parts = []
        for part in as_they_end(steps, len(shard.who), every):
            parts.append(part)
            if keep:
                ended = np.unique(part.episode)
                keep(shard, ended, _episodes(job, part, shard.who[ended]))
        rows = parts.pop() if len(parts) == 1 else _by_episode(_joined(parts))
        return _episodes(job, rows, shard.who)
    finally:
        torch.set_num_threads(threads)


def as_they_end(steps: Iterable[Steps], episodes: int, every: float) -> Iterator[Steps]:
    """Whole episodes, those that have ended by the clock every so many seconds, and the rest at the end."""
    kept: list[Steps] = []
    ended, last = np.zeros(episodes, dtype=np.bool_), time.monotonic()
    for step in steps:
        kept.append(step)
        if every == np.inf:
            continue
        ended[step.episode[step.terminated | step.truncated]] = True
        if time.monotonic() - last >= every and ended.any():
            rows = Steps.join(kept)
            whole, last = ended[rows.episode], time.monotonic()
            yield _by_episode(rows.take(whole))
            kept, ended = [rows.take(~whole)], np.zeros(episodes, dtype=np.bool_)
    if any(step.t.size for step in kept):
        yield _by_episode(_joined(kept))


def _joined(parts: list[Steps]) -> Steps:
    """One after the other; the list is empty afterwards, as many policies' steps should not be in memory twice."""
    found = Steps.join(parts)
    parts.clear()
    return found


def _by_episode(rows: Steps) -> Steps:
    """The rows of each episode together, by t."""
    return rows.take(np.lexsort((rows.t, rows.episode)))


def _chooser(job: Job, rng: np.random.Generator | Draws) -> Choose:
    """Every episode by its own logger; the log-probability of what it does under all of them is noted."""
    loggers, k, head = job.loggers, job.policies.n_policies, job.policies.head

    def choose(obs: NDArray[Any], t: Ints, which: Ints) -> Choice | Drawn:
        rows = np.arange(len(t))
        if head is not None:
            parameters = loggers.parameters(obs, t)  # [J, n, P]
            actions = head.draw(parameters[which, rows], rng)
            log_probs = head.log_probs(parameters, actions)  # [J, n]
            expected = np.moveaxis(head.expected(parameters[:k]), 0, 1).astype(np.float32)
            noted: Noted = {"log_probs": log_probs.T, "features": head.features(actions), "expected": expected}
            return Drawn(actions, head.sent(actions), np.exp(log_probs[which, rows]), noted)
        probs = loggers.probs(obs, t)

        def note(actions: Ints) -> Noted:
            with np.errstate(divide="ignore"):
                taken = np.log(probs[:, rows, actions])
            return {"log_probs": taken.T, "probs": probs[:k].swapaxes(0, 1)}

        return Choice(probs[which, rows], note)

    return choose


def _episodes(job: Job, steps: Steps, who: Ints) -> Episodes:
    """Of whole episodes in a row, `who` ran them."""
    k, j = job.policies.n_policies, steps.noted["log_probs"].shape[1]
    every = np.ascontiguousarray(steps.noted["log_probs"].T)
    known = {
        name: np.ascontiguousarray(np.moveaxis(steps.noted[name], 1, 0))
        for name in ("probs", "expected")
        if name in steps.noted
    }
    lengths = np.unique(steps.episode, return_counts=True)[1]
    return Episodes(
        steps.state,
        steps.t,
        steps.action,
        steps.reward,
        lengths,
        who,
        every[:k],
        every,
        np.where(np.bincount(who, minlength=j)[:k] > 0, np.arange(k), -1),
        job.policies.names,
        job.env.horizon,
        job.policies.n_states,
        features=steps.noted.get("features"),
        **known,
    )


def describe(
    job: Job,
    states: NDArray[Any],
    t: Ints,
    actions: NDArray[Any],
    rewards: Array,
    lengths: Ints,
    who: Ints,
    at_once: int = 40_000,
) -> Episodes:
    """Episodes that were run before, as these targets and loggers see them: all densities are computed anew.

    Args:
        at_once: densities that are computed together, of all policies; more leave the processor's cache.
    """
    loggers, k, head = job.loggers, job.policies.n_policies, job.policies.head
    rows = max(100, at_once // loggers.n_policies)
    of_policies: dict[str, NDArray[Any]] = {}  # [J, M] or [K, M, ...], as `_episodes` wants them: they are large
    found: dict[str, NDArray[Any]]
    for first in range(0, len(t), rows):
        s, at, taken = (x[first : first + rows] for x in (states, t, actions))
        if head is not None:
            parameters = loggers.parameters(s, at)
            expected = head.expected(parameters[:k]).astype(np.float32)
            found = {"log_probs": head.log_probs(parameters, taken), "expected": expected}
        else:
            probs = loggers.probs(s, at)
            with np.errstate(divide="ignore"):
                found = {"log_probs": np.log(probs[:, np.arange(len(at)), taken]), "probs": probs[:k]}
        for name, x in found.items():
            if name not in of_policies:
                of_policies[name] = np.empty((len(x), len(t), *x.shape[2:]), dtype=x.dtype)
            of_policies[name][:, first : first + rows] = x
    noted: Noted = {name: np.moveaxis(x, 0, 1) for name, x in of_policies.items()}
    if head is not None:
        noted["features"] = head.features(actions)
    episode, never = np.repeat(np.arange(len(lengths)), lengths), np.zeros(len(t), dtype=np.bool_)
    steps = Steps(episode, t, states, actions, rewards, states, never, never, rewards, noted)
    return _episodes(job, steps, who)
