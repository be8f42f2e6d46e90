"""docs/tutorial.md as a new user would follow it: its files are saved, its commands are run, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
STEP = re.compile(r"(?:Save this as `(\w+\.py)`[^`]*?\n\n)?```(python|sh|text)\n(.*?)```", re.DOTALL)


def shell(code, folder, expected=0):
    """What a command of the page printed."""
    here = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = os.environ | {"PATH": here, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TZ": "UTC"}
    done = subprocess.run(
        ["bash", "-e", "-c", code], cwd=folder, env=given, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == expected, (code, done.stdout, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The folder, and for each command of the page what it printed and what the page shows below it, if anything."""
    folder, said = tmp_path_factory.mktemp("tutorial"), []
    for name, kind, code in STEP.findall(PAGE):
        if kind == "python":
            assert name, "a file without a name"
            (folder / name).write_text(code)
        elif kind == "text":
            said[-1][2] = code
        elif "pip install" not in code:
            said.append([code, shell(code, folder), None])
    return folder, said


def rows(text):
    """Names of the policies, and their values."""
    found = re.findall(r"^(ppo_\d+_steps) +(-?[\d.]+) ", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_what_the_page_shows_is_what_the_commands_print(followed):
    """Training rounds otherwise on another machine, so numbers are compared to a third, and ties may change places."""
    shown = [(printed, page) for _, printed, page in followed[1] if page]
    assert len(shown) == 3
    for printed, page in shown[:2]:
        episodes = r"\d+(?= short episodes)"
        assert re.sub(episodes, "", printed) == re.sub(episodes, "", page)
    printed, page = shown[2]
    values, claimed = rows(printed), rows(page)
    assert values.keys() == claimed.keys()
    assert all(abs(values[name] - claimed[name]) <= claimed[name] / 3 for name in claimed)
    for line, other in zip(printed.splitlines()[:2], page.splitlines()[:2], strict=True):  # title and header
        assert line.split() == other.split()
    assert "160 episodes, " in printed


def test_every_policy_is_shared(followed):
    """Relative variances are well below 1, effective episodes above a policy's own 20."""
    (printed,) = (said for code, said, _ in followed[1] if "--episodes 160" in code)
    found = re.findall(r"^ppo_.*?(?:<|>)?0?\.\d+ +(0\.\d{3}) +(\d+)", printed, re.MULTILINE)
    assert len(found) == 8
    assert all(float(relative) < 0.7 and int(effective) > 20 for relative, effective in found)


def test_the_page_is_written_and_stopping_says_why(followed):
    folder, said = followed
    assert "ppo_8192_steps" in (folder / "report.html").read_text()
    (stopped,) = (printed for code, printed, _ in said if "--stop best" in code)
    assert re.search(r"Stopped: the best policy is known\.|The budget of 1,000 episodes is spent\.", stopped)


def test_the_store_knows_the_ninth_policy_from_the_others(followed):
    first, second = (printed for code, printed, _ in followed[1] if "--store evals/" in code)
    assert len(rows(first)) == 8
    assert len(rows(second)) == 9
    stored, total = (
        int(re.search(r"^([\d,]+) episodes, ", said, re.MULTILINE)[1].replace(",", "")) for said in (first, second)
    )
    assert f"; {stored:,} stored episodes" in second.splitlines()[0]
    assert total - stored < stored  # nine policies are not run again


def test_the_python_of_the_next_page_does_the_same(followed):
    """docs/evaluate.md, with these checkpoints."""
    folder, _ = followed
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "evaluate.md").read_text(), re.DOTALL)[1]
    (folder / "evaluate.py").write_text(code.replace("episodes=200", "episodes=90"))
    printed = shell(f"{sys.executable} evaluate.py", folder)
    assert printed.startswith("CartPole-v1: 9 policies, stochastic; pooled evaluation\n")
    assert len(rows(printed)) == 9


@pytest.mark.parametrize(("current", "new", "code"), [(1024, 8192, 0), (8192, 1024, 1)])
def test_the_job_of_the_ci_page_passes_where_the_candidate_is_better(followed, current, new, code, tmp_path):
    page = (ROOT / "docs" / "howto" / "ci.md").read_text()
    job = yaml.safe_load(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])["jobs"]["gate"]
    (step,) = (step["run"] for step in job["steps"] if "manyfold gate" in step.get("run", ""))
    (tmp_path / "policies").mkdir()
    for name, steps in (("current", current), ("new", new)):
        checkpoint = followed[0] / "checkpoints" / f"ppo_{steps}_steps.zip"
        (tmp_path / "policies" / f"{name}.zip").write_bytes(checkpoint.read_bytes())
    shell(step, tmp_path, expected=code)
    assert {"gate.json", "gate.html"} <= {path.name for path in tmp_path.iterdir()}
