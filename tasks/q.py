"""Stage `q`: the K action values of each group, by fitted Q-evaluation on its offline data (Algorithm 1, line 3).

`python -m tasks.q` runs one shard; `python -m flows.q` runs them all.
"""

import sys

import numpy as np

from manyfold.fqe import Reward, Weights
from tasks.fits import HEADER, FitStage, Inputs, own_section, policy_weights
from tasks.shards import shard_main

__all__ = ["HEADER", "collect", "describe", "prepare", "run"]


def problem(inputs: Inputs) -> tuple[Reward, Weights]:
    """The logged reward, for every policy; weights pi."""
    policies = inputs.policies()
    return lambda batch: np.repeat(batch.reward[None], policies.n_policies, axis=0), policy_weights(policies)


STAGE = FitStage("q", ("targets", "offline"), problem, "q", own_section("q"))
prepare, run, collect, describe = STAGE.prepare, STAGE.run, STAGE.collect, STAGE.describe

if __name__ == "__main__":
    sys.exit(shard_main("q", "Fits the action values of some groups of one environment under data/.work.", run))
