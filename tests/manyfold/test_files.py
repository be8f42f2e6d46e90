"""The one atomic writer, and tensor files that were cut off, damaged, edited or crafted."""

import json
import os
import stat
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save

from manyfold.files import (
    atomic,
    atomic_folder,
    field,
    load_tensors,
    save_tensors,
    sha256,
    with_ending,
    write_json,
    write_text,
)
from tests.crafted import craft, edit, read

TENSORS = {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor([1, 2, 3])}


def saved(path, **about):
    save_tensors(path, TENSORS, "test", 1, {"note": "hello", **about})
    return path


# --- atomic files and folders -----------------------------------------------------------------------------------------


def test_a_file_takes_its_name_when_the_block_ends_well(tmp_path):
    path = tmp_path / "deep" / "a.txt"
    with atomic(path) as part:
        part.write_text("new")
        assert not path.exists()
        assert part.parent == path.parent  # a rename within one file system
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


def test_an_error_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail():
        with atomic(path) as part:
            part.write_text("half of the n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_replaces_the_old_one_as_a_whole(tmp_path):
    folder = tmp_path / "deep" / "group-00"
    folder.mkdir(parents=True)
    (folder / "old.txt").write_text("old")
    (folder.parent / ".group-00").mkdir()  # what a killed run has left
    (folder.parent / ".group-00" / "half.txt").write_text("half")
    with atomic_folder(folder) as part:
        (part / "sub").mkdir()
        (part / "sub" / "new.txt").write_text("new")
        assert (folder / "old.txt").exists()
    assert [str(p.relative_to(tmp_path)) for p in sorted(tmp_path.rglob("*")) if p.is_file()] == [
        "deep/group-00/sub/new.txt"
    ]


def test_an_error_leaves_the_old_folder_and_nothing_beside_it(tmp_path):
    folder = tmp_path / "group-00"
    folder.mkdir()
    (folder / "old.txt").write_text("old")

    def fail():
        with atomic_folder(folder) as part:
            (part / "new.txt").write_text("new")
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        fail()
    assert [p.name for p in sorted(tmp_path.rglob("*"))] == ["group-00", "old.txt"]


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750)])
def test_modes_follow_the_umask(tmp_path, umask, file, folder):
    before = os.umask(umask)
    try:
        saved(tmp_path / "t.safetensors")
        write_json(tmp_path / "a.json", {})
        with atomic(tmp_path / "a.txt") as part:
            part.write_text("")
        with atomic_folder(tmp_path / "f") as part:
            (part / "a.txt").write_text("")
    finally:
        os.umask(before)
    for name in ("t.safetensors", "a.json", "a.txt", "f/a.txt"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == file, name
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == folder


def test_json_and_checksums_by_hand(tmp_path):
    write_json(tmp_path / "a.json", {"x": [1, 2]})
    assert (tmp_path / "a.json").read_text() == '{\n "x": [\n  1,\n  2\n ]\n}\n'
    (tmp_path / "abc").write_text("abc")
    assert sha256(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("q", "q.safetensors"), ("q.safetensors", "q.safetensors"), ("gamma-0.99", "gamma-0.99.safetensors")],
)
def test_an_ending_is_added_once_and_replaces_nothing(tmp_path, name, expected):
    assert with_ending(tmp_path / name) == tmp_path / expected


# --- tensors --------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded_to_the_last_bit(tmp_path):
    tensors, about = load_tensors(saved(tmp_path / "t", extra=[1, {"x": None}]), "test", 1)
    assert list(tensors) == ["a", "b"]
    for name, x in TENSORS.items():
        assert torch.equal(tensors[name], x)
        assert tensors[name].dtype == x.dtype
    assert about == {"format": "manyfold-test", "version": 1, "note": "hello", "extra": [1, {"x": None}]}


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor(3.0),
        torch.zeros(0, 4),
        torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).T,  # not contiguous
        torch.tensor([True, False]),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor([1.5, -2.0], dtype=torch.float16),
        torch.ones(3, requires_grad=True),
    ],
)
def test_every_kind_of_tensor_survives(tmp_path, x):
    save_tensors(tmp_path / "t", {"x": x}, "test", 1, {})
    found = load_tensors(tmp_path / "t", "test", 1)[0]["x"]
    assert found.dtype == x.dtype
    assert found.shape == x.shape
    assert torch.equal(found, x.detach())


def test_the_same_content_gives_the_same_bytes_in_whatever_order_it_comes(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    save_tensors(one, TENSORS, "test", 1, {"x": 1, "y": [1.5]})
    save_tensors(two, dict(reversed(TENSORS.items())), "test", 1, {"x": 1, "y": [1.5]})
    assert one.read_bytes() == two.read_bytes()
    save_tensors(two, TENSORS, "test", 1, {"x": 2, "y": [1.5]})
    assert one.read_bytes() != two.read_bytes()


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def raw(path, about):
    """A safetensors file with this text as its description."""
    path.write_bytes(save(TENSORS, metadata={"about": about}))


def header(path, text):
    """A file with this text as safetensors' own header."""
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode())


CUT, EDITED = "not a valid safetensors file", "its content does not match its checksum; was it damaged or edited?"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: p.unlink(), "no such file, expected manyfold-test"),
        (lambda p: (p.unlink(), p.mkdir()), "cannot be read (Is a directory), expected manyfold-test"),
        (lambda p: p.write_bytes(b""), CUT),
        (lambda p: p.write_bytes(b"\x00" * 8), CUT),
        (lambda p: p.write_bytes(p.read_bytes()[:7]), CUT),
        (lambda p: p.write_bytes(p.read_bytes()[:40]), CUT),
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), CUT),
        (lambda p: p.write_bytes(p.read_bytes() + b"\x00"), CUT),
        (lambda p: p.write_bytes(b"\xff" * 100), CUT),
        (lambda p: p.write_text("a pickle, for example"), CUT),
        (lambda p: header(p, "[" * 50_000 + "]" * 50_000), CUT),
        (lambda p: header(p, '{"__metadata__": 1}'), CUT),
        (lambda p: header(p, '{"x": {"dtype": "F32", "shape": [1000000000000], "data_offsets": [0, 4]}}'), CUT),
        (lambda p: header(p, '{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4000000000000]}}'), CUT),
        (lambda p: header(p, "{}"), "expected manyfold-test, found None; was it written by another program?"),
        (lambda p: p.write_bytes(save(TENSORS)), "expected manyfold-test, found None"),
        (lambda p: raw(p, "{"), CUT),
        (lambda p: raw(p, "[" * 50_000), CUT),
        (lambda p: raw(p, '{"a":' * 50_000), CUT),
        (lambda p: raw(p, "[1, 2]"), "expected manyfold-test, found None; was it written by another program?"),
        (lambda p: raw(p, "1" * 10_000), CUT),
        (lambda p: edit(p, format="manyfold-other"), "expected manyfold-test, found 'manyfold-other'"),
        (lambda p: edit(p, format={"a": 1}), "expected manyfold-test, found {'a': 1}"),
        (lambda p: edit(p, version=2), "version 2, expected 1; run the stage again"),
        (lambda p: edit(p, version="x" * 10_000), "version 'xxxxxxxxxxxxxxxxxxx, expected 1; run the stage again"),
        (lambda p: edit(p, note="bye"), EDITED),
        (lambda p: edit(p, more=1), EDITED),
        (lambda p: edit(p, sha256=None), EDITED),
        (lambda p: edit(p, sha256=[]), EDITED),
        (lambda p: flip(p, -1), EDITED),
        (lambda p: craft(p, tensors={"b": torch.tensor([1.0, torch.nan])}), "b has NaN or infinity, expected finite"),
        (lambda p: craft(p, tensors={"b": torch.tensor([torch.inf])}), "b has NaN or infinity, expected finite"),
    ],
)
def test_what_is_not_as_saved_is_refused_with_one_line(spoil, message, tmp_path):
    path = saved(tmp_path / "t")
    spoil(path)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - matched below, with its path
        load_tensors(path, "test", 1)
    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < len(str(path)) + 250


def test_no_depth_of_nesting_gets_through(tmp_path):
    """Text that can just be parsed at one depth of the stack must not break what is done with it at another."""
    for depth in range(sys.getrecursionlimit() - 120, sys.getrecursionlimit() + 20):
        about = '{"format": "manyfold-test", "version": 1, "x": ' + "[" * depth + "]" * depth + "}"
        raw(tmp_path / "t", about)
        with pytest.raises(ValueError, match=f"{CUT}|{EDITED}"):
            load_tensors(tmp_path / "t", "test", 1)


def test_every_flipped_bit_of_a_small_file_is_noticed(tmp_path):
    """Everywhere: in the length, the header, the description and the tensors."""
    path = saved(tmp_path / "t")
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        with pytest.raises(ValueError, match="^.*t: .*$"):
            load_tensors(path, "test", 1)


def test_tensors_swapped_or_reshaped_under_the_same_bytes_are_noticed(tmp_path):
    path = saved(tmp_path / "t")
    tensors, about = read(path)
    for other in (
        {"b": tensors["b"].view(3, 2), "a": tensors["a"]},
        {"c": tensors["b"], "a": tensors["a"]},
        {"b": tensors["b"].view(torch.int32), "a": tensors["a"]},
    ):
        path.write_bytes(save(other, metadata={"about": json.dumps(about)}))
        with pytest.raises(ValueError, match=EDITED):
            load_tensors(path, "test", 1)


def test_nan_is_let_through_where_it_means_something(tmp_path):
    save_tensors(tmp_path / "t", {"x": torch.tensor([torch.nan])}, "test", 1, {})
    assert torch.isnan(load_tensors(tmp_path / "t", "test", 1, finite=False)[0]["x"]).all()


def test_a_field_of_another_type_is_refused(tmp_path):
    assert field(tmp_path, {"n": 3}, "n", int) == 3
    for value in ("3", None, True, [3]):
        with pytest.raises(ValueError, match=f"^{tmp_path}: n is .*, expected another type; was it written by another"):
            field(tmp_path, {"n": value}, "n", int)
    with pytest.raises(ValueError, match="n is None"):
        field(tmp_path, {}, "n", int)


def test_text_is_utf_8_everywhere(tmp_path):
    write_text(tmp_path / "a.txt", "\N{INFINITY}\n")
    assert (tmp_path / "a.txt").read_bytes() == b"\xe2\x88\x9e\n"
