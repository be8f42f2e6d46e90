"""Fitting q and q_hat of 10 policies against d3rlpy's DiscreteFQE run for each policy, and how the time grows with K.

Same data, network, batch size and number of updates, one thread each; the peer takes the faster of 1 and 2 threads. Its
greedy target is another quantity: only the time is compared.
"""

import logging
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch

from benchmarks.show import show
from manyfold import fqe
from manyfold.gridworld import Gridworld
from manyfold.mdp import Array
from manyfold.rollout import Episodes, rollout
from manyfold.streams import stream
from manyfold.transitions import About, Transitions, Writer

M, EPISODES, BATCH, HIDDEN, RATE = 10, 10_000, 512, 64, 1e-3
UPDATES = 300


def log(path: Path) -> tuple[Transitions, Episodes]:
    """Episodes of the uniform policy on Gridworld 1,000, as this library's data set and as arrays."""
    world, rng = Gridworld.draw(M, 0), stream("benchmark-fqe")
    found = rollout(world, np.full((M, M * M, 4), 0.25), EPISODES, rng)
    after, _ = world.step(found.states[:, -1], found.actions[:, -1], rng)
    steps = np.broadcast_to(np.arange(M), found.states.shape)
    with Writer(path, About("benchmark", M, 4, 1, 0)) as writer:
        writer.write(
            {
                "episode": np.repeat(np.arange(EPISODES), M),
                "t": steps.ravel(),
                "state": found.states.ravel(),
                "action": found.actions.ravel(),
                "reward": found.rewards.ravel(),
                "next_state": np.column_stack([found.states[:, 1:], after]).ravel(),
                "terminated": (steps == M - 1).ravel(),
                "truncated": np.zeros(steps.size, dtype=bool),
            }
        )
    return Transitions(path), found


def ours(data: Transitions, policies: Array) -> float:
    """Seconds for q and q_hat of all policies."""
    torch.set_num_threads(1)
    small = policies.astype(np.float32)

    def weights(states: Array, t: Array) -> Array:
        return small[:, t, states[:, 0].astype(np.int64)]

    config = fqe.Config(hidden=HIDDEN, learning_rate=RATE, batch=BATCH, updates_per_step=UPDATES // M)
    start = time.perf_counter()
    rng = stream("benchmark-fqe", len(policies))
    q = fqe.fit(data, lambda b: np.repeat(b.reward[None], len(small), 0), weights, rng, config, M * M)
    table = q.nets.table().astype(np.float32)

    def r_hat(batch: fqe.Batch) -> Array:
        cells = batch.state[:, 0].astype(np.int64)
        return 2 * batch.reward * table[:, batch.t, cells, batch.action] - batch.reward**2

    fqe.fit(data, r_hat, weights, rng, config, M * M)
    return time.perf_counter() - start


def theirs(found: Episodes, policies: int, threads: int) -> float:
    """Seconds for the same number of fits, one after the other."""
    import d3rlpy
    from d3rlpy.logging import NoopAdapterFactory

    torch.set_num_threads(threads)
    inputs = np.zeros((found.states.size, M * M + 1), dtype=np.float32)  # one-hot cell, t/T
    inputs[np.arange(found.states.size), found.states.ravel()] = 1
    inputs[:, -1] = np.tile(np.arange(M) / M, len(found.states))
    ends = np.zeros(found.states.shape)
    ends[:, -1] = 1
    dataset = d3rlpy.dataset.MDPDataset(
        inputs, found.actions.reshape(-1, 1), found.rewards.reshape(-1, 1).astype(np.float32), ends.ravel()
    )
    encoder = d3rlpy.models.VectorEncoderFactory([HIDDEN])
    policy = d3rlpy.algos.DQNConfig(encoder_factory=encoder).create(device="cpu:0")
    policy.build_with_dataset(dataset)
    config = d3rlpy.ope.FQEConfig(
        learning_rate=RATE, batch_size=BATCH, encoder_factory=encoder, gamma=1.0, target_update_interval=100
    )
    start = time.perf_counter()
    for _ in range(2 * policies):
        d3rlpy.ope.DiscreteFQE(algo=policy, config=config, device="cpu:0").fit(
            dataset,
            n_steps=UPDATES,
            n_steps_per_epoch=UPDATES,
            show_progress=False,
            save_interval=10**6,
            logger_adapter=NoopAdapterFactory(),
        )
    return time.perf_counter() - start


def main() -> None:
    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        data, found = log(Path(folder) / "a.parquet")
        base = stream("benchmark-fqe", 1).dirichlet([1] * 4, size=(100, M, M * M))
        ours(data, base[:2])  # torch imports its optimisers at first use
        peer = min(theirs(found, 10, threads) for threads in (1, 2))
        spent = {k: ours(data, base[:k]) for k in (10, 30, 100)}
    fits = f"q and q_hat of 10 policies, {UPDATES} updates of {BATCH} rows each"
    rows = [
        ("d3rlpy DiscreteFQE, policy by policy", f"{peer:.1f} s", ""),
        ("manyfold, all at once", f"{spent[10]:.1f} s", f"{peer / spent[10]:.1f}"),
    ]
    show(fits, ("", "time", "ratio"), rows)
    growth = [(str(k), f"{s:.1f} s", f"{s / spent[10]:.2f}", f"{k / 10:.0f}") for k, s in spent.items()]
    show("The same for K policies", ("K", "time", "times K = 10's", "proportional"), growth)


if __name__ == "__main__":
    main()
