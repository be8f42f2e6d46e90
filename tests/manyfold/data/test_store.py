"""The store: what is kept, what counts, who may write, and what happens when somebody is killed."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import manyfold as mf
from benchmarks import newcomers
from manyfold import exact
from manyfold.data import episode_files
from manyfold.data.episode_files import Row, merge, save
from manyfold.data.store import Store
from manyfold.envs import Finite, GymnasiumEnvironment
from manyfold.estimate import collecting, stopping, stored
from manyfold.estimate.stored import Stored, identities
from manyfold.estimate.workers import Crew
from tests import checkpoints, doors

ROOT = Path(__file__).parents[3]


def world():
    return GymnasiumEnvironment(doors.make, doors.T, "walk")


def evaluate(folder, gains=doors.GAINS, episodes=120, **more):
    return mf.evaluate(world(), doors.policies(gains), episodes, store=folder, **more)


def open_store(folder, gains=doors.GAINS):
    return Stored(folder, world(), doors.policies(gains), 0, Crew())


def row(number, policy="a", n=2):
    x = np.arange(n, dtype=np.float64)
    return Row(policy, number, 7, x[:, None].astype(np.float32), x.astype(np.int64), x / 3, -x)


def test_what_is_read_is_what_was_written(tmp_path):
    store = Store(tmp_path, world())
    plan = store.plan({"a": 2, "b": 1}, seed=3)
    save(tmp_path, plan.id, [row(1, n=3), row(0, "b", 1)])
    save(tmp_path, plan.id, [row(0)])
    assert store.read(["a", "b"]) is None  # the plan has not ended
    assert store.counts() == {}
    store.finish(plan)
    assert store.counts() == {"a": 2, "b": 1}
    found = store.read(["b", "a"])
    assert found.who == ["b", "a", "a"]
    assert found.lengths.tolist() == [1, 2, 3]
    assert found.t.tolist() == [0, 0, 1, 0, 1, 2]
    assert found.rewards.tolist() == [0, 0, 1 / 3, 0, 1 / 3, 2 / 3]
    assert found.states.dtype == np.float32
    assert store.read(["a"]).who == ["a", "a"]
    assert store.read(["c"]) is None
    assert len(list((tmp_path / "episodes").iterdir())) == 1  # its files have become one


def filled(folder, files=5):
    """One file of two episodes for each plan."""
    store = Store(folder, world())
    for i in range(files):
        plan = store.plan({"a": 1, "b": 1}, 0)
        save(folder, plan.id, [row(plan.first["a"], n=1 + i), row(plan.first["b"], "b", 2)])
        store.finish(plan)
    return store


def test_small_files_become_one(tmp_path, monkeypatch):
    monkeypatch.setattr(episode_files, "MANY", 4)
    store = filled(tmp_path, 5)
    assert len(list((tmp_path / "episodes").iterdir())) == 2
    found = store.read(["b", "a"])
    assert found.lengths.tolist() == [2] * 5 + [1, 2, 3, 4, 5]
    assert found.rewards[-3:].tolist() == [2 / 3, 3 / 3, 4 / 3]
    assert store.counts() == Store(tmp_path, world()).counts() == {"a": 5, "b": 5}
    plan = store.plan({"a": 1}, 0)
    plan.file.close()
    assert plan.first == {"a": 5}


def test_files_that_others_merge_while_they_are_read_are_found_again(tmp_path, monkeypatch):
    store = filled(tmp_path, 5)
    known = store.contents(["b", "a"])
    before = store.read(["b", "a"], known)
    monkeypatch.setattr(episode_files, "MANY", 4)
    filled(tmp_path, 1)  # another one, whose end merges all
    assert len(list((tmp_path / "episodes").iterdir())) == 1
    after = store.read(["b", "a"], known)
    for name in ("states", "actions", "rewards", "log_prob", "lengths"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
    assert store.counts() == {"a": 6, "b": 6}


def test_killed_between_the_merged_file_and_the_end_of_the_old(tmp_path):
    """Both are there: every episode counts once, wherever it is read."""
    store = filled(tmp_path, 3)
    before, parts = store.read(["a", "b"]), sorted((tmp_path / "episodes").iterdir())
    merge(parts, tmp_path / "episodes" / "0123456789ab.parquet")
    assert store.counts() == {"a": 3, "b": 3}
    np.testing.assert_array_equal(store.read(["a", "b"]).states, before.states)
    again = store.plan({"a": 1}, 0)
    assert again.first == {"a": 3}
    again.file.close()


def test_what_somebody_is_writing_is_no_damaged_file(tmp_path):
    """A file has a name of its own until it is whole; one that was killed leaves it there."""
    store = filled(tmp_path, 1)
    (tmp_path / "episodes" / ".4711.0123456789ab-0123.parquet").write_bytes(b"PAR1 half a fi")
    assert store.counts() == {"a": 1, "b": 1}
    plan = store.plan({"a": 1}, 0)
    plan.file.close()
    assert plan.first == {"a": 1}
    assert len(store.read(["a"]).lengths) == 1


def test_files_that_somebody_removed_are_one_line(tmp_path):
    store = filled(tmp_path, 3)
    known = store.contents(["a"])
    for file in sorted((tmp_path / "episodes").iterdir())[:1]:
        file.unlink()
    with pytest.raises(ValueError, match="episodes are gone that were there, expected that nobody removes files"):
        store.read(["a"], known)


def test_some_are_read_in_any_order(tmp_path):
    store = filled(tmp_path, 5)
    known = store.contents(["a", "b"])
    found = store.read(["a", "b"], known.chosen(np.array([7, 0, 3])), log_prob=False)
    assert found.who == ["b", "a", "a"]
    assert found.lengths.tolist() == [2, 1, 4]
    assert found.rewards.tolist() == [0, 1 / 3, 0, 0, 1 / 3, 2 / 3, 3 / 3]


def test_numbers_are_given_out_once(tmp_path):
    store = Store(tmp_path, world())
    first, second = store.plan({"a": 3}, 0), Store(tmp_path, world()).plan({"a": 2, "b": 1}, 0)
    assert first.episodes() == [("a", 0), ("a", 1), ("a", 2)]
    assert second.episodes() == [("a", 3), ("a", 4), ("b", 0)]
    save(tmp_path, second.id, [row(3), row(4), row(0, "b")])
    store.finish(second)
    third = store.plan({"a": 1, "b": 1}, 0)
    assert third.first == {"a": 5, "b": 1}
    for plan in (first, third):
        plan.file.close()


def test_seeds_follow_from_the_seed_the_policy_and_the_number(tmp_path):
    store = Store(tmp_path, world())
    episodes = [("a", 0), ("b", 0), ("a", 1)]
    seeds = store.seeds(0, episodes)
    assert len(set(seeds.tolist())) == 3
    np.testing.assert_array_equal(store.seeds(0, episodes[::-1]), seeds[::-1])
    assert not set(store.seeds(1, episodes).tolist()) & set(seeds.tolist())


def test_an_evaluation_from_the_store_alone_is_the_one_that_filled_it(tmp_path):
    """The same episodes and, up to rounding, the same weights; order is by policy, so folds are the same, too."""
    first = evaluate(tmp_path)
    again = evaluate(tmp_path)
    assert again.episodes == 120
    assert "120 stored episodes" in again.title
    assert "stored" not in first.title
    assert sorted(np.concatenate(again.own_returns)) == sorted(np.concatenate(first.own_returns))
    assert np.abs(again.mean - first.mean).max() < 3 * first.standard_error.max()


def test_only_missing_episodes_are_run(tmp_path):
    evaluate(tmp_path, episodes=60)
    found = evaluate(tmp_path, (*doors.GAINS, 2.0), episodes=120)
    assert found.episodes == 120
    assert Store(tmp_path, world()).counts() == dict.fromkeys(identities(doors.policies((*doors.GAINS, 2.0))), 30)


def test_old_episodes_estimate_a_new_policy_without_bias(tmp_path):
    """From 3,000 episodes of three others, none of its own; the truth by dynamic programming."""
    evaluate(tmp_path, episodes=3000)
    gains = (*doors.GAINS, 0.5)
    found = evaluate(tmp_path, gains, None, precision=1.0)
    truth = exact.values(doors.walk(), doors.tables(gains))
    assert found.episodes == 3000  # nothing had to be run
    assert (np.abs(found.mean - truth) < 4 * found.decision.sample.standard_error).all()
    assert [x.size for x in found.own_returns] == [1000, 1000, 1000, 0]


def test_precision_runs_those_policies_only_that_need_it(tmp_path):
    evaluate(tmp_path, (0.0,), episodes=2000)
    found = evaluate(tmp_path, (0.0, 6.0), None, precision=0.8)
    assert found.decision.half_width.max() <= 0.8
    counts = Store(tmp_path, world()).counts()
    old, new = (counts[id] for id in identities(doors.policies((0.0, 6.0))))
    assert old == 2000
    assert 0 < new < 600


def test_those_that_go_on_alone_are_kept_too(tmp_path):
    """Who can't be the best is dropped; the others' later episodes are in the store as well."""
    gains = (-2.0, -1.5, 0.9999, 1.0)
    found = evaluate(tmp_path, gains, 900, stop="best")
    assert len(found.looks[-1].running) == 2
    counts = Store(tmp_path, world()).counts()
    assert [counts[id] for id in identities(doors.policies(gains))] == [x.size for x in found.own_returns]
    assert sum(counts.values()) == found.episodes


def better_than_all_before(folder, **asked):
    """Two weak policies of a beam have run 50 episodes each, and a third one arrives that falls far later."""
    pi = newcomers.balancing(np.array([0.0, 0.3, 1.1]))
    beam, (weak, every) = Finite(newcomers.beam()), (mf.TabularPolicySet(x) for x in (pi[:2], pi))
    mf.evaluate(beam, weak, 100, seed=2, store=folder)
    return mf.evaluate(beam, every, seed=2, store=folder, **asked), exact.values(newcomers.beam(), pi)


def test_a_newcomer_that_nobody_resembles_runs_its_own_episodes(tmp_path):
    """From the others' alone it is 27 +- 7, narrow enough and trusted: long episodes were never drawn. It is 62."""
    found, truth = better_than_all_before(tmp_path, precision=15.0)
    assert truth[2] == pytest.approx(62.3, abs=0.1)
    assert found.looks[0].decision.half_width.max() < 15
    assert found.looks[0].decision.interval.high[2] < truth[2]
    assert [len(x) > 50 for x in found.own_returns] == [False, False, False]
    assert len(found.own_returns[2]) >= stopping.AGAIN
    assert (np.abs(found.mean - truth) < found.decision.half_width).all()


def test_nothing_is_decided_before_a_newcomer_is_known(tmp_path):
    found, truth = better_than_all_before(tmp_path, stop="best")
    ran = [look.episodes for look in found.looks]
    assert ran[1] - ran[0] == stopping.AGAIN  # of the newcomer alone
    assert found.best == truth.argmax() == 2


def test_an_arrival_of_a_training_is_covered(tmp_path):
    """Of `benchmarks.newcomers`, small: intervals of all at once, and fewer episodes than each by itself needs."""
    wrong, _, episodes = newcomers.training(1, np.linspace(0, 1, 5))
    assert wrong == 0
    assert episodes < 5 * 200


def test_episodes_of_policies_that_are_gone_are_left_out_and_counted(tmp_path):
    evaluate(tmp_path, (0.0, 1.0), episodes=40)
    found = evaluate(tmp_path, (0.0,), episodes=20)
    assert found.episodes == 20
    (note,) = found.notes
    assert note.startswith("20 stored episodes of policy ")
    assert "it is no file, and was not given again" in note
    assert note in str(found)


def test_the_same_policy_twice_is_one_logger(tmp_path):
    found = evaluate(tmp_path, (0.0, 0.0, 1.0), episodes=90)
    again = evaluate(tmp_path, (0.0, 0.0, 1.0), episodes=90)
    assert again.episodes == 90
    assert again.mean[0] == pytest.approx(again.mean[1], abs=4 * again.standard_error[0])
    assert found.mean[0] == pytest.approx(found.mean[1], abs=4 * found.standard_error[0])


def cut_off(folder, monkeypatch, after):
    """An evaluation that ends when so many hand-outs of ended episodes were written."""
    monkeypatch.setattr(collecting, "SAVE_EVERY", 0.0)
    written = 0

    class Dying(stored.Saving):
        def __call__(self, *arguments):
            nonlocal written
            if written == after:
                raise KeyboardInterrupt
            written += 1
            super().__call__(*arguments)

    monkeypatch.setattr(stored, "Saving", Dying)
    with pytest.raises(KeyboardInterrupt):
        evaluate(folder)
    monkeypatch.undo()


def test_a_run_that_was_cut_off_is_finished_by_the_same_episodes(tmp_path, monkeypatch):
    evaluate(tmp_path / "whole")
    cut_off(tmp_path / "cut", monkeypatch, after=2)
    store = Store(tmp_path / "cut", world())
    assert store.counts() == {}  # counting the short ones that ended would favour them
    ((plan, missing),) = list(store.cut_off())
    assert 0 < len(missing) < 120
    plan.file.close()
    open_store(tmp_path / "cut")
    assert list((tmp_path / "cut" / "plans").iterdir()) == []
    ids = identities(doors.policies())
    whole, finished = (Store(tmp_path / name, world()).read(ids) for name in ("whole", "cut"))
    for name in ("states", "t", "actions", "rewards", "lengths"):
        np.testing.assert_array_equal(getattr(finished, name), getattr(whole, name))
    np.testing.assert_allclose(finished.log_prob, whole.log_prob, atol=1e-6)
    assert finished.who == whole.who


def test_ctrl_c_ends_with_the_shards_that_had_ended(tmp_path, monkeypatch):
    """Of 120 episodes 100 run side by side first; the interrupted rest is finished by the next call."""
    save, calls = stored.save, []

    def interrupted(folder, plan, rows):
        calls.append(len(rows))
        if len(calls) == 2:
            raise KeyboardInterrupt
        save(folder, plan, rows)

    monkeypatch.setattr(stored, "save", interrupted)
    found = evaluate(tmp_path)
    assert calls == [100, 20]
    assert found.episodes == 100
    assert found.notes == ("Interrupted: 100 of 120 episodes had ended.",)
    monkeypatch.undo()
    assert evaluate(tmp_path).episodes == 120
    assert sum(Store(tmp_path, world()).counts().values()) == 120


def test_a_cut_off_run_of_other_policies_waits_for_them(tmp_path, monkeypatch):
    cut_off(tmp_path, monkeypatch, after=2)
    found = evaluate(tmp_path, (5.0,), episodes=20)
    assert any("of a run that was cut off are left out" in note for note in found.notes)
    assert len(list((tmp_path / "plans").iterdir())) == 1
    evaluate(tmp_path, episodes=120)
    assert list((tmp_path / "plans").iterdir()) == []
    assert sum(Store(tmp_path, world()).counts().values()) == 140


def test_a_plan_whose_process_lives_is_not_touched(tmp_path):
    mine = Store(tmp_path, world())
    plan = mine.plan({"a": 1}, 0)
    assert list(Store(tmp_path, world()).cut_off()) == []
    plan.file.close()
    ((other, missing),) = list(Store(tmp_path, world()).cut_off())
    assert (other.id, missing) == (plan.id, [("a", 0)])
    other.file.close()


def test_an_environment_that_crashes_keeps_what_was_run(tmp_path):
    evaluate(tmp_path, episodes=60)
    steps = 0

    class Failing(doors.Walk):
        def step(self, action):
            nonlocal steps
            steps += 1
            if steps > 50:
                raise RuntimeError("the motor is hot")
            return super().step(action)

    broken = GymnasiumEnvironment(Failing, doors.T, "walk")
    with pytest.raises(ValueError, match="the motor is hot"):
        mf.evaluate(broken, doors.policies(), 120, store=tmp_path)
    assert evaluate(tmp_path, episodes=120).episodes == 120  # with the motor cold again


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "version 99, expected manyfold-store version 1; use another folder"),
        ({"format": "eggs"}, "'eggs' version 1|eggs version 1"),
        ({"environment": {"name": "CartPole-v1"}}, "a store of another environment: name CartPole-v1, expected walk"),
        ({"environment": 3}, "not readable, expected a store"),
    ],
)
def test_another_store_is_refused(tmp_path, change, message):
    Store(tmp_path, world())
    file = tmp_path / "store.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        Store(tmp_path, world())


def test_another_horizon_or_other_settings_are_another_environment(tmp_path):
    Store(tmp_path / "a", world())
    with pytest.raises(ValueError, match="horizon 6, expected 7"):
        Store(tmp_path / "a", GymnasiumEnvironment(doors.make, 7, "walk"))
    cart = {"id": "CartPole-v1", "horizon": 20}
    Store(tmp_path / "b", GymnasiumEnvironment(cart["id"], 20))
    with pytest.raises(ValueError, match="settings"):
        Store(tmp_path / "b", GymnasiumEnvironment(cart["id"], 20, sutton_barto_reward=True))


def test_a_folder_of_something_else_is_not_touched(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="not a store and not empty, expected a new or empty folder"):
        Store(tmp_path, world())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(ValueError, match="a file, expected a folder"):
        Store(tmp_path / "thesis.tex", world())


def test_a_damaged_file_is_one_line(tmp_path):
    evaluate(tmp_path)
    (file,) = (tmp_path / "episodes").iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"parquet: not readable .* was it damaged\? Remove it"):
        evaluate(tmp_path)


def test_policies_are_recognised_by_their_numbers():
    ids = identities(doors.policies((0.0, 1.0)))
    assert identities(doors.policies((1.0, 0.0))) == ids[::-1]
    relu = [nn.Sequential(nn.Linear(1, 2), kind()) for kind in (nn.ReLU, nn.Tanh)]
    with torch.no_grad():
        for name, x in relu[1].state_dict().items():
            x.copy_(relu[0].state_dict()[name])
    a, b = (identities(mf.ModulePolicySet([module], 2, 1)) for module in relu)
    assert a != b  # the same weights, another function
    tables = mf.TabularPolicySet(doors.tables((0.0, 1.0)))
    assert len(set(identities(tables))) == 2
    assert identities(mf.JoinedPolicySet([tables, tables])) == identities(tables) * 2
    assert identities(mf.ChosenPolicySet(tables, [1])) == identities(tables)[1:]
    functions = mf.CallablePolicySet([lambda obs, t: np.full((len(t), 2), 0.5)], 2, 1)
    with pytest.raises(ValueError, match="can't be recognised again, expected files, torch modules or tables"):
        identities(functions)


SCRIPT = """
import sys
import manyfold as mf
from manyfold.data import episode_files
from tests import doors
from tests.manyfold.data.test_store import world

if __name__ == "__main__":
    episode_files.MANY = int(sys.argv[3])
    for episodes in range(900 // int(sys.argv[4]), 901, 900 // int(sys.argv[4])):
        mf.evaluate(world(), doors.policies(), episodes, seed=int(sys.argv[2]), store=sys.argv[1])
"""


@pytest.mark.parametrize(("many", "calls"), [(16, 1), (2, 6)])
def test_two_processes_write_at_once(tmp_path, many, calls):
    """Both run what is missing: no number is given out twice, every file is whole, also where both merge files."""
    script = tmp_path / "both.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(script), str(tmp_path / "store")]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    more = [str(many), str(calls)]
    started = [subprocess.Popen([*command, str(seed), *more], env=env, cwd=ROOT) for seed in (0, 1)]
    assert [process.wait(timeout=300) for process in started] == [0, 0]
    store = Store(tmp_path / "store", world())
    counts = store.counts()
    assert set(counts) == set(identities(doors.policies()))
    assert all(300 <= many <= 600 for many in counts.values())
    assert len(store.read(list(counts)).lengths) == sum(counts.values())
    assert list((tmp_path / "store" / "plans").iterdir()) == []


@pytest.mark.parametrize("said", ["", "{}", "[1]", '{"seed": 0, "first": {"a": 0}, "count": {"b": 1}}'])
def test_a_damaged_plan_is_one_line(tmp_path, said):
    evaluate(tmp_path)
    (tmp_path / "plans" / "x.json").write_text(said)
    with pytest.raises(
        ValueError, match=r"x\.json: not readable, expected a plan of episodes; was it edited\? Remove it"
    ):
        evaluate(tmp_path, episodes=150)


def test_a_file_that_changes_after_it_was_read_is_not_kept(tmp_path):
    """Old episodes would be weighed by another policy's densities."""
    path = checkpoints.save(tmp_path / "best.zip", 0.0)
    policies = mf.load_policies(path)
    path.write_bytes(checkpoints.save(tmp_path / "other.zip", 1.0).read_bytes())
    with pytest.raises(ValueError, match="best.zip: changed since it was read, expected the same file; load it again"):
        mf.evaluate("CartPole-v1", policies, episodes=4, store=tmp_path / "evals")
    assert list((tmp_path / "evals" / "policies").iterdir()) == []
