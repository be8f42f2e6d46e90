"""A result in MLflow, for `manyfold evaluate --mlflow`: the names that the pipeline's runs have.

MLflow is imported here alone, and only when asked for: nothing else in manyfold knows it.
"""

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyfold.estimate.evaluation import Estimate
from manyfold.estimate.stopping import Stopped

BATCH = 1000  # metrics that MLflow takes at once
LONGEST = 200  # of its 250 characters for a metric's name


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


class Experiment:
    """Where runs go: the server that MLFLOW_TRACKING_URI names, or ./mlflow.db.

    To be opened before an episode is run: a server that doesn't answer is refused here, with one line.
    """

    def __init__(self, name: str) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # its own 7 take minutes where nobody answers
        try:
            import mlflow
            from mlflow.tracking import MlflowClient
        except ModuleNotFoundError:
            raise ValueError("--mlflow needs MLflow, which is not installed; pip install mlflow") from None
        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.ERROR)
        server = os.environ.get("MLFLOW_TRACKING_URI")
        uri = server or f"sqlite:///{Path('mlflow.db').resolve()}"
        local = None if server else (Path("mlartifacts").resolve() / name).as_uri()
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

    def log(self, result: Estimate | Stopped, about: dict[str, Any], seconds: float, page: str | None = None) -> str:
        """Logs who may be best, P(best) and half-widths over episodes, values, and the page; the run's id.

        Args:
            about: the run's parameters.
        """
        from mlflow.entities import Metric, Param

        run = str(self.client.create_run(self.id, run_name=about.get("environment")).info.run_id)
        try:
            metrics = [Metric(*one[:2], 0, one.step) for one in measured(result, seconds)]
            said = {**about, "best": result.summary()["best"], "alpha": result.summary()["alpha"]}
            self.client.log_batch(run, params=[Param(key, str(x)) for key, x in said.items()])
            for i in range(0, len(metrics), BATCH):
                self.client.log_batch(run, metrics=metrics[i : i + BATCH])
            if page:
                self.client.log_artifact(run, page)
        except BaseException:
            self.client.set_terminated(run, "FAILED")
            raise
        self.client.set_terminated(run)
        return run


def measured(result: Estimate | Stopped, seconds: float) -> list[Measured]:
    """All metrics of a result: each look's where there were several, then the values, and what it cost."""
    looks = (
        [(look.episodes, look.decision) for look in result.looks]
        if isinstance(result, Stopped)
        else [(result.episodes, result.decide())]
    )
    columns = [np.array([getattr(d, name) for _, d in looks]) for name in ("may_be_best", "p_best", "half_width")]
    out = decided(result.names, [n for n, _ in looks], *columns)
    out += [
        Measured(f"value.{name}", float(x), result.episodes)
        for name, x in zip(metric_names(result.names), result.mean, strict=True)
    ]
    spent = {"episodes": result.episodes, "steps": result.steps, "seconds.evaluate": seconds}
    return [*out, *(Measured(key, float(x), 0) for key, x in spent.items())]
