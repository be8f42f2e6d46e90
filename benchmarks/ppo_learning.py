"""Does it learn: Gridworld against the exact optimum, and two robots against Stable-Baselines3 with the same
hyperparameters; mean return of the last 20 episodes at 50,000 steps. Takes about 15 minutes on two cores.
"""

import multiprocessing
import os

import numpy as np

from benchmarks.show import show
from benchmarks.stable_baselines import make_model

SEEDS = 5
STEPS = 50_000


def gridworld_gap(group: int, updates: int | None = None) -> float:
    """How much of the gap between the uniform and the optimal value the trained policy closes."""
    import torch

    from manyfold import exact, targets
    from manyfold.gridworld import Gridworld
    from manyfold.ppo import Position
    from manyfold.targets import Plan, Training

    torch.set_num_threads(1)
    config = targets.config("gridworld-1000")
    last = Position(updates or config.total_steps // config.batch, config.epochs)
    training = Training("gridworld-1000", [group], [Plan((0, 0), (last,), last, (last,))])
    while not training.finished:
        training.run_segment()
    mdp = Gridworld.draw(10, group).to_mdp()
    trained = exact.values(mdp, training.results()[0].targets.table())[0]
    uniform = exact.values(mdp, np.full((1, 10, 100, 4), 0.25))[0]
    v_tp1 = np.zeros(100)
    for _ in range(10):
        v_tp1 = (mdp.rewards + mdp.expect(v_tp1)).max(-1)
    return float((trained - uniform) / (v_tp1 @ mdp.initial - uniform))


def ours(env: str) -> list[float]:
    """Mean return of each group's last 20 episodes; all groups at once."""
    import torch

    from manyfold import targets
    from manyfold.groups import MujocoGroups
    from manyfold.ppo import Learner

    torch.set_num_threads(1)
    config = targets.config(env)
    envs = MujocoGroups(env, list(range(SEEDS)), config.gamma)
    learner = Learner(envs, config, [(env, group) for group in range(SEEDS)])
    updates = STEPS // config.batch
    while learner.update < updates:
        learner.run_segment(updates, [set()] * SEEDS, lambda *_: None, lambda: None)
    return [float(x) for x in np.nanmean(envs.recent, axis=1)]


def peer(job: tuple[str, int]) -> float:
    import torch

    torch.set_num_threads(1)
    env, seed = job
    model = make_model(env, seed, STEPS)
    model.learn(STEPS)
    return float(np.mean([episode["r"] for episode in model.ep_info_buffer]))


def main() -> None:
    robots = ("inverted-pendulum", "hopper")
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0)), maxtasksperchild=1) as workers:
        gaps = workers.map(gridworld_gap, range(10), chunksize=1)
        mine = dict(zip(robots, workers.map(ours, robots, chunksize=1), strict=True))
        jobs = [(env, seed) for env in robots for seed in range(SEEDS)]
        theirs = dict(zip(jobs, workers.map(peer, jobs, chunksize=1), strict=True))
    closed = " ".join(f"{gap:.1%}" for gap in gaps)
    show(
        "Gridworld 1,000 after 500,000 steps",
        ("share of the gap uniform to optimal", "median"),
        [(closed, f"{np.median(gaps):.1%}")],
    )
    rows = []
    for env in robots:
        peers = [theirs[env, seed] for seed in range(SEEDS)]
        inside = min(peers) <= np.mean(mine[env]) <= max(peers)
        for name, returns in (("manyfold", mine[env]), ("Stable-Baselines3", peers)):
            each = " ".join(f"{x:.0f}" for x in returns)
            verdict = ("inside" if inside else "outside") if name == "manyfold" else ""
            rows.append((f"{env}: {name}", each, f"{np.mean(returns):.0f}", verdict))
    show(f"Mean return of the last 20 episodes at {STEPS:,} steps", ("", "seeds", "mean", "within SB3's range"), rows)


if __name__ == "__main__":
    main()
