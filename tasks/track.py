"""MLflow records what a pipeline run found: one experiment per study, a parent run, a child for each estimator.

The store is SQLite in the repository unless MLFLOW_TRACKING_URI names another one. Nothing is read from MLflow: it is
for people who compare runs. Tags lead from a run to its commit and to the very data, by DVC's hashes.
"""

import json
import logging
import os
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

from manyfold.estimate.registry import ESTIMATORS
from manyfold.fqe.nets import ValueNets
from manyfold.tracking import BATCH, columns, commit, decided
from tasks import commands, studies
from tasks.deciding import read_decisions
from tasks.params import ROOT
from tasks.report import read_curves, read_metrics

SERVER = os.environ.get("MLFLOW_TRACKING_URI")  # the user's; mlflow itself sets the variable later
# of each estimator, from metrics.json
SHOWN = (
    "relative_variance",
    "relative_variance_median",
    "relative_variance_se",
    "relative_variance_per_step",
    "episodes_to_match",
    "episodes_to_match_se",
    "steps_per_episode",
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


def experiment(store: MlflowClient, study: str, root: Path) -> str:
    """The study's experiment; artifacts are in the repository unless a server keeps them."""
    found = store.get_experiment_by_name(study)
    if found:
        return str(found.experiment_id)
    local = None if SERVER else (root.resolve() / "mlartifacts" / study).as_uri()
    return str(store.create_experiment(study, artifact_location=local))


def tags(study: str, root: Path) -> dict[str, str]:
    """The commit, and the DVC hash of every stage's outputs."""
    found = {"git_commit": commit(root), "study": study}
    lock = yaml.safe_load((root / "dvc.lock").read_text())["stages"]
    for stage, about in lock.items():
        name, _, of = stage.partition("@")
        if of == study:
            for out in about.get("outs", []):
                found[f"dvc.{name}.{Path(out['path']).name}"] = out["md5"]
    return found


def record(study: str, spent: dict[str, float], root: Path = ROOT) -> str:
    """Writes a parent run and its children; returns the parent's id."""
    read_metrics(study, root / "data")  # refuses before anything is written
    store = client(root)
    where = experiment(store, study, root)
    parent = store.create_run(where, run_name=f"{study} pipeline", tags=tags(study, root)).info.run_id
    try:
        fill(store, study, where, parent, spent, root)
    except BaseException:
        store.set_terminated(parent, "FAILED")
        raise
    store.set_terminated(parent)
    return str(parent)


def fill(store: MlflowClient, study: str, where: str, parent: str, spent: dict[str, float], root: Path) -> None:
    """Everything about a run, in its parent and its children."""
    data = root / "data"
    metrics = read_metrics(study, data)
    section = studies.read(study, root / "params.yaml")
    params = [Param(f"{a}.{b}", str(x)) for a, b, x in flat(section.params)]
    params += [Param(key, x) for key, x in {"environment": str(section.environment), **parameters(study, data)}.items()]
    times = [Metric(f"seconds.{stage}", seconds, 0, 0) for stage, seconds in spent.items()]
    times += [Metric("seconds", sum(spent.values()), 0, 0)] if spent else []
    store.log_batch(parent, metrics=times + training_curve(study, data) + fit_curves(study, data), params=params)
    known = decision_curves(study, data) + final_decision(study, data)
    for i in range(0, len(known), BATCH):
        store.log_batch(parent, metrics=known[i : i + BATCH])
    for path in (data / "report" / study, data / "evaluate" / study / "metrics.json", card(study, data)):
        (store.log_artifacts if path.is_dir() else store.log_artifact)(parent, str(path))
    curves = read_curves(study, data)
    for name, estimator in ESTIMATORS.items():
        child = store.create_run(where, run_name=estimator.label, tags={"mlflow.parentRunId": parent}).info.run_id
        shown = {key: metrics.get(key, {}).get(name) for key in SHOWN}  # an earlier version has fewer
        numbers = [Metric(key, x, 0, 0) for key, x in shown.items() if x is not None]
        episodes, mean, _ = curves[name, "all"]
        numbers += [Metric("relative_error", float(e), 0, int(n)) for n, e in zip(episodes, mean, strict=True)]
        method = estimator.method
        about = {"loggers": method.loggers, "uses": "its own episodes" if method.own else "all episodes"}
        about |= {"return": method.returns}
        params = [Param(key, value) for key, value in about.items()]
        store.log_batch(child, metrics=numbers, params=params, tags=[RunTag("estimator", name)])
        store.set_terminated(child)
    register(study, data, parent)


def flat(params: dict[str, dict[str, Any]]) -> list[tuple[str, str, object]]:
    """The parameters of every stage's section."""
    return [(a, b, x) for a, section in params.items() for b, x in section.items()]


def card(study: str, data: Path) -> Path:
    """The data card of the first group."""
    return data / "offline" / study / "group-00" / "card.json"


def training_curve(study: str, data: Path) -> list[Metric]:
    """PPO's returns, mean over groups, by training step as far as all groups have trained."""
    plans = [json.loads(path.read_text()) for path in sorted((data / "targets" / study).glob("group-*/plan.json"))]
    out = []
    for points in zip(*(plan.get("returns", []) for plan in plans), strict=False):
        known = [point["return"] for point in points if point["return"] is not None]
        if known:
            out.append(Metric("ppo.return", float(np.mean(known)), 0, points[0]["step"]))
    return out


def fit_curves(study: str, data: Path) -> list[Metric]:
    """Held-out errors of q and q_hat, mean over groups, by update."""
    out = []
    for stage in ("q", "q_hat"):
        paths = sorted((data / stage / study).glob(f"group-*/{stage}.safetensors"))
        curves = [ValueNets.load(path)[1] for path in paths]
        shortest = min(map(len, curves))  # a fit may have stopped early
        for i in range(shortest):
            error = float(np.mean([curve[i].held_out for curve in curves]))
            out.append(Metric(f"{stage}.held_out_error", error, 0, curves[0][i].update))
    return out


def decision_curves(study: str, data: Path) -> list[Metric]:
    """What could be decided of the first group, by episodes; nothing where an earlier version computed the study."""
    found = read_decisions(study, data)
    if found is None:
        return []
    half = (found.high - found.low) / 2
    every = decided(found.names, found.episodes.tolist(), found.may_be_best, found.p_best, half)
    return [Metric(key, value, 0, step) for key, value, step in every]


def parameters(study: str, data: Path) -> dict[str, str]:
    """Who is known to be the best of the first group, who leads, and how sure that is to be."""
    found = read_decisions(study, data)
    if found is None:
        return {}
    best, leads = found.final.best, found.names[found.final.order[0]]
    return {"best": str(None if best is None else found.names[best]), "leads": leads, "alpha": str(found.alpha)}


def final_decision(study: str, data: Path) -> list[Metric]:
    """What is known of the first group with all its episodes, and what these cost, under the names of any result.

    Steps are these episodes at the mean length over all groups.
    """
    found = read_decisions(study, data)
    if found is None:
        return []
    final, length = found.final, read_metrics(study, data).get("steps_per_episode", {}).get(found.estimator)
    said = columns(found.names, final.mean, final.low, final.high, final.p_best)
    spent = {"episodes": final.episodes, **({"steps": final.episodes * length} if length else {})}
    known = [Metric(key, x, 0, final.episodes) for key, x in said.items()]
    return known + [Metric(key, float(x), 0, 0) for key, x in spent.items()]


def register(study: str, data: Path, parent: str) -> None:
    """mu of the first group as an MLflow model with signature and example: a new version of the model `mu-<study>`."""
    folder = data / "behavior" / study / "group-00"
    if not (folder / "mu.json").exists():  # policies that are ONNX graphs
        return
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
            registered_model_name=f"mu-{study}",
            pip_requirements=["onnxruntime", "numpy"],
            onnx_execution_providers=["CPUExecutionProvider"],
        )


def main(arguments: list[str] | None = None) -> int:
    about = "Records the results of one study in MLflow, as `python -m flows.pipeline` does after a run."
    args = commands.parser("track", about).parse_args(arguments)

    def work() -> None:
        try:
            run = record(studies.read(args.study).name, {})
        except mlflow.MlflowException as error:
            raise ValueError(str(error).splitlines()[0]) from None
        print(f"Run {run} of the experiment {args.study}; look at it with `make ui`.")

    return commands.guarded("track", work)


if __name__ == "__main__":
    sys.exit(main())
