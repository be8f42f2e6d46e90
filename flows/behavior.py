"""Stage `behavior` of one environment: `python -m flows.behavior --env gridworld-1000`."""

import sys
from pathlib import Path

from prefect import flow

from flows.shards import run_stage, stage_main
from tasks import behavior as stage
from tasks.params import ROOT

ABOUT = (
    "Designs the behavior policy of every group from its fits and predicts the variance it will give, by params.yaml's "
    "section `behavior`; goes on after an interruption."
)


@flow(name="behavior", flow_run_name="{env}", validate_parameters=False)
def behavior(env: str, data: Path = ROOT / "data", workers: int = 1) -> Path:
    """Designs for all groups in shards and puts the result in place."""
    return run_stage("behavior", stage, "updates", env, data, workers)


if __name__ == "__main__":
    sys.exit(stage_main("behavior", behavior, stage, ABOUT))
