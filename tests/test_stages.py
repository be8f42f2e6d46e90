"""dvc.yaml: a stage depends on exactly the modules that its command imports: a plot's change trains nothing."""

import ast
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
STAGES = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
PARAMS = yaml.safe_load((ROOT / "params.yaml").read_text())


def module_file(name):
    """The file of one of our own modules, or None."""
    path = ROOT / Path(*name.split("."))
    return next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f.exists()), None)


def modules_of(path):
    """Our own modules that a file imports, with the packages they are in."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] in ("manyfold", "tasks", "flows") and module_file(name)}


def files_of(*modules):
    """All files of our own that these modules need, transitively, packages' __init__ included."""
    found, todo = set(), list(modules)
    while todo:
        name = todo.pop()
        todo += [name.rpartition(".")[0]] if "." in name else []
        file = module_file(name)
        if file not in found:
            found.add(file)
            todo += modules_of(file)
    return {str(file.relative_to(ROOT)) for file in found}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_depends_on_exactly_what_it_imports(stage):
    # a flow runs its shards by `python -m tasks.<stage>`, which it imports too
    assert len(STAGES[stage]["deps"]) == len(set(STAGES[stage]["deps"]))
    code = {dep for dep in STAGES[stage]["deps"] if dep.endswith(".py")}
    assert code == files_of(f"flows.{stage}")


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_has_its_section_its_flow_and_its_task_module(stage):
    own = [name for name in STAGES[stage].get("params", []) if name.split(".")[0] == stage]
    assert own == ([stage] if stage != "report" else [])  # a report has nothing to tune
    assert all(name.split(".")[0] in PARAMS for name in STAGES[stage].get("params", []))
    assert (ROOT / "flows" / f"{stage}.py").exists()
    assert (ROOT / "tasks" / f"{stage}.py").exists()
    assert STAGES[stage]["cmd"].startswith(f"python -m flows.{stage} ")


def test_the_environments_are_the_librarys():
    from manyfold.environments import ENVS

    assert tuple(PARAMS["envs"]) == ENVS
