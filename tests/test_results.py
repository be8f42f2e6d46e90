"""What the committed results must show: no bias, and samples that agree with the exact variances."""

import json
from pathlib import Path

import pytest

RESULTS = sorted((Path(__file__).parents[1] / "data" / "evaluate").glob("*/metrics.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.parent.name)
def test_no_estimator_is_biased_for_any_policy(path):
    assert max(json.loads(path.read_text())["largest_mean_error"].values()) < 4


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.parent.name)
@pytest.mark.parametrize("name", ["mpe", "odi", "mpe_baseline"])
def test_the_sampled_variance_is_that_of_the_same_fitted_mu(path, name):
    """Estimators without heavy tails; SON's and SODI's variance cannot be seen in samples of this size."""
    metrics = json.loads(path.read_text())
    assert metrics["relative_variance"][name] == pytest.approx(metrics["exact_relative_variance"][name], rel=0.1)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.parent.name)
def test_the_papers_order_holds(path):
    """MPE below ODI below on-policy MC; SON and SODI far above MPE, in the mean."""
    variance = json.loads(path.read_text())["relative_variance"]
    assert variance["mpe_baseline"] < variance["mpe"] < variance["odi"] < variance["on_policy"] == 1
    assert min(variance["son"], variance["sodi"]) > 5 * variance["mpe"]


def test_both_gridworlds_are_there():
    assert {"gridworld-1000", "gridworld-27000"} <= {path.parent.name for path in RESULTS}
