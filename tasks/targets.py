"""Stage `targets`: K target policies for each group, by PPO or from the user's own files.

PPO trains a part's groups together, as one batch; for each it saves the targets, a companion (a robot's other action
dimensions) and a history to log offline data with.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from manyfold import policies
from manyfold.files import atomic_folder, load_tensors, save_tensors, write_json
from manyfold.tables import Rows
from manyfold.train import targets
from manyfold.train.ppo import Position
from manyfold.train.targets import Drawn, Plan, Rule, Training, step_of
from tasks import stages
from tasks.executor import stage_main
from tasks.given import given
from tasks.params import check_names, check_numbers
from tasks.stages import reporter
from tasks.studies import Study, group_name, make_environment


def read_rule(study: Study) -> tuple[int, Rule]:
    """The number of groups and the rule by which PPO's checkpoints are drawn."""
    params = study.section("targets")
    check_names("targets", params, {"groups", "policies", "start", "width", "history"})
    check_numbers("targets", params, {"groups": (1, 10_000)})
    start = params["start"]
    if not isinstance(start, list | tuple):
        raise ValueError(f"targets.start is {start!r}, expected [low, high]")
    return params["groups"], Rule(params["policies"], tuple(start), params["width"], params["history"])


class Targets:
    """The stage, for the executor."""

    name, unit, batched = "targets", "steps", True
    header = ("group", "interval (training steps)", "policies")

    def prepare(self, study: Study, data: Path) -> tuple[int, Path]:
        """A rule that cannot be met is refused before anything is trained."""
        source = study.source("targets")
        if source is not None:
            found = given(study, source)
            seen = [[list(one.sums), one.options] for one in found]
            return len(found), stages.work_folder("targets", study, seen, data)
        groups, rule = read_rule(study)
        cfg = targets.config(make_environment(study, 0))
        for group in range(groups):
            targets.draw(rule, cfg, study.name, group)
        return groups, stages.work_folder("targets", study, asdict(rule), data)

    def run(self, study: Study, groups: list[int], work: Path, data: Path) -> None:
        if all(self.is_whole(work / group_name(group)) for group in groups):
            return
        source = study.source("targets")
        if source is None:
            rule, config = read_rule(study)[1], targets.config(make_environment(study, groups[0]))
            train(study, groups, [targets.draw(rule, config, study.name, group) for group in groups], work)
            return
        found = given(study, source)
        for group in groups:
            with atomic_folder(work / group_name(group)) as folder:
                found[group].save(folder / "targets")
                write_json(folder / "plan.json", {"study": study.name, **found[group].about})

    def is_whole(self, folder: Path) -> bool:
        """Whether a group's folder holds all its policies, and they load."""
        try:
            plan = json.loads((folder / "plan.json").read_text())
            for name in ("targets",) if "source" in plan else ("targets", "companion", "history"):
                policies.load(folder / name)
        except (ValueError, OSError):
            return False
        return True

    def collect(self, study: Study, groups: int, work: Path, data: Path) -> Path:
        return stages.collect(data / "targets" / study.name, groups, work, self.is_whole)

    def describe(self, out: Path) -> Rows:
        """Each group's name, interval and targets."""
        rows = []
        for folder in sorted(out.glob("group-*")):
            plan = json.loads((folder / "plan.json").read_text())
            if "source" in plan:
                rows.append((folder.name, plan["source"], ", ".join(policies.load(folder / "targets").names)))
            else:
                steps = ", ".join(f"{target['step']:g}" for target in plan["targets"])
                rows.append((folder.name, "{:,.0f} to {:,.0f}".format(*plan["interval"]), steps))
        return rows


def train(study: Study, groups: list[int], plans: list[Plan], work: Path) -> None:
    """Trains the groups together and writes a folder with what its plan takes for each into `work`."""
    torch.set_num_threads(1)
    state = work / f"state-{groups[0]:02d}-{groups[-1]:02d}.safetensors"
    training = _begin(study, groups, plans, state)
    tick = _ticker(training, work)
    while not training.finished:
        training.run_segment(tick)
        tensors, text = training.save()
        save_tensors(state, tensors, "training", 1, text)
    for group, drawn in zip(groups, training.results(), strict=True):
        with atomic_folder(work / group_name(group)) as folder:
            for name in ("targets", "companion", "history"):
                getattr(drawn, name).save(folder / name)
            write_json(folder / "plan.json", _describe(study, training, drawn))
    state.unlink(missing_ok=True)


def _begin(study: Study, groups: list[int], plans: list[Plan], state: Path) -> Training:
    """A training that resumes from the saved state, or starts over if there is none that can be read."""
    env = make_environment(study, groups[0])
    training = Training(env, study.name, groups, plans)
    if not state.exists():
        return training
    try:
        training.load(*load_tensors(state, "training", 1, finite=False))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        print(f"targets: {state} cannot be read ({str(error).splitlines()[0]}); starting over", file=sys.stderr)
        state.unlink()
        return Training(env, study.name, groups, plans)
    return training


def _ticker(training: Training, work: Path) -> Callable[[], None]:
    """Reports the steps of all the part's groups and their mean return."""
    each = training.config.batch * len(training.groups)
    report = reporter(work, training.groups, training.last * each)

    def tick() -> None:
        known = training.envs.mean_returns()
        known = known[np.isfinite(known)]
        report(training.learner.update * each, f"mean return {known.mean():.2f}" if len(known) else "")

    tick()
    return tick


def _describe(study: Study, training: Training, drawn: Drawn) -> dict[str, object]:
    plan, config = drawn.plan, training.config
    returns = [round(float(x), 4) if np.isfinite(x) else None for x in drawn.returns]

    def positions(some: tuple[Position, ...]) -> list[dict[str, float]]:
        return [{"update": p.update, "epoch": p.epoch, "step": step_of(p, config)} for p in some]

    return {
        "study": study.name,
        "interval": list(plan.interval),
        "targets": positions(plan.targets),
        "companion": positions((plan.companion,))[0],
        "history": positions(plan.history),
        "returns": [{"step": config.batch * (i + 1), "return": x} for i, x in enumerate(returns)],
    }


STAGE = Targets()

if __name__ == "__main__":
    sys.exit(stage_main("targets"))
