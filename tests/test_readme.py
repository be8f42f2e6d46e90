"""What README and docs show is what the commands give."""

import contextlib
import importlib
import importlib.util
import io
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml

from manyfold import cli
from tasks import studies, study

ROOT = Path(__file__).parents[1]
PAGES = {str(path.relative_to(ROOT)): path for path in (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")))}
TEXTS = {name: path.read_text() for name, path in PAGES.items()}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PICTURE = re.compile(r"!\[.*?\]\(([^)\s]+)\)")
STUDIES = studies.names()
STAGES = tuple(yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"])


def blocks(text, language):
    """The code of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def prose(text):
    """A page without its code."""
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def run(code):
    """The names of an example, and what it printed."""
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, names)
    return names, printed.getvalue().splitlines()


# --- examples ---------------------------------------------------------------------------------------------------------


def test_the_readme_is_one_screen():
    assert len(TEXTS["README.md"].encode()) <= 8000


def test_the_readmes_example_prints_what_it_says():
    (code,), (said,) = blocks(TEXTS["README.md"], "python"), blocks(TEXTS["README.md"], "text")
    _, printed = run(code)
    shown = said.strip("\n").splitlines()
    assert len(printed) == len(shown) == 12
    assert printed[:2] == shown[:2]
    for one, other in zip(printed[2:-2], shown[2:-2], strict=True):  # another machine rounds matrix products otherwise
        cells, claimed = (re.findall(r"[\d.]+", line) for line in (one, other))
        np.testing.assert_allclose([float(x) for x in claimed], [float(x) for x in cells], rtol=0.1)
        _, value, low, high, _, _, relative, _ = map(float, cells)
        assert low < value < high
        assert relative < 0.1
    assert printed[-2].startswith("policy 7 is the best, with 0.95 confidence.")


def test_the_librarys_example_designs_a_behavior_policy_and_estimates_every_policy():
    code, *_ = blocks(TEXTS["docs/library.md"], "python")
    names, printed = run(code)
    found, truth = names["found"], names["truth"]
    assert (np.abs(found.mean - truth) < 4 * np.hypot(found.standard_error, names["error"])).all()
    assert printed[0].startswith("Expect ")


def test_the_saved_policies_of_the_example_are_the_modules():
    *_, code = blocks(TEXTS["docs/howto/policies.md"], "python")
    _, printed = run(code)
    assert float(printed[0]) < 1e-6


@pytest.mark.filterwarnings("ignore")  # torch's exporter uses what torch deprecates
def test_the_exported_network_of_the_example_is_the_network(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, code, _ = blocks(TEXTS["docs/howto/policies.md"], "python")
    names, printed = run(code)
    assert printed[-1] == "('policy',) (1, 5, 2)"
    obs = np.random.default_rng(0).standard_normal((7, 4)).astype(np.float32)
    logits = names["network"](names["torch"].from_numpy(obs))
    np.testing.assert_allclose(names["policies"].probs(obs, 0)[0], logits.softmax(-1).detach(), atol=1e-6)


def test_the_pooled_example_plans_and_combines_two_stages():
    _, code, *_ = blocks(TEXTS["docs/library.md"], "python")
    names, printed = run(code)
    assert "240 episodes" in "".join(printed)
    np.testing.assert_allclose(names["plan"].alpha.sum(), 1)
    assert (names["result"].variance < names["result"].on_policy_variance).all()


def test_the_exact_example_estimates_every_policy():
    *_, code = blocks(TEXTS["docs/library.md"], "python")
    names, _ = run(code)
    found, exact, mdp = names["found"], names["exact"], names["mdp"]
    assert (np.abs(found.mean - exact.values(mdp, names["policies"])) < 4 * found.standard_error).all()


def test_the_example_of_logged_data_fits_a_q_and_uses_it():
    (code,) = blocks(TEXTS["docs/howto/data.md"], "python")
    _, printed = run(code)
    assert printed[0].startswith("2,500 rows")
    assert printed[1] == "Pendulum-v1: 3 policies, stochastic; pooled evaluation"


@pytest.mark.parametrize(
    ("page", "first", "best"),
    [
        ("environments", "Room: 2 policies, stochastic; pooled evaluation", "sharp"),
        ("policies", "CartPole-v1: 2 policies, stochastic; pooled evaluation", "rule"),
        ("robot", "Robot: 2 policies, stochastic; pooled evaluation", "new"),
        ("densities", "Pendulum-v1: 3 policies, greedy; plain returns from common starts", "weak"),
    ],
)
def test_the_examples_of_the_how_to_pages_end_with_a_table(page, first, best):
    code, *_ = blocks(TEXTS[f"docs/howto/{page}.md"], "python")
    _, printed = run(code)
    assert printed[0] == first
    assert printed[2].startswith(f"{best} ")


def test_the_coins_of_the_explanation_print_what_it_says():
    (code,), (said,) = (blocks(TEXTS["docs/explain/sharing.md"], language) for language in ("python", "text"))
    names, printed = run(code)
    assert printed == said.splitlines()
    assert names["mixture"].max() <= 3 + 1e-12
    np.testing.assert_allclose((names["mixture"] / 3).sum(0), 1)  # every episode is divided


def test_every_page_with_an_example_is_known_to_these_tests():
    own = [f"docs/howto/{name}.md" for name in ("data", "densities", "environments", "policies", "robot")]
    theirs = ["docs/tutorial.md", "docs/evaluate.md"]  # run by tests/test_tutorial.py, where there are checkpoints
    known = {"README.md", "docs/library.md", "docs/explain/sharing.md", *own, *theirs}
    assert {name for name in TEXTS if blocks(TEXTS[name], "python")} == known


def test_the_study_in_the_docs_is_one_that_can_be_read(tmp_path):
    own = yaml.safe_load(blocks(TEXTS["docs/pipeline.md"], "yaml")[0])["studies"]
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    params["studies"] |= own
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    study = studies.read("cartpole", tmp_path / "params.yaml")
    assert studies.make_environment(study, 0).horizon == 100
    assert study.source("targets") == tmp_path / "studies" / "cartpole" / "policies"
    assert study.source("offline") is None
    assert study.section("evaluate")["pool"] == 3000


# --- tables and numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "table"),
    [
        ("reproducing", "report/all/relative_variance.md"),
        ("reproducing", "report/all/episodes_to_match.md"),
        ("reproducing", "report/all/cells.md"),
        ("robots", "report/all/policies.md"),
        ("robots", "accuracy/hopper.md"),
        ("robots", "apart/hopper.md"),
        ("benchmarks", "door/evaluate_policy.md"),
        ("benchmarks", "bench/peers.md"),
        ("benchmarks", "scale/policies.md"),
        ("benchmarks", "scale/time.md"),
        ("benchmarks", "scale/fits.md"),
        ("benchmarks", "scale/subsets.md"),
        ("benchmarks", "scale/clusters.md"),
        ("experiments", "apart/all.md"),
        ("experiments", "coverage/all.md"),
        ("experiments", "coverage/aims.md"),
        ("experiments", "coverage/trust.md"),
        ("experiments", "coverage/checkpoints/trust.md"),
        ("experiments", "coverage/checkpoints/bounded.md"),
        ("experiments", "select/grid.md"),
        ("experiments", "accuracy/gridworld-1000.md"),
        ("experiments", "accuracy/gridworld-27000.md"),
    ],
)
def test_tables_are_those_that_commands_wrote(page, table):
    assert (ROOT / "data" / table).read_text().strip() in TEXTS[f"docs/{page}.md"]


def test_the_readmes_table_is_gridworld_1000s():
    lines = (ROOT / "data" / "report" / "all" / "relative_variance.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| Gridworld 1,000")]
    assert len(rows) == 2
    assert "\n".join((*lines[:2], *rows)) in TEXTS["README.md"]


def test_the_readmes_far_apart_policies_are_the_tables():
    lines = (ROOT / "data" / "apart" / "all.md").read_text().splitlines()
    header, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    (far,) = (dict(zip(header, row, strict=True)) for row in rows if row[:2] == ["Gridworld 1,000", "150,000"])
    for name in ("MPE", "MPE + q baseline", "Pooled"):
        assert far[name].split()[0] in TEXTS["README.md"].replace(",", "")
    assert far["Pooled"].split()[1].strip("()") + " for the worst" in " ".join(TEXTS["README.md"].split())


def test_the_readmes_episodes_are_the_reports():
    verdict = (ROOT / "data" / "report" / "gridworld-1000" / "verdict.txt").read_text()
    pooled, mpe, baseline = re.findall(r"(\d+) episodes", verdict)
    assert f"*Pooled* (ours) needs {pooled}" in TEXTS["README.md"]
    assert f"{mpe} episodes of one behavior policy match 1,000" in TEXTS["README.md"]
    assert f"a baseline (ours) {baseline} do" in TEXTS["README.md"]


def test_results_of_earlier_code_are_marked():
    """As long as metrics.json says that another commit computed them."""
    marks = (ROOT / "data" / "evaluate").glob("*/metrics.json")
    earlier = {yaml.safe_load(path.read_text()).get("computed_by", "").split(",")[0] for path in marks} - {""}
    for commit in earlier:
        for page in ("README.md", "docs/reproducing.md", "docs/robots.md"):
            assert commit in TEXTS[page], page


# --- links, commands and names ----------------------------------------------------------------------------------------


def anchors(text):
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", TEXTS)
def test_links_and_pictures_are_there(name):
    for link in LINK.findall(prose(TEXTS[name])):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (PAGES[name].parent / path).resolve() if path else PAGES[name]
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text()), link


def test_every_page_is_linked_from_the_readme_or_the_home_page():
    linked = {(PAGES[page].parent / link).resolve() for page in ("README.md", "docs/index.md") for link in links(page)}
    assert set(PAGES.values()) <= {*linked, ROOT / "README.md"}
    assert len([picture for text in TEXTS.values() for picture in PICTURE.findall(text)]) >= 8


def links(page):
    return [link.partition("#")[0] for link in LINK.findall(prose(TEXTS[page])) if "://" not in link]


MAKERS = {  # of the pictures in each folder of data/, and of MLflow's own
    "accuracy": "python -m tasks.accuracy",
    "apart": "make apart|python -m tasks.apart",
    "calibrate": "make\\s+calibrate",
    "coverage": "make coverage",
    "door": "python -m benchmarks.growth",
    "scale": "python -m\\s+benchmarks.policies",
    "report": "make report|dvc repro behavior@",
    "docs": "make ui",
}


def test_every_picture_is_made_by_a_command_that_its_page_names():
    for page, text in TEXTS.items():
        for link in PICTURE.findall(text):
            path = (PAGES[page].parent / link).resolve().relative_to(ROOT)
            folder = path.parts[1 if path.parts[0] == "data" else 0]
            assert folder in MAKERS, f"{link} of {page}: add the command that makes it to MAKERS"
            assert re.search(MAKERS[folder], text), (page, link)


def is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_the_commands_of_the_docs_are_taken_by_the_command():
    """Every line that starts with `manyfold`: its options exist and are complete."""
    shown = [code for text in TEXTS.values() for code in blocks(text, "sh")]
    lines = [line for code in shown for line in re.findall(r"^manyfold .*$", code, re.MULTILINE)]
    assert len(lines) >= 7
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        parser = study.parser() if words[0] == "study" else cli.parser()
        assert parser.parse_args(words[1:] if words[0] == "study" else words)


@pytest.mark.parametrize("name", TEXTS)
def test_commands_have_modules_studies_and_make_targets(name):
    """Those of 0.1.0 stand in the left column of a table of the changes."""
    text = re.sub(r"^\| `[^|]*\|", "|", TEXTS[name], flags=re.MULTILINE) if name == "CHANGELOG.md" else TEXTS[name]
    for module in re.findall(r"python -m\s+([\w.]*\w)", text):
        assert is_module(module), module
    for asked in re.findall(rf"(?:--study |-p study=|\b(?:{'|'.join(STAGES)})@)\s*([a-z][\w-]+)", text):
        assert asked in (*STUDIES, "cartpole", "mine"), asked  # which docs/pipeline.md adds
    assert not re.search(r"python -m (tasks|flows)\.(?!watch\b)\S* [^`\n]*--env\b", text)
    assert not re.search(r"flows\.(targets|offline|q|q_hat|behavior|evaluate|report)\b", text)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"(?:`|^)make\s([a-z][\w-]*)", text, re.MULTILINE):
        assert target in targets, target


def test_deployments_are_those_of_prefect_yaml():
    deployed = {item["name"] for item in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}
    asked = re.findall(r"deployment run \w+/(\w+)", TEXTS["docs/pipeline.md"])
    assert set(asked) | {"nightly"} == deployed


def test_the_benchmarks_of_the_docs_exist_and_are_all_of_them():
    named = set(re.findall(r"`benchmarks\.(\w+)`", TEXTS["docs/benchmarks.md"]))
    helpers = {"__init__", "__main__", "show", "robots", "stable_baselines"}
    assert named == {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - helpers


def resolve(name):
    """What a dotted name inside manyfold is."""
    found = importlib.import_module("manyfold")
    for i, part in enumerate(parts := name.split(".")):
        if not hasattr(found, part):
            importlib.import_module(f"manyfold.{'.'.join(parts[: i + 1])}")
        found = getattr(found, part)
    return found


def test_the_functions_of_the_papers_equations_exist():
    tables = [line for line in TEXTS["docs/paper-to-code.md"].splitlines() if line.startswith("|")]
    named = re.findall(r"`([a-z][\w]*(?:\.\w+)+)", "\n".join(tables))
    assert len(named) > 35
    for name in named:
        assert callable(resolve(name)) or resolve(name), name


@pytest.mark.parametrize("name", TEXTS)
def test_public_names_and_files_exist(name):
    for public in re.findall(r"\bmf\.(\w+(?:\.\w+)*)", TEXTS[name]):
        resolve(public)
    for path in re.findall(r"`((?:manyfold|tasks|flows|tests|benchmarks)/[\w/]*\.py)`", TEXTS[name]):
        assert (ROOT / path).exists(), path


def test_the_names_that_contributors_are_told_exist():
    text = TEXTS["CONTRIBUTING.md"]
    for name in re.findall(r"`manyfold\.([a-z_]+(?:\.\w+)+)`", text):
        resolve(name)
    defined = {
        "tasks/studies.py": "ENVIRONMENTS",
        "manyfold/policies/__init__.py": "KINDS",
        "tests/policy_kinds.py": "KINDS",
        "manyfold/estimate/methods.py": "METHODS",
        "manyfold/estimate/registry.py": "ESTIMATORS",
        "manyfold/train/targets.py": "config",
        "manyfold/train/vector_envs.py": "policy_spec",
    }
    for path, word in defined.items():
        assert path in text
        assert re.search(rf"^(def )?{word}\b", (ROOT / path).read_text(), re.MULTILINE), path


def test_the_citation_is_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == importlib.import_module("manyfold").__version__
    assert f"## {cited['version']}" in TEXTS["CHANGELOG.md"]
    assert cited["references"][0]["title"] == "Efficient Multi-Policy Evaluation for Reinforcement Learning"


def test_commits_are_checked_by_the_tools_of_the_environment():
    """By local hooks, which download nothing; `make lint` runs the same three."""
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    entries = [hook["entry"] for hook in repos[0]["hooks"]]
    assert [entry.split()[0] for entry in entries] == [".venv/bin/ruff", ".venv/bin/ruff", ".venv/bin/mypy"]
