"""params.yaml: one section for each stage."""

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]


def read(path: Path = ROOT / "params.yaml") -> dict[str, Any]:
    """The whole file, or a ValueError in one line."""
    try:
        params = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path.name}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(params, dict):
        raise ValueError(f"{path.name}: expected sections, found none")
    return params


def section(stage: str, path: Path = ROOT / "params.yaml") -> dict[str, Any]:
    """The stage's section."""
    params = read(path)
    if not isinstance(params.get(stage), dict):
        raise ValueError(f"{path.name}: expected a section {stage!r}, found none")
    return dict(params[stage])


def runner(path: Path = ROOT / "params.yaml") -> tuple[str, str]:
    """Where shards run, `local` or `dask`, and the address of Dask's scheduler."""
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
