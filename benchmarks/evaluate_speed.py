"""The whole evaluation of a group of Gridworld 1,000, all estimators, against stepping Gymnasium's SyncVectorEnv.

The peer runs the same three sets of episodes (on-policy, mu, ODI), sampling from the same tables, and computes nothing
else; ours includes every ratio, return and curve.
"""

import time

import gymnasium
import numpy as np

import manyfold  # noqa: F401 - registers the environment
from benchmarks.show import show
from manyfold import evaluation, exact
from manyfold.evaluation import Tables
from manyfold.gridworld import Gridworld
from manyfold.policies import cumulative_probs, sample_actions
from manyfold.streams import stream

M, K, EPISODES, RUNS, ENVS, PEER = 10, 10, 2_000, 10, 64, 640


def main() -> None:
    world, rng = Gridworld.draw(M, 0), stream("benchmark-evaluate")
    base = rng.dirichlet([1] * 4, size=(1, M, M * M))
    targets = 0.8 * base + 0.2 * rng.dirichlet([1] * 4, size=(K, M, M * M))
    mdp = world.to_mdp()
    q, q_hat = exact.action_values(mdp, targets), exact.second_moments(mdp, targets)
    tables = Tables(targets, exact.shared_behavior(targets, q_hat), exact.odi_behaviors(targets, q_hat), q)
    points = np.arange(1, EPISODES // K + 1) * K
    start = time.perf_counter()
    for run in range(RUNS):
        evaluation.run(
            lambda name, run=run: evaluation.log_tabular(world, tables, name, EPISODES, stream("bench", name, run)),
            points,
        )
    ours = 3 * RUNS * EPISODES / (time.perf_counter() - start)

    envs = gymnasium.make_vec("manyfold/Gridworld-v0", num_envs=ENVS, vectorization_mode="sync", m=M)
    start = time.perf_counter()
    for table in (targets[0], tables.mu, tables.odi[0]):
        thresholds = cumulative_probs(table)
        for _ in range(PEER // ENVS):
            obs, _ = envs.reset()
            for t in range(M):
                obs, *_ = envs.step(sample_actions(thresholds[t], obs[:, :-1].argmax(-1), rng))
    peer = 3 * PEER / (time.perf_counter() - start)
    rows = [
        (f"Gymnasium SyncVectorEnv, {ENVS} envs: episodes only", f"{peer:,.0f}", "1"),
        ("manyfold: episodes, 7 estimators, curves", f"{ours:,.0f}", f"{ours / peer:,.0f}"),
    ]
    show(f"Gridworld 1,000, K = {K}, one core", ("", "episodes/s", "ratio"), rows)


if __name__ == "__main__":
    main()
