"""The store: every episode that was ever run in an environment, so that later policies can be estimated from them.

    evals/
      store.json           the environment and the version
      policies/<id>/       what a later evaluation needs to ask an earlier policy for its densities
      plans/<id>.json      episodes that somebody is running, or was when it was killed
      episodes/*.parquet   a row for each episode: policy, seed, states, actions, rewards, log-probabilities

An episode counts once its plan has ended. Counting those that ended before a kill, and drawing the others again, would
favour short ones: so a plan that was cut off is finished by whoever comes next, each episode by its own seed. Several
processes may write at once: numbers of episodes are given out under a lock, and a plan is locked while its process
lives.
"""

import contextlib
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from manyfold.arrays import Array, Ints
from manyfold.draws import Seeds, seeds_of
from manyfold.envs.base import Environment
from manyfold.files import atomic, atomic_folder, sha256, write_json

VERSION = 1
KINDS = {np.dtype(x).name: pa.from_numpy_dtype(np.dtype(x)) for x in ("float32", "float64", "int64")}


class Logged(NamedTuple):
    """Whole episodes as they were run, in the order of who ran them and when."""

    states: NDArray[Any]  # [M, width]
    t: Ints  # [M]
    actions: NDArray[Any]  # [M], or [M, d]
    rewards: Array  # [M]
    log_prob: Array  # of the action under the policy that took it, [M]
    lengths: Ints  # [N]
    who: list[str]  # the id of the policy that ran each, [N]


class Row(NamedTuple):
    """One episode to be written."""

    policy: str
    number: int
    seed: int
    states: NDArray[Any]
    actions: NDArray[Any]
    rewards: Array
    log_prob: Array


@dataclass(frozen=True)
class Plan:
    """Episodes that are to be run: of each policy, a number of them from a first number on."""

    id: str
    seed: int
    first: dict[str, int]
    count: dict[str, int]
    file: TextIO = field(repr=False)  # locked until it is closed

    def episodes(self) -> list[tuple[str, int]]:
        """(policy, number) of each."""
        return [(policy, self.first[policy] + i) for policy, many in self.count.items() for i in range(many)]


class Store:
    """A folder of episodes of one environment."""

    def __init__(self, folder: str | Path, env: Environment) -> None:
        self.folder, self.env = Path(folder), env
        about = {
            "format": "manyfold-store",
            "version": VERSION,
            "environment": {
                "name": env.name,
                "settings": repr(sorted(getattr(env, "settings", {}).items())),
                "horizon": env.horizon,
                "observations": _said(env.observation_space),
                "actions": _said(env.action_space),
            },
        }
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder}: a file, expected a folder for the store")
        file = self.folder / "store.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"{self.folder}: cannot be made ({error.strerror}), expected a folder for the store"
            ) from None
        strange = [path.name for path in self.folder.iterdir() if not path.name.startswith(".")]
        if not file.exists():  # looked for after the rest: another process may just have made it, first of all
            if strange and not file.exists():
                raise ValueError(f"{self.folder}: not a store and not empty, expected a new or empty folder")
            write_json(file, about)
        self._check(file, about)
        for name in ("policies", "plans", "episodes"):
            (self.folder / name).mkdir(exist_ok=True)

    def _check(self, file: Path, about: dict[str, Any]) -> None:
        try:
            found = json.loads(file.read_text())
            kind, version, where = found["format"], found["version"], dict(found["environment"])
        except (OSError, ValueError, KeyError, TypeError):
            raise ValueError(f"{file}: not readable, expected a store of manyfold; was it edited?") from None
        if kind != about["format"] or version != VERSION:
            raise ValueError(
                f"{file}: {kind!s:.40} version {version!s:.20}, expected {about['format']} version {VERSION}; "
                "use another folder"
            )
        for name, expected in about["environment"].items():
            if where.get(name) != expected:
                raise ValueError(
                    f"{self.folder}: a store of another environment: {name} {where.get(name)!s:.80}, expected "
                    f"{expected!s:.80}; use another folder"
                )

    # --- policies ---

    def policy(self, id: str) -> Path:
        """The folder that keeps a policy."""
        return self.folder / "policies" / id

    def keep_policy(self, id: str, files: Sequence[Path], sums: Sequence[str], about: dict[str, Any]) -> None:
        """Copies a policy's files, if they aren't there yet; refuses those that aren't what was read any more."""
        if self.policy(id).exists():
            return
        with contextlib.suppress(OSError), self._lock(), atomic_folder(self.policy(id)) as part:
            for file, known in zip(files, sums, strict=True):
                shutil.copyfile(file, part / file.name)
                if sha256(part / file.name) != known:
                    raise ValueError(f"{file}: changed since it was read, expected the same file; load it again")
            write_json(part / "about.json", about)

    # --- plans ---

    def plan(self, counts: dict[str, int], seed: int) -> Plan:
        """Gives out the numbers of the next episodes of each policy."""
        with self._lock():
            taken = self._numbers()
            first = {policy: taken.get(policy, 0) for policy, many in counts.items() if many}
            id = uuid.uuid4().hex[:12]
            path = self.folder / "plans" / f"{id}.json"
            part = path.with_name(f".{id}")
            file = part.open("w")
            fcntl.flock(file, fcntl.LOCK_EX)
            count = {policy: many for policy, many in counts.items() if many}
            json.dump({"seed": seed, "first": first, "count": count}, file)
            file.flush()
            os.fsync(file.fileno())
            part.rename(path)
        return Plan(id, seed, first, count, file)

    def seeds(self, seed: int, episodes: Sequence[tuple[str, int]]) -> Seeds:
        """Of (policy, number)."""
        out = np.empty(len(episodes), dtype=np.uint64)
        for policy in {policy for policy, _ in episodes}:
            here = [i for i, (other, _) in enumerate(episodes) if other == policy]
            numbers = np.array([episodes[i][1] for i in here], dtype=np.int64)
            out[here] = seeds_of("store", self.env.name, seed, policy, numbers=numbers)
        return out

    def cut_off(self) -> Iterator[tuple[Plan, list[tuple[str, int]]]]:
        """Plans whose process is gone, and the episodes that are missing; they are ours until they are finished."""
        for path in sorted((self.folder / "plans").glob("*.json")):
            with contextlib.suppress(OSError):  # somebody else has just finished or taken it
                file = path.open()
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    file.close()
                    continue
                if not path.exists():
                    file.close()
                    continue
                try:
                    plan = Plan(path.stem, *_planned(path), file)
                except ValueError:
                    file.close()
                    raise
                there = {row for part in self._parts(plan.id) for row in _index(part)}
                yield plan, [episode for episode in plan.episodes() if episode not in there]

    def finish(self, plan: Plan) -> None:
        """All episodes of the plan are there: from now on they count; its files become one."""
        parts = self._parts(plan.id)
        if len(parts) > 1:
            with atomic(self.folder / "episodes" / f"{plan.id}.parquet") as whole:
                schema = pq.read_schema(parts[0])
                with pq.ParquetWriter(whole, schema, compression="zstd", write_page_checksum=True) as writer:
                    for part in parts:
                        writer.write_table(pq.read_table(part))
        (self.folder / "plans" / f"{plan.id}.json").unlink(missing_ok=True)
        plan.file.close()
        for part in parts if len(parts) > 1 else ():
            if part.stem != plan.id:
                part.unlink(missing_ok=True)

    # --- episodes ---

    def counts(self) -> dict[str, int]:
        """How many episodes of each policy count."""
        out: dict[str, int] = {}
        for policy, _ in sorted({episode for file in self._finished() for episode in _index(file)}):
            out[policy] = out.get(policy, 0) + 1
        return out

    def read(self, policies: Sequence[str]) -> Logged | None:
        """All episodes that these policies ran, and that count; None if there are none."""
        tables = [table for file in self._finished() if (table := _read(file)) is not None]
        if not tables:
            return None
        table = pa.concat_tables(tables).combine_chunks()
        who, number = table["policy"].to_pylist(), table["number"].to_pylist()
        order = {id: i for i, id in enumerate(dict.fromkeys(policies))}
        first: dict[tuple[str, int], int] = {}
        for i, (policy, n) in enumerate(zip(who, number, strict=True)):
            if policy in order:
                first.setdefault((policy, n), i)  # a file and what it was made of may both be there after a kill
        rows = [i for _, i in sorted(first.items(), key=lambda item: (order[item[0][0]], item[0][1]))]
        if not rows:
            return None
        taken = table.take(pa.array(rows))
        lengths = np.asarray(taken["steps"].to_numpy(), dtype=np.int64)
        steps = int(lengths.sum())

        def column(name: str) -> NDArray[Any]:
            flat = taken[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            return flat if len(flat) == steps else flat.reshape(steps, -1)

        states, actions = column("states"), column("actions")
        wide = states.reshape(steps, -1)
        if wide.shape[1] != self.env.width:
            raise ValueError(f"{self.folder}: states of {wide.shape[1]} numbers, expected {self.env.width}")
        t = np.arange(steps) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        if self.env.action_space.shape and actions.ndim == 1:
            actions = actions[:, None]
        return Logged(wide, t, actions, column("rewards"), column("log_prob"), lengths, [who[i] for i in rows])

    def _finished(self) -> list[Path]:
        running = self._running()
        every = self._parts("")
        running |= self._running()  # one may have begun, and another ended, while the files were listed
        return [path for path in every if path.stem.split("-")[0] not in running]

    def _running(self) -> set[str]:
        return {path.stem for path in (self.folder / "plans").glob("*.json")}

    def _parts(self, plan: str) -> list[Path]:
        """The files of a plan; not those that are being written, or were when somebody was killed."""
        found = (self.folder / "episodes").glob(f"{plan}*.parquet")
        return sorted(path for path in found if not path.name.startswith("."))

    def _numbers(self) -> dict[str, int]:
        """The next free number of each policy."""
        out: dict[str, int] = {}
        for path in (self.folder / "plans").glob("*.json"):  # first: of one that ends meanwhile, the files are there
            with contextlib.suppress(FileNotFoundError):
                _, first, count = _planned(path)
                for policy, many in count.items():
                    out[policy] = max(out.get(policy, 0), first[policy] + many)
        for file in self._parts(""):
            for policy, number in _index(file):
                out[policy] = max(out.get(policy, 0), number + 1)
        return out

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def save(folder: Path, plan: str, rows: Sequence[Row]) -> None:
    """Keeps episodes of a plan, in a file of their own."""
    with atomic(folder / "episodes" / f"{plan}-{uuid.uuid4().hex[:12]}.parquet") as part:
        pq.write_table(_table(rows), part, compression="zstd", write_page_checksum=True)


def _said(space: Any) -> str:
    """A space in words, whatever its numbers print like."""
    return " ".join(str(space).split())


def _table(rows: Sequence[Row]) -> pa.Table:
    def lists(name: str) -> pa.ListArray:
        parts = [np.ravel(getattr(row, name)) for row in rows]
        kind = np.result_type(*parts)
        kind = kind if kind.name in KINDS else np.dtype(np.int64 if kind.kind in "iub" else np.float64)
        ends = np.cumsum([0, *(len(part) for part in parts)])
        return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(np.concatenate(parts).astype(kind)))

    columns = {
        "policy": pa.array([row.policy for row in rows]),
        "number": pa.array([row.number for row in rows], pa.int64()),
        "seed": pa.array([row.seed for row in rows], pa.uint64()),
        "steps": pa.array([len(row.rewards) for row in rows], pa.int64()),
        **{name: lists(name) for name in ("states", "actions", "rewards", "log_prob")},
    }
    return pa.table(columns, metadata={"format": "manyfold-episodes", "version": str(VERSION)})


def _planned(path: Path) -> tuple[int, dict[str, int], dict[str, int]]:
    """Seed, first numbers and counts of a plan."""
    try:
        said = json.loads(path.read_text())
        numbers = [{str(policy): int(x) for policy, x in said[name].items()} for name in ("first", "count")]
        if numbers[0].keys() != numbers[1].keys():
            raise ValueError
        return int(said["seed"]), numbers[0], numbers[1]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path}: not readable, expected a plan of episodes; was it edited? Remove it") from None


def _index(file: Path) -> list[tuple[str, int]]:
    table = _read(file, ["policy", "number"])
    return [] if table is None else list(zip(table["policy"].to_pylist(), table["number"].to_pylist(), strict=True))


def _read(file: Path, columns: list[str] | None = None) -> pa.Table | None:
    """None of a part that has just become one with its plan's others, in a file that was there before it went."""
    try:
        return pq.read_table(file, columns=columns, page_checksum_verification=True)
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        if not file.exists():
            return None
        raise ValueError(
            f"{file}: not readable ({' '.join(str(error).split()):.80}), expected episodes; was it damaged? Remove it"
        ) from None
