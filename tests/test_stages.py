"""dvc.yaml: a stage depends on exactly the modules that decide its numbers: a colour or a flow trains nothing."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tasks import studies

ROOT = Path(__file__).parents[1]
STAGES = {name: stage["do"] for name, stage in yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"].items()}
PARAMS = yaml.safe_load((ROOT / "params.yaml").read_text())
# Imported by every computing stage, and deciding none of its numbers: where groups run, how tables are printed, and the
# list of public names.
RUNNING = {"tasks/executor.py", "tasks/locks.py", "tasks/processes.py"}
NO_NUMBERS = {*RUNNING, "tasks/commands.py", "manyfold/tables.py", "manyfold/__init__.py"}


def module_file(name):
    """The file of one of our own modules, or None."""
    path = ROOT / Path(*name.split("."))
    return next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f.exists()), None)


def modules_of(path):
    """Our own modules that a file imports when it runs, with the packages they are in."""
    names, tree = set(), ast.parse(path.read_text())
    types = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    unseen = {id(inner) for node in types for inner in ast.walk(node)}
    for node in (node for node in ast.walk(tree) if id(node) not in unseen):
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


def code_of(stage):
    """The code that a stage of the paper's studies depends on, the trainer or logger of its `source` included."""
    deps = STAGES[stage]["deps"]
    assert len(deps) == len(set(deps))
    return {dep for dep in deps if dep.endswith(".py")} | {
        source for source in sources(stage) if source.endswith(".py")
    }


def sources(stage):
    own = (
        {PARAMS["studies"][name][stage]["source"] for name in PARAMS["studies"]}
        if stage in ("targets", "offline")
        else set()
    )
    assert not own or f"${{item.{stage}.source}}" in STAGES[stage]["deps"]
    return own


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_depends_on_exactly_what_it_imports(stage):
    assert code_of(stage) == files_of(f"tasks.{stage}") - (NO_NUMBERS if stage != "report" else RUNNING)


@pytest.mark.parametrize("stage", STAGES)
def test_neither_flows_nor_figures_nor_colours_make_a_computing_stage_stale(stage):
    looks = {"tasks/figures.py", "tasks/pictures.py", "tasks/report.py", "manyfold/estimate/registry.py", *NO_NUMBERS}
    assert not {dep for dep in code_of(stage) if dep.startswith("flows/")}
    if stage != "report":
        assert not looks & code_of(stage)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_sees_its_own_parameters_and_those_of_its_own_study(stage):
    found = STAGES[stage]["params"]
    if stage == "report":
        assert found == ["studies.${key}"]
        return
    expected = {stage, "studies.${key}.environment", f"studies.${{key}}.{stage}"}
    if stage == "evaluate":  # alpha is the behavior policies'
        expected |= {"behavior.alpha", "studies.${key}.behavior"}
    assert set(found) == expected
    assert STAGES[stage]["cmd"] == f"exec python -m tasks.{stage} --study ${{key}}"


def test_every_study_has_the_sections_that_dvc_asks_for():
    for name in studies.names():
        assert {"environment", *studies.STAGES} <= PARAMS["studies"][name].keys()


def test_an_experiment_can_set_every_parameter(tmp_path):
    """By `dvc exp run -S q.hidden=128`; a YAML anchor in params.yaml would put the old value back."""
    from dvc.utils.hydra import apply_overrides

    path = tmp_path / "params.yaml"
    path.write_text((ROOT / "params.yaml").read_text())
    apply_overrides(path, ["q.hidden=128", "behavior.fit.batch=7"])
    expected = yaml.safe_load((ROOT / "params.yaml").read_text())
    expected["q"]["hidden"], expected["behavior"]["fit"]["batch"] = 128, 7
    assert yaml.safe_load(path.read_text()) == expected


def test_the_picture_in_the_docs_is_dvc_dags():
    command = [sys.executable, "-m", "dvc", "dag", "--mermaid", "report@gridworld-1000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = dict(re.findall(r'(node\d+)\["(\w+)@', done))
    edges = {(names[a], names[b]) for a, b in re.findall(r"(node\d+)-->(node\d+)", done)}
    picture = re.search(r"```mermaid\n(.*?)```", (ROOT / "docs" / "pipeline.md").read_text(), re.DOTALL)[1]
    assert set(re.findall(r"(\w+) --> (\w+)", picture)) == edges
