"""dvc.yaml: a stage depends on exactly the modules that its command imports: a plot's change trains nothing."""

import ast
import re
import subprocess
import sys
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


def test_an_experiment_can_set_every_parameter(tmp_path):
    """By `dvc exp run -S q.hidden=128`; a YAML anchor in params.yaml would put the old value back."""
    from dvc.utils.hydra import apply_overrides

    path = tmp_path / "params.yaml"
    path.write_text((ROOT / "params.yaml").read_text())
    apply_overrides(path, ["q.hidden=128", "behavior.fit.batch=7"])
    expected = yaml.safe_load((ROOT / "params.yaml").read_text())
    expected["q"]["hidden"], expected["behavior"]["fit"]["batch"] = 128, 7
    assert yaml.safe_load(path.read_text()) == expected


def test_the_picture_in_the_readme_is_dvc_dags():
    command = [sys.executable, "-m", "dvc", "dag", "--mermaid", "report@gridworld-1000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = dict(re.findall(r'(node\d+)\["(\w+)@', done))
    edges = {(names[a], names[b]) for a, b in re.findall(r"(node\d+)-->(node\d+)", done)}
    picture = re.search(r"```mermaid\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    assert set(re.findall(r"(\w+) --> (\w+)", picture)) == edges


def test_the_environments_are_the_librarys():
    from manyfold.environments import ENVS

    assert tuple(PARAMS["envs"]) == ENVS
