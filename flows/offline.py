"""Stage `offline` of one environment: `python -m flows.offline --env gridworld-1000`."""

import sys
from pathlib import Path

from prefect import flow

from flows.shards import run_stage, stage_main
from tasks import offline as stage
from tasks.params import ROOT

ABOUT = (
    "Logs the offline data of one environment: params.yaml's `offline.episodes` episodes for each group that has "
    "targets, from checkpoints over the whole training with noise, as Parquet with a data card beside it."
)


@flow(name="offline", flow_run_name="{env}", validate_parameters=False)
def offline(env: str, data: Path = ROOT / "data", workers: int = 1) -> Path:
    """Logs all groups in shards and puts the result in place."""
    return run_stage("offline", stage, "groups", env, data, workers)


if __name__ == "__main__":
    sys.exit(stage_main("offline", offline, stage, ABOUT))
