"""Named random streams: the same name gives the same numbers, on every machine and in every order."""

import hashlib

import numpy as np


def stream(*name: str | int) -> np.random.Generator:
    """A generator of its own for every name, for example `stream("gridworld-1000", group, "mpe", run)`."""
    digest = hashlib.sha256(repr(name).encode()).digest()
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(int.from_bytes(digest))))
