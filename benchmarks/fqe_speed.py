"""Fitting q and q_hat of 10 policies against d3rlpy's DiscreteFQE run for each policy, and how the time grows with K.

Same data, network, batch size and number of updates, one thread each, CPU time. Its greedy target is another quantity:
only the time is compared.
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
from manyfold.arrays import Array
from manyfold.data import About, Transitions, Writer
from manyfold.envs import Gridworld
from manyfold.policies.tabular import TabularPolicySet
from manyfold.rollout import Steps, in_turns, rollout
from manyfold.streams import stream

M, EPISODES, BATCH, HIDDEN, RATE = 10, 10_000, 512, 64, 1e-3
UPDATES = 300


def log(path: Path) -> tuple[Transitions, Steps]:
    """Episodes of the uniform policy on Gridworld 1,000, as this library's data set and as arrays."""
    uniform = TabularPolicySet(np.full((1, M, M * M, 4), 0.25))
    loggers = np.zeros(EPISODES, dtype=np.int64)
    (rows,) = rollout(Gridworld.draw(M, 0), in_turns(uniform), loggers, stream("benchmark-fqe"))
    columns = ("episode", "t", "state", "action", "reward", "next_state", "terminated", "truncated")
    with Writer(path, About("benchmark", M, 4, 1, 0)) as writer:
        writer.write({name: getattr(rows, name) for name in columns})
    return Transitions(path), rows


def ours(data: Transitions, table: Array) -> float:
    """Seconds for q and q_hat of all policies `[K, T, S, A]`."""
    torch.set_num_threads(1)
    policies, rng = TabularPolicySet(table), stream("benchmark-fqe", len(table))
    config = fqe.Config(hidden=HIDDEN, learning_rate=RATE, batch=BATCH, updates_per_step=UPDATES // M)
    start = time.process_time()
    q = fqe.fit(data, *fqe.q_problem(policies), rng, config, M * M)
    fqe.fit(data, *fqe.q_hat_problem(policies, q.nets), rng, config, M * M)
    return time.process_time() - start


def theirs(rows: Steps, policies: int) -> float:
    """Seconds for the same number of fits, one after the other."""
    import d3rlpy
    from d3rlpy.logging import NoopAdapterFactory

    torch.set_num_threads(1)
    inputs = np.zeros((len(rows.t), M * M + 1), dtype=np.float32)  # one-hot cell, t/T
    inputs[np.arange(len(rows.t)), rows.state[:, 0]] = 1
    inputs[:, -1] = rows.t / M
    rewards = rows.reward[:, None].astype(np.float32)
    dataset = d3rlpy.dataset.MDPDataset(inputs, rows.action[:, None], rewards, rows.terminated.astype(np.float64))
    encoder = d3rlpy.models.VectorEncoderFactory([HIDDEN])
    policy = d3rlpy.algos.DQNConfig(encoder_factory=encoder).create(device="cpu:0")
    policy.build_with_dataset(dataset)
    config = d3rlpy.ope.FQEConfig(
        learning_rate=RATE, batch_size=BATCH, encoder_factory=encoder, gamma=1.0, target_update_interval=100
    )
    start = time.process_time()
    for _ in range(2 * policies):
        d3rlpy.ope.DiscreteFQE(algo=policy, config=config, device="cpu:0").fit(
            dataset,
            n_steps=UPDATES,
            n_steps_per_epoch=UPDATES,
            show_progress=False,
            save_interval=10**6,
            logger_adapter=NoopAdapterFactory(),
        )
    return time.process_time() - start


def main() -> dict[str, float]:
    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        data, rows = log(Path(folder) / "a.parquet")
        base = stream("benchmark-fqe", 1).dirichlet([1] * 4, size=(100, M, M * M))
        ours(data, base[:2])  # torch imports its optimisers at first use
        peer = theirs(rows, 10)
        spent = {k: ours(data, base[:k]) for k in (10, 30, 100)}
    fits = f"q and q_hat of 10 policies, {UPDATES} updates of {BATCH} rows each"
    table = [
        ("d3rlpy DiscreteFQE, policy by policy", f"{peer:.1f} s", ""),
        ("manyfold, all at once", f"{spent[10]:.1f} s", f"{peer / spent[10]:.1f}"),
    ]
    show(fits, ("", "time", "ratio"), table)
    growth = [(str(k), f"{s:.1f} s", f"{s / spent[10]:.2f}", f"{k / 10:.0f}") for k, s in spent.items()]
    show("The same for K policies", ("K", "time", "times K = 10's", "proportional"), growth)
    return {"times d3rlpy": peer / spent[10], "K = 100 over K = 10": spent[100] / spent[10]}


if __name__ == "__main__":
    main()
