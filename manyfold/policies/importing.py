"""Finds files of policies and reads each by what is in it; needs none of the libraries that wrote them."""

import glob
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from manyfold.files import sha256
from manyfold.policies.cleanrl import read_cleanrl
from manyfold.policies.heads import Gaussian
from manyfold.policies.imported import Actions, Imported, Options, described, size
from manyfold.policies.layers import Statistics
from manyfold.policies.programs import read_export, read_onnx, read_script
from manyfold.policies.sb3 import is_sb3, read_sb3
from manyfold.policies.weights import (
    UNREADABLE,
    find_statistics,
    open_zip,
    read_bytes,
    read_statistics,
    read_tensors,
    reason,
)

PROGRAMS = (".onnx", ".pt2")
ENDINGS = (".zip", ".cleanrl_model", ".pt", ".pth", *PROGRAMS)


def load_files(patterns: str | Path | Sequence[str | Path], options: Options | None = None) -> list[Imported]:
    """All policies that patterns, folders or paths name, in natural order (step_2000 before step_10000).

    Anything that cannot be used is refused with one line: what was expected, what was found, what to do. All of them
    must be policies of one environment: the same width of observations and the same actions.
    """
    paths = find_files(patterns)
    names = distinct_names(paths)
    found = [replace(load_file(path, options), name=name) for path, name in zip(paths, names, strict=True)]
    _check_one_environment(found)
    return _with_twins(found)


def load_file(path: str | Path, options: Options | None = None) -> Imported:
    """One policy from one file, by its content."""
    path, options = Path(path), options or Options()
    statistics, file, notes = _statistics(path, options)
    try:
        found = _read(path, options, statistics)
        _check_parameters(found)
    except (*UNREADABLE, RecursionError) as error:
        known = isinstance(error, ValueError)
        text = " ".join(str(error).split()) if known else f"cannot be read ({reason(error)}), expected a policy"
        raise ValueError(text if text.startswith(str(path)) else f"{path}: {text}") from None
    files = [path, *([file] if file else [])]
    if path.with_name(f"{path.name}.data").is_file():  # an ONNX file's weights
        files.append(path.with_name(f"{path.name}.data"))
    sums = tuple(sha256(part) for part in files)
    return replace(found, notes=(*found.notes, *notes), files=tuple(files), sha256=sums, options=options)


def find_files(patterns: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files that are named: each once, in natural order; a folder stands for all known files below it."""
    listed = [patterns] if isinstance(patterns, str | Path) else list(patterns)
    found: dict[str, Path] = {}
    for pattern in listed:
        matches = _matches(Path(pattern).expanduser()) if str(pattern) else []  # "" is not the current folder
        if not matches:
            raise ValueError(
                f"{str(pattern) or repr(pattern)}: no files match, expected policies ({', '.join(ENDINGS)}); the "
                f"current folder is {Path.cwd()}"
            )
        for path in matches:
            found.setdefault(os.path.realpath(path), path)
    if not found:
        raise ValueError("no files are named, expected a pattern, a folder or paths of policies")
    return sorted(found.values(), key=lambda path: natural(str(path)))


def natural(text: str) -> list[tuple[int, int, str]]:
    """A key that sorts numbers in a name by their value."""
    pieces = [piece for piece in re.split(r"(\d+)", text) if piece]
    return [(0, int(p), p) if p.isdecimal() and p.isascii() else (1, 0, p) for p in pieces]


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """What tells the paths apart: the file's name alone, or the parts of the path that differ; all of it printable."""
    stems = [_printable(path.stem) for path in paths]
    if len(set(stems)) == len(stems):
        return stems
    split = [[*path.parts[:-1], path.stem] for path in paths]
    while all(len(p) > 1 and p[0] == split[0][0] for p in split):
        split = [p[1:] for p in split]
    while all(len(p) > 1 and p[-1] == split[0][-1] for p in split):
        split = [p[:-1] for p in split]
    names = [_printable("/".join(p)) for p in split]
    return names if len(set(names)) == len(names) else [_printable(str(path)) for path in paths]


def _printable(name: str) -> str:
    """Line ends, a terminal's commands and bytes that are no text, as escapes: they would break tables and pages."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in name)


def _matches(pattern: Path) -> list[Path]:
    if pattern.is_dir():
        inside = (path for path in pattern.rglob("*") if path.suffix in ENDINGS and path.is_file())
        return [path for path in inside if not any(p.startswith(".") for p in path.relative_to(pattern).parts)]
    if pattern.is_file():
        return [pattern]
    found = [path for path in map(Path, glob.glob(str(pattern), recursive=True)) if path.is_file()]
    return [path for path in found if path.suffix in ENDINGS] or found  # "runs/*" leaves normalisers and logs aside


def _read(path: Path, options: Options, statistics: Statistics | None) -> Imported:
    if path.suffix == ".onnx":
        return read_onnx(path, options, statistics)
    if path.suffix == ".safetensors":
        raise ValueError(f"{path}: a set of manyfold's beside other files, expected it alone: load_policies(path)")
    data = read_bytes(path)
    if data[:2] == b"PK":
        archive = open_zip(path, data)
        if is_sb3(archive):
            return read_sb3(path, archive, options, statistics)
        inside = {name.split("/", 1)[-1] for name in archive.namelist()}
        if "constants.pkl" in inside:
            return read_script(path, options, statistics)
        if inside & {"archive_format", "serialized_exported_program.json"}:
            return read_export(path, options, statistics)
        if "data.pkl" not in inside:
            raise ValueError(
                f"{path}: a zip of {', '.join(archive.namelist()[:3]) or 'nothing'!s:.80}, expected a policy: one of "
                "Stable-Baselines3 holds data and policy.pth"
            )
    elif path.suffix == ".zip":
        raise ValueError(f"{path}: not a zip, expected a policy saved by Stable-Baselines3; was it cut off?")
    elif not data.startswith(b"\x80"):  # the first byte of torch's older files
        raise ValueError(f"{path}: no file of torch, ONNX or Stable-Baselines3, expected a policy; was it cut off?")
    return read_cleanrl(path, read_tensors(path, data), options, statistics)


def _statistics(path: Path, options: Options) -> tuple[Statistics | None, Path | None, list[str]]:
    """The normaliser's statistics, their file, and what to know about them."""
    if options.normaliser == "none":
        return None, None, []
    shared = False
    if options.normaliser == "beside":
        file, shared = find_statistics(path)
        if shared and path.suffix in PROGRAMS:  # Stable-Baselines3's own: a program often has its normaliser inside
            return None, None, [f"{file} is not used for a program; say normaliser= if it has none inside"]
    else:
        file = Path(options.normaliser)
    if file is None:
        return None, None, ["no normaliser found beside it: right only if it was trained on raw observations"]
    statistics = read_statistics(file)
    if statistics is None:
        return None, file, [f"{file.name} says that observations are not normalised"]
    notes = [f"observations normalised by {file.name}"]
    if shared:
        notes[0] += ", the folder's: a checkpoint from earlier in training had other statistics"
    return statistics, file, notes


def _check_parameters(found: Imported) -> None:
    """Runs the policy on two observations: layers that don't fit together are better found here."""
    try:
        with torch.no_grad():
            shape = list(found.module(torch.zeros(2, found.width)).shape)
    except RuntimeError as error:
        raise ValueError(
            f"{found.path}: its layers don't fit together ({reason(error)}), expected the weights of one network"
        ) from None
    if shape != [2, size(found.actions)]:
        raise ValueError(
            f"{found.path}: it gives {shape} for two observations, expected {[2, size(found.actions)]} to choose "
            f"{described(found.actions)}"
        )


def _check_one_environment(found: Sequence[Imported]) -> None:
    first = max(found, key=lambda one: isinstance(one.actions, Gaussian) and np.isfinite(one.actions.low).all())
    for other in found:
        same = first.width == other.width and described(first.actions) == described(other.actions)
        if not (same and _bounds_agree(first.actions, other.actions)):
            raise ValueError(
                f"files of two environments: {first.path} takes {first.width} numbers and gives "
                f"{_within(first.actions)}, {other.path} {other.width} and {_within(other.actions)}; expected one "
                "environment: evaluate them apart"
            )


def _within(actions: Actions) -> str:
    """The kind of actions, and their bounds where there are any."""
    bounds = f" from {list(actions.low)!s:.60} to {list(actions.high)!s:.60}" if isinstance(actions, Gaussian) else ""
    return described(actions) + bounds


def _bounds_agree(a: Actions, b: Actions) -> bool:
    """Bounds that a file doesn't say are infinite and fit any."""
    if not (isinstance(a, Gaussian) and isinstance(b, Gaussian)):
        return True
    pairs = zip((*a.low, *a.high), (*b.low, *b.high), strict=True)
    return all(not math.isfinite(x - y) or abs(x - y) <= 1e-6 * max(1, abs(x)) for x, y in pairs)


def _with_twins(found: Sequence[Imported]) -> list[Imported]:
    """Says of files with the same content that they are one policy."""
    seen: dict[tuple[str, ...], str] = {}
    told = []
    for one in found:
        twin = seen.setdefault(one.sha256, one.name)
        told.append(
            one if twin == one.name else replace(one, notes=(*one.notes, f"the same policy as {twin}, byte by byte"))
        )
    return told
