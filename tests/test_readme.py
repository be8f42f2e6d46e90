"""What the README shows is what the commands give."""

import importlib
import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_its_python_example_runs_and_estimates_every_policy():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, object] = {}
    exec(example, names)
    found, exact, mdp = names["found"], names["exact"], names["mdp"]
    assert (np.abs(found.mean - exact.values(mdp, names["policies"])) < 4 * found.standard_error).all()


@pytest.mark.parametrize(
    "table",
    [
        "report/all/relative_variance.md",
        "report/all/episodes_to_match.md",
        "report/all/policies.md",
        "select/grid.md",
        "accuracy/gridworld-1000.md",
        "accuracy/gridworld-27000.md",
        "accuracy/hopper.md",
        "sensitivity/hopper.md",
    ],
)
def test_its_tables_are_those_that_commands_wrote(table):
    assert (ROOT / "data" / table).read_text().strip() in README


def test_the_page_about_the_paper_has_every_cell():
    page = (ROOT / "docs" / "reproducing.md").read_text()
    assert (ROOT / "data" / "report" / "all" / "cells.md").read_text().strip() in page


def test_its_pictures_are_there():
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", README)
    assert len(pictures) >= 4
    assert [picture for picture in pictures if not (ROOT / picture).exists()] == []


def test_the_functions_it_names_exist():
    modules = ("exact", "estimators", "fqe", "similarity", "gridworld", "behavior", "evaluation", "stats", "export")
    tables = "\n".join(line for line in README.splitlines() if line.startswith("|"))
    named = re.findall(rf"`({'|'.join(modules)})\.(\w+)", tables)
    assert len(named) > 20
    for module, function in named:
        assert hasattr(importlib.import_module(f"manyfold.{module}"), function), f"{module}.{function}"
