"""Stage `q_hat`: the K second moments of each group, the same engine on r_hat = 2 r q - r^2 (Algorithm 1, lines 4-6).

`python -m tasks.q_hat` runs one shard; `python -m flows.q_hat` runs them all. What is saved is the fit itself: q_hat is
at least q^2, and whoever uses the fit floors it there.
"""

import sys

import numpy as np

from manyfold.fqe import Reward, Weights
from manyfold.transitions import Batch
from tasks.fits import HEADER, FitStage, Inputs, own_section, policy_weights
from tasks.shards import shard_main

__all__ = ["HEADER", "collect", "describe", "prepare", "run"]


def moment_reward(inputs: Inputs) -> Reward:
    """r_hat = 2 r q(s, a) - r^2 with the fitted q of the group."""
    nets = inputs.values("q")
    table = nets.table().astype(np.float32) if nets.shape.n_cells else None

    def r_hat(batch: Batch) -> np.ndarray:
        if table is not None:
            q = table[:, batch.t, batch.state[:, 0].astype(np.int64), batch.action]
        else:
            q = nets.predict(batch.state, batch.t)[:, np.arange(len(batch.t)), batch.action]
        return np.asarray(2 * batch.reward * q - batch.reward**2)

    return r_hat


def problem(inputs: Inputs) -> tuple[Reward, Weights]:
    """r_hat; weights pi."""
    return moment_reward(inputs), policy_weights(inputs.policies())


STAGE = FitStage("q_hat", ("targets", "offline", "q"), problem, "q_hat", own_section("q_hat"))
prepare, run, collect, describe = STAGE.prepare, STAGE.run, STAGE.collect, STAGE.describe

if __name__ == "__main__":
    sys.exit(shard_main("q_hat", "Fits the second moments of some groups of one environment under data/.work.", run))
