"""Policies as a table."""

import numpy as np
import pytest
import torch

from manyfold import policies as sets
from manyfold.policies.tabular import TabularPolicySet
from tests.crafted import craft
from tests.worlds import distributions


def test_probs_are_the_tables_rows():
    table = distributions(np.random.default_rng(0), (3, 4, 5, 2))
    policies = TabularPolicySet(table)
    assert (policies.n_policies, policies.horizon, policies.n_states, policies.n_actions) == (3, 4, 5, 2)
    states = np.array([4, 0, 2])
    assert np.array_equal(policies.probs(states, 1), table[:, 1, states])
    steps = np.array([0, 3, 2])
    expected = np.stack([table[:, t, s] for s, t in zip(states, steps, strict=True)], axis=1)
    assert np.array_equal(policies.probs(states, steps), expected)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.full((2, 3, 2), 0.5), r"table has shape \[2, 3, 2\], expected \[K, T, S, A\]"),
        (np.empty((1, 0, 2, 2)), "none of them 0"),
        (np.full((1, 1, 1, 2), 0.4), "table: probabilities at k=0, t=0, s=0 sum to 0.8, expected 1"),
    ],
)
def test_bad_tables_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        TabularPolicySet(table)


@pytest.mark.parametrize(
    ("states", "t", "message"),
    [
        ([5], 0, "state: expected whole numbers .N. from 0 to 4"),
        ([-1], 0, "state: expected whole numbers .N. from 0 to 4"),
        ([0.5], 0, "state: expected whole numbers"),
        ([0], 4, "t: expected whole numbers .N. from 0 to 3"),
    ],
)
def test_observations_out_of_range_are_refused(states, t, message):
    policies = TabularPolicySet(distributions(np.random.default_rng(0), (3, 4, 5, 2)))
    with pytest.raises(ValueError, match=message):
        policies.probs(np.array(states), t)


def test_names_are_one_for_each_policy(tmp_path):
    table = distributions(np.random.default_rng(0), (2, 3, 4, 2))
    assert TabularPolicySet(table).names == ("policy 0", "policy 1")
    assert TabularPolicySet(table, ("a", "b")).names == ("a", "b")
    with pytest.raises(ValueError, match="3 names for 2 policies, expected one for each"):
        TabularPolicySet(table, ("a", "b", "c"))


def test_a_saved_table_is_the_same_to_the_last_bit(tmp_path):
    table = distributions(np.random.default_rng(0), (2, 3, 4, 2))
    TabularPolicySet(table, ("a", "b")).save(tmp_path / "set")
    found = sets.load(tmp_path / "set")
    assert isinstance(found, TabularPolicySet)
    assert found.names == ("a", "b")
    assert np.array_equal(found.table(), table)


@pytest.mark.parametrize(
    ("change", "tensors", "message"),
    [
        (lambda about: about.update(names=["a"]), {}, "1 names for 2 policies, expected one for each"),
        (lambda about: about.update(names="ab"), {}, "names is 'ab', expected another type"),
        (lambda about: about.pop("names"), {}, "names is None, expected another type"),
        (lambda about: None, {"more": torch.ones(1)}, "tensors are ['more', 'table'], expected table alone"),
        (lambda about: None, {"table": torch.ones(2, 3, 4)}, "table has shape [2, 3, 4], expected [K, T, S, A]"),
        (
            lambda about: None,
            {"table": torch.full((2, 3, 4, 2), 0.4)},
            "table: probabilities at k=0, t=0, s=0 sum",
        ),
        (lambda about: None, {"table": torch.full((2, 3, 4, 2), torch.nan)}, "table has NaN or infinity"),
    ],
)
def test_a_file_that_holds_something_else_is_refused_with_one_line(change, tensors, message, tmp_path):
    TabularPolicySet(distributions(np.random.default_rng(0), (2, 3, 4, 2)), ("a", "b")).save(tmp_path / "set")
    path = tmp_path / "set.safetensors"
    craft(path, change, tensors)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - matched below, with its path
        sets.load(path)
    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)
