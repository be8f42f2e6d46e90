"""Counting whether intervals hold: a tiny run of every kind of set."""

import json
import shutil

import numpy as np
import pytest
from scipy import stats

from manyfold.estimate import intervals
from tasks import apart, coverage, studies
from tasks.apart import Amount, Training
from tests.tasks.conftest import GRID

FILES = ("all.md", "trust.md", "aims.md", "bounded.md", "all.json", "all.svg")


@pytest.fixture
def small(monkeypatch):
    """One group of three policies, 100 episodes at most."""
    monkeypatch.setattr(studies, "read", lambda name: GRID)
    monkeypatch.setattr(coverage, "POINTS", (50, 100))
    monkeypatch.setattr(coverage, "POOL", 360)
    monkeypatch.setattr(coverage, "BATCH", 2)
    monkeypatch.setattr(apart, "K", 2)
    monkeypatch.setattr(apart, "TRAININGS", {"CartPole": Training("CartPole-v1", 20, (4, 1), 5)})
    monkeypatch.setattr(apart, "TRAINED", Amount(1, 20, 20, 1, 1))


@pytest.fixture
def folder(data, tmp_path):
    """The data folder of one group, whose results go elsewhere."""
    for path in data.iterdir():
        if not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


def arguments(folder, **more):
    given = {"runs": 3, "groups": 1, "workers": 1, "data": folder, **more}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def written(folder):
    return {name: (folder / "coverage" / name).read_bytes() for name in FILES}


def test_everything_is_counted_and_what_was_cut_off_resumes_to_the_same_bytes(small, folder, capsys):
    pytest.importorskip("stable_baselines3")
    assert coverage.main(arguments(folder)) == 0
    first = written(folder)
    assert not {b"NaN", b"Infinity"} & set(first["all.json"].replace(b",", b" ").split())  # JSON has neither
    found = json.loads(first["all.json"])
    assert len(found["sets"]) == 4
    for one in found["sets"].values():
        for name in ("on_policy", "mpe", "mpe_baseline", "pooled"):
            assert all(0 <= x <= 1 for kind in coverage.FIXED for x in one[name][kind])
    bounded = [one.get("bounded") for one in found["sets"].values()]
    assert [one is not None for one in bounded] == [False, False, False, True]
    header, _, *rows = first["bounded.md"].decode().splitlines()
    assert len(rows) == 3
    assert header.startswith("| policies of | intervals | 50 episodes | 100 episodes |")
    header, _, *rows = first["all.md"].decode().splitlines()
    assert header.startswith("| policies of | runs | estimator | single | simultaneous | differences | best known")
    assert len(rows) == 16
    assert (folder / "coverage" / "all.png").stat().st_size > 10_000
    work = next((folder / ".work" / "coverage").iterdir())
    kept = {path: path.stat().st_mtime_ns for path in work.glob("*.safetensors")}
    gone = [path for path in kept if path.name.startswith(("study", "checkpoints"))]
    assert len(gone) == 2
    for path in gone:  # as if the command had been killed before they were written
        path.unlink()
    (work / ".1.random-000.safetensors").write_bytes(b"half")
    shutil.rmtree(folder / "coverage")
    assert coverage.main(arguments(folder)) == 0
    assert written(folder) == first
    assert all(path.stat().st_mtime_ns == kept[path] for path in kept if path not in gone)
    shutil.rmtree(work)
    assert coverage.main(arguments(folder)) == 0
    assert written(folder) == first


def test_one_kind_alone_goes_to_a_folder_of_its_own(small, folder):
    assert coverage.main(arguments(folder, only="random")) == 0
    assert [path.name for path in (folder / "coverage").iterdir()] == ["random"]
    assert list(json.loads((folder / "coverage" / "random" / "all.json").read_text())["sets"]) == [
        "Random MDPs, heavy tails"
    ]


def test_bounded_intervals_hold_where_the_sample_has_seen_nothing():
    """Two policies, one of which always had 10 of 10 and is worth 9.9: by hand, and by Student's t of the other."""
    own = np.array([[10.0, 10.0, 10.0, 10.0], [2.0, 4.0, 6.0, 8.0]])
    x = np.zeros((2, 8))
    x[0, ::2], x[1, 1::2] = own
    truth = np.array([9.9, 5.0])
    columns = np.random.default_rng(0).standard_normal((6, 2, 8))  # of pooled evaluation, which is not looked at
    values = {("targets", "pdis"): x, ("targets", "pooled"): columns}
    bounded, on_policy, _ = coverage.by_bounds(values, np.array([8]), truth, (0.0, 10.0))
    assert bounded[0][:2] == [1, 1]
    assert on_policy[0][:2] == [0.5, 0]
    t = stats.t.isf(0.025, 3) * np.std(own[1], ddof=1) / 2
    np.testing.assert_allclose(on_policy[0][2], t / 2)  # the other has no width
    low, high = intervals.bounded(list(own), 0, 10)
    np.testing.assert_allclose(bounded[0][2], (high - low).mean() / 2)


def test_the_tied_set_has_its_best_policy_twice(small, folder):
    job = coverage.Job("", "tied", 0, 1, GRID, folder, folder)
    plain, tied = coverage.study_group(job), coverage.study_group(job, tied=True)
    assert np.sort(tied.truth)[-2] == tied.truth.max() == plain.truth.max()
    assert len(tied.truth) == len(plain.truth)
    again = coverage.study_group(job, tied=True)
    for key, x in tied.run(1).items():
        np.testing.assert_array_equal(x, again.run(1)[key])


def test_mpes_weights_are_heavy_on_the_random_sets(small, folder):
    job = coverage.Job("", "random", 0, 1, GRID, folder, folder)
    log_w = coverage.random_set(job).run(0)["mu", "log_weights"]
    w = np.exp(log_w)
    effective = w.sum(-1) ** 2 / (w**2).sum(-1)
    assert np.median(effective) < w.shape[-1] / 10


@pytest.mark.parametrize("name", ["runs", "groups", "workers"])
def test_bad_arguments_are_one_line(name, small, folder, capsys):
    assert coverage.main(arguments(folder, **{name: 0})) == 2
    assert capsys.readouterr().err.startswith(f"coverage: --{name} is 0, expected a whole number from 1 to 10,000")
    assert not (folder / "coverage").exists()


def test_more_groups_than_there_are_and_missing_stages_are_one_line(small, folder, tmp_path_factory, capsys):
    assert coverage.main(arguments(folder, groups=2)) == 2
    assert capsys.readouterr().err == "coverage: --groups is 2, expected at most the 1 groups of gridworld-1000\n"
    assert coverage.main(arguments(tmp_path_factory.mktemp("empty"))) == 2
    assert "expected the stage `targets` to have run" in capsys.readouterr().err
