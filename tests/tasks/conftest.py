"""One group with everything, made by the stages' tasks themselves."""

from dataclasses import replace

import pytest

from tasks import behavior, evaluate, offline, q, q_hat, report, targets
from tasks.studies import Study

FIT = {
    "hidden": 64,
    "layers": 1,
    "cosines": 0,
    "learning_rate": 0.01,
    "batch": 512,
    "updates_per_step": 150,
    "most_updates": 4500,
    "average": 0.98,
    "patience": 20,
    "relabel": False,
}
ROBOT_FIT = {**FIT, "hidden": 16, "updates_per_step": 5}
PAPER = {"figure": 2, "mpe": [0.114, 115], "odi": [0.58, 583], "son": [1.287, 1253], "sodi": [1.413, 1413]}


def study(name, environment, fit, targets, episodes, evaluate, **more):
    """A study as params.yaml would have it; the sources are our PPO and our loggers."""
    params = {
        "targets": {"source": "manyfold/train/ppo.py", **targets},
        "offline": {"source": "manyfold/data/offline.py", "episodes": episodes, "epsilons": [0.1, 0.5]},
        "q": fit,
        "q_hat": fit,
        "behavior": {"alpha": 0.0, "fit": fit},
        "evaluate": evaluate,
    }
    return Study(name, name.title(), environment, params, **more)


def changed(study, stage, **values):
    """The same study with other parameters of one stage."""
    return replace(study, params={**study.params, stage: {**study.params[stage], **values}})


GRID = study(
    "gridworld-1000",
    {"gridworld": {"m": 10}},
    FIT,
    {"groups": 1, "policies": 3, "start": [6000, 7000], "width": 4000, "history": 4},
    6000,
    {"runs": 4, "episodes": 600, "match": 300, "pool": 600, "truth": 300},
    paper={**PAPER, "figure": 1, "mpe": [0.125, 126]},
)
ROBOT = study(
    "hopper",
    {"mujoco": {"robot": "hopper"}},
    ROBOT_FIT,
    {"groups": 2, "policies": 3, "start": [1000, 1400], "width": 1000, "history": 3},
    60,
    {"runs": 3, "episodes": 60, "match": 30, "pool": 90, "truth": 30},
    paper=PAPER,
)
SMALL = changed(
    changed(GRID, "targets", groups=2, start=[600, 900], width=700, history=3), "offline", episodes=60
)  # next to nothing to train or log
STAGES = [module.STAGE for module in (targets, offline, q, q_hat, behavior, evaluate)]


def run(stage, study, data, groups=None):
    """A stage in this process; where its result is."""
    count, work = stage.prepare(study, data)
    stage.run(study, list(range(count)) if groups is None else groups, work, data)
    return stage.collect(study, count, work, data)


def chain(study, data):
    """A data folder with everything of a study, from `targets` to `report`."""
    for stage in STAGES:
        run(stage, study, data)
    report.build(study, data)
    return data


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """One group of three targets of a Gridworld."""
    return chain(GRID, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def robot_data(tmp_path_factory):
    """Two groups of three targets of a robot, all small."""
    return chain(ROBOT, tmp_path_factory.mktemp("robots"))


@pytest.fixture(scope="session")
def small_data(tmp_path_factory):
    """Two trained groups of Gridworld 1,000, nothing else."""
    data = tmp_path_factory.mktemp("small")
    run(targets.STAGE, SMALL, data)
    return data
