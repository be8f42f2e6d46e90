"""Reads other people's files without running anything that is in them: zips, tensors, and pickles as inert data.

A pickle is a program: GLOBAL looks up any function by name and REDUCE calls it. `read_pickle` keeps the program and
takes away its vocabulary: whatever name it asks for, it gets a class of ours that stores what it is given and does
nothing else. No name is ever looked up, not even numpy's, so no code outside of this file and of the unpickler itself
can run. Arrays are then rebuilt from the stored bytes, with a dtype from a fixed list.
"""

import io
import json
import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyfold.arrays import Array
from manyfold.policies.layers import Statistics

LARGEST = 2**30  # bytes that a file may hold once it is unpacked, and numbers of its tensors
DTYPES = ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "b1")
UNREADABLE = (
    OSError,
    RuntimeError,
    ValueError,
    KeyError,
    EOFError,
    AttributeError,
    TypeError,
    IndexError,
    ImportError,
    MemoryError,
    NotImplementedError,
    OverflowError,
    AssertionError,
    zipfile.BadZipFile,
    pickle.UnpicklingError,
)


def reason(error: BaseException) -> str:
    """The first line of an error, short."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


class Inert:
    """Stands for any class or function that a pickle names: keeps its arguments, state and items, and does nothing."""

    named = ""
    args: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> "Inert":
        self = object.__new__(cls)
        self.__dict__.update(args=args, state=None, items=[])
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__["items"].append((key, value))

    def append(self, item: Any) -> None:
        self.__dict__["items"].append(item)


class InertUnpickler(pickle.Unpickler):
    """A pickle as data; see the module's text."""

    def find_class(self, module: str, name: str) -> Any:
        return type("Inert", (Inert,), {"named": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of itself")


def read_pickle(data: bytes) -> Any:
    """A pickle's content with `Inert` in place of every object."""
    return InertUnpickler(io.BytesIO(data)).load()


def attributes(x: Any) -> dict[str, Any]:
    """The attributes of an object from a pickle."""
    state = x.state if isinstance(x, Inert) else None
    return state if isinstance(state, dict) else {}


def number_or_array(x: Any) -> NDArray[Any]:
    """A number, or a numpy scalar or array, from a pickle; anything else is refused."""
    if isinstance(x, int | float):
        return np.asarray(x)
    named = x.named.rsplit(".", 1)[-1] if isinstance(x, Inert) else ""
    if named == "_reconstruct" and isinstance(x.state, tuple) and len(x.state) == 5:
        _, shape, kind, fortran, data = x.state  # what ndarray.__reduce__ gives
    elif named == "_frombuffer" and len(x.args) == 4:  # the same of protocol 5
        data, kind, shape, order = x.args
        fortran = order == "F"
    elif named == "scalar" and len(x.args) == 2:
        (kind, data), shape, fortran = x.args, (), False
    else:
        raise ValueError(f"expected a number or an array, found {named or type(x).__name__}")
    code = kind.args[0] if isinstance(kind, Inert) and kind.args else None
    order = kind.state[1] if isinstance(kind, Inert) and isinstance(kind.state, tuple) and len(kind.state) > 1 else "<"
    if not isinstance(code, str) or code not in DTYPES or order not in ("<", ">", "|", "="):
        raise ValueError(f"expected an array of numbers, found dtype {code!r:.20}")
    if not isinstance(data, bytes | bytearray) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError("expected an array's bytes and shape, found other objects")
    flat = np.frombuffer(bytes(data), dtype=order.replace("|", "<") + code)
    return flat.reshape(tuple(shape), order="F" if fortran else "C")


def read_bytes(path: Path) -> bytes:
    """A whole file of bearable size."""
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"{path}: {path.stat().st_size:,} bytes, expected a policy of at most {LARGEST:,}")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}), expected a policy's file") from None


def open_zip(path: Path, data: bytes) -> zipfile.ZipFile:
    """A zip whose content fits into memory; zipfile never unpacks more of a part than its directory says."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except UNREADABLE as error:
        raise ValueError(
            f"{path}: not a readable zip ({reason(error)}), expected a policy; was it cut off? Copy or save it again"
        ) from None
    unpacked = sum(part.file_size for part in archive.infolist())
    if unpacked > LARGEST:
        raise ValueError(f"{path}: {unpacked:,} bytes once unpacked, expected at most {LARGEST:,}; is it a zip bomb?")
    return archive


def read_part(path: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    """One part of a zip."""
    try:
        return archive.read(name)
    except UNREADABLE as error:
        raise ValueError(
            f"{path}: {name} is damaged ({reason(error)}), expected a whole file; copy or save it again"
        ) from None


def read_tensors(path: Path, data: bytes) -> Any:
    """What `torch.save` wrote, read by `weights_only`: tensors and plain containers; anything else is refused."""
    if data[:2] == b"PK":
        open_zip(path, data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a pickle's protocol: it is read, or refused in one line
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        pickled = "weights_only" in str(error).lower()
        said = "a whole module or other objects were pickled" if pickled else reason(error)
        raise ValueError(
            f"{path}: no weights could be read ({said}), expected torch.save(module.state_dict(), path)"
            f"{'' if pickled else '; was it cut off?'}"
        ) from None


def state_dict(path: Path, x: Any) -> dict[str, Tensor]:
    """Checks that these are tensors by name, finite and of bearable size; in float32."""
    if not isinstance(x, Mapping) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in x.items()):
        raise ValueError(f"{path}: found {type(x).__name__}, expected a state_dict: tensors by name")
    if (total := sum(v.numel() for v in x.values())) > LARGEST:  # a view may be far larger than its storage
        raise ValueError(f"{path}: {total:,} numbers, expected a policy of at most {LARGEST:,}")
    found = {k: v.detach().to(torch.float32) if v.is_floating_point() else v.detach() for k, v in x.items()}
    for name, v in found.items():
        if v.is_floating_point() and not torch.isfinite(v).all():
            raise ValueError(f"{path}: {name} has NaN or infinity, expected finite weights; did the training diverge?")
    return found


# Statistics beside a file ------------------------------------------------------------------------------------------


def find_statistics(path: Path) -> tuple[Path | None, bool]:
    """The normaliser's file that belongs to a policy's, and whether it has the folder's name only, not the policy's."""
    stem, folder = path.stem, path.parent
    names = [f"{stem}.normalizer.npz", f"{stem}.normalizer.json"]
    if step := re.fullmatch(r"(.*)_(\d+)_steps", stem):  # as CheckpointCallback(save_vecnormalize=True) names them
        names.append(f"{step[1]}_vecnormalize_{step[2]}_steps.pkl")
    words = ("vecnormalize", "vec_normalize")
    names += [f"{stem}{mark}{word}.pkl" for word in words for mark in "_-."]
    names += [f"{word}{mark}{stem}.pkl" for word in words for mark in "_-."]
    for name in names:
        if (folder / name).is_file():
            return folder / name, False
    shared = [folder / f"{word}.{ending}" for word in words for ending in ("pkl", "pickle")]
    found = [file for file in shared if file.is_file()] or sorted(folder.glob("*/vecnormalize.pkl"))  # as RL Zoo does
    if len(found) > 1:
        raise ValueError(
            f"{path}: {len(found)} normalisers beside it ({found[0]}, {found[1]}), expected one; say normaliser="
        )
    return (found[0], True) if found else (None, False)


def read_statistics(path: Path) -> Statistics | None:
    """Mean, variance, clip and epsilon from a VecNormalize pickle (as data), .npz or .json; None if it is off."""
    data = read_bytes(path)
    try:
        if path.suffix == ".json":
            said = json.loads(data)
            found = _statistics(said, np.asarray(said["mean"], np.float64), np.asarray(said["var"], np.float64), "clip")
        elif path.suffix == ".npz":
            open_zip(path, data)
            with np.load(io.BytesIO(data), allow_pickle=False) as said:
                found = _statistics(said, said["mean"], said["var"], "clip")
        else:
            state = attributes(read_pickle(data))
            if not state.get("norm_obs", True):
                return None
            rms = attributes(state.get("obs_rms"))
            if not rms:
                raise ValueError("expected a VecNormalize of plain observations, found no obs_rms")
            mean, var = (number_or_array(rms[name]) for name in ("mean", "var"))
            found = _statistics(state, mean, var, "clip_obs")
    except (*UNREADABLE, RecursionError) as error:
        missing = f"no {error}" if isinstance(error, KeyError) else reason(error)
        raise ValueError(
            f"{path}: no statistics could be read ({missing}), expected a VecNormalize or mean, var, clip, epsilon in "
            "an .npz: load it where it was trained, then np.savez('<policy>.normalizer.npz', mean=v.obs_rms.mean, "
            "var=v.obs_rms.var, clip=v.clip_obs, epsilon=v.epsilon)"
        ) from None
    return found


def _statistics(said: Mapping[str, Any], mean: NDArray[Any], var: NDArray[Any], clip: str) -> Statistics:
    def scalar(name: str, default: float) -> float:
        x = said.get(name, default)
        return float(x if isinstance(x, np.ndarray) else number_or_array(x))

    flat: tuple[Array, Array] = (mean.astype(np.float64).flatten(), var.astype(np.float64).flatten())
    found = Statistics(*flat, scalar(clip, math.inf), scalar("epsilon", 1e-8))
    if not len(flat[0]) or flat[0].shape != flat[1].shape:
        raise ValueError(f"mean has {len(flat[0])} numbers and var {len(flat[1])}")
    if not (np.isfinite(flat).all() and (flat[1] >= 0).all() and found.clip > 0 and found.epsilon >= 0):
        raise ValueError("found NaN, infinity, a negative variance or a clip of 0")
    if (flat[1] + found.epsilon == 0).any():
        raise ValueError("a variance is 0 and so is epsilon")
    return found


def read_numbers(text: Any) -> Array:
    """Numbers as numpy prints them ("[-1. inf]"), in order; empty where there are none or some are left out."""
    if text is None or "..." in str(text):
        return np.zeros(0)
    found = re.findall(r"[-+]?(?:inf|\d+\.?\d*(?:e[-+]?\d+)?|\.\d+)", str(text), re.IGNORECASE)
    return np.asarray([float(x) for x in found], np.float64)
