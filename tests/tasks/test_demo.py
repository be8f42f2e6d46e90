import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from manyfold import exact
from manyfold.gridworld import Gridworld
from tasks import demo

ROOT = Path(__file__).parents[2]


def run(*arguments):
    command = [sys.executable, "-m", "tasks.demo", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_demo_prints_its_table_and_draws_its_figure(tmp_path):
    done = run("--m", "4", "--policies", "3", "--groups", "2", "--out", str(tmp_path / "new"))
    assert done.returncode == 0, done.stderr
    assert "MPE + q baseline" in done.stdout
    assert str(tmp_path / "new" / "relative_variance.png") in done.stdout
    assert sorted(f.name for f in (tmp_path / "new").iterdir()) == [
        "relative_variance.md",
        "relative_variance.png",
        "relative_variance.svg",
    ]
    assert (tmp_path / "new" / "relative_variance.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_holds_the_exact_numbers():
    found = demo.relative_variances(4, 3, 2)
    rows = {row[0]: row for row in demo.table(found)}
    mdp = Gridworld.draw(4, 0).to_mdp()
    policies = demo.checkpoints(mdp, 3)[demo.FIRST :: demo.SHOWN][:3]
    expected = exact.relative_variances(exact.estimator_variances(mdp, policies))
    shown = demo.SPACINGS.index(demo.SHOWN)
    assert found["mpe"][0, shown] == expected["mpe"]
    assert rows["MPE (the paper's)"][1] == f"{np.median(found['mpe'][:, shown]):.3f}"
    assert (found["best"] <= found["mpe"] * (1 + 1e-9)).all()


def test_the_policies_improve_along_the_path():
    mdp = Gridworld.draw(5, 0).to_mdp()
    assert (np.diff(exact.values(mdp, demo.checkpoints(mdp, 2))) > 0).all()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--m", "0"], "demo: m is 0, expected a whole number of at least 1: the width, height and horizon\n"),
        (["--policies", "0"], "demo: --policies is 0, expected a whole number of at least 1\n"),
        (["--groups", "-3"], "demo: --groups is -3, expected a whole number of at least 1\n"),
    ],
)
def test_bad_arguments_get_one_line_and_exit_code_2(arguments, line, tmp_path):
    done = run(*arguments, "--out", str(tmp_path / "out"))
    assert (done.returncode, done.stderr) == (2, line)
    assert not (tmp_path / "out").exists()
