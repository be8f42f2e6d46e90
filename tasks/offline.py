"""Stage `offline`: logged episodes for each group, each with a data card: logged by us, or the user's own Parquet."""

import json
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from manyfold.arrays import Ints
from manyfold.data import offline
from manyfold.data.offline import Columns, Rule
from manyfold.data.transitions import About, Transitions, Writer
from manyfold.envs import Environment
from manyfold.files import atomic_folder, sha256, write_json
from manyfold.policies.base import check_indices
from manyfold.tables import Rows
from tasks import stages
from tasks.executor import stage_main
from tasks.groups import Group
from tasks.params import check_names
from tasks.stages import earlier, reporter
from tasks.studies import Study, group_name


def read_rule(study: Study) -> Rule:
    """How much is logged."""
    params = study.section("offline")
    check_names("offline", params, {"episodes", "epsilons"})
    if not isinstance(params["epsilons"], list | tuple):
        raise ValueError(f"offline.epsilons is {params['epsilons']!r}, expected a list of numbers from 0 to 1")
    return Rule(params["episodes"], tuple(params["epsilons"]))


def about(study: Study, env: Environment, group: int) -> About:
    """What the file's metadata says of a group's data."""
    return About(study.name, env.horizon, env.n_actions, env.width, group)


def log_group(study: Study, group: Group, rule: Rule, folder: Path) -> None:
    """One group's transitions and card.json."""
    env, loggers = group.environment(), group.loggers()
    said = about(study, env, group.number)
    card = Card(said, env.n_states, offline.logger_names(loggers, rule))
    with Writer(folder / "transitions.parquet", said, log_probs=True) as writer:
        for who, columns in offline.log(env, loggers, rule, study.name, group.number):
            writer.write(columns)
            card.add(who, columns)
    write_json(folder / "card.json", card.as_json())


def import_group(study: Study, group: Group, source: Path, folder: Path) -> None:
    """The user's own transitions, checked against the environment, and a card of what can be known of them."""
    env = group.environment()
    expected = about(study, env, group.number)
    files = sorted(source.glob("*.parquet")) if source.is_dir() else [source]
    if not files:
        raise ValueError(f"{source}: no Parquet files, expected logged transitions")
    found = Transitions(files[0]).about
    rows = 0
    for i, file in enumerate(files):
        data = Transitions(file, replace(expected, env=found.env))
        for batch in data.batches(65_536, np.random.default_rng(0)):  # reads and checks every row
            for name in ("state", "next_state") if env.n_states else ():
                check_indices(f"{file}, column {name}", getattr(batch, name), env.n_states)
            rows += len(batch.t)
        shutil.copyfile(file, folder / f"transitions{f'-{i}' if i else ''}.parquet")
    about_source: dict[str, object] = {
        "source": source.name,
        "episodes": None,
        "rows": rows,
        "coverage": None,
        "loggers": [],
    }
    write_json(folder / "card.json", {**asdict(expected), **about_source})


class Card:
    """What a data set holds: returns by logger, and where states can be counted the share of (t, s, a) seen."""

    def __init__(self, about: About, n_states: int, names: list[str]) -> None:
        self.about, self.names = about, names
        self.returns: list[list[float]] = [[] for _ in names]
        self.rows = 0
        self.seen = np.zeros((about.horizon, n_states, about.n_actions), dtype=np.bool_) if n_states else None

    def add(self, loggers: Ints, columns: Columns) -> None:
        """Takes in whole episodes; `loggers` has one number for each."""
        self.rows += len(columns["t"])
        first = int(columns["episode"].min())
        returns = np.bincount(columns["episode"] - first, weights=columns["reward"])
        for logger, value in zip(loggers, returns, strict=True):
            self.returns[logger].append(float(value))
        if self.seen is not None:
            self.seen[columns["t"], columns["state"][:, 0], columns["action"]] = True

    def as_json(self) -> dict[str, object]:
        """Means and quantiles of every logger's returns, for tables and for the report's picture."""
        loggers = [
            {
                "name": name,
                "episodes": len(x),
                "mean_return": float(np.mean(x)),
                "std_return": float(np.std(x)),
                "quantiles": [round(float(q), 6) for q in np.quantile(x, [0.05, 0.25, 0.5, 0.75, 0.95])],
            }
            for name, x in zip(self.names, self.returns, strict=True)
            if x
        ]
        coverage = None if self.seen is None else float(self.seen.mean())
        episodes = sum(map(len, self.returns))
        return {**asdict(self.about), "episodes": episodes, "rows": self.rows, "coverage": coverage, "loggers": loggers}


class Offline:
    """The stage, for the executor."""

    name, unit, batched = "offline", "groups", False
    header = ("group", "episodes", "transitions", "(t, s, a) seen", "mean return, worst to best logger")

    def prepare(self, study: Study, data: Path) -> tuple[int, Path]:
        source = study.source("offline")
        groups, seen = earlier(("targets",), study, data)
        if source is None:
            return groups, stages.work_folder("offline", study, [asdict(read_rule(study)), seen], data)
        if not source.exists():
            raise ValueError(f"{source}: no such file, expected the Parquet files of offline.source")
        files = sorted(source.glob("*.parquet")) if source.is_dir() else [source]
        return groups, stages.work_folder("offline", study, [[sha256(file) for file in files], seen], data)

    def run(self, study: Study, groups: list[int], work: Path, data: Path) -> None:
        torch.set_num_threads(1)
        report, source = reporter(work, groups, len(groups)), study.source("offline")
        for i, number in enumerate(groups):
            if not self.is_whole(work / group_name(number)):
                with atomic_folder(work / group_name(number)) as folder:
                    group = Group(study, number, data)
                    if source is None:
                        log_group(study, group, read_rule(study), folder)
                    else:
                        import_group(study, group, source, folder)
            report(i + 1, "")

    def is_whole(self, folder: Path) -> bool:
        """Whether a group's folder holds its transitions and its card."""
        try:
            card = json.loads((folder / "card.json").read_text())
            return bool(Transitions(folder).rows == card["rows"])
        except (ValueError, OSError, KeyError):
            return False

    def collect(self, study: Study, groups: int, work: Path, data: Path) -> Path:
        return stages.collect(data / "offline" / study.name, groups, work, self.is_whole)

    def describe(self, out: Path) -> Rows:
        """The data cards of all groups, as text."""
        rows = []
        for folder in sorted(out.glob("group-*")):
            card = json.loads((folder / "card.json").read_text())
            means = [logger["mean_return"] for logger in card["loggers"]]
            seen = "" if card["coverage"] is None else f"{card['coverage']:.1%}"
            spread = f"{min(means):.2f} to {max(means):.2f}" if means else "unknown"
            episodes = "unknown" if card["episodes"] is None else f"{card['episodes']:,}"
            rows.append((folder.name, episodes, f"{card['rows']:,}", seen, spread))
        return rows


STAGE = Offline()

if __name__ == "__main__":
    sys.exit(stage_main("offline"))
