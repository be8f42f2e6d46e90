"""PPO steps per second of many learners, against Stable-Baselines3 with the same hyperparameters; a profile; and the
share of envpool's bare stepping that is left on Hopper while training.

Both sides have as many processes as there are cores, with one torch thread each, and all steps of all processes count.
Ours divide 30 groups among them; each of Stable-Baselines3's trains its learners one after the other. The sides take
turns, and of each the fastest round counts: whatever else the machine does can only slow it.
"""

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np

from benchmarks.show import show
from benchmarks.stable_baselines import make_environment, make_model

GROUPS = 30
CORES = len(os.sched_getaffinity(0))
PARTS = [[int(g) for g in part] for part in np.array_split(np.arange(GROUPS), CORES)]  # the groups of each process
ROUNDS = 3
UPDATES = {"gridworld-1000": 80, "inverted-pendulum": 3, "hopper": 2}
PEER_LEARNERS = 2  # one after the other, in each process
PEER_STEPS = {"gridworld-1000": 10_240, "inverted-pendulum": 4_096, "hopper": 4_096}

Result = TypeVar("Result")
ready: Any  # of a worker's process: all begin to measure together


def ours_process(env: str, groups: list[int]) -> tuple[float, dict[str, float]]:
    """Seconds in which one process trains some groups, all together and by part."""
    import torch

    from manyfold.train import targets
    from manyfold.train.ppo import Learner
    from manyfold.train.vector_envs import MujocoVector, vector_envs

    torch.set_num_threads(1)
    environment = make_environment(env)
    config = targets.config(environment)
    envs: Any = vector_envs(environment, groups, config.envs, config.gamma)
    learner = Learner(envs, config, [(env, group) for group in groups])
    seconds = dict.fromkeys(("physics", "rollout", "learning"), 0.0)

    def timed(part: str, f: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = f(*arguments)
            seconds[part] += time.perf_counter() - start
            return result

        return wrapper

    learner.run_segment(1, [set()] * len(groups), lambda *_: None, lambda: None)  # warm-up
    start_envs = envs.start

    def start_and_time(segment: int) -> Any:
        obs = start_envs(segment)
        if isinstance(envs, MujocoVector):
            envs._pool.step = timed("physics", envs._pool.step)
            envs._pool.reset = timed("physics", envs._pool.reset)
        return obs

    envs.start = start_and_time
    if not isinstance(envs, MujocoVector):
        envs.step = timed("physics", envs.step)
    learner._rollout = timed("rollout", learner._rollout)  # type: ignore[method-assign]
    learner._epoch = timed("learning", learner._epoch)  # type: ignore[method-assign]
    ready.wait()
    start = time.perf_counter()
    while learner.update < 1 + UPDATES[env]:
        learner.run_segment(1 + UPDATES[env], [set()] * len(groups), lambda *_: None, lambda: None)
    return time.perf_counter() - start, seconds


def at_once(work: Callable[[str, list[int]], Result], env: str, parts: list[list[int]]) -> list[Result]:
    """The results of `work(env, part)` for all parts, a process each, which start to measure at the same time."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(parts), timeout=120)
    with ProcessPoolExecutor(len(parts), context, take_barrier, (barrier,)) as pool:
        return list(pool.map(work, [env] * len(parts), parts))


def take_barrier(barrier: Any) -> None:
    """Keeps the barrier in the worker's process: it cannot be sent with a job."""
    global ready
    ready = barrier


def ours(env: str) -> tuple[float, dict[str, float]]:
    """Aggregate steps per second of all groups, and the share of time of each part."""
    from manyfold.train import targets

    results = at_once(ours_process, env, PARTS)
    seconds = max(result[0] for result in results)
    shares = {part: sum(r[1][part] for r in results) / sum(r[0] for r in results) for part in results[0][1]}
    shares["rest"] = 1 - shares["rollout"] - shares["learning"]
    shares["rollout"] -= shares["physics"]  # policy, normalisation, advantages: a rollout without its environments
    return GROUPS * targets.config(make_environment(env)).batch * UPDATES[env] / seconds, shares


def peer_process(env: str, seeds: list[int]) -> tuple[float, int]:
    """Seconds and steps of one process that trains Stable-Baselines3's learners one after the other."""
    import torch

    torch.set_num_threads(1)
    make_model(env, 0, PEER_STEPS[env]).learn(1)  # warm-up: one rollout and its update
    models = [make_model(env, seed, PEER_STEPS[env]) for seed in seeds]
    ready.wait()
    start = time.perf_counter()
    for model in models:
        model.learn(PEER_STEPS[env])
    return time.perf_counter() - start, sum(model.num_timesteps for model in models)


def peer(env: str) -> float:
    """Aggregate steps per second of Stable-Baselines3's learners, as many processes as `ours`."""
    seeds = [[process * PEER_LEARNERS + i for i in range(PEER_LEARNERS)] for process in range(CORES)]
    results = at_once(peer_process, env, seeds)
    return sum(steps for _, steps in results) / max(seconds for seconds, _ in results)


def bare(env: str) -> float:
    """Aggregate steps per second of envpool alone, in as many processes; 0 where it has no part."""
    return sum(at_once(bare_process, env, PARTS)) if env == "hopper" else 0.0


def bare_process(env: str, groups: list[int]) -> float:
    """Steps per second of envpool with random actions in one process, an environment for each group, one thread."""
    from manyfold.envs.binned_mujoco import make_envpool

    envs = make_envpool(env, groups, 1000, 1)
    envs.reset()
    actions = [np.stack([envs.action_space.sample() for _ in groups]).astype(np.float64) for _ in range(100)]
    ready.wait()
    steps, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < 3:
        for a in actions:
            envs.step(a)
        steps += len(groups) * len(actions)
    return steps / spent


class Round(NamedTuple):
    """One measurement of every side in an environment."""

    peer: float  # steps/s
    ours: float
    shares: dict[str, float]
    bare: float


def main() -> None:
    rows: list[tuple[str, ...]] = []
    profile: list[tuple[str, ...]] = []
    each = f"{CORES} processes of 1 thread"
    rounds = [{env: Round(peer(env), *ours(env), bare(env)) for env in UPDATES} for _ in range(ROUNDS)]
    for env in UPDATES:
        found = [every[env] for every in rounds]
        slow, limit = max(x.peer for x in found), max(x.bare for x in found)
        best = max(found, key=lambda x: x.ours)
        rate = best.ours
        rows.append((f"{env}: Stable-Baselines3, {each}, learner by learner", f"{slow:,.0f}", "1.0"))
        rows.append((f"{env}: manyfold, {each}, {GROUPS} groups at once", f"{rate:,.0f}", f"{rate / slow:.1f}"))
        if limit:
            rows.append((f"{env}: envpool's bare stepping, {each}", f"{limit:,.0f}", f"{limit / slow:.1f}"))
        profile.append((env, *(f"{share:.0%}" for share in best.shares.values())))
    show(f"PPO, same hyperparameters, all learners; best of {ROUNDS} rounds", ("", "steps/s", "ratio"), rows)
    show("Where manyfold's time goes", ("", "physics", "policy and bookkeeping", "learning", "rest"), profile)
    print(f"Hopper keeps {rate / limit:.0%} of envpool's bare stepping while training.")  # the last of UPDATES


if __name__ == "__main__":
    main()
