"""Imports go one way, flows -> tasks -> manyfold, and only the registry of studies knows environments by name."""

import ast
import re
from pathlib import Path

import pytest
import yaml

from manyfold.envs.binned_mujoco import ROBOTS

ROOT = Path(__file__).parents[1]
LAYERS = ("manyfold", "tasks", "flows")
FORBIDDEN = {"manyfold": {"prefect", "dvc", "mlflow", "tasks", "flows"}, "tasks": {"flows"}}
ON_REQUEST = {"manyfold/tracking.py": {"mlflow"}}  # a user's own tracking server, for `manyfold evaluate --mlflow`


def sources(*packages):
    """Path from the root -> syntax tree, of every module."""
    files = [f for package in packages for f in sorted((ROOT / package).rglob("*.py"))]
    assert files
    return {str(f.relative_to(ROOT)): ast.parse(f.read_text()) for f in files}


# --- imports ----------------------------------------------------------------------------------------------------------


def imported(tree):
    """Top-level names of everything that a module imports, wherever in it the import stands."""
    for node in ast.walk(tree):
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
    trees = sources(package)
    wrong = {
        file: set(imported(tree)) & FORBIDDEN[package] - ON_REQUEST.get(file, set()) for file, tree in trees.items()
    }
    assert {file: names for file, names in wrong.items() if names} == {}


def test_the_check_sees_every_form_of_import():
    source = "import prefect.flows\ndef f():\n    from mlflow import log\n    importlib.import_module('dvc')"
    assert {"prefect", "mlflow", "dvc"} <= set(imported(ast.parse(source)))


# --- names of environments --------------------------------------------------------------------------------------------

STUDIES = yaml.safe_load((ROOT / "params.yaml").read_text())["studies"]
NAMES = {*STUDIES, "gridworld-1000", "gridworld-27000", *ROBOTS, *(robot.id for robot in ROBOTS.values())}
NAME = re.compile(rf"(?<![\w-])({'|'.join(sorted(map(re.escape, NAMES), key=len, reverse=True))})(?![\w-])")
KINDS = {"gridworld", "mujoco", "gymnasium"}  # of environments, in params.yaml
CLASSES = {"Gridworld", "BinnedMujoco", "GymnasiumEnvironment", "Finite"}
REGISTRY = {"tasks/studies.py", "manyfold/envs/binned_mujoco.py"}
# Of Gridworld 1,000 by what they are: which rule puts it where the paper is, and what if policies are further apart.
EXPERIMENTS = {"tasks/calibrate.py", "tasks/apart.py"}


def excused(tree):
    """Texts that decide nothing: docstrings, defaults of parameters and of command-line options, and their help."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (default for default in (*node.args.defaults, *node.args.kw_defaults) if default)
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("add_argument", "parser"):
                yield from (keyword.value for keyword in node.keywords if keyword.arg in ("default", "help", "study"))


def texts(tree):
    """Every other string, those inside f-strings included."""
    free = {id(inner) for node in excused(tree) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in free:
            yield node.value


def named(tree):
    """Names of studies and robots that the code says."""
    return {found for text in texts(tree) for found in NAME.findall(text)}


def dispatches(tree):
    """Comparisons with a kind of environment, and questions for its class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.MatchValue):
            yield from (x.value for x in ast.walk(node) if isinstance(x, ast.Constant) and x.value in KINDS)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            yield from (x.id for x in ast.walk(node.args[1]) if isinstance(x, ast.Name) and x.id in CLASSES)
        elif isinstance(node, ast.MatchClass):
            yield from (x.id for x in ast.walk(node.cls) if isinstance(x, ast.Name) and x.id in CLASSES)


def test_only_the_registry_says_what_a_study_or_a_robot_is_called():
    found = {file: named(tree) for file, tree in sources(*LAYERS).items() if file not in REGISTRY | EXPERIMENTS}
    assert {file: names for file, names in found.items() if names} == {}


def test_nobody_asks_for_the_kind_or_class_of_an_environment():
    found = {file: set(dispatches(tree)) for file, tree in sources(*LAYERS).items() if file not in REGISTRY}
    assert {file: names for file, names in found.items() if names} == {}


def test_the_checks_see_what_they_should():
    def of(code):
        return named(ast.parse(code))

    assert of("if env == 'hopper': pass") == {"hopper"}
    assert of("ROBOTS = {'ant': 1}; x = f'{folder}/gridworld-1000/{name}'") == {"ant", "gridworld-1000"}
    assert of("parser.add_argument('hopper')") == {"hopper"}
    assert of("f(study='walker')") == {"walker"}
    assert (
        of('"""hopper"""\ndef f(study="hopper"):\n    """As hopper."""\nparser.add_argument("--s", default="ant")')
        == set()
    )
    assert of("x = 'constant', 'hopper-2', 'important'") == set()
    asked = ast.parse("isinstance(env, (Gridworld, Finite)); kind == 'mujoco'; kind in ('gridworld',); {'mujoco': 1}")
    assert set(dispatches(asked)) == {"Gridworld", "Finite", "mujoco", "gridworld"}


# --- cells ------------------------------------------------------------------------------------------------------------

CELL = re.compile(r"(^|_)cells?($|_)")
TABLE_CELLS = {"manyfold/tables.py", "tasks/report.py", "tasks/select.py"}  # of printed tables, as local names
IN_A_TABLE = {"cell", "cells", "cell_rows"}


def identifiers(tree):
    """Every name, attribute, argument and key that the code has."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name"):
            if isinstance(getattr(node, field, None), str):
                yield field, getattr(node, field)
    yield from (("text", text) for text in texts(tree) if CELL.search(text) and text.isidentifier())


def cells(file, tree):
    own = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("Gridworld")]
    inside = (
        {id(inner) for node in own for inner in ast.walk(node)} if file == "manyfold/train/vector_envs.py" else set()
    )
    tree = ast.Module([node for node in tree.body if id(node) not in inside], [])
    found = {(field, name) for field, name in identifiers(tree) if CELL.search(name)}
    if file in TABLE_CELLS:
        found = {(field, name) for field, name in found if field == "attr" or name not in IN_A_TABLE}
    return {name for _, name in found}


def test_only_the_gridworld_knows_cells():
    files = {file: tree for file, tree in sources(*LAYERS).items() if file != "manyfold/envs/gridworld.py"}
    found = {file: cells(file, tree) for file, tree in files.items()}
    assert {file: names for file, names in found.items() if names} == {}
    for package in LAYERS:  # and not in words either
        for file in sorted((ROOT / package).rglob("*.py")):
            assert "n_cells" not in file.read_text(), file


def test_the_check_sees_cells():
    assert cells("tasks/q.py", ast.parse("f(n_cells=3); spec.n_cells; cell_of = 1; x['n_cells']")) == {
        "n_cells",
        "cell_of",
    }
    assert cells("tasks/report.py", ast.parse("cells = 1; env.cells; n_cells = 2")) == {"cells", "n_cells"}
    assert cells("tasks/report.py", ast.parse("cells = [cell for cell in row]")) == set()
    vector = ast.parse("class GridworldVector:\n    def f(self): self._cells\nclass Other:\n    cell = 1")
    assert cells("manyfold/train/vector_envs.py", vector) == {"cell"}
