"""Many loggers' coefficients by block elimination against one dense system for each policy."""

import numpy as np
import pytest

from manyfold.estimate import pooled


def made(rng, k, j, n, b, folds):
    """Columns of K targets among J loggers; the last logger does as all targets do where there are more of them."""
    g, logger = rng.normal(3, 1, n), np.arange(n) % j
    w = np.exp(0.3 * rng.normal(size=(j, n)))
    w[k:] = 1 + 1e-13
    own = np.where(logger == np.arange(k)[:, None], g * j, 0)
    noise = 0.1 * rng.normal(size=(b, folds, k, n))
    return pooled.Columns(own, w[:k] * g, 0.1 * rng.normal(size=(k, n)), noise - 0.3 * w[:k] * g, w - 1), logger


@pytest.mark.parametrize(
    ("k", "j", "n", "b", "folds"), [(1, 1, 30, 0, 1), (3, 4, 60, 2, 1), (5, 5, 200, 3, 5), (5, 6, 47, 1, 1)]
)
def test_block_elimination_gives_the_values_of_the_dense_systems(monkeypatch, k, j, n, b, folds):
    columns, logger = made(np.random.default_rng(n), k, j, n, b, folds)
    fold, number = pooled.folds_of(logger)
    found = []
    for many in (0, 1000):
        monkeypatch.setattr(pooled, "MANY", many)
        found.append(pooled.combine(columns, logger, fold, number))
    blocks, dense = found
    np.testing.assert_allclose(blocks.values, dense.values, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(blocks.coefficients, dense.coefficients, atol=1e-9)
    assert blocks.recipes == dense.recipes
