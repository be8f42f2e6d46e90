"""PPO steps per second of many learners, against Stable-Baselines3 with the same hyperparameters; a profile; and the
share of envpool's bare stepping that is left on Hopper while training.

Both sides have as many processes as there are cores, with one torch thread each, and all steps of all processes count.
Ours divide 30 groups among them; each of Stable-Baselines3's trains its learners one after the other. The sides take
turns, and of each the fastest round counts: whatever else the machine does can only slow it. Seconds are CPU time of
the slowest process, in which other programs hardly count. Where SBX is installed (`pip install sbx-rl "jax<0.7"`: newer
ones break its tensorflow-probability), it runs, too: compiled before the measurement begins.
"""

import importlib.util
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
ROUNDS = 2
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
            start = time.process_time()
            result = f(*arguments)
            seconds[part] += time.process_time() - start
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
    start = time.process_time()
    while learner.update < 1 + UPDATES[env]:
        learner.run_segment(1 + UPDATES[env], [set()] * len(groups), lambda *_: None, lambda: None)
    return time.process_time() - start, seconds


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


def sbx_process(env: str, seeds: list[int]) -> tuple[float, int]:
    """The same of SBX's; JAX takes as many threads as it may use cores, so it gets one."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[seeds[0] // PEER_LEARNERS % len(cores)]})
    return peer_process(env, seeds, "sbx")


def peer_process(env: str, seeds: list[int], library: str = "stable_baselines3") -> tuple[float, int]:
    """Seconds and steps of one process that trains Stable-Baselines3's learners one after the other."""
    import torch

    torch.set_num_threads(1)
    models = [make_model(env, seed, PEER_STEPS[env], library) for seed in seeds]
    for model in models:
        model.learn(1)  # warm-up: one rollout and its update; SBX compiles each model's own
    first = sum(model.num_timesteps for model in models)
    ready.wait()
    start = time.process_time()
    for model in models:
        model.learn(PEER_STEPS[env], reset_num_timesteps=False)
    return time.process_time() - start, sum(model.num_timesteps for model in models) - first


def peer(env: str, work: Callable[[str, list[int]], tuple[float, int]] = peer_process) -> float:
    """Aggregate steps per second of Stable-Baselines3's learners, as many processes as `ours`."""
    seeds = [[process * PEER_LEARNERS + i for i in range(PEER_LEARNERS)] for process in range(CORES)]
    results = at_once(work, env, seeds)
    return sum(steps for _, steps in results) / max(seconds for seconds, _ in results)


def sbx(env: str) -> float:
    """The same of SBX's on Hopper (it compiles for long); 0 elsewhere, and where it is not installed."""
    return peer(env, sbx_process) if env == "hopper" and importlib.util.find_spec("sbx") else 0.0


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
    steps, start = 0, time.process_time()
    while (spent := time.process_time() - start) < 3:
        for a in actions:
            envs.step(a)
        steps += len(groups) * len(actions)
    return steps / spent


class Round(NamedTuple):
    """One measurement of every side in an environment."""

    peer: float  # steps/s
    sbx: float  # 0 where there is none
    ours: float
    shares: dict[str, float]
    bare: float


def main(updates: dict[str, int] = UPDATES) -> dict[str, float]:
    rows, out = list[tuple[str, ...]](), dict[str, float]()
    profile: list[tuple[str, ...]] = []
    each = f"{CORES} processes of 1 thread"
    rounds = [{env: Round(peer(env), sbx(env), *ours(env), bare(env)) for env in updates} for _ in range(ROUNDS)]
    for env in updates:
        found = [every[env] for every in rounds]
        slow, limit, jax = (max(getattr(x, side) for x in found) for side in ("peer", "bare", "sbx"))
        best = max(found, key=lambda x: x.ours)
        rate = best.ours
        rows.append((f"{env}: Stable-Baselines3, {each}, learner by learner", f"{slow:,.0f}", "1.0"))
        rows.append((f"{env}: manyfold, {each}, {GROUPS} groups at once", f"{rate:,.0f}", f"{rate / slow:.1f}"))
        out[f"{env}, times Stable-Baselines3"] = rate / slow
        if jax:
            out[f"{env}, times SBX"] = rate / jax
            rows.append((f"{env}: SBX, {each}, learner by learner", f"{jax:,.0f}", f"{jax / slow:.1f}"))
        if limit:
            out[f"{env}, share of envpool"] = rate / limit
            rows.append((f"{env}: envpool's bare stepping, {each}", f"{limit:,.0f}", f"{limit / slow:.1f}"))
        profile.append((env, *(f"{share:.0%}" for share in best.shares.values())))
    show(f"PPO, same hyperparameters, all learners; best of {ROUNDS} rounds", ("", "steps/s", "ratio"), rows)
    show("Where manyfold's time goes", ("", "physics", "policy and bookkeeping", "learning", "rest"), profile)
    if "hopper" in updates:
        print(f"Hopper keeps {out['hopper, share of envpool']:.0%} of envpool's bare stepping while training.")
    return out


if __name__ == "__main__":
    main()
