"""What many episodes cost: `python -m benchmarks.stored_scale`. CPU seconds, one thread, each in a process of its own.

A million short episodes of eight policies, written as a store has them: how fast they are read, beside pyarrow's plain
scan of the same files and columns, and what an evaluation takes that runs nothing. Their own returns are the check: the
largest deviation from their mean, in standard errors of both. Then 100,000 episodes of CartPole, 100 steps at most, run
without a store, run with one, and estimated from it.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import gymnasium
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from gymnasium import spaces
from torch import nn

import manyfold as mf
from benchmarks.show import show
from benchmarks.stored import memory
from manyfold.data.episode_files import as_lists, table
from manyfold.data.store import Store
from manyfold.envs import GymnasiumEnvironment
from manyfold.estimate.sources import Pooling
from manyfold.estimate.stored import Stored, identities
from manyfold.estimate.workers import Crew
from manyfold.streams import stream

POLICIES, STEPS, FILE, CART = 8, 20, 10_000, 100


class Drift(gymnasium.Env):
    """A place and a speed, pushed one way or the other; each step pays the place, and beyond 1 it ends."""

    observation_space, action_space = spaces.Box(-4, 4, (2,), np.float32), spaces.Discrete(2)


def linear(rows: np.ndarray) -> mf.PolicySet:
    """Policies of two actions whose difference in logits is linear in the observation."""
    modules = [nn.Linear(rows.shape[1], 2, bias=False) for _ in rows]
    with torch.no_grad():
        for module, row in zip(modules, rows, strict=True):
            module.weight.copy_(torch.tensor(np.stack([0 * row, row])))
    return mf.ModulePolicySet(modules, 2, rows.shape[1])


def drifters() -> mf.PolicySet:
    return linear(np.stack([np.linspace(-2, 2, POLICIES), np.linspace(1, -1, POLICIES)], -1))


def cart(k: int = POLICIES) -> mf.PolicySet:
    gain = np.linspace(0.5, 2, k)
    return linear(np.stack([0 * gain, 0.3 * gain, 3 * gain, gain], -1))


def world() -> GymnasiumEnvironment:
    return GymnasiumEnvironment(Drift, STEPS, "drift")


def fill(folder: Path, episodes: int) -> None:
    """Without the environment: all episodes of a file at once."""
    store, policies, rng = Store(folder, world()), drifters(), stream("stored-scale")
    ids = identities(policies)
    for first in range(0, episodes, FILE):
        n = min(FILE, episodes - first)
        who = np.arange(n) % POLICIES
        x, alive, steps = np.zeros((n, 2), np.float32), np.ones(n, dtype=bool), np.zeros(n, dtype=np.int64)
        x[:, 0] = rng.uniform(-0.5, 0.5, n)
        said = np.zeros((n, STEPS, 2), np.float32), np.zeros((n, STEPS), np.int64), *np.zeros((2, n, STEPS))
        for t in range(STEPS):
            up = policies.probs(x, np.full(n, t))[who, np.arange(n), 1]
            action = (rng.random(n) < up).astype(np.int64)
            values = x, action, x[:, 0], np.log(np.where(action, up, 1 - up))
            for column, value in zip(said, values, strict=True):
                column[:, t] = value
            steps += alive
            speed = 0.8 * x[:, 1] + 0.1 * (2 * action - 1) + 0.05 * rng.standard_normal(n)
            x = np.stack([x[:, 0] + speed, speed], -1).astype(np.float32)
            alive &= np.abs(x[:, 0]) < 1
        inside = np.arange(STEPS) < steps[:, None]
        lists = {
            name: as_lists(column[inside].ravel(), steps * (2 if name == "states" else 1))
            for name, column in zip(("states", "actions", "rewards", "log_prob"), said, strict=True)
        }
        number = (first // POLICIES + np.arange(n) // POLICIES).astype(np.int64)
        seeds = rng.integers(2**64, size=n, dtype=np.uint64)
        found = table(pa.array([ids[k] for k in who]), number, seeds, steps, lists)
        file = store.folder / "episodes" / f"{uuid.UUID(int=first).hex[-12:]}.parquet"
        pq.write_table(found, file, compression="zstd", write_page_checksum=True)


def scan(folder: Path, episodes: int) -> str:
    """pyarrow's own way through the same columns."""
    columns, many, start = ["policy", "number", "steps", "states", "actions", "rewards"], 0, time.process_time()
    for file in sorted((folder / "episodes").glob("*.parquet")):
        many += sum(batch.num_rows for batch in pq.ParquetFile(file).iter_batches(columns=columns, use_threads=False))
    return _said(many, start)


def read(folder: Path, episodes: int) -> str:
    """Every part that an evaluation would pool, checked, by policy and number."""
    start = time.process_time()
    stored = Stored(folder, world(), drifters(), 0, Crew())
    parts = Pooling(stored.env, stored.policies, stream("none"), stored=stored).parts
    each = parts.each if parts else (np.arange(len(stored.contents.number)),)
    some = (stored.store.read(stored.every, stored.contents.chosen(rows), log_prob=False) for rows in each)
    return _said(sum(len(found.lengths) for found in some if found), start)


def estimate(folder: Path, episodes: int) -> str:
    start = time.process_time()
    found = mf.evaluate(world(), drifters(), episodes, store=folder)
    assert str(found)  # diagnoses and decisions as well
    said = _said(found.episodes, start)
    plain = np.array([(x.mean(), x.var() / len(x)) for x in found.own_returns])
    off = np.abs(found.mean - plain[:, 0]) / np.sqrt(plain[:, 1] + found.standard_error**2)
    return f"{said} {off.max():.1f}"


def run(folder: Path, episodes: int) -> str:
    start = time.process_time()
    return _said(mf.evaluate("CartPole-v1", cart(), episodes, horizon=CART).episodes, start)


def run_stored(folder: Path, episodes: int) -> str:
    """The first time they are run, the second time all are there."""
    start = time.process_time()
    return _said(mf.evaluate("CartPole-v1", cart(), episodes, horizon=CART, store=folder).episodes, start)


def _said(many: int, start: float) -> str:
    return f"{many} {time.process_time() - start:.2f} {memory():.0f}"


WAYS: dict[str, tuple[str, Callable[[Path, int], str]]] = {
    "scan": ("pyarrow's plain scan", scan),
    "read": ("reading, by parts", read),
    "estimate": ("an evaluation that runs nothing", estimate),
    "run": ("CartPole, no store", run),
    "run-stored": ("CartPole, into a store", run_stored),
    "again": ("CartPole, from the store", run_stored),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1_000_000, help="short ones")
    parser.add_argument("--cart", type=int, default=100_000, help="episodes of CartPole; 0: none")
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "FOLDER"), help="one of them, in a process of its own")
    given = parser.parse_args()
    if given.measure:
        torch.set_num_threads(1)
        what, folder = given.measure
        short = what in ("scan", "read", "estimate")
        print(WAYS[what][1](Path(folder), given.episodes if short else given.cart))
        return
    with tempfile.TemporaryDirectory() as work:
        drift, carts, rows, rates = Path(work) / "drift", Path(work) / "cart", [], list[float]()
        fill(drift, given.episodes)
        for what, (label, _) in WAYS.items():
            short = what in ("scan", "read", "estimate")
            if short or given.cart:
                command = ["--measure", what, str(drift if short else carts)]
                counts = ["--episodes", f"{given.episodes}", "--cart", f"{given.cart}"]
                command = [sys.executable, "-m", "benchmarks.stored_scale", *command, *counts]
                done = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
                many, seconds, peak = map(float, done[:3])
                rates.append(many / seconds)
                share = f"{rates[-1] / rates[0]:.2f}" if what == "read" else ""
                cells = f"{many:,.0f}", f"{seconds:.0f}", f"{rates[-1]:,.0f}", share, f"{peak:,.0f}"
                rows.append((label, *cells, done[3] if len(done) > 3 else ""))
        header = ("", "episodes", "CPU s", "episodes/s", "of the scan", "peak MiB", "largest deviation")
        show(f"{POLICIES} policies; {STEPS} and {CART} steps at most", header, rows)


if __name__ == "__main__":
    main()
