"""Runs every benchmark in a process of its own, so that peak memory is its own too."""

import subprocess
import sys

for name in (
    "gridworld",
    "exact",
    "ppo_speed",
    "gradients",
    "fqe_speed",
    "evaluate_speed",
    "robots_speed",
    "pool_speed",
    "pipeline_overhead",
):
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
