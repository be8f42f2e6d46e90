"""A store that is pooled in parts: who is in which, the same mean as the parts', no bias, right errors, bounded."""

import numpy as np
import pytest

import manyfold as mf
from manyfold import exact
from manyfold.data.store import Store
from manyfold.envs import Finite
from manyfold.estimate import sources, stored
from manyfold.estimate.collecting import Job, describe
from manyfold.estimate.evaluation import combine, pool
from manyfold.estimate.parts import LEAST_ROUNDS, divided, estimated
from manyfold.estimate.pooled import folds_of
from tests import doors
from tests.manyfold.data.test_store import better_than_all_before, evaluate, open_store, world


def loggers(*counts):
    return np.repeat(np.arange(len(counts)), counts)


def test_what_fits_is_one_part():
    found = divided(loggers(10, 20), np.full(30, 5), 2, a_step=1, an_episode=1, held=150)
    assert [x.tolist() for x in found.each] == [list(range(30))]


def test_every_part_has_its_share_of_every_logger():
    who = loggers(60, 30, 43)
    found = divided(who, np.full(133, 10), 3, a_step=1, an_episode=0, held=400)
    assert len(found.each) == 4
    assert sorted(np.concatenate(found.each)) == list(range(133))
    for one in found.each:
        counts = np.bincount(who[one], minlength=3)
        assert (np.abs(counts - np.array([60, 30, 43]) / 4) < 1).all()
        assert counts.min() >= LEAST_ROUNDS
    assert found.folds == min(folds_of(who[one])[1] for one in found.each)
    assert len(np.unique(found.group)) == 4 * 3


def test_few_own_episodes_serve_several_parts_and_few_of_others_one():
    who = loggers(1000, 20, 1000, 7, 5)  # two targets, three other loggers
    found = divided(who, np.full(len(who), 10), 2, a_step=1, an_episode=0, held=3000)
    assert len(found.each) == 7
    times = np.bincount(np.concatenate(found.each), minlength=len(who))
    assert (times[who != 1] == 1).all()
    assert ((times[who == 1] == 2) | (times[who == 1] == 3)).all()  # three groups for seven parts
    assert np.unique(found.group[who == 1], return_counts=True)[1].tolist() == [7, 7, 6]
    for one in found.each:
        assert len(np.unique(found.group[one[who[one] == 1]])) == 1
        assert 10 * len(one) <= 3000 * 1.1
    for j in (3, 4):
        assert sum((who[one] == j).any() for one in found.each) == 1


def test_loggers_of_fewer_than_four_episodes_are_left_out():
    who = loggers(100, 3, 100)
    found = divided(who, np.full(203, 10), 3, a_step=1, an_episode=0, held=600)
    assert len(found.each) > 1
    assert not (who[np.concatenate(found.each)] == 1).any()


def test_short_episodes_count_by_what_is_held_of_each():
    found = divided(loggers(100, 100), np.full(200, 1), 2, a_step=1, an_episode=10, held=500)
    assert len(found.each) == 4


def test_where_nothing_fits_parts_are_as_small_as_can_be():
    """Each keeps six episodes of either target."""
    found = divided(loggers(20, 20), np.full(40, 10), 2, a_step=1, an_episode=0, held=1)
    assert len(found.each) == 3
    assert min(len(one) for one in found.each) >= 2 * LEAST_ROUNDS


def walked(counts, seed, gains=doors.GAINS):
    """Episodes by logger and number, and a way to see some of them in any order."""
    policies, env = mf.TabularPolicySet(doors.tables(gains)), Finite(doors.walk())
    alpha = np.asarray(counts) / sum(counts)
    ran = mf.collect(env, policies, sum(counts), np.random.default_rng(seed), alpha=alpha)
    order, ends = np.argsort(ran.logger, kind="stable"), np.cumsum(ran.lengths)

    def described(rows):
        which = order[rows]
        steps = np.concatenate([np.arange(ends[i] - ran.lengths[i], ends[i]) for i in which])
        taken = (x[steps] for x in (ran.states, ran.t, ran.actions, ran.rewards))
        return describe(Job(env, policies), *taken, ran.lengths[which], ran.logger[which])

    return ran.logger[order], ran.lengths[order], described


def in_parts(counts, seed, held, gains=doors.GAINS):
    logger, steps, described = walked(counts, seed, gains)
    found = divided(logger, steps, len(counts), 1, 0, held)
    pooled = [pool(described(one), folds=found.folds) for one in found.each]
    return found, pooled, estimated(found, logger, described, lambda episodes, folds: pool(episodes, folds=folds))


def test_parts_that_share_nothing_are_combined_as_stages_are():
    found, pooled, result = in_parts((40, 40, 40), 0, 250)
    assert len(found.each) > 1
    expected, order = combine(pooled), np.argsort(np.concatenate(found.each))
    np.testing.assert_array_equal(result.values, expected.values[:, order])
    np.testing.assert_array_equal(result.log_weights, expected.log_weights[:, order])
    np.testing.assert_allclose(result.sample.covariance, expected.sample.covariance, rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(result.standard_error, expected.standard_error, rtol=1e-9)
    assert result.steps == expected.steps
    for mine, theirs in zip(result.own_returns, expected.own_returns, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_the_mean_is_the_parts_mean_by_size_and_so_is_the_mean_weight():
    found, pooled, result = in_parts((60, 60, 13), 1, 250)
    assert len(found.each) > 2
    sizes = np.array([one.episodes for one in pooled])
    assert result.episodes == 133 < sizes.sum()
    np.testing.assert_allclose(result.mean, np.average([one.mean for one in pooled], axis=0, weights=sizes))
    weights = [np.exp(one.log_weights).mean(-1) for one in pooled]
    np.testing.assert_allclose(np.exp(result.log_weights).mean(-1), np.average(weights, axis=0, weights=sizes))
    assert [len(x) for x in result.own_returns] == [60, 60, 13]
    assert len(pooled[0].own_returns[2]) in (6, 7)
    assert sorted(result.own_returns[2]) == sorted([*pooled[0].own_returns[2], *pooled[1].own_returns[2]])


@pytest.mark.parametrize("counts", [(24, 24, 24), (30, 30, 8)])
def test_no_bias_and_right_errors_in_many_small_stores(counts):
    """Against dynamic programming; where the third policy has few episodes, all parts have the same ones of it."""
    truth = exact.values(doors.walk(), doors.tables(doors.GAINS))
    means, errors = [], []
    for seed in range(60):
        found, _, result = in_parts(counts, seed, 160)
        means.append(result.mean)
        errors.append(result.standard_error)
    assert len(found.each) > 2
    assert (sum(map(len, found.each)) > sum(counts)) == (counts[2] == 8)
    off, spread = np.mean(means, 0) - truth, np.std(means, 0, ddof=1)
    assert (np.abs(off) < 4 * spread / np.sqrt(60)).all()
    ratio = np.sqrt(np.mean(np.square(errors), 0)) / spread
    assert ((ratio > 0.7) & (ratio < 1.4)).all(), ratio


def small(monkeypatch, held=90_000):
    monkeypatch.setattr(sources, "HELD", held)


def test_a_large_store_says_the_same_as_in_one_part(tmp_path, monkeypatch):
    evaluate(tmp_path, episodes=600)
    whole = evaluate(tmp_path, episodes=600)
    small(monkeypatch)
    found = evaluate(tmp_path, episodes=600)
    assert len(np.unique(found.logger)) > 2 * 3  # several parts: `logger` tells them apart
    assert found.episodes == 600
    assert found.steps == whole.steps
    assert found.title == whole.title
    for mine, theirs in zip(found.own_returns, whole.own_returns, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert (np.abs(found.mean - whole.mean) < whole.standard_error).all()
    np.testing.assert_allclose(found.standard_error, whole.standard_error, rtol=0.3)
    again = evaluate(tmp_path, episodes=600)
    np.testing.assert_array_equal(again.values, found.values)


def test_a_store_that_becomes_large_while_it_is_filled(tmp_path, monkeypatch):
    """In waves; what was run is read again from the store, so that a second call gives the same bytes."""
    small(monkeypatch)
    sizes, run = [], stored.Stored.run
    monkeypatch.setattr(
        stored.Stored, "run", lambda self, *args: (sizes.append(int(args[2].sum())), run(self, *args))[1]
    )
    first = evaluate(tmp_path, episodes=900)
    assert len(sizes) > 1
    assert sum(sizes) == first.episodes == 900
    np.testing.assert_array_equal(evaluate(tmp_path, episodes=900).values, first.values)


def test_a_newcomer_at_a_large_store(tmp_path, monkeypatch):
    """None of its own at first, then few, which are in several parts."""
    evaluate(tmp_path, (0.0, 1.0), episodes=900)
    small(monkeypatch, 180_000)
    seen, divide = [], sources.divided
    monkeypatch.setattr(sources, "divided", lambda *x: (seen.append(divide(*x)), seen[-1])[1])
    found = evaluate(tmp_path, (0.0, 1.0, 6.0), None, precision=0.8)
    truth = exact.values(doors.walk(), doors.tables((0.0, 1.0, 6.0)))
    assert min(len(one.each) for one in seen) > 1
    assert any(sum(map(len, one.each)) > len(one.group) for one in seen)  # some episodes are in several parts
    assert found.decision.half_width.max() <= 0.8
    assert (np.abs(found.mean - truth) < found.decision.half_width).all()
    assert 0 < len(found.own_returns[2]) < 300
    assert found.episodes == sum(map(len, found.own_returns))
    assert str(found)


def test_borrowed_episodes_are_mistrusted_in_parts_too(tmp_path, monkeypatch):
    small(monkeypatch, 20_000)
    found, truth = better_than_all_before(tmp_path, precision=15.0)
    assert len(found.own_returns[2]) >= 10
    assert (np.abs(found.mean - truth) < found.decision.half_width).all()


def test_ctrl_c_at_a_large_store_ends_with_what_was_there(tmp_path, monkeypatch):
    evaluate(tmp_path, episodes=600)
    small(monkeypatch)
    save, calls = stored.save, []

    def interrupted(folder, plan, rows):
        calls.append(len(rows))
        if len(calls) == 2:
            raise KeyboardInterrupt
        save(folder, plan, rows)

    monkeypatch.setattr(stored, "save", interrupted)
    found = evaluate(tmp_path, episodes=1200)
    assert len(calls) == 2
    assert 600 <= found.episodes < 1200
    assert found.notes == (f"Interrupted: {found.episodes:,} of 1,200 episodes had ended.",)
    monkeypatch.undo()
    assert evaluate(tmp_path, episodes=1200).episodes == 1200


def test_others_new_episodes_wait(tmp_path):
    """What another process adds between two looks belongs to the next call."""
    evaluate(tmp_path, episodes=120)
    mine = open_store(tmp_path)
    evaluate(tmp_path, episodes=240)
    assert mine.counts().sum() == 120
    mine.run(mine.job, np.arange(3), np.array([1, 0, 2]))
    assert mine.counts().tolist() == [41, 40, 42]
    assert sum(Store(tmp_path, world()).counts().values()) == 243
