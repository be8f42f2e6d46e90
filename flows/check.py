"""Are the committed results what the committed code computes? `python -m flows.check --env gridworld-1000`.

Clones the last commit into a temporary folder, runs the chain there from nothing by `dvc repro`, and compares
metrics.json. The deployment `nightly` runs this on a schedule.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.pipeline import last_line
from flows.processes import child
from flows.server import environment, joined_server
from manyfold import environments
from tasks.params import ROOT
from tasks.report import read_metrics


@task(cache_policy=NO_CACHE, task_run_name="anew {env}")
def anew(env: str, folder: Path) -> None:
    """The chain up to `evaluate` in a fresh clone, which has no cache."""
    clone = ["git", "clone", "--quiet", str(ROOT), str(folder)]
    done = subprocess.run(clone, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    log = folder / "check.log"
    command = [sys.executable, "-m", "dvc", "repro", f"evaluate@{env}"]
    with (
        log.open("w") as said,
        child(command, cwd=folder, stdout=said, stderr=said, env=environment(folder)) as process,
    ):
        code = process.wait()
    if code:
        raise RuntimeError(last_line(log.read_text()) or f"dvc repro evaluate@{env}: exit code {code}")


@flow(name="check", flow_run_name="{env}", validate_parameters=False)
def check(env: str = "gridworld-1000") -> int:
    """How many numbers were compared; a RuntimeError names the first one that is not the committed one."""
    environments.check_env(env)
    committed = f"HEAD:data/evaluate/{env}/metrics.json"
    shown = subprocess.run(["git", "show", committed], cwd=ROOT, capture_output=True, text=True, check=False)
    if shown.returncode:
        raise ValueError(f"{committed}: not in Git, expected committed results of {env}")
    with tempfile.TemporaryDirectory() as folder:
        anew(env, Path(folder) / "clone")
        found = flat(read_metrics(env, Path(folder) / "clone" / "data"))
    expected = flat(json.loads(shown.stdout))
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise RuntimeError(f"{env}: {name} is {found.get(name)}, expected the committed {expected.get(name)}")
    return len(expected)


def flat(metrics: dict[str, Any]) -> dict[str, Any]:
    """relative_variance.mpe and so on."""
    out: dict[str, Any] = {}
    for name, value in metrics.items():
        out |= {f"{name}.{key}": x for key, x in value.items()} if isinstance(value, dict) else {name: value}
    return out


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.check",
        description="Computes an environment's results anew in a clone of the last commit and compares them with the "
        "committed ones.",
    )
    parser.add_argument("--env", default="gridworld-1000", help=f"one of {', '.join(environments.ENVS)}")
    args = parser.parse_args(arguments)
    try:
        environments.check_env(args.env)
        with joined_server():
            numbers = check(args.env)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    print(f"{args.env}: all {numbers} numbers of metrics.json are the committed ones.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
