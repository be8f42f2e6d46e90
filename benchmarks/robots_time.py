"""What a robot's chain costs, from one group of it: `python -m benchmarks.robots_time hopper ant`, all by default.

Each stage is run for one group by params.yaml, `targets` also for the groups of larger shards, which it trains as one
batch. From these shard times: 30 groups on 2, 16 and 128 cores, where a shard is 15, 2 and 1 groups. CPU time of all
threads, which other work on the machine disturbs less; starting the stages comes on top (`pipeline_overhead`).
"""

import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.robots import asked_for
from benchmarks.show import show
from manyfold.envs.binned_mujoco import ROBOTS
from tasks import behavior, evaluate, offline, q, q_hat, studies, targets
from tasks.stages import Stage
from tasks.studies import Study

GROUPS = 30
CORES = {2: 15, 16: 2, 128: 1}  # and the groups of the largest shard


def spent(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def run(stage: Stage, study: Study, groups: int, data: Path) -> float:
    """Seconds for some groups of a stage."""
    _, work = stage.prepare(study, data)
    seconds = spent(lambda: stage.run(study, list(range(groups)), work, data))
    stage.collect(study, groups, work, data)
    return seconds


def stages(study: Study, data: Path) -> dict[str, float]:
    """Seconds of one group in each stage after `targets`."""
    torch.set_num_threads(1)
    every: tuple[Stage, ...] = tuple(module.STAGE for module in (offline, q, q_hat, behavior, evaluate))
    return {stage.name: run(stage, study, 1, data) for stage in every}


def main(robots: list[str]) -> None:
    rows = []
    for robot in robots:
        study = studies.read(robot)
        with tempfile.TemporaryDirectory() as folder:
            training = {
                groups: run(targets.STAGE, study, groups, Path(folder) / str(groups)) for groups in CORES.values()
            }
            data = Path(folder) / "1"
            each = stages(study, data)
            size = sum(path.stat().st_size for path in data.rglob("*") if path.is_file()) * GROUPS / 2**30
        total = {cores: training[groups] + groups * sum(each.values()) for cores, groups in CORES.items()}
        minutes = (f"{seconds / 60:.0f} min" for seconds in total.values())
        parts = ", ".join(f"{name} {seconds:.0f}" for name, seconds in each.items())
        rows.append((robot, f"targets {training[1]:.0f}, {parts}", *minutes, f"{size:.1f} GiB"))
    header = ("", "seconds of one group", *(f"{cores} cores" for cores in CORES), "disk")
    show(f"{GROUPS} groups of a robot, from the time of one", header, rows)
    print(f"Peak memory of a shard: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")


if __name__ == "__main__":
    main(asked_for("What a robot's chain costs, from one group of it; all robots by default.", tuple(ROBOTS)))
