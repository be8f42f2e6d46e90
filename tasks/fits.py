"""What the stages `q`, `q_hat` and `behavior` share: fit K functions for each group and save them with their curves."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyfold import environments
from manyfold.fqe import Config, Diverged, Reward, Weights, fit
from manyfold.networks import NetworkPolicySet
from manyfold.streams import stream
from manyfold.transitions import Transitions
from manyfold.values import ValueNets
from tasks import shards
from tasks.params import check_names, section
from tasks.shards import group_name, reporter, whole_folder

HEADER = ("group", "updates", "held-out error")


@dataclass(frozen=True)
class Inputs:
    """One group, and what earlier stages have made for it."""

    env: str
    group: int
    data: Path

    def folder(self, stage: str) -> Path:
        return self.data / stage / self.env / group_name(self.group)

    def policies(self) -> NetworkPolicySet:
        return NetworkPolicySet.load(self.folder("targets") / "targets")

    def transitions(self) -> Transitions:
        return Transitions(self.folder("offline"))

    def values(self, stage: str) -> ValueNets:
        """The fit of an earlier stage."""
        return ValueNets.load(self.folder(stage) / f"{stage}.safetensors")[0]


def no_more(inputs: Inputs, nets: ValueNets | None, folder: Path) -> None:
    """Nothing beside the fit itself; without one there is nothing at all."""


@dataclass(frozen=True)
class FitStage:
    """A stage whose work is one fit for each group.

    Args:
        name: of the stage.
        needs: stages that must have run.
        problem: the reward and the next weights of a group's fit.
        fitted: what is fitted: the file's name.
        params: the hyperparameters of the fit, and whatever else the result depends on.
        finish: writes what else belongs to the group's folder.
        may_diverge: a fit that ran away is a result too, `finish` gets None; otherwise it ends the stage.
    """

    name: str
    needs: tuple[str, ...]
    problem: Callable[[Inputs], tuple[Reward, Weights]]
    fitted: str
    params: Callable[[], tuple[Config, object]]
    finish: Callable[[Inputs, ValueNets | None, Path], None] = no_more
    may_diverge: bool = False

    def prepare(self, env: str, data: Path) -> tuple[int, Path]:
        """The number of groups and the work folder."""
        config, more = self.params()
        groups, seen = earlier(self.needs, env, data)
        return groups, shards.work_folder(self.name, env, [asdict(config), more, seen], data)

    def run(self, env: str, groups: list[int], data: Path) -> Path:
        """Fits one shard's groups, one after the other; those that are there already are kept, a begun one goes on."""
        torch.set_num_threads(1)
        config, _ = self.params()
        _, work = self.prepare(env, data)
        updates = config.updates(environments.horizon(env))
        report = reporter(work, groups, updates * len(groups))
        for i, group in enumerate(groups):
            out = work / group_name(group)
            if not self.is_whole(out):
                inputs = Inputs(env, group, data)

                def progress(check: Any, of: int, before: int = i * updates) -> None:
                    report(before + check.update, f"held-out error {check.held_out:.4g}")

                rng, state = stream("fit", self.fitted, env, group), work / f"{out.name}.state"
                cells = inputs.policies().spec.n_cells
                about: dict[str, object] = {"env": env, "group": group}
                try:
                    found = fit(
                        inputs.transitions(),
                        *self.problem(inputs),
                        rng,
                        config,
                        cells,
                        progress,
                        state,
                    )
                    about |= found.curves[-1]._asdict()
                except Diverged as error:
                    if not self.may_diverge:
                        raise ValueError(f"{out.name}: {error}") from None
                    found, about = None, about | {"diverged": str(error)}
                with whole_folder(out) as folder:
                    if found:
                        found.nets.save(folder / f"{self.fitted}.safetensors", found.curves)
                    (folder / f"{self.fitted}.json").write_text(json.dumps(about, indent=1) + "\n")
                    self.finish(inputs, found.nets if found else None, folder)
                state.unlink(missing_ok=True)
            report((i + 1) * updates, "")
        return work

    def is_whole(self, folder: Path) -> bool:
        """Whether a group's folder holds its nets, and they load."""
        try:
            about = json.loads((folder / f"{self.fitted}.json").read_text())
            if "diverged" not in about:
                ValueNets.load(folder / f"{self.fitted}.safetensors")
        except (ValueError, OSError):
            return False
        return True

    def collect(self, env: str, groups: int, work: Path, data: Path) -> Path:
        """Puts the finished groups in place: data/<stage>/<env>."""
        return shards.collect(data / self.name / env, groups, work, self.is_whole)

    def describe(self, out: Path) -> list[tuple[str, ...]]:
        """How each group's fit ended, as text."""
        rows = []
        for folder in sorted(out.glob("group-*")):
            about = json.loads((folder / f"{self.fitted}.json").read_text())
            rows.append((folder.name, f"{about['update']:,}", f"{about['held_out']:.4g}"))
        return rows


def own_section(stage: str) -> Callable[[], tuple[Config, object]]:
    """`FitStage.params` of a stage whose section of params.yaml holds hyperparameters only."""
    return lambda: (read_config(stage, section(stage)), None)


def read_config(stage: str, params: dict[str, Any]) -> Config:
    """Checked hyperparameters of a fit."""
    check_names(stage, params, {field.name for field in fields(Config)})
    try:
        return Config(**params)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{stage}.{error}") from None


def earlier(needs: tuple[str, ...], env: str, data: Path) -> tuple[int, list[list[str]]]:
    """The number of groups, which every earlier stage must have alike, and what they hold."""
    groups = [sorted(folder.name for folder in (data / need / env).glob("group-*")) for need in needs]
    for need, names in zip(needs, groups, strict=True):
        if not names or names != groups[0]:
            raise ValueError(f"{data / need / env}: {len(names)} groups, expected the stage `{need}` to have run")
    return len(groups[0]), [fingerprint(data / need / env / name) for need in needs for name in groups[0]]


def fingerprint(folder: Path) -> list[str]:
    """What a group's work depends on: descriptions hold their tensors' hashes; of large files the size is enough."""
    return [f.read_text() if f.suffix == ".json" else f"{f.name} {f.stat().st_size}" for f in sorted(folder.iterdir())]


def policy_weights(policies: NetworkPolicySet) -> Weights:
    """pi_k(a'|s') at the next states of a batch; a look-up where states are cells."""
    if policies.spec.n_cells:
        table = policies.table().astype(np.float32)
        return lambda states, t: table[:, t, states[:, 0].astype(np.int64)]
    return lambda states, t: policies.probs(states, t)
