"""Named random streams: the same name gives the same numbers, on every machine and in every order."""

import hashlib

import numpy as np


def stream(*name: str | int) -> np.random.Generator:
    """A generator of its own for every name, for example `stream("gridworld-1000", group, "mpe", run)`."""
    if not all(isinstance(part, str | int | np.integer) for part in name):
        raise ValueError(f"stream name {name!r}: expected words and whole numbers")
    plain = tuple(part if isinstance(part, str) else int(part) for part in name)
    digest = hashlib.sha256(repr(plain).encode()).digest()
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(int.from_bytes(digest))))
