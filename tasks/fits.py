"""What the stages `q` and `q_hat` share: fit K functions for each group of a shard and save them with their curves."""

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyfold import environments
from manyfold.fqe import Config, Reward, ValueNets, Weights, fit
from manyfold.networks import NetworkPolicySet
from manyfold.streams import stream
from manyfold.transitions import Transitions
from tasks import shards
from tasks.params import check_names, section
from tasks.shards import group_name, reporter, whole_folder

MakeReward = Callable[[Path, NetworkPolicySet], Reward]


def read_config(stage: str) -> Config:
    """The hyperparameters, from the stage's section of params.yaml."""
    params = section(stage)
    check_names(stage, params, {field.name for field in fields(Config)})
    try:
        return Config(**params)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{stage}.{error}") from None


def prepare(stage: str, needs: tuple[str, ...], env: str, data: Path) -> tuple[int, Path]:
    """The number of groups and the work folder; every earlier stage must have the same groups."""
    config = read_config(stage)
    groups = [sorted(folder.name for folder in (data / need / env).glob("group-*")) for need in needs]
    for need, names in zip(needs, groups, strict=True):
        if not names or names != groups[0]:
            raise ValueError(f"{data / need / env}: {len(names)} groups, expected the stage `{need}` to have run")
    seen = [_fingerprint(data / need / env / name) for need in needs for name in groups[0]]
    return len(groups[0]), shards.work_folder(stage, env, [asdict(config), seen], data)


def _fingerprint(folder: Path) -> list[str]:
    """What a group's fit depends on: the descriptions hold their tensors' hashes; of large files the size is enough."""
    return [f.read_text() if f.suffix == ".json" else f"{f.name} {f.stat().st_size}" for f in sorted(folder.iterdir())]


def policy_weights(policies: NetworkPolicySet) -> Weights:
    """pi_k(a'|s') at the next states of a batch; a look-up where states are cells."""
    if policies.spec.n_cells:
        table = policies.table().astype(np.float32)
        return lambda states, t: table[:, t, states[:, 0].astype(np.int64)]
    return lambda states, t: policies.probs(states, t)


def run(stage: str, needs: tuple[str, ...], make_reward: MakeReward, env: str, groups: list[int], data: Path) -> Path:
    """Fits one shard's groups, one after the other; those that are there already are kept, a begun one goes on."""
    torch.set_num_threads(1)
    config = read_config(stage)
    _, work = prepare(stage, needs, env, data)
    updates = config.updates_per_step * environments.horizon(env)
    report = reporter(work, groups, updates * len(groups))
    for i, group in enumerate(groups):
        name = group_name(group)
        if not is_whole(stage, work / name):
            policies = NetworkPolicySet.load(data / "targets" / env / name / "targets")
            rows = Transitions(data / "offline" / env / name)

            def progress(check: Any, of: int, before: int = i * updates) -> None:
                report(before + check.update, f"held-out error {check.held_out:.4g}")

            reward, weights = make_reward(data / "q" / env / name, policies), policy_weights(policies)
            rng = stream("fit", stage, env, group)
            state = work / f"{name}.state"
            found = fit(rows, reward, weights, rng, config, policies.spec.n_cells, progress, state)
            with whole_folder(work / name) as folder:
                found.nets.save(folder / f"{stage}.safetensors", found.curves)
                last = found.curves[-1]._asdict()
                (folder / f"{stage}.json").write_text(json.dumps({"env": env, "group": group, **last}, indent=1) + "\n")
            state.unlink(missing_ok=True)
        report((i + 1) * updates, "")
    return work


def is_whole(stage: str, folder: Path) -> bool:
    """Whether a group's folder holds its nets, and they load."""
    try:
        ValueNets.load(folder / f"{stage}.safetensors")
        json.loads((folder / f"{stage}.json").read_text())
    except (ValueError, OSError):
        return False
    return True


def collect(stage: str, env: str, groups: int, work: Path, data: Path) -> Path:
    """Puts the finished groups in place: data/<stage>/<env>."""
    return shards.collect(stage, env, groups, work, data, lambda folder: is_whole(stage, folder))


HEADER = ("group", "updates", "held-out error")


def describe(stage: str, out: Path) -> list[tuple[str, ...]]:
    """How each group's fit ended, as text."""
    rows = []
    for folder in sorted(out.glob("group-*")):
        about = json.loads((folder / f"{stage}.json").read_text())
        rows.append((folder.name, f"{about['update']:,}", f"{about['held_out']:.4g}"))
    return rows
