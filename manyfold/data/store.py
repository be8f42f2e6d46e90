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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from manyfold.arrays import Array, Ints
from manyfold.data.episode_files import VERSION, Contents, Index, index_of, merge, mergeable, read_rows, version_of
from manyfold.draws import Seeds, seeds_of
from manyfold.envs.base import Environment
from manyfold.files import atomic_folder, sha256, write_json

T = TypeVar("T")
AGAIN = 20  # looks at the folder at most, while others merge files
FILES = "[!.]*.parquet"  # without those that are being written


class Logged(NamedTuple):
    """Whole episodes as they were run, in the order of who ran them and when."""

    states: NDArray[Any]  # [M, width]
    t: Ints  # [M]
    actions: NDArray[Any]  # [M], or [M, d]
    rewards: Array  # [M]
    log_prob: Array  # of the action under the policy that took it, [M]
    lengths: Ints  # [N]
    who: list[str]  # the id of the policy that ran each, [N]


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
        self._indices: dict[Path, tuple[tuple[Path, int, int], Index]] = {}
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
            taken = self._next()
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
                found = [self._index(part) for part in self._parts(plan.id)]
                there = {(x.policies[i], n) for x in found for i, n in zip(x.policy, x.number.tolist(), strict=True)}
                yield plan, [episode for episode in plan.episodes() if episode not in there]

    def finish(self, plan: Plan) -> None:
        """All episodes of the plan are there: from now on they count; its files become one."""
        parts = self._parts(plan.id)
        if len(parts) > 1:
            merge(parts, self.folder / "episodes" / f"{plan.id}.parquet")
        with self._lock():
            (self.folder / "plans" / f"{plan.id}.json").unlink(missing_ok=True)
            for part in parts if len(parts) > 1 else ():
                if part.stem != plan.id:
                    part.unlink(missing_ok=True)
        plan.file.close()
        self._merge()

    def _merge(self) -> None:
        """Small files become one: thousands would take long to open. Killed before they go, each episode counts once.

        Files come and go under the lock, so that nobody who lists them sees neither the old nor the new.
        """
        with (self.folder / "merging").open("w") as mine:
            try:
                fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return  # somebody else does
            while True:
                with self._lock():
                    files = self._finished()
                parts = mergeable({file: len(self._index(file).number) for file in files})
                if not parts:
                    return
                part = self.folder / "episodes" / f".{uuid.uuid4().hex[:12]}.merged"
                merge(parts, part)
                with self._lock():
                    part.rename(part.with_name(f"{part.stem[1:]}.parquet"))
                    for old in parts:
                        old.unlink()

    # --- episodes ---

    def counts(self) -> dict[str, int]:
        """How many episodes of each policy count."""

        def look() -> dict[str, int]:
            with self._lock():
                files = self._finished()
            policies = sorted({id for file in files for id in self._index(file).policies})
            many = np.bincount(self._contents(policies).policy, minlength=len(policies))
            return {id: n for id, n in zip(policies, many.tolist(), strict=True) if n}

        return self._again(look)

    def contents(self, policies: Sequence[str]) -> Contents:
        """The episodes of these policies that count; of two of the same number one, as a kill may leave both."""
        return self._again(lambda: self._contents(policies))

    def _again(self, look: Callable[[], T]) -> T:
        """Until no file was merged into another one while we looked."""
        for _ in range(AGAIN):
            with contextlib.suppress(FileNotFoundError):
                return look()
        raise ValueError(f"{self.folder}: files came and went {AGAIN} times; is another program at work there?")

    def _contents(self, policies: Sequence[str]) -> Contents:
        with self._lock():
            files = self._finished()
        code = {id: i for i, id in reversed(list(enumerate(policies)))}  # of two that are the same, the first
        parts, groups = list[tuple[NDArray[Any], ...]](), list[Ints]()
        for i, file in enumerate(files):
            found = self._index(file)
            groups.append(found.groups)
            policy = np.array([code.get(id, -1) for id in found.policies], dtype=np.int32)[found.policy]
            rows = np.flatnonzero(policy >= 0)
            parts.append((policy[rows], found.number[rows], found.steps[rows], np.full(len(rows), i, np.int32), rows))
        columns = [np.concatenate(x) for x in zip(*parts, strict=True)] if parts else [np.empty(0, np.int64)] * 5
        every = Contents(tuple(files), tuple(groups), *columns)
        return every.chosen(np.unique(every.keys, return_index=True)[1])

    def read(self, policies: Sequence[str], known: Contents | None = None, log_prob: bool = True) -> Logged | None:
        """Episodes that these policies ran, and that count; None if there are none.

        Args:
            known: those to read, of `contents(policies)`; all of them if left out.
        """
        wanted = self.contents(policies) if known is None else known
        for _ in range(AGAIN):
            if not len(wanted.number):
                return None
            with contextlib.suppress(FileNotFoundError):
                return self._read(policies, wanted, log_prob)
            now = self.contents(policies)  # files were merged
            places = np.minimum(np.searchsorted(now.keys, wanted.keys), len(now.keys) - 1)
            if not len(places) or (now.keys[places] != wanted.keys).any():
                raise ValueError(
                    f"{self.folder}: episodes are gone that were there, expected that nobody removes files"
                )
            wanted = now.chosen(places)
        raise ValueError(f"{self.folder}: files came and went {AGAIN} times; is another program at work there?")

    def _read(self, policies: Sequence[str], wanted: Contents, log_prob: bool) -> Logged:
        names = ["states", "actions", "rewards", *(["log_prob"] if log_prob else [])]
        order = np.lexsort((wanted.row, wanted.file))
        file = wanted.file[order]
        parts = []
        for i in np.unique(file).tolist():
            rows = wanted.row[order[np.searchsorted(file, i) : np.searchsorted(file, i, side="right")]]
            parts.append(read_rows(wanted.files[i], rows, wanted.groups[i], names))
        found = np.concatenate([lengths for lengths, _ in parts]).astype(np.int64)
        places = np.argsort(order)  # of each wanted episode among those found
        lengths = found[places]
        t = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        step = np.repeat((np.cumsum(found) - found)[places], lengths) + t
        columns = [np.concatenate(x).take(step, axis=0) for x in zip(*(every for _, every in parts), strict=True)]
        states, actions, rewards = columns[:3]
        if states.shape[1] != self.env.width:
            raise ValueError(f"{self.folder}: states of {states.shape[1]} numbers, expected {self.env.width}")
        if not self.env.action_space.shape:
            actions = actions[:, 0]
        logs = columns[3][:, 0] if log_prob else np.empty(0)
        return Logged(states, t, actions, rewards[:, 0], logs, lengths, [policies[i] for i in wanted.policy.tolist()])

    def _finished(self) -> list[Path]:
        running = {path.stem for path in (self.folder / "plans").glob("*.json")}
        every = sorted((self.folder / "episodes").glob(FILES))
        return [path for path in every if path.stem.split("-")[0] not in running]

    def _parts(self, plan: str) -> list[Path]:
        return sorted((self.folder / "episodes").glob(f"{plan}*.parquet"))

    def _index(self, file: Path) -> Index:
        """Read once, as long as the file is the same."""
        version = version_of(file)
        if file not in self._indices or self._indices[file][0] != version:
            self._indices[file] = version, index_of(file)
        return self._indices[file][1]

    def _next(self) -> dict[str, int]:
        """The next free number of each policy."""
        out: dict[str, int] = {}
        for file in (self.folder / "episodes").glob(FILES):
            found = self._index(file)
            last = np.full(len(found.policies), -1, dtype=np.int64)
            np.maximum.at(last, found.policy, found.number)
            for policy, number in zip(found.policies, last.tolist(), strict=True):
                out[policy] = max(out.get(policy, 0), number + 1)
        for path in (self.folder / "plans").glob("*.json"):
            _, first, count = _planned(path)
            for policy, many in count.items():
                out[policy] = max(out.get(policy, 0), first[policy] + many)
        return out

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _said(space: Any) -> str:
    """A space in words, whatever its numbers print like."""
    return " ".join(str(space).split())


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
