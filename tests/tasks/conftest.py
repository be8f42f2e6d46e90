"""One group with everything, made by the stages' tasks themselves."""

import pytest
import yaml

from manyfold.offline import Rule
from manyfold.targets import Rule as TargetRule
from tasks import behavior, evaluate, fits, offline, params, q, q_hat, report, shards, targets

ENV = "gridworld-1000"
FIT = {
    "hidden": 64,
    "learning_rate": 0.01,
    "batch": 512,
    "updates_per_step": 150,
    "most_updates": 4500,
    "average": 0.98,
    "patience": 20,
}

EVALUATE = {"runs": 4, "episodes": 600, "match": 300, "pool": 600, "truth": 300, "more": {}}


ROBOT = "hopper"
ROBOT_FIT = {**FIT, "hidden": 16, "updates_per_step": 5}
ROBOT_EVALUATE = {"runs": 3, "episodes": 60, "match": 30, "pool": 30, "truth": 30, "more": {ROBOT: {"pool": 90}}}


def chain(folder, env, groups, target_rule, offline_rule, fit, protocol):
    """A data folder with everything of some groups, from `targets` to `report`."""
    work = targets.work_folder(env, target_rule, folder)
    targets.train_shard(env, list(range(groups)), target_rule, work)
    targets.collect(env, groups, work, folder)
    for group in range(groups):
        name = shards.group_name(group)
        with shards.whole_folder(folder / "offline" / env / name) as part:
            offline.log_group(env, group, offline_rule, folder / "targets" / env / name, part)
    stages = {"q": fit, "q_hat": fit, "behavior": {"alpha": 0.0, "fit": fit}, "evaluate": protocol}
    (folder / "params.yaml").write_text(yaml.safe_dump(stages))
    original = params.section
    fits.section = behavior.section = evaluate.section = lambda stage: original(stage, folder / "params.yaml")
    try:
        for stage in (q, q_hat, behavior, evaluate):
            work = stage.run(env, list(range(groups)), folder)
            stage.collect(env, groups, work, folder)
    finally:
        fits.section = behavior.section = evaluate.section = original
    report.build(env, folder)
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """One group of three targets of a Gridworld."""
    rule = TargetRule(policies=3, start=(6000, 7000), width=4000, history=4)
    return chain(tmp_path_factory.mktemp("data"), ENV, 1, rule, Rule(6000, (0.1, 0.5)), FIT, EVALUATE)


@pytest.fixture(scope="session")
def robot_data(tmp_path_factory):
    """Two groups of three targets of a robot, all small."""
    rule = TargetRule(policies=3, start=(1000, 1400), width=1000, history=3)
    return chain(tmp_path_factory.mktemp("robots"), ROBOT, 2, rule, Rule(60, (0.1, 0.5)), ROBOT_FIT, ROBOT_EVALUATE)
