"""PPO steps per second, 30 groups on all cores, against Stable-Baselines3 with the same hyperparameters; a profile; and
the share of envpool's bare stepping that is left on Hopper while training.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.show import show
from benchmarks.stable_baselines import make_model

GROUPS = 30
CORES = len(os.sched_getaffinity(0))
UPDATES = {"gridworld-1000": 60, "inverted-pendulum": 4, "hopper": 3}
PEER_STEPS = {"gridworld-1000": 20_480, "inverted-pendulum": 8_192, "hopper": 8_192}


def shard(env: str, groups: list[int], ready: Any, out: Any) -> None:
    """Trains some groups in a process of its own, and reports its seconds by part."""
    import torch

    from manyfold import environments, targets
    from manyfold.groups import GridworldGroups, MujocoGroups
    from manyfold.ppo import Learner

    torch.set_num_threads(1)
    config = targets.config(env)
    envs: Any
    if env in environments.GRIDWORLDS:
        envs = GridworldGroups(environments.GRIDWORLDS[env], groups, config.envs)
    else:
        envs = MujocoGroups(env, groups, config.gamma)
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
        if env in environments.ROBOTS:
            envs._pool.step = timed("physics", envs._pool.step)
            envs._pool.reset = timed("physics", envs._pool.reset)
        return obs

    envs.start = start_and_time
    if env in environments.GRIDWORLDS:
        envs.step = timed("physics", envs.step)
    learner._rollout = timed("rollout", learner._rollout)  # type: ignore[method-assign]
    learner._epoch = timed("learning", learner._epoch)  # type: ignore[method-assign]
    ready.wait()
    start = time.perf_counter()
    while learner.update < 1 + UPDATES[env]:
        learner.run_segment(1 + UPDATES[env], [set()] * len(groups), lambda *_: None, lambda: None)
    out.put((time.perf_counter() - start, seconds))


def ours(env: str) -> tuple[float, dict[str, float]]:
    """Aggregate steps per second of all groups, and the share of time of each part."""
    from manyfold import targets

    context = multiprocessing.get_context("spawn")
    ready, out = context.Barrier(CORES), context.Queue()
    parts = [[int(g) for g in part] for part in np.array_split(np.arange(GROUPS), CORES)]
    workers = [context.Process(target=shard, args=(env, part, ready, out)) for part in parts]
    for worker in workers:
        worker.start()
    results = [out.get() for _ in workers]
    for worker in workers:
        worker.join()
    seconds = max(result[0] for result in results)
    shares = {part: sum(r[1][part] for r in results) / sum(r[0] for r in results) for part in results[0][1]}
    shares["rest"] = 1 - shares["rollout"] - shares["learning"]
    shares["rollout"] -= shares["physics"]  # policy, normalisation, advantages: a rollout without its environments
    return GROUPS * targets.config(env).batch * UPDATES[env] / seconds, shares


def peer(env: str, threads: int) -> float:
    """Stable-Baselines3's steps per second with so many torch threads."""
    import torch

    torch.set_num_threads(threads)
    model = make_model(env, seed=0, total_steps=PEER_STEPS[env])
    start = time.perf_counter()
    model.learn(PEER_STEPS[env])
    return PEER_STEPS[env] / (time.perf_counter() - start)


def bare(env: str) -> float:
    """envpool's steps per second with random actions, one environment for each group, a thread for each core."""
    from manyfold.mujoco import pool

    envs = pool(env, list(range(GROUPS)), 1000, CORES)
    envs.reset()
    actions = [np.stack([envs.action_space.sample() for _ in range(GROUPS)]).astype(np.float64) for _ in range(100)]
    steps, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < 5:
        for a in actions:
            envs.step(a)
        steps += GROUPS * len(actions)
    return steps / spent


def main() -> None:
    rows, profile = [], []
    for env in UPDATES:
        rates = {f"{threads} thread" + "s" * (threads > 1): peer(env, threads) for threads in sorted({1, CORES})}
        rate, shares = ours(env)
        best = max(rates.values())
        for threads, slow in rates.items():
            rows.append((f"{env}: Stable-Baselines3, {threads}", f"{slow:,.0f}", f"{slow / best:.2f}"))
        rows.append((f"{env}: manyfold, {GROUPS} groups, {CORES} processes", f"{rate:,.0f}", f"{rate / best:.1f}"))
        profile.append((env, *(f"{share:.0%}" for share in shares.values())))
        if env == "hopper":
            limit = bare(env)
            rows.append((f"{env}: envpool's bare stepping, {CORES} threads", f"{limit:,.0f}", f"{limit / best:.1f}"))
            kept = f"Hopper keeps {rate / limit:.0%} of envpool's bare stepping while training."
    show("PPO, same hyperparameters (ratio to the faster Stable-Baselines3)", ("", "steps/s", "ratio"), rows)
    show("Where manyfold's time goes", ("", "physics", "policy and bookkeeping", "learning", "rest"), profile)
    print(kept)


if __name__ == "__main__":
    sys.exit(main())
