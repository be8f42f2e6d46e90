"""Stage `report` of one environment: `python -m flows.report --env gridworld-1000`."""

import argparse
import sys
from pathlib import Path

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.server import joined_server
from manyfold import environments
from tasks import report as stage
from tasks.params import ROOT


@task(cache_policy=NO_CACHE, task_run_name="report {env}")
def build(env: str, data: Path) -> Path:
    """Tables and figures."""
    return stage.build(env, data)


@flow(name="report", flow_run_name="{env}", validate_parameters=False)
def report(env: str, data: Path = ROOT / "data") -> Path:
    """Builds the tables and figures of one environment."""
    return build(env, data)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.report",
        description="Writes the paper's tables and figures for one environment, its numbers beside ours.",
    )
    parser.add_argument("--env", required=True, help=f"one of {', '.join(environments.ENVS)}")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of all data (default data)")
    args = parser.parse_args(arguments)
    try:
        environments.check_env(args.env)
        stage.read_metrics(args.env, args.data)
        with joined_server():
            out = report(args.env, args.data)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print(f"Tables and figures: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
