"""Shards: the same bytes here, in other processes and on a Dask cluster, and after a worker was killed."""

import contextlib
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np
import pytest

import manyfold as mf
from manyfold import exact
from manyfold.draws import seeds_of
from manyfold.envs import GymnasiumEnvironment
from manyfold.estimate import collecting
from manyfold.estimate.collecting import Job, run_shard, spread
from manyfold.estimate.workers import Crew, shards
from manyfold.rollout import Steps
from tests import doors

WHO = spread(np.full(3, 80))
FIELDS = ("states", "t", "actions", "rewards", "lengths", "logger", "log_targets", "log_loggers", "own", "probs")


def job(env=None):
    return Job(env or GymnasiumEnvironment(doors.make, doors.T, "walk"), doors.policies())


def run(crew, workers=1, keep=None, env=None):
    one = job(env)
    return crew.run(one, shards(one, WHO, seeds_of("test", numbers=np.arange(len(WHO))), workers), keep)


def assert_same(a, b):
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def test_other_processes_give_the_same_bytes():
    here = run(Crew())
    with Crew(2) as crew:
        assert_same(run(crew), here)
    assert here.lengths.sum() == len(here.t)
    assert (here.logger == WHO).all()


def test_a_dask_cluster_gives_the_same_bytes(dask_scheduler):
    with Crew(1, dask_scheduler) as crew:
        kept = []
        found = run(crew, 1, lambda shard, ended, episodes: kept.append((shard.number, len(ended))))
    assert_same(found, run(Crew()))
    assert sorted(kept) == [(0, 100), (1, 100), (2, 40)]


class Telling(doors.Walk):
    """The first process that comes to the middle of an episode tells its number, and waits there to be killed."""

    def __init__(self, folder):
        self.folder, self.steps = folder, 0

    def step(self, action):
        self.steps += 1
        if self.steps == 3 and not (self.folder / "told").exists():
            with contextlib.suppress(FileExistsError), (self.folder / "told").open("x"):
                (self.folder / "pipe").write_text(str(os.getpid()))
                threading.Event().wait()
        return super().step(action)


def test_a_worker_of_a_cluster_that_is_killed_in_the_middle_changes_no_byte(dask_scheduler, tmp_path):
    def kill():
        os.kill(int((tmp_path / "pipe").read_text()), signal.SIGKILL)  # reading waits for who writes

    os.mkfifo(tmp_path / "pipe")
    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with Crew(1, dask_scheduler) as crew:
        before = set(crew._client.run(os.getpid).values())
        found = run(crew, env=GymnasiumEnvironment(partial(Telling, tmp_path), doors.T, "walk"))
        killer.join(60)
        assert not killer.is_alive()
        assert before != set(crew._client.run(os.getpid).values())  # its nanny has started another, or is about to
    assert_same(found, run(Crew()))


def test_a_worker_that_is_killed_is_replaced():
    with Crew(2) as crew:
        assert isinstance(crew.executor, ProcessPoolExecutor)
        os.kill(crew.executor.submit(os.getpid).result(), signal.SIGKILL)
        assert_same(run(crew), run(Crew()))


def test_an_episode_is_the_same_whatever_runs_beside_it():
    """Other shards, other neighbours: the same states, actions and rewards, and densities up to rounding."""
    one, seeds = job(), seeds_of("test", numbers=np.arange(len(WHO)))
    whole = Crew().run(one, shards(one, WHO, seeds))
    small = Crew().run(one, shards(one, WHO, seeds, workers=60))  # of four episodes each
    for name in ("states", "t", "actions", "rewards", "lengths", "logger"):
        np.testing.assert_array_equal(getattr(small, name), getattr(whole, name))
    np.testing.assert_allclose(small.log_loggers, whole.log_loggers, atol=1e-6)


def test_values_are_those_of_dynamic_programming():
    found = mf.evaluate(doors.make, doors.policies(), 6000, horizon=doors.T)
    truth = exact.values(doors.walk(), doors.tables())
    assert (np.abs(found.mean - truth) < 4 * found.standard_error).all()
    assert found.standard_error.max() < 0.15


def test_episodes_are_handed_on_as_they_end(monkeypatch):
    """With no pause between, each step hands on what ended in it; together they are all, and each is whole."""
    monkeypatch.setattr(collecting, "SAVE_EVERY", 0.0)
    one, seeds, kept = job(), seeds_of("test", numbers=np.arange(60)), []
    (shard,) = shards(one, WHO[:60], seeds)
    found = run_shard(one, shard, lambda shard, ended, episodes: kept.append((ended, episodes)))
    assert len(kept) > 1
    assert sorted(np.concatenate([ended for ended, _ in kept]).tolist()) == list(range(60))
    of = {}
    for ended, part in kept:
        for i, e in enumerate(ended.tolist()):
            of[e] = part.returns[i]
    np.testing.assert_array_equal([of[e] for e in range(60)], found.returns)
    assert_same(found, run_shard(one, shard))


def test_nothing_is_handed_on_twice_and_nothing_is_lost():
    def rows(t, episodes, done):
        n = len(episodes)
        x = np.zeros(n)
        return Steps(np.array(episodes), np.full(n, t), x[:, None], x, x + t, x[:, None], np.array(done), x > 0, x, {})

    steps = [rows(0, [0, 1, 2], [False, True, False]), rows(1, [0, 2], [False, True]), rows(2, [0], [True])]
    parts = list(collecting.as_they_end(iter(steps), 3, 0.0))
    assert [np.unique(part.episode).tolist() for part in parts] == [[1], [2], [0]]
    assert [part.t.tolist() for part in parts] == [[0], [0, 1], [0, 1, 2]]
    (whole,) = collecting.as_they_end(iter(steps), 3, np.inf)
    assert whole.episode.tolist() == [0, 0, 0, 1, 2, 2]


def test_what_cannot_be_sent_is_said():
    one = job()
    one.policies.modules[0].lock = threading.Lock()
    with Crew(2) as crew, pytest.raises(ValueError, match=r"can't be sent to other processes.*expected workers=1"):
        crew.run(one, shards(one, WHO, seeds_of("test", numbers=np.arange(len(WHO)))))


def test_a_wrong_address_is_one_line():
    with pytest.raises(ValueError, match=r"no Dask scheduler answers.*expected tcp://host:port"), Crew(1, "nonsense"):
        pass
