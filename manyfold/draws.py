"""Random numbers of many episodes at once that don't depend on which others run beside them."""

import numpy as np
from numpy.typing import NDArray
from scipy import special

from manyfold.arrays import Array, Ints
from manyfold.streams import stream

Seeds = NDArray[np.uint64]
GOLDEN, ODD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)  # odd: their multiples visit every number


def seeds_of(*name: str | int, numbers: Ints) -> Seeds:
    """A seed of 64 bits for each number, all of them different streams; `[N]`."""
    key = stream(*name).integers(2**64, dtype=np.uint64)
    return _mixed(_mixed(numbers.astype(np.uint64) + key) + key)


class Draws:
    """Random numbers of N episodes at once, each from its own seed and step: the same whoever else is running.

    Has the two methods of `np.random.Generator` that policies draw by. A counter is hashed (the finaliser of
    SplitMix64, twice), so nothing is kept from step to step.
    """

    def at(self, seeds: Seeds, t: Ints) -> None:
        """The episodes that are drawn for next, `[N]` each."""
        self._keys, self._drawn = _mixed(seeds + (t.astype(np.uint64) + np.uint64(1)) * GOLDEN), 0

    def random(self, size: int | tuple[int, ...]) -> Array:
        """Uniform on (0, 1), rows by episode: `[N]` or `[N, d]`."""
        shape = (size,) if isinstance(size, int) else size
        if shape[0] != len(self._keys):
            raise ValueError(f"{shape[0]} rows are drawn for {len(self._keys)} episodes, expected one for each")
        columns = int(np.prod(shape[1:], dtype=np.int64))
        counters = np.arange(self._drawn + 1, self._drawn + columns + 1, dtype=np.uint64) * ODD
        self._drawn += columns
        bits = _mixed(self._keys[:, None] + counters) >> np.uint64(11)  # 53 of them
        return np.asarray((bits + 0.5) * 2.0**-53, dtype=np.float64).reshape(shape)

    def standard_normal(self, size: int | tuple[int, ...]) -> Array:
        """Standard normal, rows by episode."""
        return np.asarray(special.ndtri(self.random(size)))


def _mixed(x: Seeds) -> Seeds:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection in which every bit depends on all."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
