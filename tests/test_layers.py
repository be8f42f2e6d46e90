"""Imports go one way: flows -> tasks -> manyfold."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {"manyfold": {"prefect", "dvc", "mlflow", "tasks", "flows"}, "tasks": {"flows"}}


def imported(source):
    """Top-level names of everything that a module imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            yield from (str(a.value).split(".")[0] for a in node.args if isinstance(a, ast.Constant))


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_layer_does_not_import_what_is_above_it(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    wrong = {str(f.relative_to(ROOT)): set(imported(f.read_text())) & FORBIDDEN[package] for f in files}
    assert {f: names for f, names in wrong.items() if names} == {}


def test_the_check_sees_every_form_of_import():
    source = "import prefect.flows\ndef f():\n    from mlflow import log\n    importlib.import_module('dvc')"
    assert {"prefect", "mlflow", "dvc"} <= set(imported(source))
