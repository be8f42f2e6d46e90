"""Stage `targets`: trains PPO for a shard of groups and saves K target policies, a companion and a history for each.

`python -m tasks.targets` runs one shard; `python -m flows.targets` runs them all.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from manyfold import targets
from manyfold.networks import NetworkPolicySet
from manyfold.ppo import Position
from manyfold.targets import Drawn, Rule, Training, step_of
from tasks import shards
from tasks.files import whole
from tasks.params import check_names, section
from tasks.shards import group_name, reporter, whole_folder


def read_rule(params: dict[str, object]) -> tuple[int, Rule]:
    """The number of groups and the rule, from the stage's section of params.yaml."""
    check_names("targets", params, {"groups", "policies", "start", "width", "history"})
    values = dict(params)
    groups, start = values.pop("groups"), values.pop("start")
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise ValueError(f"targets.groups is {groups!r}, expected a whole number of at least 1")
    if not isinstance(start, list | tuple):
        raise ValueError(f"targets.start is {start!r}, expected [low, high]")
    return groups, Rule(start=tuple(start), **values)  # type: ignore[arg-type]


def prepare(env: str, data: Path) -> tuple[int, Path]:
    """The number of groups and the work folder; a rule that cannot be met is refused before anything is trained."""
    groups, rule = read_rule(section("targets"))
    for group in range(groups):
        targets.draw(rule, env, group)
    return groups, work_folder(env, rule, data)


def work_folder(env: str, rule: Rule, data: Path) -> Path:
    return shards.work_folder("targets", env, asdict(rule), data)


def train_shard(env: str, groups: list[int], rule: Rule, work: Path) -> None:
    """Trains the groups, unless they are there already, and writes a folder for each into `work`."""
    if all(is_whole(work / group_name(group)) for group in groups):
        return
    torch.set_num_threads(1)
    state = work / f"state-{groups[0]:02d}-{groups[-1]:02d}.safetensors"
    training = _begin(env, groups, rule, state)
    tick = _ticker(training, work)
    while not training.finished:
        training.run_segment(tick)
        tensors, text = training.save()
        with whole(state) as part:
            save_file(tensors, part, metadata=text)
    for group, drawn in zip(groups, training.results(), strict=True):
        with whole_folder(work / group_name(group)) as folder:
            for name in ("targets", "companion", "history"):
                getattr(drawn, name).save(folder / name)
            (folder / "plan.json").write_text(json.dumps(_describe(env, drawn), indent=1) + "\n")
    state.unlink(missing_ok=True)


def _begin(env: str, groups: list[int], rule: Rule, state: Path) -> Training:
    """A training that goes on from the saved state, or from the start if there is none that can be read."""
    plans = [targets.draw(rule, env, group) for group in groups]
    training = Training(env, groups, plans)
    if not state.exists():
        return training
    try:
        with safe_open(state, "pt") as saved:
            training.load({name: saved.get_tensor(name) for name in saved.keys()}, saved.metadata())  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        print(f"targets: {state} cannot be read ({str(error).splitlines()[0]}); starting anew", file=sys.stderr)
        state.unlink()
        return Training(env, groups, plans)
    return training


def _ticker(training: Training, work: Path) -> Callable[[], None]:
    """Reports the steps of all the shard's groups and their mean return."""
    each = training.config.batch * len(training.groups)
    report = reporter(work, training.groups, training.last * each)

    def tick() -> None:
        known = training.envs.mean_returns()
        known = known[np.isfinite(known)]
        report(training.learner.update * each, f"mean return {known.mean():.2f}" if len(known) else "")

    tick()
    return tick


def _describe(env: str, drawn: Drawn) -> dict[str, object]:
    plan, config = drawn.plan, targets.config(env)
    returns = [round(float(x), 4) if np.isfinite(x) else None for x in drawn.returns]

    def positions(some: tuple[Position, ...]) -> list[dict[str, float]]:
        return [{"update": p.update, "epoch": p.epoch, "step": step_of(p, config)} for p in some]

    return {
        "env": env,
        "interval": list(plan.interval),
        "targets": positions(plan.targets),
        "companion": positions((plan.companion,))[0],
        "history": positions(plan.history),
        "returns": [{"step": config.batch * (i + 1), "return": x} for i, x in enumerate(returns)],
    }


def is_whole(folder: Path) -> bool:
    """Whether a group's folder holds all its policies, and they load."""
    try:
        for name in ("targets", "companion", "history"):
            NetworkPolicySet.load(folder / name)
        json.loads((folder / "plan.json").read_text())
    except (ValueError, OSError):
        return False
    return True


def collect(env: str, groups: int, work: Path, data: Path) -> Path:
    """Puts the finished groups in place: data/targets/<env>."""
    return shards.collect(data / "targets" / env, groups, work, is_whole)


HEADER = ("group", "interval (training steps)", "checkpoints")


def describe(out: Path) -> list[tuple[str, ...]]:
    """Each group's name, interval and target checkpoints, as text."""
    rows = []
    for folder in sorted(out.glob("group-*")):
        plan = json.loads((folder / "plan.json").read_text())
        steps = ", ".join(f"{target['step']:g}" for target in plan["targets"])
        rows.append((folder.name, "{:,.0f} to {:,.0f}".format(*plan["interval"]), steps))
    return rows


def run(env: str, groups: list[int], data: Path) -> Path:
    """One shard of the stage, by params.yaml."""
    _, rule = read_rule(section("targets"))
    work = work_folder(env, rule, data)
    train_shard(env, groups, rule, work)
    return work


def main(arguments: list[str] | None = None) -> int:
    about = (
        "Trains PPO for some groups of one environment, all at once as one batch, and saves their target policies "
        "under data/.work; `python -m flows.targets` runs all groups and puts the result in place."
    )
    return shards.shard_main("targets", about, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
