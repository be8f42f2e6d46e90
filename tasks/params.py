"""params.yaml: one section of defaults for each stage, one section for each study."""

import re
from pathlib import Path
from typing import Any

import yaml

from manyfold.arrays import check_number

ROOT = Path(__file__).parents[1]
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")  # 1e-3 is text to YAML 1.1, which wants 1.0e-3


class Loader(yaml.SafeLoader):
    """YAML without surprises: a key that stands twice is an error, not the second one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read(path: Path = ROOT / "params.yaml") -> dict[str, Any]:
    """The whole file, or a ValueError in one line that names the place."""
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name}: not YAML ({type(error).__name__})") from None
    return parse(text, path.name)


def parse(text: str, name: str) -> dict[str, Any]:
    """The same of the file's text."""
    try:
        params = yaml.load(text, Loader)  # a SafeLoader: no objects
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{name}{place}: not YAML ({getattr(error, 'problem', None) or error})") from None
    except RecursionError as error:
        raise ValueError(f"{name}: not YAML ({type(error).__name__})") from None
    if not isinstance(params, dict):
        raise ValueError(f"{name}: expected sections, found none")
    try:
        return {key: _numbers(value) for key, value in params.items()}
    except RecursionError:
        raise ValueError(f"{name}: a section that contains itself, expected numbers, text and sections") from None


def _numbers(value: Any) -> Any:
    """Text that is a number in scientific notation as that number."""
    if isinstance(value, dict):
        return {name: _numbers(x) for name, x in value.items()}
    if isinstance(value, list):
        return [_numbers(x) for x in value]
    if isinstance(value, str) and NUMBER.fullmatch(value):
        number = float(value)
        return int(number) if number.is_integer() and "-" not in value[1:] else number
    return value


def runner(path: Path = ROOT / "params.yaml") -> tuple[str, str]:
    """Where groups are worked on, `local` or `dask`, and the address of Dask's scheduler."""
    params = read(path)
    kind, scheduler = params.get("runner"), params.get("scheduler") or ""
    if kind not in ("local", "dask"):
        raise ValueError(f"{path.name}: runner is {kind!r}, expected local or dask")
    if kind == "dask" and not str(scheduler).startswith(("tcp://", "tls://")):
        raise ValueError(f"{path.name}: scheduler is {scheduler!r}, expected its address such as tcp://10.0.0.1:8786")
    return kind, scheduler


def check_names(stage: str, found: dict[str, Any], expected: set[str]) -> None:
    """Refuses missing and unknown parameters of a stage."""
    for name in sorted(expected - found.keys()):
        raise ValueError(f"params.yaml: {stage}.{name} is missing")
    for name in sorted(map(str, found.keys() - expected)):
        raise ValueError(f"params.yaml: {stage}.{name} is unknown, expected {', '.join(sorted(expected))}")


def check_numbers(stage: str, found: dict[str, Any], bounds: dict[str, tuple[int, int]]) -> None:
    """Refuses whole numbers of a stage that are out of bounds; the upper ones are what a machine can hold."""
    for name, (least, most) in bounds.items():
        check_number(f"{stage}.{name}", found[name], least, most)
