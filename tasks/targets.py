"""Stage `targets`: trains PPO for a shard of groups and saves K target policies, a companion and a history for each.

Work in progress lives in data/.work, outside of what DVC deletes before a stage runs, so an interrupted stage goes on
from its last save. `python -m tasks.targets` runs one shard; `python -m flows.targets` runs them all.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from manyfold import environments, targets
from manyfold.networks import NetworkPolicySet
from manyfold.ppo import Position
from manyfold.targets import Plan, Rule, Training, step_of
from tasks.files import whole
from tasks.params import ROOT, check_names, section


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


def work_folder(env: str, rule: Rule, data: Path) -> Path:
    """Where an unfinished run of exactly this rule and code keeps its state."""
    key = hashlib.sha256(json.dumps([env, asdict(rule)]).encode())
    for source in sorted(Path(targets.__file__).parent.glob("*.py")):
        key.update(source.read_bytes())  # work that other code began is not gone on with
    return data / ".work" / "targets" / f"{env}-{key.hexdigest()[:12]}"


def group_name(group: int) -> str:
    return f"group-{group:02d}"


def train_shard(env: str, groups: list[int], rule: Rule, work: Path) -> None:
    """Trains the groups, unless they are there already, and writes a folder for each into `work`."""
    if all(is_whole(work / group_name(group)) for group in groups):
        return
    torch.set_num_threads(1)
    state = work / f"state-{groups[0]:02d}-{groups[-1]:02d}.safetensors"
    training = _begin(env, groups, rule, state)
    report = _reporter(training, work / f"progress-{groups[0]:02d}-{groups[-1]:02d}.json")
    while not training.finished:
        training.run_segment(report)
        tensors, text = training.save()
        with whole(state) as part:
            save_file(tensors, part, metadata=text)
    for group, drawn in zip(groups, training.results(), strict=True):
        _write_group(work / group_name(group), env, drawn)
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


def _reporter(training: Training, path: Path) -> Callable[[], None]:
    """Writes the shard's progress for whoever watches: steps of all its groups, and their mean return."""
    total = training.last * training.config.batch * len(training.groups)
    parent = os.getppid()

    def report() -> None:
        if os.getppid() != parent:  # whoever started this shard is gone, and may start it again
            sys.exit("targets: the flow that started this shard has ended")
        done = training.learner.update * training.config.batch * len(training.groups)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"steps": done, "of": total, "mean_return": training.envs.mean_return()}))
        part.replace(path)

    path.parent.mkdir(parents=True, exist_ok=True)
    report()
    return report


def _write_group(folder: Path, env: str, drawn: targets.Drawn) -> None:
    """A group's folder appears when all its files are whole."""
    part = folder.with_name(f".{folder.name}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name in ("targets", "companion", "history"):
        getattr(drawn, name).save(part / name)
    (part / "plan.json").write_text(json.dumps(_describe(env, drawn.plan), indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def _describe(env: str, plan: Plan) -> dict[str, object]:
    config = targets.config(env)

    def positions(some: tuple[Position, ...]) -> list[dict[str, float]]:
        return [{"update": p.update, "epoch": p.epoch, "step": step_of(p, config)} for p in some]

    return {
        "env": env,
        "interval": list(plan.interval),
        "targets": positions(plan.targets),
        "companion": positions((plan.companion,))[0],
        "history": positions(plan.history),
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


def forget_progress(work: Path) -> None:
    """Drops what earlier shards reported."""
    for report in work.glob("progress-*"):
        report.unlink()


def collect(env: str, groups: int, work: Path, data: Path) -> Path:
    """Moves the finished groups to data/targets/<env>, all of them or none, and drops the work folder."""
    expected = [group_name(group) for group in range(groups)]
    if missing := [name for name in expected if not is_whole(work / name)]:
        raise ValueError(f"{work}: {', '.join(missing)} missing, expected {groups} groups; run the stage again")
    out = data / "targets" / env
    part = out.with_name(f".{env}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name in expected:
        (work / name).rename(part / name)
    shutil.rmtree(out, ignore_errors=True)
    part.rename(out)
    shutil.rmtree(work)
    return out


def describe(out: Path) -> list[tuple[str, str, str]]:
    """Each group's name, interval and target checkpoints, as text."""
    rows = []
    for folder in sorted(out.glob("group-*")):
        plan = json.loads((folder / "plan.json").read_text())
        steps = ", ".join(f"{target['step']:g}" for target in plan["targets"])
        rows.append((folder.name, "{:,.0f} to {:,.0f}".format(*plan["interval"]), steps))
    return rows


def progress(work: Path) -> tuple[int, int, float]:
    """Steps done and steps in all of the shards that have reported, and their mean return."""
    reports = [json.loads(path.read_text()) for path in sorted(work.glob("progress-*.json"))]
    returns = [report["mean_return"] for report in reports if report["mean_return"] == report["mean_return"]]
    mean = sum(returns) / len(returns) if returns else float("nan")
    return sum(report["steps"] for report in reports), sum(report["of"] for report in reports), mean


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.targets",
        description="Trains PPO for some groups of one environment, all at once as one batch, and saves their target "
        "policies under data/.work; `python -m flows.targets` runs all groups and puts the result in place.",
    )
    parser.add_argument("--env", required=True, help=f"one of {', '.join(environments.ENVS)}")
    parser.add_argument("--groups", required=True, help="first and last group, for example 0-14")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of all data (default data)")
    args = parser.parse_args(arguments)
    try:
        environments.check_env(args.env)
        first, _, last = args.groups.partition("-")
        if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
            raise ValueError(f"--groups is {args.groups!r}, expected first-last, for example 0-14")
        _, rule = read_rule(section("targets"))
        work = work_folder(args.env, rule, args.data)
        start = time.perf_counter()
        train_shard(args.env, list(range(int(first), int(last) + 1)), rule, work)
    except (ValueError, OSError) as error:
        print(f"targets: {error}", file=sys.stderr)
        return 2
    print(f"groups {args.groups} of {args.env} in {time.perf_counter() - start:.0f} s: {work}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
