"""The choice of hyperparameters."""

import numpy as np
import yaml

from tasks import select

PARAMS = """# comment
targets:
  hidden: 1             # another section's
q:
  hidden: 64
  learning_rate: 0.01    # falls
  batch: 512

q_hat:
  hidden: 64
  learning_rate: 0.01    # falls
  batch: 512

behavior:
  fit:
    hidden: 64
    learning_rate: 0.01  # as above
    batch: 512
"""


def test_the_smallest_network_then_rate_within_one_percent_of_the_best():
    errors = {(64, 1e-3): 1.2, (64, 1e-2): 1.009, (128, 1e-2): 1.0, (256, 1e-2): 1.001}
    assert select.choose(errors) == (64, 1e-2)
    assert select.choose({**errors, (64, 1e-4): 1.0095}) == (64, 1e-4)
    assert select.choose({**errors, (256, 1e-2): 0.9}) == (256, 1e-2)


def test_scores_are_multiples_of_the_best_of_the_same_data():
    """One environment's errors are a thousand times the other's: each counts alike."""
    found = {}
    for env, size in (("a", 1.0), ("b", 1000.0)):
        found[env, 0, (64, 1e-3)] = (size, 0.0)
        found[env, 0, (128, 1e-3)] = ((2 if env == "a" else 8) * size, 0.0)
    scores = select.scores(found)
    np.testing.assert_allclose([scores[64, 1e-3], scores[128, 1e-3]], [1, 4])


def test_the_choice_is_written_and_nothing_else_changes(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text(PARAMS)
    select.write(path, (128, 1e-4))
    expected = PARAMS.replace("hidden: 64", "hidden: 128").replace("learning_rate: 0.01 ", "learning_rate: 0.0001 ")
    assert path.read_text() == expected
    found = yaml.safe_load(path.read_text())
    assert (
        found["behavior"]["fit"] == found["q_hat"] == found["q"] == {"hidden": 128, "learning_rate": 1e-4, "batch": 512}
    )


def test_1e_05_stays_a_number(tmp_path):
    """YAML reads 1e-05 as a text."""
    path = tmp_path / "params.yaml"
    path.write_text(PARAMS)
    select.write(path, (64, 1e-5))
    assert yaml.safe_load(path.read_text())["q"]["learning_rate"] == 1e-5


def test_without_offline_data_it_says_what_to_run(tmp_path, capsys):
    assert select.main(["--data", str(tmp_path), "--params", str(tmp_path / "params.yaml")]) == 2
    err = capsys.readouterr().err
    folder = tmp_path / "offline" / "gridworld-1000" / "group-00"
    assert err == f"select: {folder}: no such folder, expected the stage `offline` to have run\n"
