"""The Parquet files of a store: a row for each episode, written once; what is in them, some of them, many made one."""

import contextlib
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from manyfold.arrays import Array, Bools, Ints
from manyfold.files import atomic

VERSION = 1
KINDS = {np.dtype(x).name: pa.from_numpy_dtype(np.dtype(x)) for x in ("float32", "float64", "int64")}
GROUP = 2**17  # steps that are read at once, at least, where files are merged
MANY, LARGE = 16, 2**20  # files of a size that become one; episodes of a file that stays as it is


class Row(NamedTuple):
    """One episode to be written."""

    policy: str
    number: int
    seed: int
    states: NDArray[Any]
    actions: NDArray[Any]
    rewards: Array
    log_prob: Array


class Index(NamedTuple):
    """What is in a file of n episodes."""

    policies: tuple[str, ...]
    policy: Ints  # who ran each, as a number of `policies`, [n]
    number: Ints  # [n]
    steps: Ints  # [n]
    groups: Ints  # the first row of each row group, [G]


class Contents(NamedTuple):
    """N episodes that count, by policy and number, and where they are."""

    files: tuple[Path, ...]
    groups: tuple[Ints, ...]  # of each file's `Index`
    policy: Ints  # [N]
    number: Ints  # [N]
    steps: Ints  # [N]
    file: Ints  # [N]
    row: Ints  # [N]

    @property
    def keys(self) -> Ints:
        """(policy, number) as one number, increasing; `[N]`."""
        return (self.policy.astype(np.int64) << 40) + self.number

    def chosen(self, which: Bools | Ints) -> "Contents":
        """Some of them."""
        return self._replace(**{name: getattr(self, name)[which] for name in self._fields[2:]})


def save(folder: Path, plan: str, rows: Sequence[Row]) -> None:
    """Keeps episodes of a plan, in a file of their own."""
    with atomic(folder / "episodes" / f"{plan}-{uuid.uuid4().hex[:12]}.parquet") as part:
        pq.write_table(_table(rows), part, compression="zstd", write_page_checksum=True)


def _table(rows: Sequence[Row]) -> pa.Table:
    def lists(name: str) -> pa.ListArray:
        parts = [np.ravel(getattr(row, name)) for row in rows]
        return as_lists(np.concatenate(parts), np.array([len(part) for part in parts]))

    return table(
        pa.array([row.policy for row in rows]),
        np.array([row.number for row in rows], dtype=np.int64),
        np.array([row.seed for row in rows], dtype=np.uint64),
        np.array([len(row.rewards) for row in rows], dtype=np.int64),
        {name: lists(name) for name in ("states", "actions", "rewards", "log_prob")},
    )


def table(
    policy: pa.Array, number: Ints, seed: NDArray[np.uint64], steps: Ints, lists: dict[str, pa.ListArray]
) -> pa.Table:
    """Of episodes, as a file has them."""
    columns = {"policy": policy, "number": pa.array(number), "seed": pa.array(seed), "steps": pa.array(steps), **lists}
    return pa.table(columns, metadata={"format": "manyfold-episodes", "version": str(VERSION)})


def as_lists(flat: NDArray[Any], lengths: Ints) -> pa.ListArray:
    """The numbers of all episodes in a row, as one list for each."""
    kind = flat.dtype if flat.dtype.name in KINDS else np.dtype(np.int64 if flat.dtype.kind in "iub" else np.float64)
    return pa.ListArray.from_arrays(pa.array(np.append(0, np.cumsum(lengths)), pa.int32()), pa.array(flat.astype(kind)))


def index_of(file: Path) -> Index:
    """What is in a file."""
    with _readable(file):
        opened = pq.ParquetFile(file, read_dictionary=["policy"], page_checksum_verification=True)
        rows = opened.read(["policy", "number", "steps"], use_threads=False)
        policy = rows["policy"].unify_dictionaries().combine_chunks()
        sizes = [opened.metadata.row_group(i).num_rows for i in range(opened.num_row_groups)]
        return Index(
            tuple(policy.dictionary.to_pylist()),
            policy.indices.to_numpy().astype(np.int32),
            rows["number"].to_numpy(),
            rows["steps"].to_numpy().astype(np.int32),
            np.append(0, np.cumsum(sizes, dtype=np.int64))[:-1],
        )


def read_rows(file: Path, rows: Ints, groups: Ints, columns: Sequence[str]) -> tuple[Ints, list[NDArray[Any]]]:
    """Some episodes of a file: the steps of each `[n]`, and the numbers of every column, all steps in a row `[M, ...]`.

    Args:
        rows: of the file, in increasing order.
        groups: of its `Index`.
    """
    with _readable(file):
        opened = pq.ParquetFile(file, page_checksum_verification=True)
        group = np.searchsorted(groups, rows, side="right") - 1
        lengths, parts = list[Ints](), [list[NDArray[Any]]() for _ in columns]
        for g in np.unique(group).tolist():
            some = opened.read_row_group(g, columns=["steps", *columns], use_threads=False)
            steps = some["steps"].to_numpy()
            inside = np.zeros(len(steps), dtype=np.bool_)
            inside[rows[group == g] - groups[g]] = True
            lengths.append(steps[inside])
            for part, name in zip(parts, columns, strict=True):
                flat = some[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
                flat = flat.reshape(int(steps.sum()), -1)
                part.append(flat if inside.all() else flat[np.repeat(inside, steps)])
        return np.concatenate(lengths), [np.concatenate(part) for part in parts]


def merge(parts: Sequence[Path], whole: Path) -> None:
    """One file of several, its row groups large."""
    with atomic(whole) as file:
        opened = [pq.ParquetFile(part, page_checksum_verification=True) for part in parts]
        with pq.ParquetWriter(file, opened[0].schema_arrow, compression="zstd", write_page_checksum=True) as writer:
            waiting, steps = list[pa.Table](), 0
            for one in opened:
                for g in range(one.num_row_groups):
                    waiting.append(one.read_row_group(g, use_threads=False))
                    steps += int(waiting[-1]["steps"].to_numpy().sum())
                    if steps >= GROUP:
                        writer.write_table(pa.concat_tables(waiting))
                        waiting, steps = [], 0
            if waiting:
                writer.write_table(pa.concat_tables(waiting))


def mergeable(files: dict[Path, int]) -> list[Path]:
    """Of files by their numbers of episodes, some of about one size that should become one; none where few are so."""
    sizes: dict[int, list[Path]] = {}
    for file, many in files.items():
        if many < LARGE:
            sizes.setdefault(many.bit_length() // 4, []).append(file)
    for _, some in sorted(sizes.items()):
        same: dict[str, list[Path]] = {}
        for file in some if len(some) >= MANY else ():
            same.setdefault(str(pq.read_schema(file).remove_metadata()), []).append(file)
        if large := [alike for alike in same.values() if len(alike) >= MANY]:
            return large[0]
    return []


def version_of(file: Path) -> tuple[Path, int, int]:
    """What differs when a file is written again."""
    said = os.stat(file)
    return file, said.st_mtime_ns, said.st_size


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise  # just merged into another one
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise ValueError(
            f"{file}: not readable ({' '.join(str(error).split()):.80}), expected episodes; was it damaged? Remove it"
        ) from None
