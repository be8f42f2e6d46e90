"""Strong scaling of one evaluation on a Dask cluster: `python -m benchmarks.clusters`.

1,000 episodes of ten checkpoints of Hopper-v5 (those near together of `benchmarks.policies`), here in this process
and on real schedulers with 1, 2 and 4 worker processes of one thread. Time is CPU time, which other work on the machine
disturbs less: that of the worker that had most to do, and of the process that asks, which hands out shards, joins the
episodes and estimates. The cluster's values must be those of this process, byte by byte.

For 16 and 128 cores all shards are run here, one after the other, as such a crew would be handed them; the time is that
of the core that has most to do if each takes the next shard when it is free, and the asking process's as measured.
"""

import argparse
import heapq
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import manyfold as mf
from benchmarks.policies import WORLDS, chosen, load, train
from manyfold import envs
from manyfold.draws import seeds_of
from manyfold.estimate.collecting import Job, run_shard, spread
from manyfold.estimate.workers import shards
from manyfold.files import write_json
from manyfold.tables import markdown, write_table

ENV, POLICIES = "Hopper-v5", 10
WORKERS, COMPUTED = (1, 2, 4), (16, 128)
OUT = Path("data/scale/clusters.json")


def policies(work: Path) -> mf.PolicySet:
    """Ten checkpoints near together, of `benchmarks.policies`."""
    world, folder = WORLDS["Hopper"], work / "hopper" / "seed-0"
    train(world, 0, folder)
    return load(world, folder, "near", chosen(POLICIES))


def evaluated(policies: mf.PolicySet, episodes: int, dask: str | None = None) -> tuple[mf.Estimate, float]:
    """And the CPU seconds of this process."""
    start = time.process_time()
    found = mf.evaluate(ENV, policies, episodes, dask=dask)
    assert isinstance(found, mf.Estimate)
    return found, time.process_time() - start


def on_cluster(policies: mf.PolicySet, workers: int, episodes: int) -> tuple[mf.Estimate, float, list[float]]:
    """The estimate, this process's CPU seconds and those of each worker."""
    from distributed import Client, LocalCluster

    start: Any = LocalCluster
    connect: Any = Client
    with start(n_workers=workers, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster:
        address = cluster.scheduler_address
        with connect(address, set_as_default=False) as client:
            client.run(evaluated, policies, 20)  # so that all have imported what they need
            before = client.run(time.process_time)
            found, asking = evaluated(policies, episodes, address)
            after = client.run(time.process_time)
    return found, asking, [after[name] - before[name] for name in before]


def shard_seconds(policies: mf.PolicySet, workers: int, episodes: int) -> list[float]:
    """CPU seconds of each shard that so many workers would be handed."""
    job, out = Job(envs.make(ENV), policies), []
    who = spread(np.full(POLICIES, episodes // POLICIES))
    for shard in shards(job, who, seeds_of("benchmark-clusters", numbers=np.arange(episodes)), workers):
        start = time.process_time()
        run_shard(job, shard)
        out.append(time.process_time() - start)
    return out


def longest(seconds: list[float], cores: int) -> float:
    """Of the core that has most to do, if each takes the next shard when it is free."""
    busy = [0.0] * cores
    for one in seconds:
        heapq.heappush(busy, heapq.heappop(busy) + one)
    return max(busy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--work", type=Path, default=Path("build/policies"), help="of benchmarks.policies")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ready = policies(args.work)
    evaluated(ready, 100)
    alone, here = evaluated(ready, args.episodes)
    rows: list[tuple[str, ...]] = [("", "shards", "busiest worker", "asking process", "together", "times one process")]
    rows.append(("this process", f"{len(shard_sizes(ready, 1, args.episodes))}", "", "", f"{here:.1f} s", "1.0"))
    found: dict[str, Any] = {"here": here, "clusters": {}, "computed": {}}
    for workers in WORKERS:
        result, asking, each = on_cluster(ready, workers, args.episodes)
        same = result.values.tobytes() == alone.values.tobytes() and str(result) == str(alone)
        if not same:
            raise SystemExit(f"{workers} workers gave other numbers than this process")
        found["clusters"][workers] = {"asking": asking, "workers": each}
        rows.append(
            row(f"Dask, {workers} workers", len(shard_sizes(ready, workers, args.episodes)), max(each), asking, here)
        )
    for cores in COMPUTED:
        each = shard_seconds(ready, cores, args.episodes)
        found["computed"][cores] = each
        rows.append(row(f"{cores} cores, computed", len(each), longest(each, cores), asking, here))
    print(markdown(rows))
    write_json(OUT, found)
    write_table(rows, OUT.with_suffix(""), ("md",))


def shard_sizes(policies: mf.PolicySet, workers: int, episodes: int) -> list[int]:
    job = Job(envs.make(ENV), policies)
    who = np.zeros(episodes, dtype=np.int64)
    return [len(x.who) for x in shards(job, who, np.zeros(episodes, dtype=np.uint64), workers)]


def row(name: str, number: int, busiest: float, asking: float, here: float) -> tuple[str, ...]:
    both = busiest + asking
    return name, f"{number}", f"{busiest:.2f} s", f"{asking:.2f} s", f"{both:.2f} s", f"{here / both:.1f}"


if __name__ == "__main__":
    main()
