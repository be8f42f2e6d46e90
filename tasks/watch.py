"""Checkpoints as they appear: `python -m tasks.watch --study cartpole --precision 25` evaluates what is new, once.

New checkpoints are estimated from the episodes in the store first, and only what is missing is run. Where nothing is
new, nothing is done, in less than a second. `flows/watch.py` does this on a schedule.

    data/watch/<study>/
      store/       every episode, and what is needed to ask earlier policies
      seen.json    what has been evaluated: files by size and time, policies, and what was asked for
      0001.json    an evaluation: the ranked policies, what was left out, what it cost, its run in MLflow
      page.html    the last one, for people
"""

import argparse
import contextlib
import glob
import importlib
import json
import os
import re
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tasks import commands, params
from tasks.params import ROOT

SETTLE = 10.0  # seconds since a file was written, before it counts: whoever writes it may not have ended
OPTIONS = ("greedy", "epsilon", "activation")  # of `load_policies`, as a study's section `targets` has them
Files = dict[str, list[int]]  # by path: size, and time in nanoseconds

ABOUT = """\
Evaluates the checkpoints of a folder if some are new: from the episodes in the store first, running only what is
missing. MLflow gets a run for each evaluation, and one run with values, ranks and P(best) by the evaluation's number.
"""


@dataclass(frozen=True)
class Asked:
    """What is to be evaluated, and how well.

    Attributes:
        how: what decides the result beside the files: environment, options of policies, when to stop.
        folder: of this study's results.
    """

    study: str
    patterns: tuple[str, ...]
    how: dict[str, Any]
    folder: Path
    store: Path
    settle: float
    workers: int

    @property
    def where(self) -> str:
        return ", ".join(self.patterns)


class News(NamedTuple):
    """The files that are there: what has settled, whether some of that is new, and how many have not settled."""

    settled: Files
    new: bool
    unsettled: int


def parser(prog: str = "python -m tasks.watch", about: str = ABOUT) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog=prog, description=about)
    found.add_argument("--study", required=True, metavar="NAME", help="a study of params.yaml; any name with --env")
    found.add_argument("--policies", nargs="+", metavar="PATH", help="files, 'patterns' or folders (the study's own)")
    other = found.add_argument_group("where it is no study")
    other.add_argument("--env", metavar="ID", help="a Gymnasium id, or module:function that makes one")
    other.add_argument("--horizon", type=int, metavar="T", help="steps of an episode at most (its TimeLimit)")
    other.add_argument("--greedy", action="store_true", help="the most likely action instead of a sample")
    amount = found.add_argument_group("how many episodes (one of the first two)")
    amount.add_argument("--precision", type=float, metavar="X", help="until every value is known to +- X")
    amount.add_argument("--stop", choices=("best", "order"), help="until the best one, or the whole order, is known")
    amount.add_argument("--budget", type=int, default=10_000, metavar="N", help="new ones at most, each time (10,000)")
    amount.add_argument("--alpha", type=float, default=0.05, metavar="P", help="probability of a wrong claim (0.05)")
    found.add_argument("--store", type=Path, metavar="FOLDER", help="of all episodes (data/watch/NAME/store)")
    settle = f"a file counts when it was written so many seconds ago ({SETTLE:g}): a training may still be writing it"
    found.add_argument("--settle", type=float, default=SETTLE, metavar="S", help=settle)
    found.add_argument("--workers", type=int, default=1, metavar="N", help="processes for the episodes (1)")
    found.add_argument("--data", type=Path, default=ROOT / "data", help="folder of all data (default data)")
    return found


def asked_of(args: argparse.Namespace) -> Asked:
    """What the arguments say, or a ValueError in one line. Imports nothing that takes long."""
    if args.precision is None and args.stop is None:
        raise ValueError("nothing says when to stop, expected --precision 25 or --stop best")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", args.study):  # it names a folder
        raise ValueError(f"--study {args.study!r:.60}, expected a name of letters, digits, dots, dashes and _")
    how = {name: getattr(args, name) for name in ("precision", "stop", "budget", "alpha")}
    if args.env is None:
        own, patterns = of_study(args)
    else:
        own, patterns = {name: getattr(args, name) for name in ("env", "horizon", "greedy")}, args.policies
        if not patterns:
            raise ValueError("--env is without --policies, expected a folder or a 'pattern' of checkpoints")
    folder = args.data / "watch" / args.study
    store = args.store or folder / "store"
    return Asked(args.study, tuple(patterns), {**own, **how}, folder, store, args.settle, args.workers)


def of_study(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The environment and options of a study of params.yaml, and its checkpoints unless others are named."""
    found = params.read().get("studies")
    section = found.get(args.study) if isinstance(found, dict) else None
    targets = section.get("targets") if isinstance(section, dict) else None
    if not isinstance(section, dict) or not isinstance(targets, dict):
        try:
            importlib.import_module("tasks.studies").read(args.study)  # says what is wrong, and imports environments
        except ValueError as error:
            raise ValueError(f"{error}; or name it as you like and say --env and --policies") from None
        raise ValueError(f"params.yaml: expected studies.{args.study}.targets")
    for name in ("horizon", "greedy"):
        if getattr(args, name):
            raise ValueError(f"--{name} is for --env, expected it in params.yaml, where the study {args.study} is")
    patterns = args.policies
    if not patterns:
        source = str(targets.get("source"))
        if source.endswith(".py") or list(ROOT.joinpath(source).glob("*.safetensors")):
            raise ValueError(f"{args.study} has its policies from {source}, expected --policies: a folder to watch")
        patterns = [os.path.relpath(ROOT / source)]
    options = {name: targets[name] for name in OPTIONS if name in targets}
    return {"environment": section.get("environment"), **options}, patterns


# --- what is there ----------------------------------------------------------------------------------------------------


def files_there(patterns: tuple[str, ...]) -> Files:
    """Every file that may matter: all in a folder, and all beside what a pattern matches, as normalisers are."""
    found: set[Path] = set()
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            found.update(path.rglob("*"))
        elif matches := glob.glob(str(path), recursive=True):
            found.update(near for folder in {Path(one).parent for one in matches} for near in folder.iterdir())
        elif not glob.has_magic(str(path)):
            raise ValueError(f"{pattern}: no such file or folder, expected checkpoints; make the folder first")
    out: Files = {}
    for path in sorted(found):
        with contextlib.suppress(OSError):  # gone meanwhile
            about = path.stat()
            if stat.S_ISREG(about.st_mode) and not path.name.startswith("."):
                out[str(path)] = [about.st_size, about.st_mtime_ns]
    return out


def news(asked: Asked) -> News:
    """Whether some file that has settled is another one than when it was seen last, or something else is asked for."""
    there, now, seen = files_there(asked.patterns), time.time(), read_seen(asked)
    for kept in (asked.folder.resolve(), asked.store.resolve()):
        if any(Path(name).resolve().is_relative_to(kept) for name in there):
            raise ValueError(f"{kept} is inside of {asked.where}, expected results elsewhere than checkpoints")
    settled = {name: about for name, about in there.items() if now - about[1] / 1e9 >= asked.settle}
    new = seen.get("how") != asked.how or any(seen["files"].get(name) != about for name, about in settled.items())
    return News(settled, new, len(there) - len(settled))


def read_seen(asked: Asked) -> dict[str, Any]:
    """What the last evaluation has seen; nothing where there was none."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((asked.folder / "seen.json").read_text())
        if isinstance(found, dict) and isinstance(found.get("files"), dict):
            return found
    return {"files": {}}


def last(folder: Path) -> dict[str, Any] | None:
    """The last evaluation, as its file has it."""
    files = sorted(folder.glob("[0-9]*.json"), key=lambda path: int(path.stem))
    return dict(json.loads(files[-1].read_text())) if files else None


def nothing_new(asked: Asked, found: News) -> str:
    before = last(asked.folder)
    said = f"Nothing new in {asked.where}" + (f" since evaluation {before['number']}" if before else "")
    files = "1 file was" if found.unsettled == 1 else f"{found.unsettled} files were"
    return f"{said}; {files} written in the last {asked.settle:g} s: the next time" if found.unsettled else said


# --- the command line -------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    sys.path.insert(0, os.getcwd())  # a user's own module beside the checkpoints

    def work() -> None:
        asked = asked_of(args)
        found = news(asked)
        # torch, environments and MLflow take seconds, which a look at nothing new need not pay
        print(importlib.import_module("tasks.watched").evaluate(asked) if found.new else nothing_new(asked, found))

    try:
        return commands.guarded("watch", work)
    except KeyboardInterrupt:
        print("watch: interrupted; the next time resumes", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
