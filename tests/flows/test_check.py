"""The command that tells whether results are what the code computes."""

import json

import pytest

from tests.projects import STUDY


def test_one_group_is_compared_byte_by_byte_with_what_was_accepted(project):
    """A change that touches no number passes; one that touches a number is found in its own stage and later ones."""
    source = project.folder / "tasks" / "evaluate.py"
    source.write_text(source.read_text() + "\n# a comment\n")
    done = project.python("flows.check", "--study", STUDY, "--group", "1")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert f"same    data/q_hat/{STUDY}/group-01/q_hat.safetensors" in said
    assert f"same    data/evaluate/{STUDY}/runs/group-01/runs.safetensors" in said
    assert said[-1].endswith("is the same to the last byte: `dvc commit` may accept the code.")
    project.set("offline:\n  episodes: 60", "offline:\n  episodes: 66")
    project.run("rm", "-r", str(project.data / "evaluate" / STUDY / "runs" / "group-00"))  # the cache has it
    done = project.python("flows.check", "--study", STUDY, "--group", "1")
    assert done.returncode == 2
    found = dict(line.split()[::-1] for line in done.stdout.splitlines())
    assert found[f"data/targets/{STUDY}/group-01/targets.safetensors"] == "same"
    assert found[f"data/offline/{STUDY}/group-01/transitions.parquet"] == "differs"
    assert found[f"data/q/{STUDY}/group-01/q.safetensors"] == "differs"
    assert done.stderr.startswith("check: ")
    assert "files of group 1 are not as before" in done.stderr


def test_a_group_that_is_not_there_is_one_line(project):
    done = project.python("flows.check", "--study", STUDY, "--group", "7")
    assert done.returncode == 2
    assert done.stderr.startswith(f"check: data/targets/{STUDY}/group-07: not there, expected results to compare with")


@pytest.mark.slow
def test_the_nightly_check_passes_when_the_committed_results_are_right(project):
    done = project.python("flows.check", "--study", STUDY)
    assert done.returncode == 0, done.stderr
    assert "numbers of metrics.json are the committed ones." in done.stdout


def test_the_nightly_check_finds_a_committed_number_that_is_not_computed(project):
    metrics = project.data / "evaluate" / STUDY / "metrics.json"
    found = json.loads(metrics.read_text())["relative_variance"]["mpe"]
    metrics.write_text(metrics.read_text().replace(str(found), "0.001", 1))
    project.commit()
    done = project.python("flows.check", "--study", STUDY)
    assert done.returncode == 2
    line = f"check: {STUDY}: relative_variance.mpe is {found}, expected the committed 0.001"
    assert done.stderr.splitlines()[-1] == line
