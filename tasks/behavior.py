"""Stage `behavior`: designs mu from the fits and says, before any online episode, what it will give.

For each group: the predicted variances of on-policy MC, MPE, MPE + q and pooled evaluation for every target, how alike
the targets are, and a verdict. mu of the first group is exported as self-contained files, unless the policies are ONNX
graphs; others on demand, by `python -m tasks.export`.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyfold.arrays import check_number
from manyfold.design.behavior import Behavior
from manyfold.design.export import export, exportable
from manyfold.design.prediction import LABELS, Predicted, Prediction, forecast, recommend, similar, verdict
from manyfold.files import atomic_folder, sha256, write_json
from manyfold.fqe import Check, Config, Problem
from manyfold.streams import stream
from manyfold.tables import Rows
from tasks.executor import stage_main
from tasks.fits import FitStage, read_config
from tasks.groups import Group
from tasks.params import check_names
from tasks.studies import Study, group_name

PROMISED: tuple[Predicted, ...] = ("mpe", "mpe_baseline", "pooled")
HEADER = ("group", "eta spread", "Theorem 3, 4 hold", "MPE", "MPE + q", "pooled", "verdict")
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


def json_numbers(x: NDArray[np.float64]) -> list[list[float | None]]:
    """Rounded, and null for NaN and infinity, which JSON does not have."""
    return [[round(v, 6) if np.isfinite(v) else None for v in row] for row in x.tolist()]


def finish(group: Group, behavior: Behavior, prediction: Prediction, folder: Path) -> None:
    """behavior.json: predictions, similarity and the verdict; of the first group mu.pt2, mu.onnx and mu.json too."""
    batch = next(iter(group.transitions().batches(SAMPLE, np.random.default_rng(0))))
    alike = similar(behavior, batch.state, batch.t, 1 / behavior.policies.n_policies)
    names, totals = behavior.policies.names, {of: prediction.total(of) for of in LABELS}
    numbers = {"plan": prediction.mpe, "relative_variance": prediction.relative, **prediction._asdict()}
    about: dict[str, Any] = {
        "study": group.study.name,
        "group": group.number,
        "alpha": behavior.alpha,
        "verdict": verdict(prediction, names),
        "recommended": recommend(prediction),
        "relative_variance": json_numbers(np.array([[totals["mpe"]]]))[0][0],
        "relative_variances": {of: json_numbers(np.array([[total]]))[0][0] for of, total in totals.items()},
        "unknown": {of: np.flatnonzero(which).tolist() for of, which in prediction.unknown.items()},
        "policies": names,
        **{f"predicted_{name}": json_numbers(x[None])[0] for name, x in numbers.items() if name != "unknown"},
        **{name: json_numbers(x) for name, x in alike._asdict().items()},
    }
    write_json(folder / "behavior.json", about)
    if group.number == 0 and exportable(behavior.policies):
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
        totals, unknown = about["relative_variances"], about["unknown"]
        said = ("unknown" if totals[of] is None or unknown[of] else f"{totals[of]:.3f}" for of in PROMISED)
        rows.append((path.parent.name, f"{spread:.2f}", f"{third:.0%}, {fourth:.0%}", *said, about["verdict"]))
    return rows


class BehaviorStage(FitStage):
    """The stage, for the executor: several fits for each group instead of one, none of which is kept."""

    def fit_group(self, group: Group, config: Config, work: Path, progress: Callable[[Check, int], None]) -> None:
        out, behavior = work / group_name(group.number), design(group)
        updates = config.updates(behavior.policies.horizon)

        def state(name: str) -> Path:
            return work / f"{out.name}.{name}.state"

        def tick(done: float, check: Check) -> None:
            progress(check._replace(update=int(done * updates)), updates)

        rng = stream("fit", "variances", group.study.name, group.number)
        prediction = forecast(behavior, group.transitions(), rng, config, tick, state)
        with atomic_folder(out) as folder:
            finish(group, behavior, prediction, folder)
        for path in work.glob(f"{out.name}.*.state"):
            path.unlink()

    def is_whole(self, folder: Path) -> bool:
        """Whether a group's folder holds its predictions."""
        try:
            return "verdict" in json.loads((folder / "behavior.json").read_text())
        except (ValueError, OSError):
            return False

    def describe(self, out: Path) -> Rows:
        return describe(out)


def no_problem(group: Group) -> Problem:
    """`FitStage.problem` of a stage that has several."""
    raise NotImplementedError


STAGE = BehaviorStage("behavior", ("targets", "offline", "q", "q_hat"), no_problem, "", params, header=HEADER)

if __name__ == "__main__":
    sys.exit(stage_main("behavior"))
