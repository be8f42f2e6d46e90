"""What all stages share: groups are worked on in shards, each in a process of its own, and appear whole or not at all.

Work in progress lives in data/.work, outside of what DVC deletes before a stage runs, so an interrupted stage goes on.
"""

import argparse
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import manyfold
from manyfold import environments
from tasks.params import ROOT

Report = Callable[[int, str], None]


def group_name(group: int) -> str:
    return f"group-{group:02d}"


def work_folder(stage: str, env: str, params: object, data: Path) -> Path:
    """Where an unfinished run of exactly these parameters and this code keeps its state."""
    key = hashlib.sha256(json.dumps([env, params]).encode())
    for source in sorted([*Path(manyfold.__file__).parent.glob("*.py"), *Path(__file__).parent.glob("*.py")]):
        key.update(source.read_bytes())  # work that other code began is not gone on with
    return data / ".work" / stage / f"{env}-{key.hexdigest()[:12]}"


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes its name when the block ends well."""
    part = folder.with_name(f".{folder.name}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    yield part
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def reporter(work: Path, groups: list[int], of: int) -> Report:
    """Writes a shard's progress, `report(done, text)`, for whoever watches."""
    path = work / f"progress-{groups[0]:02d}-{groups[-1]:02d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)

    def report(done: int, text: str) -> None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"done": done, "of": of, "text": text}))
        part.replace(path)

    report(0, "")
    return report


def progress(work: Path) -> tuple[int, int, str]:
    """What is done and what there is to do in all shards that have reported, and the first one's text."""
    reports = [json.loads(path.read_text()) for path in sorted(work.glob("progress-*.json"))]
    texts = [report["text"] for report in reports if report["text"]]
    return sum(r["done"] for r in reports), sum(r["of"] for r in reports), texts[0] if texts else ""


def forget_progress(work: Path) -> None:
    """Drops what earlier shards reported."""
    for report in work.glob("progress-*"):
        report.unlink()


def collect(out: Path, groups: int, work: Path, is_whole: Callable[[Path], bool]) -> Path:
    """Moves the finished groups to `out`, all of them or none, and drops the work folder."""
    expected = [group_name(group) for group in range(groups)]
    part = work / "whole"  # what an interrupted call has moved already is there
    if missing := [name for name in expected if not (is_whole(work / name) or is_whole(part / name))]:
        raise ValueError(f"{work}: {', '.join(missing)} missing, expected {groups} groups; run the stage again")
    part.mkdir(exist_ok=True)
    for name in expected:
        if (work / name).exists():
            shutil.rmtree(part / name, ignore_errors=True)
            (work / name).rename(part / name)
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out, ignore_errors=True)
    part.rename(out)
    shutil.rmtree(work)
    return out


def shard_main(
    stage: str, about: str, run: Callable[[str, list[int], Path], Path], arguments: list[str] | None = None
) -> int:
    """The command line of one shard: `run(env, groups, data)` and where its results are."""
    parser = argparse.ArgumentParser(prog=f"python -m tasks.{stage}", description=about)
    parser.add_argument("--env", required=True, help=f"one of {', '.join(environments.ENVS)}")
    parser.add_argument("--groups", required=True, help="first and last group, for example 0-14")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of all data (default data)")
    args = parser.parse_args(arguments)
    start = time.perf_counter()
    try:
        environments.check_env(args.env)
        first, _, last = args.groups.partition("-")
        if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
            raise ValueError(f"--groups is {args.groups!r}, expected first-last, for example 0-14")
        work = run(args.env, list(range(int(first), int(last) + 1)), args.data)
    except (ValueError, OSError) as error:
        print(f"{stage}: {error}", file=sys.stderr)
        return 2
    print(f"groups {args.groups} of {args.env} in {time.perf_counter() - start:.0f} s: {work}")
    return 0
