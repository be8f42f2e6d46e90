"""A new study as text in params.yaml: what stands there already stays as it is, comments and order included."""

from pathlib import Path
from typing import Any

import yaml

from tasks.params import parse


def with_study(text: str, name: str, section: dict[str, Any], path: Path) -> str:
    """The text of params.yaml with one more study, the last one; a ValueError where that would change anything else.

    Args:
        path: of the file, for messages.
    """
    before = parse(text, path.name)
    root = yaml.compose(text, yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)  # as `parse` has found
    found = next((value for key, value in root.value if key.value == "studies"), None)
    if not isinstance(found, yaml.MappingNode) or found.flow_style or not found.value:
        raise ValueError(f"{path.name}: expected a section 'studies' with a study on lines of its own to add one to")
    end = "\r\n" if "\r\n" in text else "\n"
    lines = text.split("\n")
    last = _last_line(found) + 1
    indent = " " * found.start_mark.column
    new = [f"{indent}{_flow(name)}:", *(f"{indent}  {key}: {_flow(value)}" for key, value in section.items())]
    head, tail = "\n".join(lines[:last]).rstrip("\r\n"), "\n".join(lines[last:])
    made = end.join([head, *new, tail])
    after = parse(made, path.name)
    others = {key: value for key, value in after["studies"].items() if key != name}
    same = {**after, "studies": others} == before and list(after) == list(before)
    if not same or list(others) != list(before["studies"]) or after["studies"].get(name) != section:
        raise ValueError(f"{path.name}: a section can't be added to this text; write it by hand:{end}{end.join(new)}")
    return made


def _last_line(node: yaml.Node) -> int:
    """Where the text of a node ends: of blocks, their last part; what follows may be another section's comments."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _last_line(last[1] if isinstance(last, tuple) else last)
    mark = node.end_mark
    return int(mark.line if mark.column else mark.line - 1)


def _flow(value: Any) -> str:
    """On one line."""
    said = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False, allow_unicode=True)
    return str(said).removesuffix("\n").removesuffix("\n...")
