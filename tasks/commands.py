"""What every command of tasks has in common: its arguments, one line for bad input, a table at the end."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tasks.params import ROOT


def parser(module: str, about: str, study: str | None = None, positional: bool = False) -> argparse.ArgumentParser:
    """A parser with --study and --data.

    Args:
        module: as in `python -m tasks.<module>`.
        about: what the command does, for --help.
        study: the default of --study, which is required if left out.
        positional: the study's name alone, without --study.
    """
    found = argparse.ArgumentParser(prog=f"python -m tasks.{module}", description=about)
    default = f" (default {study})" if study else ""
    needed: dict[str, Any] = {} if positional else {"required": study is None, "default": study}
    found.add_argument(
        "study" if positional else "--study", help=f"a name of params.yaml's section `studies`{default}", **needed
    )
    found.add_argument("--data", type=Path, default=ROOT / "data", help="folder of all data (default data)")
    return found


def guarded(name: str, work: Callable[[], None]) -> int:
    """The exit code of a command: 0, or 2 and one line on stderr for bad input or a bad disk."""
    try:
        work()
    except (ValueError, OSError) as error:
        print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def show(title: str, rows: Sequence[Sequence[str]], width: int | None = None) -> None:
    """Rows of text, header first, as a table on the terminal; the first column to the left."""
    table = Table(title=title)
    for i, column in enumerate(rows[0]):
        table.add_column(column, justify="right" if i else "left")
    for row in rows[1:]:
        table.add_row(*row)
    Console(width=width, markup=False, emoji=False).print(table)  # a policy may be called [red]
