"""Stage `q` of one environment: `python -m flows.q --env gridworld-1000`."""

import sys
from pathlib import Path

from prefect import flow

from flows.shards import run_stage, stage_main
from tasks import q as stage
from tasks.params import ROOT

ABOUT = (
    "Fits q of all K target policies of every group on its offline data, by params.yaml's section `q`; a group "
    "that is finished is not fitted again after an interruption."
)


@flow(name="q", flow_run_name="{env}", validate_parameters=False)
def q(env: str, data: Path = ROOT / "data", workers: int = 1) -> Path:
    """Fits all groups in shards and puts the result in place."""
    return run_stage("q", stage, "updates", env, data, workers)


if __name__ == "__main__":
    sys.exit(stage_main("q", q, stage, ABOUT))
