"""Tensor files as an attacker, another program or a failing disk would leave them."""

import json

from safetensors.torch import load, save

from manyfold.files import save_tensors


def read(path):
    """Tensors and description, unchecked."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return load(data), json.loads(header["__metadata__"]["about"])


def edit(path, **changes):
    """Changes entries of the description and leaves the checksum as it was."""
    tensors, about = read(path)
    path.write_bytes(save(tensors, metadata={"about": json.dumps({**about, **changes})}))


def craft(path, change=lambda about: None, tensors=None):
    """Changes the description in place and some tensors (None removes one), under a checksum that fits."""
    found, about = read(path)
    change(about)
    found = {name: x for name, x in {**found, **(tensors or {})}.items() if x is not None}
    rest = {name: x for name, x in about.items() if name not in ("format", "version", "sha256")}
    save_tensors(path, found, about["format"].removeprefix("manyfold-"), about["version"], rest)
