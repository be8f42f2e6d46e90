"""Stage `behavior`: designs mu from the fits and says, before any online episode, what it will give.

`python -m tasks.behavior` runs one shard; `python -m flows.behavior` runs them all. For each group: the fit of m (the
second moment of the PDIS return under mu), the predicted relative variance of every target, how alike the targets are.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from manyfold.behavior import Behavior, plan_weights, predict, similar
from manyfold.fqe import Config, Reward, ValueNets, Weights
from tasks.fits import FitStage, Inputs, read_config
from tasks.params import check_names, section
from tasks.q_hat import moment_reward
from tasks.shards import shard_main

HEADER = ("group", "predicted relative variance", "verdict")
__all__ = ["HEADER", "collect", "describe", "prepare", "run"]
SAMPLE = 8192  # logged states at which similarity is looked at


def params() -> tuple[Config, float]:
    """The fit's hyperparameters, and alpha."""
    found = section("behavior")
    check_names("behavior", found, {"alpha", "fit"})
    alpha = found["alpha"]
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 <= alpha <= 1:
        raise ValueError(f"behavior.alpha is {alpha!r}, expected a number from 0 to 1")
    if not isinstance(found["fit"], dict):
        raise ValueError(f"behavior.fit is {found['fit']!r}, expected hyperparameters like those of q")
    return read_config("behavior.fit", found["fit"]), float(alpha)


def design(inputs: Inputs) -> Behavior:
    """mu and ODI's policies of a group, from its fits."""
    _, alpha = params()
    return Behavior(inputs.policies(), inputs.values("q"), inputs.values("q_hat"), alpha)


def problem(inputs: Inputs) -> tuple[Reward, Weights]:
    """r_hat; weights pi^2 / mu."""
    return moment_reward(inputs), plan_weights(design(inputs))


def verdict(relative: np.ndarray, total: float, names: tuple[str, ...]) -> str:
    """One sentence that a person can act on."""
    said = f"Expect {total:.0%} of on-policy's variance"
    odd = int(relative.argmax())
    if relative[odd] > 2 * max(total, float(np.median(relative))):
        said += f"; policy {odd} (step {names[odd]}) is the odd one out: {relative[odd]:.0%}"
    if total >= 1:
        return said + ": sharing does not pay, evaluate these policies one by one or drop the odd ones."
    return said + "."


def finish(inputs: Inputs, m: ValueNets, folder: Path) -> None:
    """behavior.json: predictions, similarity and the verdict."""
    behavior, rows = design(inputs), inputs.transitions()
    prediction = predict(behavior, m, rows.initial_states(SAMPLE))
    batch = next(iter(rows.batches(SAMPLE, np.random.default_rng(0))))
    alike = similar(behavior, batch.state, batch.t, 1 / behavior.policies.n_policies)
    names, relative = behavior.policies.spec.names, prediction.relative
    total = float(prediction.plan.sum() / (len(relative) * prediction.on_policy.sum()))
    about: dict[str, Any] = {
        "env": inputs.env,
        "group": inputs.group,
        "alpha": behavior.alpha,
        "verdict": verdict(relative, total, names),
        "relative_variance": total,
        "policies": names,
        **{f"predicted_{name}": x.tolist() for name, x in prediction._asdict().items()},
        "predicted_relative_variance": relative.tolist(),
        **{name: np.round(x, 6).tolist() for name, x in alike._asdict().items()},
    }
    (folder / "behavior.json").write_text(json.dumps(about, indent=1) + "\n")


STAGE = FitStage("behavior", ("targets", "offline", "q", "q_hat"), problem, "m", params, finish)
prepare, run, collect = STAGE.prepare, STAGE.run, STAGE.collect


def describe(out: Path) -> list[tuple[str, ...]]:
    """What each group's plan promises."""
    rows = []
    for path in sorted(out.glob("group-*/behavior.json")):
        about = json.loads(path.read_text())
        rows.append((path.parent.name, f"{about['relative_variance']:.3f}", about["verdict"]))
    return rows


if __name__ == "__main__":
    sys.exit(shard_main("behavior", "Designs mu for some groups of one environment under data/.work.", run))
