"""The whole evaluation of a group of Gridworld 1,000, all estimators, against stepping Gymnasium's SyncVectorEnv.

The peer runs the same three sets of episodes (on-policy, mu, ODI), sampling from the same tables, and computes nothing
else; ours includes every ratio, return and curve. Seconds are CPU time; of several processes, the slowest's.
"""

import os
import time
from concurrent.futures import ProcessPoolExecutor

import gymnasium
import numpy as np

import manyfold  # noqa: F401 - registers the environment
from benchmarks.show import show
from manyfold import exact
from manyfold.data.episodes import Padded
from manyfold.envs import Gridworld
from manyfold.estimate import runs
from manyfold.estimate.loggers import TabularLogging
from manyfold.estimate.methods import METHODS, Loggers
from manyfold.policies.base import sample_actions
from manyfold.streams import stream

M, K, EPISODES, RUNS, ENVS, PEER = 10, 10, 2_000, 10, 64, 640
CORES = len(os.sched_getaffinity(0))


def make() -> TabularLogging:
    world, rng = Gridworld.draw(M, 0), stream("benchmark-evaluate")
    base = rng.dirichlet([1] * 4, size=(1, M, M * M))
    targets = 0.8 * base + 0.2 * rng.dirichlet([1] * 4, size=(K, M, M * M))
    mdp = world.mdp()
    q, q_hat = exact.action_values(mdp, targets), exact.second_moments(mdp, targets)
    mu, odi = exact.shared_behavior(targets, q_hat), exact.odi_behaviors(targets, q_hat)
    return TabularLogging(world, targets, mu, odi, q)


def ours(first: int) -> float:
    """Seconds for some runs of all estimators, in this process."""
    logging = make()
    points = np.array([*range(1, 11), *range(15, EPISODES // K + 1, 5)]) * K  # as the stage takes them
    start = time.process_time()
    for run in range(first, first + RUNS):

        def log(name: Loggers, run: int = run) -> Padded:
            return next(logging.log(name, EPISODES, stream("bench", name, run)))

        runs.run(log, points)
    return time.process_time() - start


def theirs() -> float:
    """Seconds for as many episodes of the same policies."""
    tables = make()
    envs = gymnasium.make_vec("manyfold/Gridworld-v0", num_envs=ENVS, vectorization_mode="sync", m=M)
    rng = stream("benchmark-evaluate", 1)
    start = time.process_time()
    for table in (tables.targets, tables.mu[None], tables.odi):
        for i in range(PEER // ENVS):
            policy = table[i % len(table)]  # [T, S, A]
            obs, _ = envs.reset()
            for t in range(M):
                obs, *_ = envs.step(sample_actions(policy[t, obs[:, :-1].argmax(-1)], rng))
    return time.process_time() - start


def main() -> dict[str, float]:
    with ProcessPoolExecutor(CORES) as pool:
        list(pool.map(ours, range(CORES)))  # warm-up
        spent = list(pool.map(ours, range(0, CORES * RUNS, RUNS)))
    both = CORES * 3 * RUNS * EPISODES / max(spent)
    one, peer = 3 * RUNS * EPISODES / min(spent), 3 * PEER / theirs()
    rows = [
        (f"Gymnasium SyncVectorEnv, {ENVS} envs: episodes only", f"{peer:,.0f}", "1"),
        (f"manyfold, one process: episodes, {len(METHODS)} estimators, curves", f"{one:,.0f}", f"{one / peer:,.0f}"),
        (f"manyfold, {CORES} processes, as the stage runs", f"{both:,.0f}", f"{both / peer:,.0f}"),
    ]
    show(f"Evaluation of Gridworld 1,000, K = {K}", ("", "episodes/s", "ratio"), rows)
    return {"one process, times SyncVectorEnv": one / peer, f"{CORES} processes, times SyncVectorEnv": both / peer}


if __name__ == "__main__":
    main()
