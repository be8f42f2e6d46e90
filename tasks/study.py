"""A study of one's own: `python -m tasks.study new my-robot --env CartPole-v1 --policies 'checkpoints/*.zip'`.

`manyfold study new` does the same inside a clone of the repository. It writes a section of params.yaml. A file or
folder inside the clone is referred to; anything else is copied to studies/<name>, so that DVC can watch it.
"""

import argparse
import glob
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyfold.arrays import check_number
from manyfold.data.reading import read as read_data
from manyfold.data.transitions import About, Transitions, Writer
from manyfold.envs import Environment
from manyfold.files import write_text
from manyfold.policies.checking import check
from manyfold.policies.importing import load_files
from tasks import commands, studies
from tasks.given import OPTIONS, Given, given
from tasks.params import ROOT, parse
from tasks.sections import with_study
from tasks.studies import OURS, STAGES, Study

FOLDER = "studies"  # of files that are copied
STEPS = 1_000_000  # logged for each group, about: as many as fits need
LARGER = 3  # than the episodes to match, the pool
VERSION = re.compile(r"-v\d+$")  # of a Gymnasium id, such as my_module:MyEnv-v0
MOST_ROWS = 2**22  # of logged data in another format than ours

NEW = """\
Writes a section of params.yaml, and leaves everything else in that file as it is. Then:

  dvc repro report@NAME                                        all seven stages, what has changed
  python -m flows.pipeline --study NAME                        the same, and recorded in MLflow
  prefect deployment run pipeline/environment -p study=NAME    the same, by a worker

Policies: Stable-Baselines3 zips, CleanRL models, ONNX graphs (all of them are one group), or sets that manyfold saved
(each file is one group). Their actions must be counted: vectors are for `manyfold evaluate`.
"""


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="manyfold study", description="Studies of the pipeline.")
    command = found.add_subparsers(dest="command", required=True)
    raw = argparse.RawDescriptionHelpFormatter
    new = command.add_parser("new", help="a study of your own", description=NEW, formatter_class=raw)
    new.add_argument("name", help="letters, digits, dots, dashes and _")
    new.add_argument("--title", help="for tables and figures (the name)")
    where = new.add_argument_group("environment and policies")
    where.add_argument("--env", required=True, metavar="ID", help="a Gymnasium id, or module:function that makes one")
    where.add_argument("--env-kwargs", metavar="JSON", help="arguments of the environment, for example '{\"mode\": 1}'")
    where.add_argument("--horizon", type=int, metavar="T", help="steps of an episode at most (its TimeLimit)")
    where.add_argument("--policies", required=True, nargs="+", metavar="PATH", help="files, 'patterns' or folders")
    where.add_argument("--greedy", action="store_true", help="the most likely action instead of a sample")
    where.add_argument("--epsilon", type=float, metavar="E", help="of DQN's epsilon-greedy policies (the file's)")
    where.add_argument("--activation", metavar="NAME", help="of networks whose file doesn't say")
    offline = new.add_argument_group("offline data, to design from").add_mutually_exclusive_group()
    offline.add_argument("--data", metavar="PATH", help="logged already: Parquet, Minari, HDF5 or npz")
    offline.add_argument("--episodes", type=int, metavar="N", help="to log with the policies, of each group")
    return found


def environment_of(args: argparse.Namespace) -> dict[str, Any]:
    """The section `environment`."""
    try:
        kwargs = json.loads(args.env_kwargs) if args.env_kwargs else {}
    except ValueError:
        kwargs = None
    if not isinstance(kwargs, dict):
        raise ValueError(f"--env-kwargs is {args.env_kwargs!r:.60}, expected JSON such as '{{\"mode\": 1}}'")
    if kwargs and ":" not in args.env:
        raise ValueError(
            "--env-kwargs are for a factory, expected --env module:function: an id in params.yaml has none"
        )
    kind = "factory" if ":" in args.env else "id"
    more = {"horizon": args.horizon, "kwargs": kwargs or None}
    return {"gymnasium": {kind: args.env, **{name: x for name, x in more.items() if x is not None}}}


def new(args: argparse.Namespace, root: Path) -> str:
    """Writes the study; what a person should know about it."""
    path = root / "params.yaml"
    text = path.read_bytes().decode()
    params = parse(text, path.name)
    known = studies.names(path)
    if args.name in known:
        raise ValueError(
            f"{path.name} has a study {args.name!r} already, expected another name than {', '.join(known)}"
        )
    folder = root / FOLDER / args.name
    if folder.exists():
        raise ValueError(f"{folder} is there already, expected another name, or no such folder")
    files = policy_files(args)
    policies = inside(args.policies, files, root)
    options = {name: getattr(args, name) for name in OPTIONS if getattr(args, name)}
    section: dict[str, Any] = {
        "title": args.title or args.name,
        "environment": environment_of(args),
        "targets": {"source": policies or f"{FOLDER}/{args.name}/policies", **options},
        "offline": {"source": OURS["offline"]},
        **{stage: {} for stage in STAGES[2:]},
    }

    def study() -> Study:
        return studies.study_of({**params, "studies": {**params["studies"], args.name: section}}, args.name, path)

    env = studies.make_environment(study(), 0)
    try:
        if policies is None:
            copy(files, folder / "policies")
        found = given(study(), root / section["targets"]["source"])
        if args.data:
            section["offline"] = {"source": data_of(Path(args.data), env, folder / "data", root)}
        else:
            section["offline"] |= logged(params, env, args.episodes)
        section["evaluate"] = multiples(params["evaluate"], found[0].policies.n_policies)
        written = with_study(text, args.name, section, path)
        said = findings(env, found)
        write_text(path, written)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return about(args.name, found, env, section, said)


def policy_files(args: argparse.Namespace) -> list[Path]:
    """All files that the policies need: sets of ours, or checkpoints with their normalisers."""
    own: list[Path] = []
    for pattern in args.policies:
        matches = Path(pattern).glob("*") if Path(pattern).is_dir() else map(Path, glob.glob(pattern))
        own += [path for path in sorted(matches) if path.suffix == ".safetensors"]
    if own:
        return own
    found = load_files(args.policies)
    return list(dict.fromkeys(file for one in found for file in one.files))


def inside(patterns: Sequence[str], files: Sequence[Path], root: Path) -> str | None:
    """The one file or folder that has all of it, relative to the clone; None if it must be copied."""
    one = Path(patterns[0]).resolve()
    whole = one.is_dir() or len(files) == 1
    if len(patterns) > 1 or not one.exists() or not whole or not one.is_relative_to(root.resolve()):
        return None
    relative = one.relative_to(root.resolve()).as_posix()
    return None if (root / "data").resolve().is_relative_to(one) else relative  # DVC's own folder can't be in a source


def copy(files: Sequence[Path], to: Path) -> None:
    """Copies files, with the folders between them: normalisers are found by where they are."""
    every = [Path(os.path.abspath(file)) for file in files]
    base = Path(os.path.commonpath([file.parent for file in every]))
    for file in every:
        target = to / file.relative_to(base)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def data_of(path: Path, env: Environment, to: Path, root: Path) -> str:
    """Where the logged data are for DVC: as they are if they are ours and in the clone; converted where they aren't."""
    expected = About(env.name, env.horizon, env.n_actions, env.width, 0)
    if is_ours(path, expected):
        if path.resolve().is_relative_to(root.resolve()):
            return path.resolve().relative_to(root.resolve()).as_posix()
        copy(sorted(path.glob("*.parquet")) if path.is_dir() else [path], to)
        return to.relative_to(root).as_posix()
    found = read_data(path, env, most=MOST_ROWS)
    more = {"episode": np.arange(len(found.rows.t)), "truncated": ~found.rows.terminated & ~found.known}
    with Writer(to / "transitions.parquet", expected) as writer:
        writer.write({**found.rows._asdict(), **more})  # every row as an episode: the stages take tuples in any order
    return to.relative_to(root).as_posix()


def is_ours(path: Path, expected: About) -> bool:
    """Whether the files have our schema, and are of such an environment; its name may be another one."""
    try:
        said = Transitions(path).about
    except (ValueError, OSError):
        return False
    return replace(said, env=expected.env, seed=expected.seed) == expected


def logged(params: dict[str, Any], env: Environment, episodes: int | None) -> dict[str, int]:
    """What `offline` overrides where we log: the default, of long episodes so many that STEPS are logged."""
    default = params["offline"]["episodes"]
    if episodes is not None:
        check_number("--episodes", episodes, 1)
    wanted = episodes or min(default, max(1, STEPS // env.horizon))
    return {} if wanted == default else {"episodes": wanted}


def multiples(defaults: dict[str, Any], k: int) -> dict[str, int]:
    """What `evaluate` overrides: the defaults as multiples of five episodes for each of K policies.

    Runs are drawn from the pool: were it no larger than what is to be matched, all runs of the one group were the same.
    """
    wanted = {**defaults, "pool": max(defaults["pool"], LARGER * defaults["match"])}
    counts = {name: -(-wanted[name] // (5 * k)) * 5 * k for name in ("episodes", "match", "pool", "truth")}
    return {name: count for name, count in counts.items() if count != defaults[name]}


def findings(env: Environment, found: Sequence[Given]) -> list[str]:
    """What `manyfold check` says of the first group; errors are refused."""
    torch.set_num_threads(1)
    said = check(env, found[0].policies)
    for finding in said:
        if finding.level == "error":
            raise ValueError(finding.text)
    return [str(finding) for finding in said]


def about(name: str, found: Sequence[Given], env: Environment, section: dict[str, Any], said: Sequence[str]) -> str:
    """The end of it, for a person."""
    policies = found[0].policies.names
    groups = f" in each of {len(found)} groups" if len(found) > 1 else ""
    sources = [section[stage]["source"] for stage in ("targets", "offline") if section[stage]["source"] != OURS[stage]]
    return "\n".join(
        [
            *said,
            f"Study {name} is in params.yaml: {len(policies)} policies{groups}, {env.name}, up to {env.horizon} steps.",
            f"DVC watches {' and '.join(sources)}; keep them with the repository: git add (or dvc add).",
            f"Next: dvc repro report@{name}",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    sys.path.insert(0, os.getcwd())  # a user's own module beside the checkpoints
    return commands.guarded("study", lambda: print(new(args, ROOT)))


if __name__ == "__main__":
    sys.exit(main())
