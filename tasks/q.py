"""Stage `q`: the K action values of each group, by fitted Q-evaluation on its offline data (Algorithm 1, line 3).

`python -m tasks.q` runs one shard; `python -m flows.q` runs them all.
"""

import sys
from pathlib import Path

import numpy as np

from manyfold.fqe import Reward
from manyfold.networks import NetworkPolicySet
from tasks import fits
from tasks.fits import HEADER
from tasks.shards import shard_main

__all__ = ["HEADER", "collect", "describe", "prepare", "run"]
NEEDS = ("targets", "offline")


def reward(_: Path, policies: NetworkPolicySet) -> Reward:
    """The logged reward, for every policy."""
    return lambda batch: np.repeat(batch.reward[None], policies.n_policies, axis=0)


def prepare(env: str, data: Path) -> tuple[int, Path]:
    return fits.prepare("q", NEEDS, env, data)


def run(env: str, groups: list[int], data: Path) -> Path:
    return fits.run("q", NEEDS, reward, env, groups, data)


def collect(env: str, groups: int, work: Path, data: Path) -> Path:
    return fits.collect("q", env, groups, work, data)


def describe(out: Path) -> list[tuple[str, ...]]:
    return fits.describe("q", out)


if __name__ == "__main__":
    sys.exit(shard_main("q", "Fits the action values of some groups of one environment under data/.work.", run))
