"""Random numbers by seed and step: uniform, independent, and the same whoever runs beside."""

import numpy as np
import pytest
from scipy import stats

from manyfold.draws import Draws, seeds_of


def drawn(seeds, t, columns=2):
    draws = Draws()
    draws.at(seeds, t)
    return draws.random((len(seeds), columns))


def test_they_are_uniform_and_independent():
    """Of neighbouring episodes, steps and columns: 400,000 numbers, correlations within five standard errors."""
    seeds = seeds_of("test", numbers=np.arange(500))
    u = np.stack([drawn(seeds, np.full(500, t)) for t in range(400)])  # [T, N, 2]
    assert stats.kstest(u.ravel(), "uniform").pvalue > 1e-4
    for a, b in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u[..., 0], u[..., 1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / np.sqrt(a.size)
    assert ((u > 0) & (u < 1)).all()


def test_seeds_that_follow_each_other_do_not_make_streams_that_do():
    """Seeds 0, 1, 2, ... as they are: step t of one must not be step t - 1 of the next."""
    u = np.stack([drawn(np.arange(300, dtype=np.uint64), np.full(300, t), 1)[:, 0] for t in range(300)])
    assert len(np.unique(u)) == u.size


def test_an_episode_draws_the_same_whoever_runs_beside_it():
    seeds, t = seeds_of("test", numbers=np.arange(9)), np.arange(9) * 7
    every = drawn(seeds, t)
    some = np.array([8, 3, 4])
    np.testing.assert_array_equal(drawn(seeds[some], t[some]), every[some])
    assert (drawn(seeds, t + 1) != every).all()


def test_later_calls_at_the_same_step_draw_other_numbers():
    draws = Draws()
    draws.at(seeds_of("test", numbers=np.arange(5)), np.zeros(5, dtype=np.int64))
    first, second, third = draws.random(5), draws.random((5, 2)), draws.standard_normal((5, 3))
    assert first.shape == (5,)
    assert len(np.unique(np.concatenate([first[:, None], second, stats.norm.cdf(third)], 1).round(12))) == 30
    with pytest.raises(ValueError, match="4 rows are drawn for 5 episodes"):
        draws.random(4)


def test_normal_numbers_are_normal():
    draws = Draws()
    draws.at(seeds_of("test", numbers=np.arange(50_000)), np.zeros(50_000, dtype=np.int64))
    z = draws.standard_normal((50_000, 2))
    assert stats.kstest(z.ravel(), "norm").pvalue > 1e-4
    assert abs((z[:, 0] * z[:, 1]).mean()) < 5 / np.sqrt(50_000)


def test_seeds_have_names():
    numbers = np.arange(1000)
    a, b = seeds_of("a", 0, numbers=numbers), seeds_of("a", 1, numbers=numbers)
    assert len(np.unique(np.concatenate([a, b]))) == 2000
    np.testing.assert_array_equal(seeds_of("a", 0, numbers=numbers[5:7]), a[5:7])
