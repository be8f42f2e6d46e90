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
    "average": 0.98,
    "patience": 20,
}

EVALUATE = {"runs": 4, "episodes": 600, "match": 300}


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A data folder with one group of three targets, from `targets` to `report`."""
    folder = tmp_path_factory.mktemp("data")
    rule = TargetRule(policies=3, start=(6000, 7000), width=4000, history=4)
    work = targets.work_folder(ENV, rule, folder)
    targets.train_shard(ENV, [0], rule, work)
    targets.collect(ENV, 1, work, folder)
    with shards.whole_folder(folder / "offline" / ENV / "group-00") as part:
        offline.log_group(ENV, 0, Rule(6000, (0.1, 0.5)), folder / "targets" / ENV / "group-00", part)
    stages = {"q": FIT, "q_hat": FIT, "behavior": {"alpha": 0.0, "fit": FIT}, "evaluate": EVALUATE}
    (folder / "params.yaml").write_text(yaml.safe_dump(stages))
    original = params.section
    fits.section = behavior.section = evaluate.section = lambda stage: original(stage, folder / "params.yaml")
    try:
        for stage in (q, q_hat, behavior, evaluate):
            work = stage.run(ENV, [0], folder)
            stage.collect(ENV, 1, work, folder)
    finally:
        fits.section = behavior.section = evaluate.section = original
    report.build(ENV, folder)
    return folder
