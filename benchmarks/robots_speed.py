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

from benchmarks.robots import asked_for
from benchmarks.show import show
from manyfold import evaluation, slots, targets
from manyfold.behavior import Behavior
from manyfold.mujoco import pool
from manyfold.robots import Robot
from manyfold.streams import stream
from manyfold.targets import Rule, Training
from manyfold.values import Shape, ValueNets, size

EPISODES, ROUNDS = 2000, 3
RULE = Rule(policies=10, start=(1000, 5000), width=8500, history=2)


def make(env: str) -> Robot:
    """Targets as the stages train them; values of the same size, which know nothing."""
    training = Training(env, [0], [targets.draw(RULE, env, 0)])
    while not training.finished:
        training.run_segment()
    (drawn,) = training.results()
    width = drawn.targets.spec.n_features + drawn.companion.tensors["w3"].shape[2] - 1
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
    return Robot(env, drawn.companion, Behavior(drawn.targets, q, q_hat))


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


def ours(robot: Robot) -> tuple[Any, int, float, list[Any]]:
    """Seconds by the clock and of the CPU, steps, share of the slots' steps spent waiting, what envpool was asked."""
    rng = stream("benchmark-robots")
    world = slots.fill(robot.env, robot.companion, EPISODES, rng)
    world._pool = recorder = Recorder(world._pool)
    running: list[int] = []

    def steps() -> Any:
        for step in slots.play(world, EPISODES, robot.chooser("mu"), rng):
            running.append(len(step.t))
            yield step

    start = now()
    for rows in slots.blocks(steps(), EPISODES, slots.BLOCK):
        evaluation.returns(robot.logged(rows, "mu"), "mu")
    seconds = now() - start
    return seconds, sum(running), 1 - float(np.mean(running)) / world.n, recorder.asked


def theirs(robot: Robot, asked: list[Any]) -> Any:
    """Seconds for the same steps, by the clock and of the CPU."""
    seeds = stream("benchmark-robots").integers(2**31, size=min(slots.SLOTS, EPISODES)).tolist()
    envs = pool(robot.env, seeds, robot.companion.horizon + 1, 1)
    start = now()
    for actions, ids in asked:
        if actions is None:
            envs.reset(ids)
        else:
            envs.step(actions, ids)
    return now() - start


def main(envs: list[str]) -> None:
    torch.set_num_threads(1)
    rows = []
    for env in envs:
        robot = make(env)
        found = []
        for _ in range(ROUNDS):
            seconds, steps, waiting, asked = ours(robot)
            found.append((steps / seconds, steps / theirs(robot, asked)))
        (mine, mine_cpu), (bare, bare_cpu) = np.max(found, 0)
        shares = (f"{mine / bare:.0%}", f"{mine_cpu / bare_cpu:.0%}")
        rows.append((env, f"{steps / EPISODES:.0f}", f"{bare:,.0f}", f"{mine:,.0f}", *shares, f"{waiting:.1%}"))
    header = ("", "steps/episode", "envpool alone, steps/s", "manyfold, steps/s", "share", "of CPU time", "waiting")
    show(f"{EPISODES:,} episodes of mu, K = {RULE.policies}, {slots.SLOTS} slots, one thread", header, rows)


if __name__ == "__main__":
    main(asked_for("A robot's logged episodes against envpool alone; Hopper by default.", ("hopper",)))
