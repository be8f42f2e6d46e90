import re
from pathlib import Path

import numpy as np

from manyfold import exact
from manyfold.envs import Gridworld
from manyfold.train import ppo, targets
from manyfold.train.targets import Plan, Rule, Training
from tasks import calibrate, studies

ROOT = Path(__file__).parents[2]


def fake(shift):
    """Baselines that are the paper's at start 2, width 5, and off elsewhere; MPE as asked."""
    shape = (len(calibrate.STARTS), len(calibrate.WIDTHS), 3)
    found = {name: np.full(shape, 5 * paper) for name, paper in calibrate.PAPER.items()}
    for name, paper in calibrate.PAPER.items():
        found[name][2, 5] = paper
    return found | {"mpe": np.full(shape, shift), "mpe_baseline": np.full(shape, shift)}


def test_the_choice_is_the_nearest_to_the_papers_baselines():
    found = fake(0.1)
    assert calibrate.choose({name: found[name] for name in calibrate.PAPER}) == (2, 5)
    assert calibrate.distance(found)[2, 5] == 0
    np.testing.assert_allclose(calibrate.distance(found)[0, 0], np.log(5))


def test_mpe_takes_no_part_in_the_choice():
    assert "mpe" not in calibrate.PAPER
    assert calibrate.rows(fake(0.1)) == calibrate.rows(fake(1e9))


def test_params_yaml_has_the_calibrated_rule():
    lines = (ROOT / "data/calibrate/calibration.md").read_text().splitlines()
    (chosen,) = [line for line in lines if "*" in line]
    start, width = re.match(r"\| ([\d,]+ to [\d,]+) \| ([\d,]+) \|", chosen).groups()
    low, high = (int(x.replace(",", "")) for x in start.split(" to "))
    params = studies.read("gridworld-1000").section("targets")
    assert (params["start"], params["width"]) == ([low, high], int(width.replace(",", "")))
    medians = [cell.strip() for cell in chosen.split("|")[3:6]]
    assert f"({', '.join(medians)})" in " ".join((ROOT / "docs" / "experiments.md").read_text().split())


def test_the_tables_are_the_policies_that_the_stage_would_draw():
    (group,) = calibrate.tables([3], 1500)
    plan = targets.draw(Rule(3, (500, 700), 700, 2), ppo.DISCRETE, calibrate.STUDY, 3)
    training = Training(
        Gridworld.draw(10, 3), calibrate.STUDY, [3], [Plan(plan.interval, plan.targets, plan.companion, plan.history)]
    )
    while not training.finished:
        training.run_segment()
    drawn = training.results()[0].targets.table()
    np.testing.assert_allclose(np.stack([group[position] for position in plan.targets]), drawn, atol=1e-6)
    mdp = Gridworld.draw(10, 3).mdp()
    assert exact.relative_variances(exact.estimator_variances(mdp, drawn))["mpe"] < 1
