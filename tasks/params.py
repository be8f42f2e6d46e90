"""params.yaml: one section for each stage."""

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]


def section(stage: str, path: Path = ROOT / "params.yaml") -> dict[str, Any]:
    """The stage's section, or a ValueError in one line."""
    try:
        params = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path.name}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(params, dict) or not isinstance(params.get(stage), dict):
        raise ValueError(f"{path.name}: expected a section {stage!r}, found none")
    return dict(params[stage])


def check_names(stage: str, found: dict[str, Any], expected: set[str]) -> None:
    """Refuses missing and unknown parameters of a stage."""
    for name in sorted(expected - found.keys()):
        raise ValueError(f"params.yaml: {stage}.{name} is missing")
    for name in sorted(map(str, found.keys() - expected)):
        raise ValueError(f"params.yaml: {stage}.{name} is unknown, expected {', '.join(sorted(expected))}")
