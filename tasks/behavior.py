"""Stage `behavior`: designs mu from the fits and says, before any online episode, what it will give.

`python -m tasks.behavior` runs one shard; `python -m flows.behavior` runs them all. For each group: the fit of m (the
second moment of the PDIS return under mu), the predicted relative variance of every target, how alike the targets are,
a picture of it, and mu itself as self-contained files.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from manyfold.behavior import Behavior, plan_weights, predict, similar
from manyfold.export import Exporter, sha256
from manyfold.fqe import Config, Reward, Weights
from manyfold.values import ValueNets
from tasks.figures import plt, style
from tasks.fits import FitStage, Inputs, read_config
from tasks.params import check_names, section
from tasks.q_hat import moment_reward
from tasks.shards import shard_main

HEADER = ("group", "eta spread", "Theorem 3, 4 hold", "predicted", "verdict")
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
    """One sentence that a person can act on; `total` is NaN where the fit of m ran away."""
    if np.isnan(total):
        return "Expect an explosion: even the fit of the variance ran away. Evaluate these policies one by one."
    said = f"Expect {total:.0%} of on-policy's variance"
    odd = int(relative.argmax())
    if relative[odd] > 2 * max(total, float(np.median(relative))):
        said += f"; policy {odd} ({names[odd]}) is the odd one out: {relative[odd]:.0%}"
    if total >= 1:
        return said + ": sharing does not pay, evaluate these policies one by one or drop the odd ones."
    return said + "."


def json_numbers(x: np.ndarray) -> list[list[float | None]]:
    """Rounded, and null for NaN and infinity, which JSON does not have."""
    return [[round(v, 6) if np.isfinite(v) else None for v in row] for row in x.tolist()]


def finish(inputs: Inputs, m: ValueNets | None, folder: Path) -> None:
    """behavior.json and .png: predictions, similarity and the verdict; mu.pt2, mu.onnx and mu.json."""
    behavior, rows = design(inputs), inputs.transitions()
    initial = rows.initial_states(SAMPLE)
    prediction = predict(behavior, m or behavior.q_hat, initial)
    if m is None:
        prediction = prediction._replace(plan=np.full(behavior.policies.n_policies, np.nan))
    batch = next(iter(rows.batches(SAMPLE, np.random.default_rng(0))))
    alike = similar(behavior, batch.state, batch.t, 1 / behavior.policies.n_policies)
    names, relative = behavior.policies.spec.names, prediction.relative
    total = float(prediction.plan.sum() / (len(relative) * prediction.on_policy.sum()))
    about: dict[str, Any] = {
        "env": inputs.env,
        "group": inputs.group,
        "alpha": behavior.alpha,
        "verdict": verdict(relative, total, names),
        "relative_variance": None if np.isnan(total) else total,
        "policies": names,
        **{f"predicted_{name}": json_numbers(x[None])[0] for name, x in prediction._asdict().items()},
        "predicted_relative_variance": json_numbers(relative[None])[0],
        **{name: json_numbers(x) for name, x in alike._asdict().items()},
    }
    (folder / "behavior.json").write_text(json.dumps(about, indent=1) + "\n")
    draw(about, folder / "behavior.png")
    shape = (inputs.env, behavior.policies.n_policies, behavior.q.shape, behavior.q_hat.shape, behavior.alpha)
    exporter(shape, behavior).save(behavior, folder, sha256(inputs.folder("offline") / "transitions.parquet"))


_TRACED: dict[object, Exporter] = {}


def exporter(shape: object, behavior: Behavior) -> Exporter:
    """Traced once for all groups of a shard: tracing takes seconds, putting in other numbers does not."""
    if shape not in _TRACED:
        _TRACED[shape] = Exporter(behavior)
    return _TRACED[shape]


def draw(about: dict[str, Any], path: Path) -> None:
    """Similarity over the horizon, and what is predicted for every policy."""
    style()
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    steps = np.arange(len(about["eta_spread"][0]))
    spread = np.array(about["eta_spread"], dtype=float)
    left.plot(steps, spread.T, color="#0072B2", alpha=0.35, linewidth=1)
    left.plot(steps, np.median(spread, 0), color="#0072B2", linewidth=2, label="median policy")
    left.set_ylabel("sqrt(eta_max / eta_min), median state")
    left.set_title("How unlike the policies are (1: equal)")
    left.legend(frameon=False)
    for name, label, colour in (("theorem_3", "Theorem 3 (equal n)", "#009E73"), ("theorem_4", "Theorem 4", "#D55E00")):
        middle.plot(steps, np.mean(np.array(about[name], dtype=float), 0), color=colour, label=label, linewidth=2)
    middle.set_ylim(-0.02, 1.02)
    middle.set_ylabel("share of logged states")
    middle.set_title("Where sharing is promised to pay")
    middle.legend(frameon=False)
    for axes in (left, middle):
        axes.set_xlabel("t")
    relative = np.array(about["predicted_relative_variance"], dtype=float)
    right.plot(range(len(relative)), relative, "o", color="#0072B2", markersize=8)
    right.axhline(1, color="#000000", linewidth=0.8)
    right.axhline(about["relative_variance"] or np.nan, color="#D55E00", linestyle="--", label="all policies together")
    right.set_yscale("log")
    right.set_xticks(range(len(relative)))
    right.set_xlabel("policy")
    right.set_ylabel("predicted variance / on-policy MC's")
    known = relative[np.isfinite(relative)]
    right.set_ylim(min(0.05, 0.8 * known.min(initial=1)), max(3.0, 2 * known.max(initial=1)))
    right.set_title("What MPE will give at equal cost")
    right.legend(frameon=False, loc="upper center")
    figure.suptitle(about["verdict"], fontsize=11)
    figure.savefig(path, dpi=100)
    plt.close(figure)


STAGE = FitStage("behavior", ("targets", "offline", "q", "q_hat"), problem, "m", params, finish, True)
prepare, run, collect = STAGE.prepare, STAGE.run, STAGE.collect


def describe(out: Path) -> list[tuple[str, ...]]:
    """What each group's plan promises."""
    rows = []
    for path in sorted(out.glob("group-*/behavior.json")):
        about = json.loads(path.read_text())
        spread = np.nanmedian(np.array(about["eta_spread"], dtype=float))
        third, fourth = (np.nanmean(np.array(about[name], dtype=float)) for name in ("theorem_3", "theorem_4"))
        predicted = "" if about["relative_variance"] is None else f"{about['relative_variance']:.3f}"
        rows.append((path.parent.name, f"{spread:.2f}", f"{third:.0%}, {fourth:.0%}", predicted, about["verdict"]))
    return rows


if __name__ == "__main__":
    sys.exit(shard_main("behavior", "Designs mu for some groups of one environment under data/.work.", run))
