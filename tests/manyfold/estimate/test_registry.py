"""The registry of estimators: one entry each, all that tables and figures need."""

import re

from manyfold.estimate.methods import METHODS
from manyfold.estimate.registry import ESTIMATORS


def test_every_method_has_one_entry_in_the_same_order():
    assert list(ESTIMATORS) == list(METHODS)
    for name, estimator in ESTIMATORS.items():
        assert re.fullmatch(r"[a-z_]+", name)
        assert estimator.method is METHODS[name]


def test_no_two_estimators_look_alike():
    for field in ("label", "colour", "marker"):
        assert len({getattr(e, field) for e in ESTIMATORS.values()}) == len(ESTIMATORS), field
    assert all(re.fullmatch("#[0-9A-F]{6}", e.colour) for e in ESTIMATORS.values())
