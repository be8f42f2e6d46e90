"""Does it learn, side by side with Stable-Baselines3 and the same hyperparameters: Gridworld after 500,000 steps
against the exact optimum, two robots by the mean return of their last 20 episodes at 50,000 steps. About 25 minutes.
"""

import multiprocessing
import os

import numpy as np

from benchmarks.show import show
from benchmarks.stable_baselines import make_environment, make_model

SEEDS = 5
STEPS = 50_000


def gridworld_ours(groups: list[int]) -> list[float]:
    """The share of the gap that each group's policy closes."""
    import torch

    from manyfold.train import targets
    from manyfold.train.ppo import Position
    from manyfold.train.targets import Plan, Training

    torch.set_num_threads(1)
    environment = make_environment("gridworld-1000")
    config = targets.config(environment)
    last = Position(config.total_steps // config.batch, config.epochs)
    training = Training(environment, "gridworld-1000", groups, [Plan((0, 0), (last,), last, (last,))] * len(groups))
    while not training.finished:
        training.run_segment()
    return [gap(group, drawn.targets.table()) for group, drawn in zip(groups, training.results(), strict=True)]


def gridworld_peer(group: int) -> float:
    import torch

    from manyfold.envs.gridworld import Gridworld

    torch.set_num_threads(1)
    model = make_model("gridworld-1000", group, 500_000)
    model.learn(500_000)
    world = Gridworld.draw(10, group)
    with torch.no_grad():
        obs = [torch.from_numpy(world.observe(np.arange(100), t)) for t in range(10)]
        table = np.stack([model.policy.get_distribution(o).distribution.probs.double().numpy() for o in obs])
    return gap(group, table[None])


def gap(group: int, table: np.ndarray) -> float:
    """How much of the gap between the uniform and the optimal value a policy `[1, T, S, A]` closes; exact."""
    from manyfold import exact
    from manyfold.envs.gridworld import Gridworld

    mdp = Gridworld.draw(10, group).mdp()
    trained = exact.values(mdp, table)[0]
    uniform = exact.values(mdp, np.full((1, 10, 100, 4), 0.25))[0]
    v_tp1 = np.zeros(100)
    for _ in range(10):
        v_tp1 = (mdp.rewards + mdp.expect(v_tp1)).max(-1)
    return float((trained - uniform) / (v_tp1 @ mdp.initial - uniform))


def ours(env: str) -> list[float]:
    """Mean return of each group's last 20 episodes; all groups at once."""
    import torch

    from manyfold.train import targets
    from manyfold.train.ppo import Learner
    from manyfold.train.vector_envs import MujocoVector

    torch.set_num_threads(1)
    config = targets.config(make_environment(env))
    envs = MujocoVector(env, list(range(SEEDS)), config.gamma)
    learner = Learner(envs, config, [(env, group) for group in range(SEEDS)])
    updates = -(-STEPS // config.batch)  # as many as Stable-Baselines3, which ends with a whole rollout
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
        halves = workers.map(gridworld_ours, [list(range(5)), list(range(5, 10))], chunksize=1)
        mine = dict(zip(robots, workers.map(ours, robots, chunksize=1), strict=True))
        jobs = [(env, seed) for env in robots for seed in range(SEEDS)]
        theirs = dict(zip(jobs, workers.map(peer, jobs, chunksize=1), strict=True))
        grid_peers = workers.map(gridworld_peer, range(10), chunksize=1)
    grid = []
    for name, shares in (("manyfold", [*halves[0], *halves[1]]), ("Stable-Baselines3", grid_peers)):
        grid.append((name, " ".join(f"{share:.0%}" for share in shares), f"{np.median(shares):.1%}"))
    show("Gridworld 1,000: share of the gap from uniform to optimal value", ("", "seeds", "median"), grid)
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
