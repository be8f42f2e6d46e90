"""Stage `offline`: logs episodes of policies of widely varying quality for a shard of groups, each with a data card.

`python -m tasks.offline` runs one shard; `python -m flows.offline` runs them all.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

from manyfold import environments, offline
from manyfold.networks import NetworkPolicySet
from manyfold.offline import Columns, Rule
from manyfold.transitions import About, Transitions, Writer
from tasks import shards
from tasks.params import check_names, section
from tasks.shards import group_name, reporter, whole_folder

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def read_rule(params: dict[str, Any], env: str) -> Rule:
    """The rule for an environment, from the stage's section of params.yaml."""
    check_names("offline", params, {"episodes", "fewer", "epsilons"})
    if not isinstance(params["fewer"], dict) or not params["fewer"].keys() <= set(environments.ENVS):
        raise ValueError(
            f"offline.fewer is {params['fewer']!r}, expected numbers by environment, such as {{ant: 3000}}"
        )
    if not isinstance(params["epsilons"], list | tuple):
        raise ValueError(f"offline.epsilons is {params['epsilons']!r}, expected a list of numbers from 0 to 1")
    return Rule(params["fewer"].get(env, params["episodes"]), tuple(params["epsilons"]))


def prepare(env: str, data: Path) -> tuple[int, Path]:
    """The number of groups that have targets, and the work folder."""
    rule = read_rule(section("offline"), env)
    targets = data / "targets" / env
    groups = sorted(folder.name for folder in targets.glob("group-*"))
    if not groups or groups != [group_name(i) for i in range(len(groups))]:
        raise ValueError(f"{targets}: {len(groups)} groups of targets, expected the stage `targets` to have run")
    seen = [(targets / name / "history.json").read_text() for name in groups]  # each holds its policies' hash
    return len(groups), shards.work_folder("offline", env, [asdict(rule), seen], data)


def log_group(env: str, group: int, rule: Rule, targets: Path, folder: Path) -> None:
    """One group's transitions, card.json and card.png."""
    history, companion = (NetworkPolicySet.load(targets / name) for name in ("history", "companion"))
    rows: Iterator[tuple[np.ndarray, Columns]]
    if env in environments.GRIDWORLDS:
        about = offline.about(env, group, 1, history.n_actions)
        rows = ((np.array([logger]), columns) for logger, columns in offline.log_gridworld(env, group, history, rule))
    else:
        width = history.spec.n_features + companion.tensors["w3"].shape[2] - 1
        about = offline.about(env, group, width, history.n_actions)
        rows = offline.log_robot(env, group, history, companion, rule)
    card = Card(about, offline.logger_names(history, rule))
    with Writer(folder / "transitions.parquet", about, log_probs=True) as writer:
        for loggers, columns in rows:
            writer.write(columns)
            card.add(loggers, columns)
    (folder / "card.json").write_text(json.dumps(card.as_json(), indent=1) + "\n")
    card.draw(folder / "card.png")


class Card:
    """What a data set holds: returns by logger, and for Gridworld the share of (t, s, a) cells seen."""

    def __init__(self, about: About, names: list[str]) -> None:
        self.about, self.names = about, names
        self.returns: list[list[float]] = [[] for _ in names]
        self.rows = 0
        m = environments.GRIDWORLDS.get(about.env)
        self.seen = np.zeros((about.horizon, m * m, about.n_actions), dtype=np.bool_) if m else None

    def add(self, loggers: np.ndarray, columns: Columns) -> None:
        """Takes in whole episodes; `loggers` has one number for each, or one for all."""
        self.rows += len(columns["t"])
        first = int(columns["episode"].min())
        returns = np.bincount(columns["episode"] - first, weights=columns["reward"])
        for logger, value in zip(np.broadcast_to(loggers, returns.shape), returns, strict=True):
            self.returns[logger].append(float(value))
        if self.seen is not None:
            self.seen[columns["t"], columns["state"][:, 0], columns["action"]] = True

    def as_json(self) -> dict[str, object]:
        loggers = [
            {"name": name, "episodes": len(x), "mean_return": float(np.mean(x)), "std_return": float(np.std(x))}
            for name, x in zip(self.names, self.returns, strict=True)
            if x
        ]
        coverage = None if self.seen is None else float(self.seen.mean())
        episodes = sum(map(len, self.returns))
        return {**asdict(self.about), "episodes": episodes, "rows": self.rows, "coverage": coverage, "loggers": loggers}

    def draw(self, path: Path) -> None:
        """The spread of returns of every logger."""
        shown = [(name, x) for name, x in zip(self.names, self.returns, strict=True) if x]
        figure, axes = plt.subplots(figsize=(7, 0.6 + 0.24 * len(shown)), layout="constrained")
        axes.boxplot([x for _, x in shown], orientation="horizontal", showfliers=False, widths=0.6)
        axes.set_yticks(range(1, len(shown) + 1), [name for name, _ in shown], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("return of an episode")
        seen = "" if self.seen is None else f", {self.seen.mean():.0%} of (t, s, a) seen"
        axes.set_title(f"{self.about.env}, group {self.about.seed}: {self.rows:,} transitions{seen}", fontsize=9)
        axes.grid(axis="x", alpha=0.25)
        figure.savefig(path, dpi=110)
        plt.close(figure)


def is_whole(folder: Path) -> bool:
    """Whether a group's folder holds its transitions and its card."""
    try:
        card = json.loads((folder / "card.json").read_text())
        return Transitions(folder / "transitions.parquet").rows == card["rows"] and (folder / "card.png").exists()
    except (ValueError, OSError, KeyError):
        return False


def collect(env: str, groups: int, work: Path, data: Path) -> Path:
    """Puts the finished groups in place: data/offline/<env>."""
    return shards.collect(data / "offline" / env, groups, work, is_whole)


HEADER = ("group", "episodes", "transitions", "(t, s, a) seen", "mean return, worst to best logger")


def describe(out: Path) -> list[tuple[str, ...]]:
    """The data cards of all groups, as text."""
    rows = []
    for folder in sorted(out.glob("group-*")):
        card = json.loads((folder / "card.json").read_text())
        means = [logger["mean_return"] for logger in card["loggers"]]
        seen = "" if card["coverage"] is None else f"{card['coverage']:.1%}"
        spread = f"{min(means):.2f} to {max(means):.2f}"
        rows.append((folder.name, f"{card['episodes']:,}", f"{card['rows']:,}", seen, spread))
    return rows


def run(env: str, groups: list[int], data: Path) -> Path:
    """One shard of the stage, by params.yaml."""
    torch.set_num_threads(1)
    rule = read_rule(section("offline"), env)
    _, work = prepare(env, data)
    report = reporter(work, groups, len(groups))
    for i, group in enumerate(groups):
        if not is_whole(work / group_name(group)):
            with whole_folder(work / group_name(group)) as folder:
                log_group(env, group, rule, data / "targets" / env / group_name(group), folder)
        report(i + 1, "")
    return work


def main(arguments: list[str] | None = None) -> int:
    about = (
        "Logs the offline data of some groups of one environment under data/.work; `python -m flows.offline` runs all "
        "groups and puts the result in place."
    )
    return shards.shard_main("offline", about, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
