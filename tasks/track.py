"""MLflow records what a pipeline run found: one experiment per environment, a parent run, a child for each estimator.

The store is SQLite in the repository unless MLFLOW_TRACKING_URI names another one. Nothing is read from MLflow: it is
for people who compare runs. Tags lead from a run to its commit and to the very data, by DVC's hashes.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # before mlflow is imported
import mlflow
import numpy as np
import onnx
import yaml
from mlflow.entities import Metric, Param, RunTag
from mlflow.models import ModelSignature
from mlflow.tracking import MlflowClient
from mlflow.types import Schema, TensorSpec

from manyfold import environments
from manyfold.evaluation import ESTIMATORS
from manyfold.values import ValueNets
from tasks.params import ROOT
from tasks.report import read_curves, read_metrics

SERVER = os.environ.get("MLFLOW_TRACKING_URI")  # the user's; mlflow itself sets the variable later
# of each estimator, from metrics.json
SHOWN = (
    "relative_variance",
    "relative_variance_median",
    "relative_variance_se",
    "episodes_to_match",
    "largest_mean_error",
)


def client(root: Path = ROOT) -> MlflowClient:
    """The store, made at first use."""
    uri = SERVER or f"sqlite:///{root.resolve() / 'mlflow.db'}"
    for noisy in ("mlflow", "alembic"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    return MlflowClient(uri, uri)


def experiment(store: MlflowClient, env: str, root: Path) -> str:
    """The environment's experiment; artifacts are in the repository unless a server keeps them."""
    found = store.get_experiment_by_name(env)
    if found:
        return str(found.experiment_id)
    local = None if SERVER else (root.resolve() / "mlartifacts" / env).as_uri()
    return str(store.create_experiment(env, artifact_location=local))


def tags(env: str, root: Path) -> dict[str, str]:
    """The commit, and the DVC hash of every stage's outputs."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    found = {"git_commit": done.stdout.strip() or "none", "env": env}
    lock = yaml.safe_load((root / "dvc.lock").read_text())["stages"]
    for stage, about in lock.items():
        name, _, of = stage.partition("@")
        if of == env:
            for out in about.get("outs", []):
                found[f"dvc.{name}.{Path(out['path']).name}"] = out["md5"]
    return found


def record(env: str, spent: dict[str, float], root: Path = ROOT) -> str:
    """Writes a parent run and its children; returns the parent's id."""
    read_metrics(env, root / "data")  # refuses before anything is written
    store = client(root)
    where = experiment(store, env, root)
    parent = store.create_run(where, run_name=f"{env} pipeline", tags=tags(env, root)).info.run_id
    try:
        fill(store, env, where, parent, spent, root)
    except BaseException:
        store.set_terminated(parent, "FAILED")
        raise
    store.set_terminated(parent)
    return str(parent)


def fill(store: MlflowClient, env: str, where: str, parent: str, spent: dict[str, float], root: Path) -> None:
    """Everything about a run, in its parent and its children."""
    data = root / "data"
    metrics = read_metrics(env, data)
    params = [Param(f"{a}.{b}", str(x)) for a, b, x in flat(yaml.safe_load((root / "params.yaml").read_text()))]
    times = [Metric(f"seconds.{stage}", seconds, 0, 0) for stage, seconds in spent.items()]
    store.log_batch(parent, metrics=times + training_curve(env, data) + fit_curves(env, data), params=params)
    for path in (data / "report" / env, data / "evaluate" / env / "metrics.json", card(env, data)):
        (store.log_artifacts if path.is_dir() else store.log_artifact)(parent, str(path))
    curves = read_curves(env, data)
    for name, estimator in ESTIMATORS.items():
        child = store.create_run(where, run_name=estimator.label, tags={"mlflow.parentRunId": parent}).info.run_id
        numbers = [Metric(key, metrics[key][name], 0, 0) for key in SHOWN if metrics[key][name] is not None]
        episodes, mean, _ = curves[name, "all"]
        numbers += [Metric("relative_error", float(e), 0, int(n)) for n, e in zip(episodes, mean, strict=True)]
        about = {"loggers": estimator.loggers, "uses": "its own episodes" if estimator.own else "all episodes"}
        about |= {"return": estimator.returns.__name__}
        params = [Param(key, value) for key, value in about.items()]
        store.log_batch(child, metrics=numbers, params=params, tags=[RunTag("estimator", name)])
        store.set_terminated(child)
    register(env, data, parent)


def flat(params: dict[str, Any]) -> list[tuple[str, str, object]]:
    """Sections' parameters; `envs` is a list and says nothing about a run."""
    return [(a, b, x) for a, section in params.items() if isinstance(section, dict) for b, x in section.items()]


def card(env: str, data: Path) -> Path:
    """The data card of the first group."""
    return data / "offline" / env / "group-00" / "card.json"


def training_curve(env: str, data: Path) -> list[Metric]:
    """PPO's returns, mean over groups, by training step as far as all groups have trained."""
    plans = [json.loads(path.read_text()) for path in sorted((data / "targets" / env).glob("group-*/plan.json"))]
    out = []
    for points in zip(*(plan["returns"] for plan in plans), strict=False):
        known = [point["return"] for point in points if point["return"] is not None]
        if known:
            out.append(Metric("ppo.return", float(np.mean(known)), 0, points[0]["step"]))
    return out


def fit_curves(env: str, data: Path) -> list[Metric]:
    """Held-out errors of q and q_hat, mean over groups, by update."""
    out = []
    for stage in ("q", "q_hat"):
        paths = sorted((data / stage / env).glob(f"group-*/{stage}.safetensors"))
        curves = [ValueNets.load(path)[1] for path in paths]
        shortest = min(map(len, curves))  # a fit may have stopped early
        for i in range(shortest):
            error = float(np.mean([curve[i].held_out for curve in curves]))
            out.append(Metric(f"{stage}.held_out_error", error, 0, curves[0][i].update))
    return out


def register(env: str, data: Path, parent: str) -> None:
    """mu of the first group as an MLflow model with signature and example: a new version of the model `mu-<env>`."""
    folder = data / "behavior" / env / "group-00"
    about = json.loads((folder / "mu.json").read_text())
    width, actions, policies = about["inputs"]["observation"][1], about["actions"], len(about["policies"])
    single, whole = np.dtype("float32"), np.dtype("int64")
    signature = ModelSignature(
        Schema([TensorSpec(single, (-1, width), "observation"), TensorSpec(whole, (-1,), "t")]),
        Schema([TensorSpec(single, (-1, actions), "mu"), TensorSpec(single, (policies, -1, actions), "targets")]),
    )
    example = {"observation": np.zeros((2, width), np.float32), "t": np.zeros(2, np.int64)}
    with mlflow.start_run(run_id=parent):
        mlflow.onnx.log_model(
            onnx.load(folder / "mu.onnx"),
            name="mu",
            signature=signature,
            input_example=example,
            registered_model_name=f"mu-{env}",
            pip_requirements=["onnxruntime", "numpy"],
            onnx_execution_providers=["CPUExecutionProvider"],
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.track",
        description="Records the results of one environment in MLflow, as `python -m flows.pipeline` does after a run.",
    )
    parser.add_argument("--env", required=True, help=f"one of {', '.join(environments.ENVS)}")
    args = parser.parse_args(arguments)
    try:
        environments.check_env(args.env)
        run = record(args.env, {})
    except (ValueError, OSError, mlflow.MlflowException) as error:
        print(f"track: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    print(f"Run {run} of the experiment {args.env}; look at it with `make ui`.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
