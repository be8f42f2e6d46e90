"""What is left of an on-policy episode's variance with the fitted q as a baseline, and what the fit costs.

    python -m benchmarks.fits                    # inverted-pendulum and hopper, 3 groups each
    python -m benchmarks.fits walker

Targets and offline data are made by the stages, as params.yaml says. Each setting fits q on the same data and is looked
at in the same on-policy episodes: Var(sum_t r + v - q) / Var(sum_t r), mean over the policies. Seconds are CPU time of
one fit, one thread.
"""

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.robots import asked_for
from benchmarks.show import show
from manyfold.arrays import Array
from manyfold.fqe import PAPER, Config, fit, q_problem
from manyfold.rollout import Steps, in_turns, rollout
from manyfold.streams import stream
from tasks import offline, studies, targets
from tasks.accuracy_sampled import left
from tasks.groups import Group
from tasks.studies import Study

GROUPS, EPISODES = 3, 1000
BEFORE = replace(PAPER, learning_rate=0.01)  # what all studies had before there was a choice
RELABELLED = replace(BEFORE, relabel=True)
SETTINGS = {
    "the paper's (PAPER)": PAPER,
    "its network at a rate of 0.01": BEFORE,
    "twice the updates": replace(BEFORE, updates_per_step=300, most_updates=9000),
    "a layer of 128": replace(BEFORE, hidden=128),
    "relabelled": RELABELLED,
    "two layers of 32": replace(BEFORE, hidden=32, layers=2),
    "two layers of 32, relabelled": replace(RELABELLED, hidden=32, layers=2),
    "two layers of 32, relabelled, 4 cosines": replace(RELABELLED, hidden=32, layers=2, cosines=4),
    "two layers of 48, relabelled, 4 cosines": replace(RELABELLED, hidden=48, layers=2, cosines=4),
    "two layers of 64, relabelled, 4 cosines": replace(RELABELLED, layers=2, cosines=4),
}


def make(study: Study, data: Path) -> list[Group]:
    """Some groups of a study with targets and offline data."""
    study = replace(study, params={**study.params, "targets": {**study.params["targets"], "groups": GROUPS}})
    for stage in (targets.STAGE, offline.STAGE):
        groups, work = stage.prepare(study, data)
        stage.run(study, list(range(groups)), work, data)
        stage.collect(study, groups, work, data)
    return [Group(study, number, data) for number in range(GROUPS)]


def log(group: Group) -> Steps:
    """On-policy episodes, of every policy in turns."""
    policies, rng = group.policies(), stream("benchmark-fits", group.study.name, group.number)
    loggers = np.arange(EPISODES) % policies.n_policies
    return Steps.join(list(rollout(group.environment(), in_turns(policies), loggers, rng)))


def measure(group: Group, rows: Steps, config: Config) -> tuple[float, float]:
    """The share that q leaves, mean over the policies, and the seconds of its fit."""
    policies, rng = group.policies(), stream("fit", "q", group.study.name, group.number)
    start = time.process_time()
    q = fit(group.transitions(), *q_problem(policies), rng, config).nets
    seconds = time.process_time() - start
    own, n = rows.episode % policies.n_policies, np.arange(len(rows.t))
    values = q.predict(rows.state, rows.t)[own, n]  # [n, A]
    v = (policies.probs_of(own, rows.state, rows.t) * values).sum(-1)
    return float(left(rows, own, values[n, rows.action], v, policies.n_policies).mean()), seconds


def compare(groups: list[Group], settings: dict[str, Config]) -> dict[str, Array]:
    """Share left and seconds of every setting; `[groups, 2]` each."""
    torch.set_num_threads(1)
    episodes = [log(group) for group in groups]
    found = {}
    for name, config in settings.items():
        found[name] = np.array([measure(*pair, config) for pair in zip(groups, episodes, strict=True)])
    return found


def main(robots: list[str]) -> None:
    for robot in robots:
        with tempfile.TemporaryDirectory() as folder:
            found = compare(make(studies.read(robot), Path(folder)), SETTINGS)
        rows: list[tuple[str, ...]] = []
        for name, x in found.items():
            each = ", ".join(f"{share:.3f}" for share in x[:, 0])
            rows.append((name, f"{x[:, 0].mean():.3f}", each, f"{x[:, 1].mean():.1f} s"))
        title = f"{robot}: variance of {EPISODES:,} on-policy episodes left with q as a baseline"
        show(title, ("q fitted with", "left", f"each of {GROUPS} groups", "a fit"), rows)


if __name__ == "__main__":
    main(asked_for("What q leaves of the variance, by setting of its fit.", ("inverted-pendulum", "hopper")))
