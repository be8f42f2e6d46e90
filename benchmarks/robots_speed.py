"""A robot's logged episodes against envpool alone: `python -m benchmarks.robots_speed hopper ant`, Hopper by default.

Ours chooses by mu, notes the probabilities of all K targets, their q and v at every step, and computes the returns of
every estimator that mu logs for. The peer repeats the very same resets and actions, and computes nothing. One thread
each, in turns; the best of each, by the clock and by the CPU time of all threads, which other work on the machine
disturbs less. Slots wait when no episode is left to begin: counted, neither stepped nor evaluated.
"""

import time
from typing import Any

import numpy as np
import torch

from benchmarks.robots import RULE, asked_for, trained
from benchmarks.show import show
from manyfold.design.behavior import Behavior
from manyfold.envs import BinnedMujoco
from manyfold.envs.binned_mujoco import RunningMujoco, make_envpool
from manyfold.estimate import runs
from manyfold.estimate.loggers import FittedLogging
from manyfold.fqe.nets import Shape, ValueNets, size
from manyfold.rollout import rollout
from manyfold.streams import stream

EPISODES, ROUNDS = 2000, 3


class Recorded(BinnedMujoco):
    """A robot that remembers what its envpool was asked to do, and how many slots were running."""

    def open(self, n: int, rng: np.random.Generator) -> RunningMujoco:
        running = super().open(n, rng)
        running._pool = self.recorder = Recorder(running._pool)
        self.opened = running
        return running


def make(robot: str) -> FittedLogging:
    """Targets as the stages train them; values of the same size, which know nothing."""
    drawn, width = trained(robot), BinnedMujoco(robot).width
    shape = Shape(drawn.targets.horizon, drawn.targets.n_actions, RULE.policies, 64, 0, width)
    generator = torch.Generator().manual_seed(0)
    q, q_hat = (
        ValueNets(
            shape,
            0.1 * torch.randn(size(shape), generator=generator),
            torch.zeros(width),
            torch.ones(width),
            torch.full((RULE.policies,), scale),
        )
        for scale in (50.0, 2500.0)
    )
    return FittedLogging(Recorded(robot, drawn.companion.companion()), Behavior(drawn.targets, q, q_hat))


class Recorder:
    """An envpool that remembers what it was asked to do."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.asked = inner, []

    def reset(self, ids: Any) -> Any:
        self.asked.append((None, ids))
        return self.inner.reset(ids)

    def step(self, actions: Any, ids: Any) -> Any:
        self.asked.append((actions, ids))
        return self.inner.step(actions, ids)


def now() -> Any:
    """By the clock, and CPU time of all threads."""
    return np.array([time.perf_counter(), time.process_time()])


def ours(logging: FittedLogging) -> tuple[Any, int, float, list[Any]]:
    """Seconds by the clock and of the CPU, steps, share of the slots' steps spent waiting, what envpool was asked."""
    rng, steps, start = stream("benchmark-robots"), 0, now()
    for rows in rollout(logging.env, logging.choose("mu"), np.zeros(EPISODES, dtype=int), rng):
        runs.returns([logging.episodes(rows, "mu")], "mu")
        steps += len(rows.t)
    seconds = now() - start
    asked = logging.env.recorder.asked  # type: ignore[attr-defined]
    moves = [len(ids) for actions, ids in asked if actions is not None]
    return seconds, steps, 1 - float(np.mean(moves)) / logging.env.slots, asked


def theirs(logging: FittedLogging, asked: list[Any]) -> Any:
    """Seconds for the same steps, by the clock and of the CPU."""
    env = logging.env
    seeds = stream("benchmark-robots").integers(2**31, size=min(env.slots, EPISODES)).tolist()
    envs = make_envpool(env.name, seeds, env.horizon + 1, 1)
    start = now()
    for actions, ids in asked:
        if actions is None:
            envs.reset(ids)
        else:
            envs.step(actions, ids)
    return now() - start


def main(robots: tuple[str, ...] = ("hopper",)) -> dict[str, float]:
    torch.set_num_threads(1)
    rows, out = [], dict[str, float]()
    for robot in robots:
        logging = make(robot)
        found = []
        for _ in range(ROUNDS):
            seconds, steps, waiting, asked = ours(logging)
            found.append((steps / seconds, steps / theirs(logging, asked)))
        (mine, mine_cpu), (bare, bare_cpu) = np.max(found, 0)
        out |= {f"{robot}, share of envpool": mine / bare, f"{robot}, share of envpool's CPU time": mine_cpu / bare_cpu}
        shares = (f"{mine / bare:.0%}", f"{mine_cpu / bare_cpu:.0%}")
        rows.append((robot, f"{steps / EPISODES:.0f}", f"{bare:,.0f}", f"{mine:,.0f}", *shares, f"{waiting:.1%}"))
    header = ("", "steps/episode", "envpool alone, steps/s", "manyfold, steps/s", "share", "of CPU time", "waiting")
    show(f"{EPISODES:,} episodes of mu, K = {RULE.policies}, {BinnedMujoco.slots} slots, one thread", header, rows)
    return out


if __name__ == "__main__":
    main(asked_for("A robot's logged episodes against envpool alone; Hopper by default.", ("hopper",)))
