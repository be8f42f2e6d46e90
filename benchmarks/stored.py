"""What a full store costs an evaluation that runs nothing: `python -m benchmarks.stored` (after `benchmarks.growth`).

Ten of its CartPole checkpoints, and 10,000 episodes of 100 steps at most. CPU seconds of one thread: reading the files;
every step's densities under all policies; pooling, which each look does again. Peak memory of the process that reads.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

import manyfold as mf
from benchmarks.show import show
from manyfold import envs
from manyfold.estimate.evaluation import pool
from manyfold.estimate.stored import Stored
from manyfold.estimate.workers import Crew

HORIZON, POLICIES = 100, 10


def policies(work: Path) -> mf.PolicySet:
    """Ten in a row."""
    found = mf.load_policies([*sorted((work / "CartPole-v1" / "checkpoints").glob("*.zip"))[:POLICIES]])
    assert isinstance(found, mf.PolicySet)
    return found


def fill(work: Path, folder: Path, episodes: int) -> None:
    mf.evaluate("CartPole-v1", policies(work), episodes, horizon=HORIZON, store=folder)


def memory() -> float:
    """This process's own peak, MiB; `getrusage` would count what the one that started it had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) / 1024


def measure(work: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    opened = Stored(folder, envs.make("CartPole-v1", HORIZON), policies(work), 0, Crew())
    before, times = memory(), [time.process_time()]
    logged = opened.store.read(opened.every)
    times.append(time.process_time())
    assert logged is not None
    steps, many = len(logged.t), len(logged.lengths)
    del logged
    begun = time.process_time()
    episodes = opened.old()
    assert episodes is not None
    densities = time.process_time() - begun - (times[1] - times[0])
    begun = time.process_time()
    pool(episodes)
    spent = times[1] - times[0], densities, time.process_time() - begun
    peak = memory()
    header = ("episodes", "steps", "reading, s", "densities, s", "pooling, s", "peak, MiB", "before, MiB")
    cells = f"{many:,}", f"{steps:,}", *(f"{x:.1f}" for x in spent), f"{peak:,.0f}", f"{before:,.0f}"
    show(f"{POLICIES} checkpoints of CartPole, {HORIZON} steps at most", header, [cells])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("episodes", nargs="?", type=int, default=10_000)
    parser.add_argument("--work", type=Path, default=Path("build/growth"))
    parser.add_argument("--measure", action="store_true", help="the store is filled: measure, in a process of its own")
    given = parser.parse_args()
    stored = given.work / f"stored-{given.episodes}"
    if given.measure:
        measure(given.work, stored)
    else:
        fill(given.work, stored, given.episodes)
        arguments = [f"{given.episodes}", "--work", f"{given.work}", "--measure"]
        subprocess.run([sys.executable, "-m", "benchmarks.stored", *arguments], check=True)
