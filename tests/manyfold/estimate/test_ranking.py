"""Decisions: hand-made cases, ties, wrong decisions by simulation, the winner's curse."""

from dataclasses import replace

import numpy as np
import pytest

from manyfold.estimate.intervals import Sample, sample
from manyfold.estimate.ranking import decide, p_best, probability, winner


def known(mean, error):
    """A sample with these independent errors."""
    mean = np.asarray(mean, dtype=float)
    cov = np.diag(np.full(len(mean), float(error) ** 2))[None]
    return Sample(tuple(f"p{i}" for i in range(len(mean))), mean, cov, np.array([1e6]), 1000)


@pytest.mark.parametrize("anytime", [False, True])
def test_far_apart_policies_are_ordered(anytime):
    said = decide(known([1, 3, 2], 0.01), anytime=anytime)
    assert said.best == 1
    assert said.order_known
    assert said.order.tolist() == [1, 2, 0]
    low, high = said.ranks
    assert low.tolist() == high.tolist() == [3, 1, 2]
    assert "p1 is the best" in said.verdict
    assert said.trusted(["", "", "why"]) == said.verdict
    assert (
        said.trusted(["", "why", ""])
        == f"{said.verdict} That rests on an estimate that is not to be trusted: see below."
    )
    assert str(said).splitlines()[1].split()[:2] == ["p1", "3"]
    assert probability(said.p_best[1]) == ">0.999"


def test_near_policies_are_not_told_apart():
    said = decide(known([1, 1.01, 5, 5.01], 0.1))
    low, high = said.ranks
    assert said.best is None
    assert not said.order_known
    assert low.tolist() == [3, 3, 1, 1]
    assert high.tolist() == [4, 4, 2, 2]
    assert said.may_be_best.tolist() == [False, False, True, True]
    assert "p3, p2 may be" in said.verdict
    assert np.isclose(said.p_best.sum(), 1)
    assert said.p_best[3] > said.p_best[2] > 0.4


def test_ranks_agree_with_who_may_be_best():
    """All pairs at once need more than the best against the rest: p0 leads without a single pair that is told apart."""
    said = decide(known([0.0, -3.5, -3.6, -3.7, -3.8, -3.9], 1.0))
    assert said.best == 0
    assert not (said.difference.low > 0).any()
    low, high = said.ranks
    assert low.tolist() == [1, 2, 2, 2, 2, 2]
    assert high.tolist() == [1, 6, 6, 6, 6, 6]
    assert said.rows()[1][-1] == ""
    assert not said.told_apart[1:, 1:].any()
    two = replace(said, may_be_best=np.arange(6) < 2)
    assert [x.tolist() for x in two.ranks] == [[1, 1, 2, 2, 2, 2], [6] * 6]
    alone = known([0.0, 5.0, 1.0], 0.1)
    stands = replace(decide(alone), may_be_best=np.array([True, False, False]))  # an earlier look's claim, now refuted
    low, high = stands.ranks
    assert (low <= high).all()
    assert (low[0], high[0], low[1]) == (1, 1, 2)


def test_the_order_is_known_by_differences_alone():
    """p0 is known to be the best, yet the pairs' own intervals, three at once, leave open whether it is above p1."""
    said = decide(known([0.0, -3.0, -8.0], 1.0))
    assert said.best == 0
    assert said.told_apart[0, 1]
    assert not said.order_known
    assert decide(known([0.0, -4.0, -8.0], 1.0)).order_known


@pytest.mark.parametrize("anytime", [False, True])
def test_a_tie_is_broken_seldom(anytime):
    """Two equals, either of which could be called the better one: together at most alpha."""
    rng, runs = np.random.default_rng(5), 1000
    claimed = sum(decide(sample(rng.normal(size=(2, 20))), 0.1, anytime).best is not None for _ in range(runs))
    assert claimed / runs <= 0.1 + 2 * np.sqrt(0.1 * 0.9 / runs)


def test_equal_policies_share_and_one_policy_has_nothing_to_compare():
    said = decide(sample(np.ones((3, 5))))
    assert np.allclose(said.p_best, 1 / 3)
    assert said.best is None
    assert not said.told_apart.any()
    assert np.allclose(said.interval.low, 1)
    assert np.allclose(said.interval.high, 1)
    one = decide(sample([[1.0, 2.0]]))
    assert one.best == 0
    assert one.p_best == [1]
    assert "nothing to compare" in one.verdict
    twins = np.random.default_rng(0).normal(size=30)
    assert np.allclose(p_best(sample(np.stack([twins, twins]))), 0.5)


@pytest.mark.parametrize("anytime", [False, True])
def test_a_wrong_best_is_claimed_seldom(anytime):
    rng, wrong, runs = np.random.default_rng(3), 0, 400
    truth = np.array([0.0, 0.0, -0.2, -1.0])
    for _ in range(runs):
        x = truth[:, None] - 1e-9 * np.arange(4)[:, None] + rng.normal(size=(4, 20)) + rng.normal(size=20)
        said = decide(sample(x), anytime=anytime)
        wrong += said.best not in (None, 0)
    assert wrong / runs <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / runs)


def test_the_winners_curse_is_corrected():
    rng, naive, fresh = np.random.default_rng(4), [], []
    for _ in range(300):
        found = winner(rng.normal(size=(20, 40)))
        naive.append(found.value)
        fresh.append(found.fresh)
    assert np.mean(naive) > 0.25  # 1.87 standard errors of 0.158
    assert abs(np.mean(fresh)) < 3 * np.std(fresh) / np.sqrt(300)


def test_asking_for_the_winner_changes_nothing():
    """Parts are made where the folds are one: of a copy, as what is asked afterwards must not depend on it."""
    logger, fold = np.arange(40) % 2, np.zeros(40, dtype=np.int64)
    winner(np.random.default_rng(0).normal(size=(2, 40)), logger, fold)
    assert not fold.any()


def test_the_winner_keeps_loggers_and_says_when_there_are_too_few():
    x = np.arange(8.0).reshape(2, 4)
    few = winner(x[:, :2])
    assert np.isnan(few.fresh)
    assert "too few" in few.describe(("a", "b"))
    found = winner(x, np.array([0, 1, 0, 1]), np.array([0, 0, 0, 0]))
    assert found.policy == 1
    assert np.isclose(found.value, 5.5)
    plenty = winner(np.random.default_rng(0).normal(size=(2, 40)), np.arange(40) % 2)
    assert "did not choose" in plenty.describe(("a", "b"))


def test_rows_stay_short_with_many_policies():
    said = decide(known(np.zeros(50), 1.0))
    assert len(said.rows()) == 51
    assert all("and 46 more" in row[-1] for row in said.rows()[1:])
    assert "and 47 more may be" in said.verdict
