"""Runs benchmarks, each in a process of its own, so that peak memory is its own too: `python -m benchmarks`.

    python -m benchmarks                       # those of `make bench`
    python -m benchmarks door_speed ppo_speed  # some of them

Each prints its tables; its ratios go to data/bench/bench.json, where `dvc metrics diff` compares them between commits.
One that fails is named at the end, with exit code 1; the others run all the same. Of those that were not asked for, the
file keeps what it has; of one that failed it has nothing. At the end: peers at a glance (`benchmarks.glance`).
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import glance
from manyfold.files import write_json

NAMES = (
    "gridworld",
    "exact",
    "ppo_speed",
    "gradients",
    "fqe_speed",
    "evaluate_speed",
    "robots_speed",
    "pool_speed",
    "door_speed",
    "pipeline_overhead",
)
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "data/bench/bench.json"


def one(name: str, path: Path) -> None:
    """Of a process: runs a benchmark and writes its ratios."""
    sys.argv = [f"benchmarks.{name}"]
    found = importlib.import_module(f"benchmarks.{name}").main()
    path.write_text(json.dumps(found))


def run(names: Sequence[str], results: Path = RESULTS) -> list[str]:
    """Those that failed."""
    failed = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            path, start = Path(folder) / "ratios.json", time.monotonic()
            done = subprocess.run([sys.executable, "-m", "benchmarks", name, "--to", str(path)], check=False)
            if done.returncode or not path.exists():
                failed.append(name)
                print(f"benchmarks.{name} failed with exit code {done.returncode}; the others run on", file=sys.stderr)
            found = rounded(json.loads(path.read_text())) if path.exists() and not done.returncode else None
        every: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
        every.pop(name, None)
        if found is not None:
            every[name] = found
            print(f"benchmarks.{name}: {time.monotonic() - start:.0f} s", flush=True)
        every["cores"] = len(os.sched_getaffinity(0))
        write_json(results, dict(sorted(every.items())))
    return failed


def rounded(found: dict[str, float]) -> dict[str, float]:
    """Four digits: more are noise."""
    return {name: float(f"{x:.4g}") for name, x in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(NAMES)}; all of them if left out")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="FILE", help="instead of data/bench/bench.json"
    )
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := sorted(set(given.names) - set(NAMES)):
        parser.exit(2, f"{', '.join(unknown)}: no benchmark, expected some of {', '.join(NAMES)}\n")
    if given.to is not None:
        one(given.names[0], given.to)
        return 0
    failed = run(given.names or NAMES, given.results)
    glance.main(given.results)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
