"""Are the results what the code computes? `python -m flows.check --study gridworld-1000`; `--group 0` for one group.

Without --group it clones the last commit into a temporary folder, runs the chain there from nothing by `dvc repro`, and
compares metrics.json with the committed one; the deployment `nightly` does so on a schedule.

With --group it proves that a change of code touches no number: it recomputes one group of every stage with the code as
it stands, in a temporary folder, and compares every byte with what dvc.lock of the last commit has accepted. Where all
of it is the same, `dvc commit` may accept the changed code without computing the rest.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.pipeline import STAGES, check_study, last_line
from flows.processes import child, environment
from flows.server import ends_without_server, joined_server
from tasks import params
from tasks.params import ROOT

COMPUTING = STAGES[:-1]  # those whose results are groups


# --- the chain --------------------------------------------------------------------------------------------------------


@task(cache_policy=NO_CACHE, task_run_name="recompute {study}")
def recompute(study: str, folder: Path) -> None:
    """The chain up to `evaluate` in a fresh clone, which has no cache."""
    clone = ["git", "clone", "--quiet", str(ROOT), str(folder)]
    done = subprocess.run(clone, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    run([sys.executable, "-m", "dvc", "repro", f"evaluate@{study}"], folder)


def run(command: list[str], folder: Path) -> None:
    """A command in a copy of the project; a failure's message is the stage's own last line."""
    log = folder / "check.log"
    with (
        log.open("w") as said,
        child(command, cwd=folder, stdout=said, stderr=said, env=environment(folder)) as process,
    ):
        code = process.wait()
    if code:
        raise RuntimeError(last_line(log.read_text()) or f"{' '.join(command[1:])}: exit code {code}")


@flow(name="check", flow_run_name="{study}", validate_parameters=False)
def check(study: str = "gridworld-1000") -> int:
    """How many numbers were compared; a RuntimeError names the first one that is not the committed one."""
    check_study(study)
    committed = f"HEAD:data/evaluate/{study}/metrics.json"
    shown = subprocess.run(["git", "show", committed], cwd=ROOT, capture_output=True, text=True, check=False)
    if shown.returncode:
        raise ValueError(f"{committed}: not in Git, expected committed results of {study}")
    with tempfile.TemporaryDirectory() as folder, ends_without_server("check"):
        recompute(study, Path(folder) / "clone")
        metrics = Path(folder) / "clone" / "data" / "evaluate" / study / "metrics.json"
        found = flat(json.loads(metrics.read_text()))
    expected = flat(json.loads(shown.stdout))
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise RuntimeError(f"{study}: {name} is {found.get(name)}, expected the committed {expected.get(name)}")
    return len(expected)


def flat(metrics: dict[str, Any]) -> dict[str, Any]:
    """relative_variance.mpe and so on."""
    out: dict[str, Any] = {}
    for name, value in metrics.items():
        out |= {f"{name}.{key}": x for key, x in value.items()} if isinstance(value, dict) else {name: value}
    return out


# --- one group --------------------------------------------------------------------------------------------------------


def place(stage: str, study: str) -> str:
    """Where a stage's groups are, in the project's folder."""
    return f"data/{stage}/{study}" + ("/runs" if stage == "evaluate" else "")


def accepted(stage: str, study: str, group: str) -> dict[str, str]:
    """MD5 by file name of a group: what the last commit's dvc.lock has accepted, by DVC's cache.

    Where the cache has no such list, what is in the work tree.
    """
    lock = subprocess.run(["git", "show", "HEAD:dvc.lock"], cwd=ROOT, capture_output=True, text=True, check=False)
    stages = (yaml.safe_load(lock.stdout) or {}).get("stages", {}) if lock.returncode == 0 else {}
    for out in stages.get(f"{stage}@{study}", {}).get("outs", []):
        hashed = str(out.get("md5"))
        listed = ROOT / ".dvc" / "cache" / "files" / "md5" / hashed[:2] / hashed[2:]
        if out["path"] == place(stage, study) and listed.exists():
            files = {entry["relpath"]: entry["md5"] for entry in json.loads(listed.read_text())}
            return {name.partition("/")[2]: x for name, x in files.items() if name.startswith(f"{group}/")}
    return hashes(ROOT / place(stage, study) / group)


def hashes(folder: Path) -> dict[str, str]:
    """MD5 by file name."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            found[str(path.relative_to(folder))] = hashlib.file_digest(file, "md5").hexdigest()
    return found


def copy_code(study: str, folder: Path) -> None:
    """The code and parameters as they stand, committed or not, and the study's own files."""
    section = params.read()["studies"][study]
    sources = [str(section[stage].get("source", "")) for stage in ("targets", "offline")]
    for name in ("manyfold", "tasks", "params.yaml", *(x for x in sources if x and not x.endswith(".py"))):
        source, copied = ROOT / name, folder / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, copied) if source.is_dir() else shutil.copy(source, copied)


def recompute_group(stage: str, study: str, number: int, group: str, folder: Path) -> Path:
    """One group of a stage, from the recomputed group of earlier stages, in its place in `folder`.

    Other groups are links to those of the work tree: a stage wants to see that there are as many as before.
    """
    run([sys.executable, "-m", f"tasks.{stage}", "--study", study, "--groups", f"{number}-{number}"], folder)
    out = folder / place(stage, study)
    out.mkdir(parents=True, exist_ok=True)
    (made,) = (folder / "data" / ".work" / stage).glob(f"{study}-*/{group}")
    made.rename(out / group)
    for other in (ROOT / place(stage, study)).glob("group-*"):
        if other.name != group:
            (out / other.name).symlink_to(other)
    return out / group


def compare(study: str, number: int) -> int:
    """Prints for every file of one group whether it is the same; how many are not."""
    check_study(study)
    group, differing = f"group-{number:02d}", 0
    for stage in COMPUTING:
        if not (ROOT / place(stage, study) / group).is_dir():
            raise ValueError(
                f"{place(stage, study)}/{group}: not there, expected results to compare with; `dvc checkout` brings "
                "them from DVC's cache, `dvc repro` computes them"
            )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_code(study, folder)
        for stage in COMPUTING:
            expected = accepted(stage, study, group)
            found = hashes(recompute_group(stage, study, number, group, folder))
            for name in sorted(expected.keys() | found.keys()):
                same = expected.get(name) == found.get(name)
                said = "same" if same else "gone" if name not in found else "new" if name not in expected else "differs"
                print(f"{said:8}{place(stage, study)}/{group}/{name}", flush=True)
                differing += not same
    return differing


# --- the command line -------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.check",
        description="Recomputes a study's results in a clone of the last commit and compares metrics.json with the "
        "committed one; with --group recomputes one group with the code as it stands, committed or not, and compares "
        "every byte with the results that the last commit's dvc.lock has accepted.",
    )
    parser.add_argument("--study", default="gridworld-1000", help="a name of params.yaml's section `studies`")
    parser.add_argument("--group", type=int, help="this group alone, stage by stage")
    args = parser.parse_args(arguments)
    try:
        if args.group is None:
            check_study(args.study)
            with joined_server():
                numbers = check(args.study)
            print(f"{args.study}: all {numbers} numbers of metrics.json are the committed ones.")
        elif differing := compare(args.study, args.group):
            raise RuntimeError(f"{differing} files of group {args.group} are not as before; run `dvc repro`")
        else:
            print(f"Group {args.group} of {args.study} is the same to the last byte: `dvc commit` may accept the code.")
    except (ValueError, OSError, RuntimeError) as error:
        print(f"check: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
