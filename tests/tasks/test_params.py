import re

import pytest
import yaml

from tasks import studies
from tasks.params import ROOT, check_names, read, runner

STAGES = {stage: {} for stage in studies.STAGES}


def test_missing_parameters_are_named():
    with pytest.raises(ValueError, match="targets.width is missing"):
        check_names("targets", {"groups": 1}, {"groups", "width"})


def test_yaml_that_is_broken_is_named_by_line_and_column(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text("a: 1\nb: [1\nc: 2\n")
    with pytest.raises(ValueError, match=r"params.yaml, line 3, column 2: not YAML"):
        read(path)


def test_a_section_that_stands_twice_is_refused(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text("studies: {a: 1}\nq: {}\nstudies: {b: 1}\n")
    with pytest.raises(ValueError, match=r"params.yaml, line 3, column 1: not YAML \('studies' stands twice\)"):
        read(path)


def test_numbers_in_scientific_notation_are_numbers(tmp_path):
    """YAML 1.1 reads 1e-3 as text."""
    path = tmp_path / "params.yaml"
    path.write_text("q: {rate: 1e-3, list: [2E5, -1.5e+2], name: e5, other: 1e}")
    found = read(path)
    assert found == {"q": {"rate": 0.001, "list": [200000, -150], "name": "e5", "other": "1e"}}
    assert isinstance(found["q"]["list"][0], int)  # a count may be written so


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("runner: cloud", "params.yaml: runner is 'cloud', expected local or dask"),
        ("{}", "params.yaml: runner is None, expected local or dask"),
        ("[]", "params.yaml: expected sections, found none"),
        ("runner: dask", "params.yaml: scheduler is '', expected its address such as tcp://10.0.0.1:8786"),
    ],
)
def test_a_runner_that_is_not_there_is_refused(tmp_path, text, line):
    (tmp_path / "params.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(line)):
        runner(tmp_path / "params.yaml")


def test_a_study_overrides_the_stages_defaults():
    hopper, ant = studies.read("hopper"), studies.read("ant")
    assert (hopper.params["evaluate"]["pool"], ant.params["evaluate"]["pool"]) == (3000, 1000)
    assert hopper.section("offline") == {"episodes": 3000, "epsilons": [0.1, 0.5]}
    assert hopper.title == "Hopper"
    assert hopper.source("targets") is None
    assert studies._merged({"a": 1, "fit": {"x": 1, "y": 2}}, {"fit": {"y": 3}}) == {"a": 1, "fit": {"x": 1, "y": 3}}


def test_the_papers_seven_are_there():
    assert len([name for name in studies.names() if studies.read(name).paper]) == 7


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("walkr", r"unknown study 'walkr'; did you mean 'walker'\? \(params.yaml has: gridworld-1000, "),
        ("CartPole", r"unknown study 'CartPole' \(params.yaml has: "),  # nothing is near
    ],
)
def test_an_unknown_study_gets_a_near_name_only_if_it_is_near(name, line):
    with pytest.raises(ValueError, match=line):
        studies.read(name)


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ("{}", "expected a section 'studies.mine.targets', found None"),
        ("{targts: {}}", "studies.mine.targts is unknown, expected behavior, environment"),
        ("{STAGES, environment: {atari: {}}}", "studies.mine.environment is {'atari': {}}, expected one of gridworld"),
        ("{STAGES}", "studies.mine.environment is None, expected one of gridworld, mujoco, gymnasium"),
    ],
)
def test_a_bad_section_is_one_line(tmp_path, section, line):
    stages = ", ".join(f"{stage}: {{}}" for stage in studies.STAGES)
    text = "\n".join(f"{stage}: {{}}" for stage in studies.STAGES)
    (tmp_path / "params.yaml").write_text(f"{text}\nstudies: {{mine: {section.replace('STAGES', stages)}}}")
    with pytest.raises(ValueError, match=re.escape(line)):
        studies.read("mine", tmp_path / "params.yaml")


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"gridworld": {"n": 3}}, r"environment.gridworld: .*unexpected keyword argument 'n'"),
        ({"gridworld": 3}, "environment.gridworld is 3, expected its arguments"),
        (
            {"gridworld": {"m": 10**9}},
            r"m \(the width, height and horizon\) is 1000000000, expected a whole number from 1",
        ),
        ({"mujoco": {"robot": "hoper"}}, "unknown robot 'hoper', expected one of ant, hopper"),
        ({"mujoco": {"robot": "hopper", "companion": "median"}}, "companion is 'median', expected mean or sample"),
        ({"gymnasium": {"id": "NoSuch-v0"}}, "environment 'NoSuch-v0': "),
        ({"gymnasium": {}}, "expected either id or factory"),
        ({"gymnasium": {"factory": "json:nothing"}}, "factory 'json:nothing': .*expected module:function"),
        ({"gymnasium": {"id": "Pendulum-v1"}}, "actions are Box.*expected a Discrete space"),
    ],
)
def test_an_environment_that_cannot_be_made_is_one_line(environment, line):
    study = studies.Study("mine", "mine", environment, STAGES)
    with pytest.raises(ValueError, match=line):
        studies.make_environment(study, 0)


def test_an_environment_may_come_from_a_factory():
    arguments = {"factory": "gymnasium:make", "kwargs": {"id": "FrozenLake-v1"}, "horizon": 7}
    env = studies.make_environment(studies.Study("mine", "mine", {"gymnasium": arguments}, STAGES), 0)
    assert (env.n_states, env.n_actions, env.horizon) == (16, 4, 7)


@pytest.mark.parametrize("name", [".", "..", "/tmp/x", "../docs", "a/b", "a b", "", "a[b]*", "-x", "x" * 101])
def test_a_name_that_is_no_folder_of_its_own_is_refused(tmp_path, name):
    """A study's name becomes a folder whose old content is replaced."""
    (tmp_path / "params.yaml").write_text(yaml.safe_dump({"studies": {name: {}}}))
    with pytest.raises(ValueError, match="expected a name of letters, digits, dots, dashes and _"):
        studies.names(tmp_path / "params.yaml")


def test_only_our_own_two_modules_are_sources_that_are_code():
    own = {"targets": {"source": "my_policies.py"}, "offline": {"source": "manyfold/data/offline.py"}}
    study = studies.Study("mine", "mine", {"gridworld": {"m": 3}}, {**STAGES, **own})
    assert study.source("offline") is None
    with pytest.raises(ValueError, match=r"targets.source is 'my_policies.py', expected manyfold/train/ppo.py or your"):
        study.source("targets")


def test_an_override_of_another_type_is_left_to_the_stages_own_check():
    assert studies._merged({"alpha": 0.0}, {"alpha": {"x": 1}}) == {"alpha": {"x": 1}}


def test_a_section_that_contains_itself_is_one_line(tmp_path):
    (tmp_path / "params.yaml").write_text("a: &a {x: *a}")
    with pytest.raises(ValueError, match="params.yaml: a section that contains itself"):
        read(tmp_path / "params.yaml")


def test_params_yaml_is_beside_the_code():
    assert (ROOT / "params.yaml").exists()
