"""Stage `targets` of one environment: `python -m flows.targets --env gridworld-1000`."""

import sys
from pathlib import Path

from prefect import flow

from flows.shards import run_stage, stage_main
from tasks import targets as stage
from tasks.params import ROOT

ABOUT = (
    "Trains the PPO target policies of one environment: all groups of params.yaml's section `targets`, batched, in as "
    "many processes as there are cores. An interrupted run goes on where it was last saved."
)


@flow(name="targets", flow_run_name="{env}", validate_parameters=False)
def targets(env: str, data: Path = ROOT / "data", workers: int = 1) -> Path:
    """Draws the targets, trains all groups in shards, and puts the result in place."""
    return run_stage("targets", stage, "steps", env, data, workers)


if __name__ == "__main__":
    sys.exit(stage_main("targets", targets, stage, ABOUT))
