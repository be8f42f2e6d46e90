"""How large an installation is, package by package: `python -m benchmarks.install_size`, of the extras named or of all.

What each extra of pyproject.toml pulls in, with all that it needs in turn, as far as it is installed here; the size is
the sum of the files in each package's RECORD. A package counts for the first extra that needs it, `core` (the library
alone) before the others, so that the sums add up to the whole.
"""

import argparse
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.show import show

ROOT = Path(__file__).parents[1]
ORDER = ("core", "onnx", "data", "mujoco", "pipeline", "dev", "bench")
SHOWN = 12  # packages of each extra


def wanted() -> dict[str, list[str]]:
    """Requirements by extra; `core` are those of the library."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"core": project["dependencies"], **project["optional-dependencies"]}


def closure(requirements: Iterable[str], extras: dict[str, list[str]]) -> set[str]:
    """Names of all packages that are needed and installed; an extra of manyfold stands for its requirements."""
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    left = [Requirement(line) for line in requirements]
    while left:
        one = left.pop()
        name, of = canonicalize_name(one.name), frozenset(one.extras)
        if (name, of) in seen:
            continue
        seen.add((name, of))
        if name == "manyfold":
            left += [Requirement(line) for extra in of for line in extras[extra]]
            continue
        try:
            more = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for needed in map(Requirement, more):
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in of or {""}):
                left.append(needed)
    return found


def size(name: str) -> float:
    """MB of an installed package."""
    files = metadata.files(name) or []
    return sum(path.stat().st_size for file in files if (path := Path(str(file.locate()))).is_file()) / 1e6


def sizes() -> dict[str, dict[str, float]]:
    """MB by extra and package; each package once."""
    extras, counted, out = wanted(), set[str](), dict[str, dict[str, float]]()
    for extra in (*ORDER, *sorted(set(extras) - set(ORDER))):
        new = closure(extras[extra], extras) - counted
        counted |= new
        out[extra] = {name: size(name) for name in new}
    return out


def main(asked: Iterable[str] = ()) -> dict[str, float]:
    found, rows = sizes(), list[tuple[str, ...]]()
    for extra in asked or found:
        each = sorted(found[extra].items(), key=lambda item: -item[1])
        rows.append((extra, f"{len(each)} packages", f"{sum(found[extra].values()):,.0f}"))
        rows += [("", name, f"{mb:,.1f}") for name, mb in each[:SHOWN]]
        if rest := each[SHOWN:]:
            rows.append(("", f"{len(rest)} more", f"{sum(mb for _, mb in rest):,.1f}"))
    total = sum(sum(packages.values()) for packages in found.values())
    rows.append(("all", f"{sum(map(len, found.values()))} packages", f"{total:,.0f}"))
    show("What is installed beside the extras before it", ("extra", "package", "MB"), rows)
    return {f"{extra}, MB": sum(packages.values()) for extra, packages in found.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", choices=[[], *ORDER], metavar="extra", help=", ".join(ORDER))
    main(parser.parse_args().extras)
