"""mu of any group as self-contained files: `python -m tasks.export --study hopper --group 3 --out exported`."""

import argparse
import sys
from pathlib import Path

from tasks import studies
from tasks.behavior import design, export_group
from tasks.groups import Group
from tasks.params import ROOT


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.export",
        description="Writes the behavior policy of one group for a machine without manyfold: mu.pt2 (torch.export), "
        "mu.onnx and mu.json (what they are for). The stage `q_hat` must have run.",
    )
    parser.add_argument("--study", required=True, help="a name of params.yaml's section `studies`")
    parser.add_argument("--group", type=int, default=0, help="number of the group (default 0)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of all data (default data)")
    args = parser.parse_args(arguments)
    try:
        group = Group(studies.read(args.study), args.group, args.data)
        if not group.folder("q_hat").exists():
            raise ValueError(f"{group.folder('q_hat')}: no such folder, expected the stage `q_hat` to have run")
        args.out.mkdir(parents=True, exist_ok=True)
        export_group(group, design(group), args.out)
    except (ValueError, OSError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 2
    print(f"Written: {', '.join(str(args.out / name) for name in ('mu.pt2', 'mu.onnx', 'mu.json'))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
