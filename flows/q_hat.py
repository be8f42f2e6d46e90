"""Stage `q_hat` of one environment: `python -m flows.q_hat --env gridworld-1000`."""

import sys
from pathlib import Path

from prefect import flow

from flows.shards import run_stage, stage_main
from tasks import q_hat as stage
from tasks.params import ROOT

ABOUT = (
    "Fits q_hat of all K target policies of every group on its offline data, by params.yaml's section `q_hat`; a group "
    "that is finished is not fitted again after an interruption."
)


@flow(name="q_hat", flow_run_name="{env}", validate_parameters=False)
def q_hat(env: str, data: Path = ROOT / "data", workers: int = 1) -> Path:
    """Fits all groups in shards and puts the result in place."""
    return run_stage("q_hat", stage, "updates", env, data, workers)


if __name__ == "__main__":
    sys.exit(stage_main("q_hat", q_hat, stage, ABOUT))
