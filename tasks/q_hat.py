"""Stage `q_hat`: the K second moments of each group, the same engine on r_hat = 2 r q - r^2 (Algorithm 1, lines 4-6).

`python -m tasks.q_hat` runs one shard; `python -m flows.q_hat` runs them all. What is saved is the fit itself: q_hat is
at least q^2, and whoever uses the fit floors it there.
"""

import sys
from pathlib import Path

import numpy as np

from manyfold.fqe import Reward, ValueNets
from manyfold.networks import NetworkPolicySet
from manyfold.transitions import Batch
from tasks import fits
from tasks.fits import HEADER
from tasks.shards import shard_main

__all__ = ["HEADER", "collect", "describe", "prepare", "run"]
NEEDS = ("targets", "offline", "q")


def reward(folder: Path, policies: NetworkPolicySet) -> Reward:
    """r_hat = 2 r q(s, a) - r^2 with the fitted q of the group."""
    nets, _ = ValueNets.load(folder / "q.safetensors")
    table = nets.table().astype(np.float32) if policies.spec.n_cells else None

    def r_hat(batch: Batch) -> np.ndarray:
        if table is not None:
            q = table[:, batch.t, batch.state[:, 0].astype(np.int64), batch.action]
        else:
            q = nets.predict(batch.state, batch.t)[:, np.arange(len(batch.t)), batch.action]
        return np.asarray(2 * batch.reward * q - batch.reward**2)

    return r_hat


def prepare(env: str, data: Path) -> tuple[int, Path]:
    return fits.prepare("q_hat", NEEDS, env, data)


def run(env: str, groups: list[int], data: Path) -> Path:
    return fits.run("q_hat", NEEDS, reward, env, groups, data)


def collect(env: str, groups: int, work: Path, data: Path) -> Path:
    return fits.collect("q_hat", env, groups, work, data)


def describe(out: Path) -> list[tuple[str, ...]]:
    return fits.describe("q_hat", out)


if __name__ == "__main__":
    sys.exit(shard_main("q_hat", "Fits the second moments of some groups of one environment under data/.work.", run))
