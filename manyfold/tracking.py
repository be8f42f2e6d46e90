"""A result in MLflow, with one set of names for `manyfold evaluate --mlflow`, the pipeline and watched folders.

    value low high p_best half_width    the leader's mean, its interval, P(best); the widest interval of all, halved
    may_be_best policies                how many may be the best, of how many
    value.x half_width.x p_best.x rank.x    of the policy x; 1 is the highest mean
    episodes steps seconds              what it cost
    best leads alpha environment        parameters: who is known to be the best, who leads

MLflow is imported here alone, and only when asked for: nothing else in manyfold knows it.
"""

import logging
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyfold.estimate.evaluation import Estimate
from manyfold.estimate.stopping import Stopped

BATCH = 1000  # metrics that MLflow takes at once
LONGEST = 200  # of its 250 characters for a metric's name
LONGEST_PARAM = 6000  # characters of a parameter


class Measured(NamedTuple):
    """One metric at a number of episodes."""

    key: str
    value: float
    step: int


def metric_names(names: Sequence[str]) -> list[str]:
    """Policies' names of letters, digits, _ and -, as MLflow takes them; a number is added where two would be one."""
    clean = [re.sub(r"[^A-Za-z0-9_-]+", "_", name)[-LONGEST:] or "_" for name in names]
    return [name if clean.count(name) == 1 else f"{name}.{k}" for k, name in enumerate(clean)]


def decided(
    names: Sequence[str],
    episodes: Sequence[int],
    may_be_best: NDArray[Any],
    p_best: NDArray[Any],
    half_width: NDArray[Any],
) -> list[Measured]:
    """What could be decided by episodes, arrays `[looks, K]`; half-widths where they are known."""
    out = []
    for i, n in enumerate(episodes):
        out.append(Measured("may_be_best", float(may_be_best[i].sum()), n))
        for k, name in enumerate(metric_names(names)):
            out.append(Measured(f"p_best.{name}", float(p_best[i, k]), n))
            if np.isfinite(half_width[i, k]):
                out.append(Measured(f"half_width.{name}", float(half_width[i, k]), n))
    return out


def columns(
    names: Sequence[str], mean: NDArray[Any], low: NDArray[Any], high: NDArray[Any], p_best: NDArray[Any]
) -> dict[str, float]:
    """What a decision says, arrays `[K]`: under names that all studies share, and by policy; none that is infinite."""
    leader, half = int(np.argmax(mean)), (high - low) / 2
    found = {"policies": len(names), "value": mean[leader], "low": low[leader], "high": high[leader]}
    found |= {"p_best": p_best[leader], "half_width": half.max()}
    places = np.argsort(np.argsort(-mean, kind="stable"))
    for k, name in enumerate(metric_names(names)):
        found |= {f"value.{name}": mean[k], f"rank.{name}": places[k] + 1}
    return {key: float(x) for key, x in found.items() if np.isfinite(x)}


def commit(folder: Path) -> str:
    """The Git commit of a folder, "none" where there is none."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError:  # no Git
        return "none"
    return done.stdout.strip() if done.returncode == 0 else "none"


class Experiment:
    """Where runs go: the server that MLFLOW_TRACKING_URI names, or mlflow.db in a folder, the current one if left out.

    To be opened before an episode is run: a server that doesn't answer is refused here, with one line.
    """

    def __init__(self, name: str, folder: Path = Path()) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # its own 7 take minutes where nobody answers
        try:
            import mlflow
            from mlflow.tracking import MlflowClient
        except ModuleNotFoundError:
            raise ValueError("this needs MLflow, which is not installed; pip install mlflow") from None
        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.ERROR)
        server = os.environ.get("MLFLOW_TRACKING_URI")
        uri = server or f"sqlite:///{folder.resolve() / 'mlflow.db'}"
        local = None if server else (folder.resolve() / "mlartifacts" / name).as_uri()
        try:
            mlflow.set_tracking_uri(uri)
            mlflow.set_registry_uri(uri)
            self.client: Any = MlflowClient(uri, uri)
            found = self.client.get_experiment_by_name(name)
            self.id = found.experiment_id if found else self.client.create_experiment(name, artifact_location=local)
        except Exception as error:  # of MLflow, its database or the network
            said = " ".join(str(error).split())
            raise ValueError(
                f"MLflow at {uri}, experiment {name!r}: {said:.150}; is MLFLOW_TRACKING_URI right?"
            ) from None

    def log(
        self,
        result: Estimate | Stopped,
        about: Mapping[str, Any],
        spent: Mapping[str, float],
        page: str | Path | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> str:
        """Logs who may be best, P(best) and half-widths over episodes, values, costs, and the page; the run's id.

        Args:
            about: the run's parameters.
            spent: seconds, and what else it cost.
            tags: beside the Git commit of the current folder.
        """
        from mlflow.entities import Metric, Param

        said = {"git_commit": commit(Path.cwd()), **(tags or {})}
        name = said.get("mlflow.runName", about.get("environment"))
        run = str(self.client.create_run(self.id, run_name=name, tags=said).info.run_id)
        try:
            metrics = [Metric(*one[:2], 0, one.step) for one in measured(result, spent)]
            params = {**about, **parameters(result)}
            self.client.log_batch(run, params=[Param(key, str(x)[:LONGEST_PARAM]) for key, x in params.items()])
            for i in range(0, len(metrics), BATCH):
                self.client.log_batch(run, metrics=metrics[i : i + BATCH])
            if page:
                self.client.log_artifact(run, str(page))
        except BaseException:
            self.client.set_terminated(run, "FAILED")
            raise
        self.client.set_terminated(run)
        return run

    def series(self, name: str) -> str:
        """The id of the run that goes on and on under this name, made at first use."""
        found = self.client.search_runs([self.id], f"tags.series = '{name}'", max_results=1)
        if found:
            return str(found[0].info.run_id)
        made = self.client.create_run(self.id, run_name=name, tags={"series": name})
        self.client.set_terminated(made.info.run_id)  # what is logged later belongs to it all the same
        return str(made.info.run_id)

    def drop(self, tags: Mapping[str, str]) -> None:
        """Deletes the runs that have all of these tags."""
        wanted = " and ".join(f"tags.`{key}` = '{x}'" for key, x in tags.items())
        for run in self.client.search_runs([self.id], wanted):
            self.client.delete_run(run.info.run_id)

    def go_on(self, series: str, number: int, result: Estimate | Stopped, spent: Mapping[str, float]) -> None:
        """Logs a result as one point of a series: everything that `log` does, as it is at the end, at step `number`."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        points = {one.key: one.value for one in measured(result, spent)}  # looks in their order: the last one stands
        metrics = [Metric(key, x, now, number) for key, x in points.items()]
        for i in range(0, len(metrics), BATCH):
            self.client.log_batch(series, metrics=metrics[i : i + BATCH])


def parameters(result: Estimate | Stopped) -> dict[str, Any]:
    """Who is known to be the best, if anybody, who leads, and the probability of a wrong claim."""
    said = result.summary()
    return {"best": said["best"], "leads": said["policies"][0]["name"], "alpha": said["alpha"]}


def measured(result: Estimate | Stopped, spent: Mapping[str, float]) -> list[Measured]:
    """All metrics of a result: each look's where there were several, what is known at the end, and what it cost."""
    looks = (
        [(look.episodes, look.decision) for look in result.looks]
        if isinstance(result, Stopped)
        else [(result.episodes, result.decide())]
    )
    arrays = [np.array([getattr(d, name) for _, d in looks]) for name in ("may_be_best", "p_best", "half_width")]
    out = decided(result.names, [n for n, _ in looks], *arrays)
    last = looks[-1][1]
    said = columns(result.names, result.mean, last.interval.low, last.interval.high, last.p_best)
    out += [Measured(key, x, result.episodes) for key, x in said.items()]
    every = {"episodes": result.episodes, "steps": result.steps, **spent}
    return [*out, *(Measured(key, float(x), 0) for key, x in every.items())]
