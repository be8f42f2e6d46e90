"""Gridworld steps a second of CPU time, actions sampled from a table: manyfold against Gymnasium's SyncVectorEnv."""

import time

import gymnasium
import numpy as np

import manyfold  # noqa: F401 - registers the environment
from benchmarks.show import show
from manyfold.envs import Gridworld
from manyfold.policies.base import sample_actions
from manyfold.rollout import rollout_tabular
from manyfold.streams import stream

SECONDS = 2.0
ENVS = 64


def policy(m: int) -> np.ndarray:
    return stream("benchmark", m).dirichlet(np.ones(4), size=(m, m * m))  # [T, S, A]


def manyfold_rate(m: int, episodes: int) -> float:
    world, mu, rng = Gridworld.draw(m, 0), policy(m), np.random.default_rng(0)
    steps, start = 0, time.process_time()
    while (spent := time.process_time() - start) < SECONDS:
        rollout_tabular(world, mu, episodes, rng)
        steps += episodes * m
    return steps / spent


def gymnasium_rate(m: int) -> float:
    envs = gymnasium.make_vec("manyfold/Gridworld-v0", num_envs=ENVS, vectorization_mode="sync", m=m)
    mu, rng = policy(m), np.random.default_rng(0)
    steps, start = 0, time.process_time()
    obs, _ = envs.reset(seed=0)
    t = 0
    while (spent := time.process_time() - start) < SECONDS:
        obs, _, terminated, _, _ = envs.step(sample_actions(mu[t, obs[:, :-1].argmax(-1)], rng))
        steps += ENVS
        t = t + 1 if t + 1 < m else 0
        if terminated.all():
            obs, _ = envs.reset()
    return steps / spent


def main() -> dict[str, float]:
    rows, out = [], dict[str, float]()
    for m in (10, 30):
        peer = gymnasium_rate(m)
        rows.append((f"{m**3:,}: Gymnasium SyncVectorEnv, {ENVS} envs", f"{peer:,.0f}", "1"))
        for episodes in (1_000, 10_000, 100_000):
            rate = manyfold_rate(m, episodes)
            out[f"{m**3:,}, {episodes:,} episodes, times SyncVectorEnv"] = rate / peer
            rows.append((f"{m**3:,}: manyfold, {episodes:,} episodes a call", f"{rate:,.0f}", f"{rate / peer:,.0f}"))
    show("Gridworld, one core, actions sampled from a tabular policy", ("", "steps/s", "ratio"), rows)
    return out


if __name__ == "__main__":
    main()
