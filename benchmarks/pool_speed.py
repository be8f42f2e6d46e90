"""What estimating costs beside the rollouts: `OMP_NUM_THREADS=1 python -m benchmarks.pool_speed hopper ant`.

2,000 episodes of ten PPO checkpoints in turns; then everything that pooled evaluation does with them, nothing logged:
weights, regressions, folds, recipes. One thread (NumPy's second one only waits, and counts), CPU time of both. And what
it gives: the variance relative to on-policy MC with as many episodes, of all policies together and of the worst one.
"""

import time

import numpy as np
import torch

from benchmarks.robots import RULE, asked_for, trained
from benchmarks.show import show
from manyfold.envs import BinnedMujoco
from manyfold.estimate.collecting import collect
from manyfold.estimate.evaluation import pool
from manyfold.streams import stream

EPISODES = 2000


def main(robots: tuple[str, ...] = ("hopper",)) -> dict[str, float]:
    torch.set_num_threads(1)
    out: dict[str, float] = {}
    rows: list[tuple[str, ...]] = []
    for robot in robots:
        drawn = trained(robot)
        env = BinnedMujoco(robot, drawn.companion.companion())
        start = time.process_time()
        episodes = collect(env, drawn.targets, EPISODES, stream("benchmark-pool"))
        rollouts = time.process_time()
        found = pool(episodes)
        seconds = np.diff([start, rollouts, time.process_time()])
        relative = found.variance / found.on_policy_variance
        whole = found.variance.sum() / found.on_policy_variance.sum()
        out[f"{robot}, share of the rollouts"] = seconds[1] / seconds[0]
        times = f"{seconds[0]:.1f} s", f"{seconds[1]:.2f} s", f"{seconds[1] / seconds[0]:.1%}"
        rows.append((robot, f"{episodes.steps:,}", *times, f"{whole:.3f} ({relative.max():.3f})"))
    header = ("", "steps", "rollouts", "estimating", "share", "relative variance (worst)")
    show(f"{EPISODES:,} episodes, K = {RULE.policies}, T = 100, one thread", header, rows)
    return out


if __name__ == "__main__":
    main(asked_for("What pooled evaluation costs beside the rollouts; Hopper by default.", ("hopper",)))
