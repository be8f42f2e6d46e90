"""Logged data of other programs as pieces of columns with our names: Parquet, HDF5 of Minari and of D4RL, npz.

A file is a table (a row a step: Parquet, D4RL, npz), or holds whole episodes, each with one observation more than steps
(Minari, npz with keys such as "episode_0/observations", or with `lengths`). Everything but npz is read piece by piece.
No pickle is ever loaded.
"""

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

NAMES = {
    "state": ("state", "states", "observation", "observations", "obs"),
    "action": ("action", "actions", "act"),
    "reward": ("reward", "rewards", "rew"),
    "next_state": ("next_state", "next_states", "next_observation", "next_observations", "next_obs"),
    "terminated": ("terminated", "terminations", "terminals", "terminal"),
    "truncated": ("truncated", "truncations", "timeouts", "timeout"),
    "done": ("done", "dones"),
    "t": ("t", "step", "timestep", "timesteps"),
    "episode": ("episode", "episode_id"),
    "propensity": (
        "propensity",
        "propensities",
        "log_prob",
        "log_probs",
        "behavior_log_prob",
        "infos/action_log_probs",
    ),
}
NEEDED = ("state", "action", "reward")
ENDS = ("t", "episode", "terminated", "truncated", "done")  # any of them tells the step of a row
HDF5, PARQUET, NPZ = (".hdf5", ".h5"), (".parquet",), (".npz",)
ROWS = 65_536  # of a piece of a table

Columns = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Source:
    """One file."""

    path: Path
    rows: int
    names: frozenset[str]  # of `NAMES`, those that it has
    pieces: Callable[[], Iterator[Columns]]  # in order
    who: str = ""  # ran it, if the file says so
    from_zero: bool = False  # actions and counted states are numbered from 0, wherever their space starts


def sources(path: Path) -> list[Source]:
    """The files of a path: one file, a folder of them, or a folder of a Minari data set."""
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder, expected logged data")
    files = [path]
    if path.is_dir():
        minari = [file for file in (path / "main_data.hdf5", path / "data" / "main_data.hdf5") if file.exists()]
        files = minari or sorted(file for file in path.iterdir() if file.suffix in (*HDF5, *PARQUET, *NPZ))
    found = []
    for file in files:
        if file.suffix in PARQUET:
            found.append(_parquet(file))
        elif file.suffix in HDF5:
            found.append(_hdf5(file))
        elif file.suffix in NPZ:
            found.append(_npz(file))
    if not found:
        raise ValueError(
            f"{path}: expected logged data: .parquet, .hdf5, .h5 or .npz, or the folder of a Minari data set"
        )
    return found


def _by_name(path: Path, there: Mapping[str, Any] | list[str]) -> dict[str, str]:
    """Our names of the columns that are there, and theirs."""
    found = {ours: next((name for name in names if name in there), "") for ours, names in NAMES.items()}
    named = {ours: name for ours, name in found.items() if name}
    for ours in NEEDED:
        if ours not in named:
            names, found_names = ", ".join(NAMES[ours]), ", ".join(there) or "none"
            raise ValueError(f"{path}: no column {ours}, expected one of {names}; found {found_names:.80}")
    return named


def _check_ends(path: Path, named: Mapping[str, str]) -> None:
    if not any(name in named for name in ENDS):
        raise ValueError(
            f"{path}: nothing says at which step a row was, expected a column t, episode, terminated or done"
        )


def _parquet(path: Path) -> Source:
    try:
        with pq.ParquetFile(path) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a whole Parquet file ({_line(error)}); was it cut off?") from None
    named = _by_name(path, schema.names)
    _check_ends(path, named)
    about = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items() if b"ARROW" not in key}

    def pieces() -> Iterator[Columns]:
        try:
            with pq.ParquetFile(path) as file:
                wanted = [name for ours, name in named.items() if ours != "propensity"]
                for batch in file.iter_batches(ROWS, columns=wanted):
                    yield {ours: _plain(path, ours, batch[named[ours]]) for ours in named if ours != "propensity"}
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path}: cannot be read ({_line(error)}); was the file damaged?") from None

    ours = "n_actions" in about and "horizon" in about
    return Source(path, rows, frozenset(named), pieces, f"manyfold in {about.get('env')}" if ours else "", ours)


def _plain(path: Path, name: str, column: pa.Array) -> NDArray[Any]:
    """A column of numbers `[n]`, or of lists of the same length `[n, d]`."""
    if column.null_count:
        raise ValueError(f"{path}: column {name} has {column.null_count} nulls, expected none")
    shape = [len(column)]
    while (
        pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type) or pa.types.is_large_list(column.type)
    ):
        lengths = np.unique(
            column.value_lengths().to_numpy() if hasattr(column, "value_lengths") else column.type.list_size
        )
        if len(lengths) > 1:
            raise ValueError(
                f"{path}: lists in column {name} have {lengths[0]} to {lengths[-1]} numbers, expected as many"
            )
        shape.append(int(lengths[0]) if len(lengths) else 0)
        column = column.flatten()
    return np.asarray(column.to_numpy(zero_copy_only=False)).reshape(shape)


def _hdf5(path: Path) -> Source:
    h5py = _h5py(path)
    try:
        with h5py.File(path, "r") as file:
            episodes = sorted((key for key in file if key.startswith("episode_")), key=_number)
            if not episodes:
                return _table(path, {name: file[name] for name in _datasets(h5py, file)}, _reopened(h5py, path))
            groups = [{name: file[key][name] for name in _datasets(h5py, file[key])} for key in episodes]
            return _episodes(path, groups, _reopened(h5py, path), [f"{key}/" for key in episodes], _algorithm(path))
    except OSError as error:
        raise ValueError(f"{path}: not a whole HDF5 file ({_line(error):.80}); was it cut off?") from None


def _h5py(path: Path) -> Any:
    try:
        import h5py
    except ImportError:
        raise ValueError(f"{path}: HDF5 needs h5py, expected it installed: pip install 'manyfold[data]'") from None
    return h5py


def _datasets(h5py: Any, group: Any) -> list[str]:
    """Names of arrays; those of `NAMES` may lie one level down."""
    known = {name for names in NAMES.values() for name in names}
    return [name for name in sorted({*group.keys(), *known}) if isinstance(group.get(name), h5py.Dataset)]


def _reopened(h5py: Any, path: Path) -> Callable[[], Any]:
    return lambda: h5py.File(path, "r")


def _algorithm(path: Path) -> str:
    """Who ran a Minari data set, from the description beside it."""
    try:
        said = json.loads((path.parent / "metadata.json").read_text())
    except (OSError, ValueError):
        return ""
    name = said.get("algorithm_name") if isinstance(said, dict) else None
    return name if isinstance(name, str) else ""


def _npz(path: Path) -> Source:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path}: not an npz file of plain arrays ({_line(error):.80})") from None
    keys = sorted({name.split("/")[0] for name in arrays if name.startswith("episode_")}, key=_number)
    whole = _Open(arrays)
    if keys:
        groups = [{n.removeprefix(f"{key}/"): x for n, x in arrays.items() if n.startswith(f"{key}/")} for key in keys]
        return _episodes(path, groups, lambda: whole, [f"{key}/" for key in keys])
    if "lengths" in arrays:
        return _in_a_row(path, arrays)
    return _table(path, arrays, lambda: whole)


class _Open(dict[str, NDArray[Any]]):
    """Arrays in memory, as a file that is open."""

    def __enter__(self) -> "_Open":
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _table(path: Path, arrays: Mapping[str, Any], reopen: Callable[[], Any]) -> Source:
    """A row a step."""
    named = _by_name(path, arrays)
    _check_ends(path, named)
    rows = _rows(path, {ours: arrays[name] for ours, name in named.items()}, 0)
    wanted = {ours: name for ours, name in named.items() if ours != "propensity"}

    def pieces() -> Iterator[Columns]:
        with reopen() as file:
            for first in range(0, rows, ROWS):
                yield {ours: np.asarray(file[name][first : first + ROWS]) for ours, name in wanted.items()}

    return Source(path, rows, frozenset(named), pieces)


def _in_a_row(path: Path, arrays: Columns) -> Source:
    """npz with `lengths`: episodes one after the other; observations may have one more than steps for each."""
    lengths = arrays["lengths"]
    if lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer) or (lengths < 1).any():
        raise ValueError(f"{path}: lengths is {lengths!r:.40}, expected the steps of each episode, [N]")
    named, steps = _by_name(path, arrays), int(lengths.sum())
    more = len(arrays[named["state"]]) == steps + len(lengths) != steps
    groups: list[Columns] = []
    for i, end in enumerate(np.cumsum(lengths).tolist()):
        begin = end - int(lengths[i])
        group = {name: arrays[name][begin:end] for ours, name in named.items() if ours != "state"}
        state = arrays[named["state"]]
        group[named["state"]] = state[begin + i : end + i + 1] if more else state[begin:end]
        groups.append(group)
    if any(len(arrays[name]) != steps for ours, name in named.items() if ours != "state"):
        raise ValueError(f"{path}: lengths sum to {steps}, expected as many rows of every array")
    whole = _Open({f"{i}/{name}": x for i, group in enumerate(groups) for name, x in group.items()})
    return _episodes(path, groups, lambda: whole, [f"{i}/" for i in range(len(groups))])


def _episodes(path: Path, groups: list[Any], reopen: Callable[[], Any], prefixes: list[str], who: str = "") -> Source:
    """Whole episodes, observations with one more than steps or without."""
    named = _by_name(path, groups[0])
    sizes = []
    for prefix, group in zip(prefixes, groups, strict=True):
        if missing := [name for name in named.values() if name not in group]:
            raise ValueError(f"{path}: {prefix.rstrip('/')} has no {missing[0]}, expected what the first episode has")
        steps = len(group[named["reward"]])
        sizes.append(_rows(path, {o: group[n] for o, n in named.items()}, len(group[named["state"]]) - steps))
    final = all(len(group[named["state"]]) == n + 1 for group, n in zip(groups, sizes, strict=True))
    wanted = {ours: name for ours, name in named.items() if ours not in ("propensity", "t", "episode")}

    def pieces() -> Iterator[Columns]:
        with reopen() as file:
            for i, (prefix, n) in enumerate(zip(prefixes, sizes, strict=True)):
                found = {ours: np.asarray(file[prefix + name]) for ours, name in wanted.items()}
                if final:
                    found["next_state"] = found["state"][1:]
                found["state"] = found["state"][:n]
                yield found | {"t": np.arange(n), "episode": np.full(n, i)}

    names = frozenset(named) | {"t", "episode"} | ({"next_state"} if final else set())
    return Source(path, sum(sizes), names, pieces, who)


def _rows(path: Path, arrays: Mapping[str, Any], more: int) -> int:
    """The rows that all arrays have; observations may have one more."""
    n = int(arrays["reward"].shape[0]) if arrays["reward"].ndim else -1
    for ours, x in arrays.items():
        expected = n + (more if ours == "state" and more in (0, 1) else 0)
        if not x.ndim or x.shape[0] != expected or n < 0:
            raise ValueError(f"{path}: {ours} has shape {list(x.shape)}, expected {expected} rows as the rewards have")
    return n


def _number(name: str) -> tuple[int, str]:
    digits = name.rsplit("_", 1)[-1]
    return (int(digits) if digits.isdigit() else 0), name


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
