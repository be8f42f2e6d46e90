"""Rows of a file of logged data as tuples (t, s, a, r, s') in an environment's own numbers, checked and in one pass.

What follows a row is its next_state where it is kept, and the next row of its episode elsewhere. Where t is not kept it
is counted from the last end of an episode: what flags or a column of episodes say, or a next_state that is not the next
row's state.
"""

from collections.abc import Iterator
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from manyfold.arrays import Array, Bools, Ints
from manyfold.data.formats import Columns, Source
from manyfold.envs.base import Environment
from manyfold.policies.base import check_indices


class Linked(NamedTuple):
    """Tuples, and what is known beside them."""

    t: Ints
    state: NDArray[Any]
    action: NDArray[Any]
    reward: Array
    next_state: NDArray[Any]
    terminated: Bools
    known: Bools
    episode: Ints
    ends: Bools  # the row after it is of another episode

    def take(self, rows: Any) -> "Linked":
        return Linked._make(x[rows] for x in self)


def linked(source: Source, env: Environment) -> Iterator[Linked]:
    """All rows piece by piece; the last row of a piece waits for the next one, which may be what follows it."""
    waiting: Columns | None = None
    t_next, row = 0, 0
    for piece in source.pieces():
        if not len(piece["reward"]):
            continue
        new = _checked(source, piece, env, row)
        row += len(new["reward"])
        rows = new if waiting is None else {name: np.concatenate([waiting[name], new[name]]) for name in new}
        waiting = {name: x[-1:] for name, x in rows.items()}
        part = _linked(source, rows, env.horizon, t_next).take(slice(-1))
        if len(part.t):
            t_next = 0 if part.ends[-1] else int(part.t[-1]) + 1
            yield part
    if waiting is not None:
        part = _linked(source, waiting, env.horizon, t_next)
        yield part._replace(ends=np.ones(1, dtype=np.bool_))


def _linked(source: Source, rows: Columns, horizon: int, t_next: int) -> Linked:
    """Which rows end an episode, at which t they are and what follows them; of the last row that isn't known yet.

    Args:
        t_next: of the first row, where t is counted.
    """
    n, given = len(rows["reward"]), source.names
    false = np.zeros(n, dtype=np.bool_)
    flags = [rows[name] for name in ("terminated", "truncated", "done") if name in rows]
    ends = np.logical_or.reduce(flags) if flags else false.copy()
    if "episode" in rows:
        ends[:-1] |= rows["episode"][1:] != rows["episode"][:-1]
    if "t" in rows:
        t = rows["t"]
        ends[:-1] |= t[1:] != t[:-1] + 1
    else:
        if "next_state" in rows and "episode" not in rows:
            breaks = (rows["state"][1:] != rows["next_state"][:-1]).any(-1) & ~ends[:-1]
            if n > 2 and breaks.mean() > 0.5:
                raise ValueError(
                    f"{source.path}: rows are in no order and have no t, expected a column t or whole episodes"
                )
            ends[:-1] |= breaks
        begins = np.concatenate([[False], ends[:-1]])
        last = np.maximum.accumulate(np.where(begins, np.arange(n), -1))
        t = np.where(last < 0, np.arange(n) + t_next, np.arange(n) - last)
        if not given & {"truncated", "done", "episode", "next_state"}:  # as D4RL has it: time limits leave no trace
            t = t % horizon
            ends |= t == horizon - 1
    if "terminated" in rows:
        terminated = rows["terminated"]
    elif "done" in rows:
        terminated = rows["done"] & ~rows.get("truncated", false)
    else:  # nothing says so: what ended before the horizon has terminated, unless it says that it was cut off
        terminated = ends & (t < horizon - 1) & ~rows.get("truncated", false)
    state, known = rows["state"], np.ones(n, dtype=np.bool_)
    if "next_state" in rows:
        after = rows["next_state"]
    else:
        known = ~ends
        after = np.where(known[:, None], np.concatenate([state[1:], state[-1:]]), state)
    episode = rows.get("episode", np.zeros(n, dtype=np.int64))
    return Linked(t, state, rows["action"], rows["reward"], after, terminated, known, episode, ends)


def _checked(source: Source, piece: Columns, env: Environment, first: int) -> Columns:
    """A piece in the environment's numbers, states `[n, width]`, actions `[n]` or `[n, d]`, or an error in one line."""
    n, found = len(piece["reward"]), dict(piece)
    for name in ("state", "next_state"):
        if name in piece:
            found[name] = _states(f"{source.path}: {name}", piece[name], env, 0 if source.from_zero else None)
    found["action"] = _actions(f"{source.path}: actions", piece["action"], env.action_space, source.from_zero)
    found["reward"] = _numbers(f"{source.path}: reward", piece["reward"]).reshape(n, -1)[:, 0]
    for name in ("terminated", "truncated", "done"):
        if name in piece:
            found[name] = _numbers(f"{source.path}: {name}", piece[name]).reshape(n, -1)[:, 0] != 0
    if "t" in piece:
        t = _numbers(f"{source.path}: t", piece["t"]).reshape(n, -1)[:, 0]
        if (t < 0).any() or (t != np.floor(t)).any():
            raise ValueError(f"{source.path}: t is {t[(t < 0) | (t != np.floor(t))][0]:g}, expected steps 0, 1, 2, ...")
        found["t"] = t.astype(np.int64)
    if "episode" in piece:
        names, numbers = np.unique(piece["episode"].reshape(n), return_inverse=True)
        whole = np.issubdtype(names.dtype, np.integer)
        found["episode"] = piece["episode"].reshape(n).astype(np.int64) if whole else _hashes(names)[numbers]
    for name in ("state", "next_state", "action", "reward"):
        if name in found and not np.isfinite(found[name]).all():
            row = first + int((~np.isfinite(found[name])).reshape(n, -1).any(1).argmax())
            raise ValueError(f"{source.path}: {name} is NaN or infinite in row {row}, expected finite numbers")
    return found


def _hashes(names: NDArray[Any]) -> Ints:
    """A number for each episode's name."""
    return np.array([int.from_bytes(sha256(str(name).encode()).digest()[:7]) for name in names], dtype=np.int64)


def _numbers(name: str, x: NDArray[Any]) -> Array:
    if not (np.issubdtype(x.dtype, np.number) or x.dtype == np.bool_):
        raise ValueError(f"{name} holds {x.dtype}, expected numbers")
    return x.astype(np.float64)


def _states(name: str, x: NDArray[Any], env: Environment, first: int | None) -> NDArray[Any]:
    """Observations `[n, width]`: of a Discrete space from 0 on."""
    flat = _numbers(name, x).reshape(len(x), -1)
    if flat.shape[1] != env.width:
        raise ValueError(f"{name} has {flat.shape[1]} numbers a row, expected {env.width} as {env.name} has")
    if not env.n_states:
        return flat.astype(np.float32)
    start = int(getattr(env.observation_space, "start", 0)) if first is None else first
    return check_indices(name, flat - start, env.n_states)[:, None]


def _actions(name: str, x: NDArray[Any], space: spaces.Space[Any], from_zero: bool) -> NDArray[Any]:
    """`[n]` from 0 on of a Discrete space, else `[n, d]`."""
    flat = _numbers(name, x).reshape(len(x), -1)
    if isinstance(space, spaces.Box):
        d = int(np.prod(space.shape))
        if flat.shape[1] != d or (np.issubdtype(space.dtype, np.floating) and not np.issubdtype(x.dtype, np.floating)):
            raise ValueError(f"{name} are {x.dtype} of {flat.shape[1]} numbers, expected {d} as in {space}")
        return flat
    sizes = np.ravel(_sizes(space))
    start = np.ravel(0 if from_zero else getattr(space, "start", 0))
    if flat.shape[1] != len(sizes):
        raise ValueError(f"{name} are {flat.shape[1]} numbers a row, expected {len(sizes)} as in {space}")
    moved = flat - start
    bad = (moved != np.floor(moved)) | (moved < 0) | (moved >= sizes)
    if bad.any():
        raise ValueError(f"{name} have {flat[bad][0]:g} in them, expected whole numbers of {space}")
    whole = moved.astype(np.int64)
    return whole[:, 0] if isinstance(space, spaces.Discrete) else whole


def _sizes(space: spaces.Space[Any]) -> Any:
    """How many choices each dimension has."""
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    return space.nvec if isinstance(space, spaces.MultiDiscrete) else np.full(space.shape or (), 2)
