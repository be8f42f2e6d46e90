"""Array types, and the checks that every array and number passes before it is used."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

SUM_TOLERANCE = 1e-6  # float32 softmax rows pass, a forgotten normalisation does not


def check_finite(name: str, x: Array) -> None:
    """Refuses NaN and infinity, naming the first place."""
    bad = ~np.isfinite(x)
    if bad.any():
        where = np.unravel_index(int(bad.argmax()), x.shape)
        raise ValueError(f"{name}[{', '.join(map(str, where))}] is {x[where]}, expected a finite number")


def check_actions(actions: Ints, n_actions: int) -> None:
    """Refuses actions out of range: as an index they would silently read another state's row."""
    if actions.size and not 0 <= actions.min() <= actions.max() < n_actions:
        raise ValueError(f"actions run from {actions.min()} to {actions.max()}, expected 0 to {n_actions - 1}")


def check_shape(name: str, x: NDArray[Any], expected: tuple[int, ...], axes: str) -> None:
    """Refuses any other shape; `axes` says in words what the expected one means."""
    if x.shape != expected:
        raise ValueError(f"{name} has shape {list(x.shape)}, expected {list(expected)} = {axes}")


def check_distributions(name: str, x: Array, axes: tuple[str, ...]) -> None:
    """Refuses rows (last axis) that are no probability distributions, naming the row by its axes."""
    check_finite(name, x)

    def place(index: tuple[Any, ...]) -> str:
        return ", ".join(f"{axis}={i}" for axis, i in zip(axes, index, strict=False))

    if x.min(initial=0.0) < 0:
        where = np.unravel_index(int((x < 0).argmax()), x.shape)
        raise ValueError(f"{name}: probability {x[where]:g} at {place(where)} is negative, expected 0 or more")
    total = x.sum(-1)
    off = np.abs(total - 1) > SUM_TOLERANCE
    if off.any():
        where = np.unravel_index(int(off.argmax()), off.shape)
        raise ValueError(
            f"{name}: probabilities at {place(where) or 'the start'} sum to {total[where]:.6g}, expected 1; "
            "were they saved before softmax?"
        )


def check_number(name: str, x: Any, least: float, most: float = 2**53, whole: bool = True) -> None:
    """Refuses anything but a number (a whole one unless told otherwise) from `least` to `most`."""
    kind = int | np.integer if whole else int | float | np.integer | np.floating
    if isinstance(x, bool) or not isinstance(x, kind) or not least <= x <= most:  # NaN is in no range
        bounds = f"of at least {least:,g}" if most == 2**53 else f"from {least:,g} to {most:,g}"
        raise ValueError(f"{name} is {x!r:.60}, expected a {'whole ' if whole else ''}number {bounds}")


def check_distinct(names: Sequence[str]) -> None:
    """Refuses two policies of one name: they could not be told apart."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"two policies are called {name!r:.60}, expected a name of its own for each; say names=")
        seen.add(name)


def divide(a: Array, b: Array) -> Array:
    """a / b, and 0 where b = 0: a ratio to a behavior policy that never takes the action."""
    return np.divide(a, b, out=np.zeros_like(a), where=np.broadcast_to(b > 0, a.shape))
