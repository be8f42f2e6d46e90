"""What the stages `q`, `q_hat` and `behavior` share: fit K functions for each group and save them with their curves."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from manyfold.files import atomic_folder, write_json
from manyfold.fqe import Check, Config, Diverged, Problem, ValueNets, fit
from manyfold.streams import stream
from manyfold.tables import Rows
from tasks import stages
from tasks.groups import Group
from tasks.params import check_names
from tasks.stages import earlier, reporter
from tasks.studies import Study, group_name

HEADER = ("group", "updates", "held-out error")


@dataclass(frozen=True)
class FitStage:
    """A stage whose work is one fit for each group.

    Args:
        name: of the stage.
        needs: stages that must have run.
        problem: the reward and the next weights of a group's fit.
        fitted: what is fitted: the file's name.
        params: the hyperparameters of the fit, and whatever else the result depends on.
        header: of the stage's table.
    """

    name: str
    needs: tuple[str, ...]
    problem: Callable[[Group], Problem]
    fitted: str
    params: Callable[[Study], tuple[Config, object]]
    header: tuple[str, ...] = HEADER
    unit: str = "updates"
    batched: bool = False

    def prepare(self, study: Study, data: Path) -> tuple[int, Path]:
        """The number of groups and the work folder."""
        config, more = self.params(study)
        groups, seen = earlier(self.needs, study, data)
        return groups, stages.work_folder(self.name, study, [asdict(config), more, seen], data)

    def run(self, study: Study, groups: list[int], work: Path, data: Path) -> None:
        """Fits the groups one after the other; finished ones are kept, a begun one is resumed."""
        torch.set_num_threads(1)
        config, _ = self.params(study)
        updates = config.updates(Group(study, groups[0], data).policies().horizon)
        report = reporter(work, groups, updates * len(groups))
        for i, number in enumerate(groups):
            if not self.is_whole(work / group_name(number)):

                def progress(check: Check, of: int, before: int = i * updates) -> None:
                    report(before + check.update, f"held-out error {check.held_out:.4g}")

                self.fit_group(Group(study, number, data), config, work, progress)
            report((i + 1) * updates, "")

    def fit_group(self, group: Group, config: Config, work: Path, progress: Callable[[Check, int], None]) -> None:
        """One group's fit, into a folder of its own."""
        out = work / group_name(group.number)
        study, state = group.study, work / f"{out.name}.state"
        rng = stream("fit", self.fitted, study.name, group.number)
        n_states = group.policies().n_states
        try:
            nets, curves = fit(group.transitions(), *self.problem(group), rng, config, n_states, progress, state)
        except Diverged as error:
            raise ValueError(f"{out.name}: {error}") from None
        with atomic_folder(out) as folder:
            nets.save(folder / f"{self.fitted}.safetensors", curves)
            about = {"study": study.name, "group": group.number, **curves[-1]._asdict()}
            write_json(folder / f"{self.fitted}.json", about)
        state.unlink(missing_ok=True)

    def is_whole(self, folder: Path) -> bool:
        """Whether a group's folder holds its nets, and they load."""
        try:
            json.loads((folder / f"{self.fitted}.json").read_text())
            ValueNets.load(folder / f"{self.fitted}.safetensors")
        except (ValueError, OSError):
            return False
        return True

    def collect(self, study: Study, groups: int, work: Path, data: Path) -> Path:
        """Puts the finished groups in place: data/<stage>/<study>."""
        return stages.collect(data / self.name / study.name, groups, work, self.is_whole)

    def describe(self, out: Path) -> Rows:
        """How each group's fit ended, as text."""
        rows = []
        for folder in sorted(out.glob("group-*")):
            about = json.loads((folder / f"{self.fitted}.json").read_text())
            rows.append((folder.name, f"{about['update']:,}", f"{about['held_out']:.4g}"))
        return rows


def own_section(stage: str) -> Callable[[Study], tuple[Config, object]]:
    """`FitStage.params` of a stage whose section holds hyperparameters only."""
    return lambda study: (read_config(stage, study.section(stage)), None)


def read_config(stage: str, params: dict[str, Any]) -> Config:
    """Checked hyperparameters of a fit."""
    check_names(stage, params, {field.name for field in fields(Config)})
    try:
        return Config(**params)
    except ValueError as error:
        raise ValueError(f"{stage}.{error}") from None
