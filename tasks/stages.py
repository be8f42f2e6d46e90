"""What all stages share: groups are worked on one by one or in parts, and appear atomically.

Work in progress lives in data/.work, outside of what DVC deletes before a stage runs, so an interrupted stage resumes.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import manyfold
from manyfold.files import atomic
from manyfold.tables import Rows
from tasks.studies import Study, group_name

Report = Callable[[int, str], None]


class Stage(Protocol):
    """A stage of the pipeline, as an executor needs it."""

    name: str
    unit: str  # of its progress
    header: tuple[str, ...]  # of the table that `describe` gives
    batched: bool  # groups are worked on together, one part for each worker; otherwise one group is a job

    def prepare(self, study: Study, data: Path) -> tuple[int, Path]:
        """The number of groups and the work folder, or a ValueError that says what is wrong with the parameters."""

    def run(self, study: Study, groups: list[int], work: Path, data: Path) -> None:
        """Makes these groups' folders in the work folder, each atomically; finished ones are kept."""

    def collect(self, study: Study, groups: int, work: Path, data: Path) -> Path:
        """Puts the finished groups in place: data/<stage>/<study>."""

    def describe(self, out: Path) -> Rows:
        """What was made, as rows of text."""


def work_folder(stage: str, study: Study, params: object, data: Path) -> Path:
    """Where an unfinished run of exactly these parameters and this code keeps its state."""
    key = hashlib.sha256(json.dumps([study.name, study.environment, params]).encode())
    for package in (Path(manyfold.__file__).parent, Path(__file__).parent):
        for source in sorted(package.rglob("*.py")):
            key.update(source.read_bytes())  # work that other code began is not resumed
    return data / ".work" / stage / f"{study.name}-{key.hexdigest()[:12]}"


def earlier(needs: tuple[str, ...], study: Study, data: Path) -> tuple[int, list[str]]:
    """The number of groups, which every earlier stage must have alike, and the checksums of what they hold."""
    folders = [data / need / study.name for need in needs]
    found = [sorted(folder.name for folder in each.glob("group-*")) for each in folders]
    for need, folder, groups in zip(needs, folders, found, strict=True):
        if not groups or groups != found[0] or groups != [group_name(i) for i in range(len(groups))]:
            raise ValueError(f"{folder}: {len(groups)} groups, expected the stage `{need}` to have run")
    return len(found[0]), [fingerprint(folder / name) for folder in folders for name in found[0]]


ENDS = 65_536  # bytes


def fingerprint(folder: Path) -> str:
    """A checksum of what a group's folder holds: of the ends of its files, where their own checksums are."""
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        size = path.stat().st_size
        with path.open("rb") as file:
            found.update(f"{path.name} {size}".encode() + file.read(ENDS))
            file.seek(max(size - ENDS, 0))
            found.update(file.read(ENDS))
    return found.hexdigest()


def reporter(work: Path, groups: list[int], of: int) -> Report:
    """Writes a part's progress, `report(done, text)`, for whoever watches."""
    path = work / f"progress-{groups[0]:02d}-{groups[-1]:02d}.json"

    def report(done: int, text: str) -> None:
        with atomic(path) as part:
            part.write_text(json.dumps({"done": done, "of": of, "text": text, "groups": len(groups)}))

    report(0, "")
    return report


def progress(work: Path, groups: int = 0) -> tuple[int, int, str]:
    """What is done and what there is to do in all `groups`, judged by those that have reported, and a part's text."""
    reports = [json.loads(path.read_text()) for path in sorted(work.glob("progress-*.json"))]
    texts = [report["text"] for report in reports if report["text"]]
    done, of, seen = (sum(report[name] for report in reports) for name in ("done", "of", "groups"))
    return done, round(of * max(groups, seen) / seen) if seen else 0, texts[-1] if texts else ""


def forget_progress(work: Path) -> None:
    """Drops what earlier parts reported."""
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
