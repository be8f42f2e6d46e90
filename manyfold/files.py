"""The one atomic writer, and tensors on disk: safetensors with a description and a checksum, never a pickle."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed to it when the block ends well and removed when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield part
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes its name when the block ends well and is removed when it does not."""
    part = folder.with_name(f".{folder.name}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """UTF-8, atomically."""
    with atomic(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def sha256(path: Path) -> str:
    """The checksum of a file, read as a stream."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def with_ending(path: Path, ending: str = "safetensors") -> Path:
    """`path` with that ending; what follows a dot in a name ("gamma-0.99") belongs to the name."""
    return path if path.suffix == f".{ending}" else path.with_name(f"{path.name}.{ending}")


def save_tensors(path: Path, tensors: dict[str, Tensor], kind: str, version: int, about: dict[str, Any]) -> None:
    """One safetensors file, atomically: the same bytes for the same content.

    The description is one key of the metadata (safetensors writes several in any order) and holds a checksum of itself
    and of all tensors, so that neither can be changed alone.
    """
    contiguous = {name: x.detach().contiguous() for name, x in tensors.items()}
    said = {"format": f"manyfold-{kind}", "version": version, **about}
    said["sha256"] = _checksum(contiguous, said)
    data = save(contiguous, metadata={"about": json.dumps(said)})
    with atomic(path) as part:
        part.write_bytes(data)


def load_tensors(path: Path, kind: str, version: int, finite: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_tensors` wrote: tensors and description; anything else is refused with one line.

    Args:
        finite: refuse NaN and infinity.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file, expected manyfold-{kind}") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}), expected manyfold-{kind}") from None
    try:
        tensors = load(data)
        size = int.from_bytes(data[:8], "little")
        said = json.loads(json.loads(data[8 : 8 + size]).get("__metadata__", {}).get("about", "null"))
        if not _shallow(said, 20):  # what could just be parsed might exhaust the stack of whoever looks at it next
            raise ValueError("its description is nested too deeply")
    except (SafetensorError, ValueError, RecursionError, AttributeError, TypeError) as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise ValueError(f"{path}: not a valid safetensors file ({reason}); was it cut off?") from None
    if not isinstance(said, dict) or said.get("format") != f"manyfold-{kind}":
        found = said.get("format") if isinstance(said, dict) else None
        raise ValueError(f"{path}: expected manyfold-{kind}, found {found!r:.40}; was it written by another program?")
    if said.get("version") != version:
        raise ValueError(f"{path}: version {said.get('version')!r:.20}, expected {version}; run the stage again")
    # In one order, and in memory of torch's own: the last bits of a matrix product depend on where its operands begin.
    tensors = {name: tensors[name].clone() for name in sorted(tensors)}
    checksum = said.pop("sha256", None)
    if checksum != _checksum(tensors, said):
        raise ValueError(f"{path}: its content does not match its checksum; was it damaged or edited?")
    if finite:
        for name, x in tensors.items():
            if x.is_floating_point() and not torch.isfinite(x).all():
                raise ValueError(f"{path}: {name} has NaN or infinity, expected finite numbers; did a fit diverge?")
    return tensors, said


def _shallow(x: Any, levels: int) -> bool:
    """Whether lists and mappings lie at most so many levels inside one another."""
    inside = x.values() if isinstance(x, dict) else x if isinstance(x, list) else ()
    return levels > 0 and all(_shallow(part, levels - 1) for part in inside)


def _checksum(tensors: dict[str, Tensor], about: dict[str, Any]) -> str:
    found = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        x = tensors[name]
        found.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        found.update(x.flatten().view(torch.uint8).numpy().tobytes())  # as bytes: numpy has no bfloat16
    return found.hexdigest()


def field(path: Path, about: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    """One entry of a description, of the expected type; anything else is refused with one line."""
    value = about.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{path}: {name} is {value!r:.40}, expected another type; was it written by another program?")
    return value
