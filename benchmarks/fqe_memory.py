"""Fitting on a data set that is larger than memory should be: 100 million rows, peak memory, throughput.

    python -m benchmarks.fqe_memory             # 100 million rows, some minutes
    python -m benchmarks.fqe_memory 5000000

Reading is measured beside pyarrow's plain scan of the same file and columns, in CPU seconds; each in a process of its
own.
"""

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.show import show
from manyfold.data.transitions import ROW_GROUP, About, Batch, Transitions, Writer
from manyfold.streams import stream

ABOUT = About("benchmark", 10, 4, 1, 0)
CELLS, BATCH, POLICIES, FITTED = 100, 16_384, 2, 10_000_000


def generate(path: Path, rows: int) -> None:
    """Random tuples, as many as asked for, written as a stream."""
    rng = stream("benchmark-memory")
    with Writer(path, ABOUT) as writer:
        for start in range(0, rows, 16 * ROW_GROUP):
            n = min(16 * ROW_GROUP, rows - start)
            t = rng.integers(10, size=n)
            writer.write(
                {
                    "episode": np.arange(start, start + n) // 10,
                    "t": t,
                    "state": rng.integers(CELLS, size=n),
                    "action": rng.integers(4, size=n),
                    "reward": rng.standard_normal(n),
                    "next_state": rng.integers(CELLS, size=n),
                    "terminated": t == 9,
                    "truncated": np.zeros(n, dtype=bool),
                }
            )


def scan(path: Path) -> int:
    """pyarrow's own way through the same columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pa.set_cpu_count(1)
    batches = pq.ParquetFile(path).iter_batches(batch_size=ROW_GROUP, columns=list(Batch._fields), use_threads=False)
    return sum(batch.num_rows for batch in batches)


def read(path: Path) -> int:
    """Shuffled, checked batches."""
    return sum(len(batch.t) for batch in Transitions(path).batches(BATCH, stream("benchmark-memory", 1)))


def fit(path: Path) -> int:
    """Fitted evaluation of some 10 million training rows: a pass, or a part of one."""
    import torch

    from manyfold.fqe import engine as fqe

    torch.set_num_threads(1)
    data = Transitions(path)
    updates = int(0.9 * min(data.rows, FITTED)) // BATCH // 10
    config = fqe.Config(batch=BATCH, updates_per_step=updates, most_updates=10 * updates, patience=10**6)
    table = np.full((POLICIES, 10, CELLS, 4), 0.25, dtype=np.float32)
    fqe.fit(
        data,
        lambda batch: np.repeat(batch.reward[None], POLICIES, 0),
        lambda states, t: table[:, t, states[:, 0].astype(np.int64)],
        stream("benchmark-memory", 2),
        config,
        CELLS,
    )
    return config.updates_per_step * 10 * BATCH


def main() -> None:
    if len(sys.argv) == 3:  # one measurement, in a process of its own
        start = time.process_time()
        rows = {"scan": scan, "read": read, "fit": fit}[sys.argv[1]](Path(sys.argv[2]))
        print(rows, time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        return
    count = int(sys.argv[1]) if len(sys.argv) == 2 else 100_000_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "transitions.parquet"
        generate(path, count)
        size = path.stat().st_size / 2**30
        table, plain = [], 0.0
        for what, label in (
            ("scan", "pyarrow's plain scan"),
            ("read", "shuffled, checked batches"),
            ("fit", f"fit, K = {POLICIES}, batches of {BATCH:,}"),
        ):
            command = [sys.executable, "-m", "benchmarks.fqe_memory", what, str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows, seconds, peak = map(float, done.stdout.split())
            rate = rows / seconds / 1e6
            plain = plain or rate
            table.append((label, f"{rate:.2f}", f"{rate / plain:.2f}", f"{seconds:.0f} s", f"{peak:.2f} GiB"))
    title = f"{count:,} rows, {size:.2f} GiB of Parquet, one thread"
    show(title, ("", "million rows/s", "of the scan", "CPU time", "peak memory"), table)


if __name__ == "__main__":
    main()
