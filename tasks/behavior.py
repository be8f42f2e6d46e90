"""Stage `behavior`: designs mu from the fits and says, before any online episode, what it will give.

For each group: the fit of m (the second moment of the PDIS return under mu), the predicted relative variance of every
target, how alike the targets are, and a verdict. mu of the first group is exported as self-contained files; others on
demand, by `python -m tasks.export`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyfold.arrays import check_number
from manyfold.design.behavior import Behavior
from manyfold.design.export import export
from manyfold.design.prediction import plan_problem, predict, similar, verdict
from manyfold.files import sha256, write_json
from manyfold.fqe import Config, Problem, ValueNets
from manyfold.tables import Rows
from tasks.executor import stage_main
from tasks.fits import FitStage, read_config
from tasks.groups import Group
from tasks.params import check_names
from tasks.studies import Study

HEADER = ("group", "eta spread", "Theorem 3, 4 hold", "predicted", "verdict")
SAMPLE = 8192  # logged states at which similarity is looked at


def params(study: Study) -> tuple[Config, float]:
    """The fit's hyperparameters, and alpha."""
    found = study.section("behavior")
    check_names("behavior", found, {"alpha", "fit"})
    check_number("behavior.alpha", found["alpha"], 0, 1, whole=False)
    if not isinstance(found["fit"], dict):
        raise ValueError(f"behavior.fit is {found['fit']!r}, expected hyperparameters like those of q")
    return read_config("behavior.fit", found["fit"]), float(found["alpha"])


def design(group: Group) -> Behavior:
    """mu and ODI's policies of a group, from its fits."""
    _, alpha = params(group.study)
    return Behavior(group.policies(), group.values("q"), group.values("q_hat"), alpha)


def problem(group: Group) -> Problem:
    """r_hat; weights pi^2 / mu."""
    return plan_problem(design(group))


def json_numbers(x: NDArray[np.float64]) -> list[list[float | None]]:
    """Rounded, and null for NaN and infinity, which JSON does not have."""
    return [[round(v, 6) if np.isfinite(v) else None for v in row] for row in x.tolist()]


def finish(group: Group, m: ValueNets | None, folder: Path) -> None:
    """behavior.json: predictions, similarity and the verdict; of the first group mu.pt2, mu.onnx and mu.json too."""
    behavior, rows = design(group), group.transitions()
    prediction = predict(behavior, m or behavior.q_hat, rows.initial_states(SAMPLE))
    if m is None:
        prediction = prediction._replace(plan=np.full(behavior.policies.n_policies, np.nan))
    batch = next(iter(rows.batches(SAMPLE, np.random.default_rng(0))))
    alike = similar(behavior, batch.state, batch.t, 1 / behavior.policies.n_policies)
    names, relative = behavior.policies.names, prediction.relative
    total = float(prediction.plan.sum() / (len(relative) * prediction.on_policy.sum()))
    about: dict[str, Any] = {
        "study": group.study.name,
        "group": group.number,
        "alpha": behavior.alpha,
        "verdict": verdict(relative, total, names),
        "relative_variance": None if np.isnan(total) else total,
        "policies": names,
        **{f"predicted_{name}": json_numbers(x[None])[0] for name, x in prediction._asdict().items()},
        "predicted_relative_variance": json_numbers(relative[None])[0],
        **{name: json_numbers(x) for name, x in alike._asdict().items()},
    }
    write_json(folder / "behavior.json", about)
    if group.number == 0:
        export_group(group, behavior, folder)


def export_group(group: Group, behavior: Behavior, folder: Path) -> None:
    """mu of a group as self-contained files."""
    data = sorted(group.folder("offline").glob("*.parquet"))[0]
    export(behavior, folder, group.study.name, sha256(data))


def describe(out: Path) -> Rows:
    """What each group's plan promises."""
    rows = []
    for path in sorted(out.glob("group-*/behavior.json")):
        about = json.loads(path.read_text())
        spread = np.nanmedian(np.array(about["eta_spread"], dtype=float))
        third, fourth = (np.nanmean(np.array(about[name], dtype=float)) for name in ("theorem_3", "theorem_4"))
        predicted = "" if about["relative_variance"] is None else f"{about['relative_variance']:.3f}"
        rows.append((path.parent.name, f"{spread:.2f}", f"{third:.0%}, {fourth:.0%}", predicted, about["verdict"]))
    return rows


class BehaviorStage(FitStage):
    """The stage, for the executor."""

    def describe(self, out: Path) -> Rows:
        return describe(out)


STAGE = BehaviorStage(
    "behavior", ("targets", "offline", "q", "q_hat"), problem, "m", params, finish, may_diverge=True, header=HEADER
)

if __name__ == "__main__":
    sys.exit(stage_main("behavior"))
