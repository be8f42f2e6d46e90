"""Stage `evaluate` of one environment: `python -m flows.evaluate --env gridworld-1000`."""

import sys
from pathlib import Path

from prefect import flow

from flows.shards import run_stage, stage_main
from tasks import evaluate as stage
from tasks.params import ROOT

ABOUT = (
    "Runs every estimator online for all groups, by params.yaml's section `evaluate`, and writes metrics.json and "
    "curves.csv; a group that is finished is not run again after an interruption."
)


@flow(name="evaluate", flow_run_name="{env}", validate_parameters=False)
def evaluate(env: str, data: Path = ROOT / "data", workers: int = 1) -> Path:
    """Runs all groups in shards and puts the result in place."""
    return run_stage("evaluate", stage, "runs", env, data, workers)


if __name__ == "__main__":
    sys.exit(stage_main("evaluate", evaluate, stage, ABOUT))
