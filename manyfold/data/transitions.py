"""Logged transitions in Parquet: written as a stream, read as a stream of shuffled batches, validated on the way.

Columns: episode int32, t int16, state and next_state fixed_size_list<float32>, action int16, reward float32, terminated
and truncated bool, and optionally behavior_log_prob float32, which is kept and never needed: the rows may be a shuffled
subset of tuples from unknown loggers. The schema's metadata says which environment, horizon, actions and seed.

Memory stays bounded as data grows: whole row groups, in random order, pass through a pool that is shuffled.
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from manyfold.files import atomic

Part = Literal["all", "train", "held_out"]
ROW_GROUP = 65_536
HELD_OUT = 0.1  # share of the rows that `part="held_out"` reads


@dataclass(frozen=True)
class About:
    """What the rows don't say; in the schema's metadata."""

    env: str
    horizon: int
    n_actions: int
    width: int  # of a state
    seed: int


class Batch(NamedTuple):
    """N tuples (t, s, a, r, s') and how they ended."""

    t: NDArray[np.int16]  # [N]
    state: NDArray[np.float32]  # [N, width]
    action: NDArray[np.int16]  # [N]
    reward: NDArray[np.float32]  # [N]
    next_state: NDArray[np.float32]  # [N, width]
    terminated: NDArray[np.bool_]  # [N]
    truncated: NDArray[np.bool_]  # [N]


class RowGroup(NamedTuple):
    """What is read at once."""

    file: Path
    number: int
    first: int  # number of its first row in the data set
    rows: int


def schema(about: About, log_probs: bool = False) -> pa.Schema:
    """The columns and the metadata of a file."""
    state = pa.list_(pa.float32(), about.width)
    columns = {
        "episode": pa.int32(),
        "t": pa.int16(),
        "state": state,
        "action": pa.int16(),
        "reward": pa.float32(),
        "next_state": state,
        "terminated": pa.bool_(),
        "truncated": pa.bool_(),
    }
    if log_probs:
        columns["behavior_log_prob"] = pa.float32()
    return pa.schema(list(columns.items()), metadata={name: str(value) for name, value in asdict(about).items()})


class Writer:
    """Writes rows as they come, zstd-compressed; the file takes its name when the block ends well."""

    def __init__(self, path: Path, about: About, log_probs: bool = False) -> None:
        self.schema, self.rows = schema(about, log_probs), 0
        self._atomic = atomic(path)

    def __enter__(self) -> "Writer":
        part = self._atomic.__enter__()
        self._file = pq.ParquetWriter(part, self.schema, compression="zstd", write_page_checksum=True)
        return self

    def write(self, columns: dict[str, NDArray[np.generic]]) -> None:
        """Appends rows; `columns` has one array for each column, states `[N, width]`."""
        arrays = []
        for field in self.schema:
            x = np.ascontiguousarray(columns[field.name])
            if pa.types.is_fixed_size_list(field.type):
                flat = pa.array(x.reshape(-1).astype(np.float32, copy=False))
                arrays.append(pa.FixedSizeListArray.from_arrays(flat, field.type.list_size))
            else:
                arrays.append(pa.array(x).cast(field.type))
        table = pa.Table.from_arrays(arrays, schema=self.schema)
        self._file.write_table(table, row_group_size=ROW_GROUP)
        self.rows += table.num_rows

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._atomic.__exit__(kind, error, trace)


class Transitions:
    """A data set: one Parquet file, or all those of a folder.

    Args:
        path: file or folder.
        expected: refused if the files are of another environment, horizon, number of actions or width; None takes
            what the first file says.
        pool_rows: rows that are shuffled together and held in memory; a smaller data set is read once and kept.
    """

    def __init__(self, path: Path, expected: About | None = None, pool_rows: int = 2**20) -> None:
        files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"{path}: no Parquet files, expected logged transitions")
        self.about = expected or _about(files[0])
        self.pool_rows = pool_rows
        self._groups: list[RowGroup] = []
        self._metadata: dict[Path, pq.FileMetaData] = {}  # read once: it says where each of many row groups begins
        self.rows = 0
        for file in files:
            _check_file(file, self.about)
            metadata = self._metadata[file] = _open(file).metadata
            for i in range(metadata.num_row_groups):
                count = metadata.row_group(i).num_rows
                self._groups.append(RowGroup(file, i, self.rows, count))
                self.rows += count
        if self.rows == 0:
            raise ValueError(f"{path}: 0 rows, expected at least one logged transition")
        self._kept: dict[Part, Batch] = {}
        self._other_steps = False

    def relabelled(self) -> "Transitions":
        """The same rows, each at a step t drawn from all of the horizon, the same one in every pass.

        For environments whose dynamics and rewards don't depend on t. Rows of the last step keep theirs: whether their
        episode ended there, or only the horizon did, cannot be known.
        """
        other = copy.copy(self)
        other._kept, other._other_steps = {}, True
        return other

    def batches(self, size: int, rng: np.random.Generator, part: Part = "all") -> Iterator[Batch]:
        """One pass over the rows in random order, in batches of `size` (the last one may be smaller)."""
        return (batch for _, batch in self.numbered(size, rng, part))

    def numbered(
        self, size: int, rng: np.random.Generator, part: Part = "all"
    ) -> Iterator[tuple[NDArray[np.int64], Batch]]:
        """The same batches with the numbers that their rows have in `whole(part)`, where there is one."""
        if size < 1:
            raise ValueError(f"size is {size}, expected at least 1 row a batch")
        if self.rows <= self.pool_rows:
            kept = self._all(part)
            order = rng.permutation(len(kept.t))
            rows = _take(kept, order)
            for start in range(0, len(order), size):
                yield order[start : start + size], _rows(rows, start, start + size)
            return
        most = self.pool_rows + max(group.rows for group in self._groups) + size
        pool, shuffled = self._room(most), self._room(most)  # once for all pools
        filled = fresh = 0
        order, groups = np.empty(0, dtype=np.int64), rng.permutation(len(self._groups))
        for i, number in enumerate(groups.tolist()):
            read = self._read(self._groups[number], part)
            first, filled, fresh = filled, filled + len(read.t), fresh + len(read.t)
            for x, y in zip(pool, read, strict=True):
                x[first:filled] = y
            if fresh >= self.pool_rows or i == len(groups) - 1:
                order = rng.permutation(filled)
                for x, y in zip(pool, shuffled, strict=True):
                    x.take(order, axis=0, out=y[:filled], mode="clip")  # raising needs a buffer
                ends = filled // size * size
                for start in range(0, ends, size):
                    yield order[start : start + size], _rows(shuffled, start, start + size)
                order = order[ends:]
                for x, y in zip(pool, shuffled, strict=True):
                    x[: filled - ends] = y[ends:filled]
                filled, fresh = filled - ends, 0
        if filled:
            yield order, _rows(pool, 0, filled)

    def whole(self, part: Part = "all") -> Batch | None:
        """All rows, if they are few enough to be held in memory."""
        return self._all(part) if self.rows <= self.pool_rows else None

    def initial_states(self, most: int) -> NDArray[np.float32]:
        """States of rows with t = 0, up to `most` of them; `[N, width]`."""
        found: list[NDArray[np.float32]] = []
        for group in self._groups:
            batch = self._read(group, "all")
            found.append(batch.state[batch.t == 0])
            if sum(map(len, found)) >= most:
                break
        states = np.concatenate(found)[:most]
        if not len(states):
            raise ValueError(f"{self._groups[0].file}: no row with t = 0, expected some: episodes start there")
        return states

    def _all(self, part: Part) -> Batch:
        """All rows, read once and kept."""
        if part not in self._kept:
            parts = [self._read(group, part) for group in self._groups]
            self._kept[part] = Batch._make(np.concatenate(x) for x in zip(*parts, strict=True))
        return self._kept[part]

    def _room(self, rows: int) -> list[NDArray[Any]]:
        """Of a batch of so many rows."""
        state = (rows, self.about.width)
        return [
            np.empty(rows, np.int16),
            np.empty(state, np.float32),
            np.empty(rows, np.int16),
            np.empty(rows, np.float32),
            np.empty(state, np.float32),
            np.empty(rows, np.bool_),
            np.empty(rows, np.bool_),
        ]

    def _read(self, group: RowGroup, part: Part) -> Batch:
        """One row group, checked."""
        where = f"{group.file}: row group {group.number}"
        try:
            file = _open(group.file, self._metadata[group.file])
            table = file.read_row_group(group.number, columns=list(Batch._fields), use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{where} cannot be read ({_line(error)}); was the file damaged?") from None
        columns = {}
        for name in Batch._fields:
            column = table.column(name).combine_chunks()
            if column.null_count:
                raise ValueError(f"{where}, column {name}: {column.null_count} nulls, expected none")
            if pa.types.is_fixed_size_list(column.type):
                columns[name] = column.flatten().to_numpy().reshape(-1, self.about.width)
            else:
                columns[name] = column.to_numpy(zero_copy_only=False)
        batch = Batch(**columns)
        _check_rows(f"{where}, column", batch, self.about)
        if self._other_steps:
            last, drawn = self.about.horizon - 1, np.random.default_rng(group.first)
            steps = drawn.integers(self.about.horizon, size=group.rows, dtype=np.int16)
            batch = batch._replace(t=np.where(batch.t == last, batch.t, steps))
        if part == "all":
            return batch
        held_out = _held_out(group.first, group.rows)
        return _take(batch, np.flatnonzero(held_out if part == "held_out" else ~held_out))


def _held_out(first: int, rows: int) -> NDArray[np.bool_]:
    """Which rows are held out: a hash of the row's number, so it is the same in every pass and order."""
    number = np.arange(first, first + rows, dtype=np.uint64)
    scrambled = (number * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)  # Fibonacci hashing
    return (scrambled % np.uint64(1000)) < 1000 * HELD_OUT


def _check_rows(where: str, batch: Batch, about: About) -> None:
    for name in ("reward", "state", "next_state"):
        x = getattr(batch, name)
        if not np.isfinite(x).all():
            row = int((~np.isfinite(x)).reshape(len(x), -1).any(1).argmax())
            raise ValueError(f"{where} {name}: NaN or infinity in row {row}, expected finite numbers")
    for name, size in (("action", about.n_actions), ("t", about.horizon)):
        x = getattr(batch, name)
        if x.size and not 0 <= x.min() <= x.max() < size:
            row = int(((x < 0) | (x >= size)).argmax())
            raise ValueError(f"{where} {name}: {x[row]} in row {row}, expected 0 to {size - 1}")


def _check_file(file: Path, about: About) -> None:
    found = _open(file).schema_arrow
    for field in schema(about):
        i = found.get_field_index(field.name)
        if i < 0:
            raise ValueError(f"{file}: column {field.name} is missing, expected {', '.join(schema(about).names)}")
        if found.field(i).type != field.type:
            raise ValueError(f"{file}: column {field.name} is {found.field(i).type}, expected {field.type}")
    said = _about(file)
    for name in ("env", "horizon", "n_actions", "width"):
        if getattr(said, name) != getattr(about, name):
            raise ValueError(f"{file}: its {name} is {getattr(said, name)!r}, expected {getattr(about, name)!r}")


def _about(file: Path) -> About:
    metadata = {k.decode(): v.decode() for k, v in (_open(file).schema_arrow.metadata or {}).items()}
    values: dict[str, str | int] = {}
    for field in fields(About):
        if field.name not in metadata:
            raise ValueError(
                f"{file}: {field.name} is missing in the schema's metadata; was it written by another program?"
            )
        text = metadata[field.name]
        if field.type is int and not text.lstrip("-").isdigit():
            raise ValueError(f"{file}: {field.name} in the schema's metadata is {text!r}, expected a whole number")
        values[field.name] = int(text) if field.type is int else text
    return About(**values)  # type: ignore[arg-type]


def _open(file: Path, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file, metadata=metadata, page_checksum_verification=True)
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file, expected logged transitions") from None
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file}: not a whole Parquet file ({_line(error)}); was it cut off?") from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _take(batch: Batch, rows: NDArray[np.int64]) -> Batch:
    return Batch._make(x.take(rows, axis=0) for x in batch)


def _rows(batch: Iterable[NDArray[Any]], first: int, last: int) -> Batch:
    """Copied: what is computed of them must not depend on where they lie."""
    return Batch._make(x[first:last].copy() for x in batch)
