"""What orchestration costs: all stages with next to nothing to compute, and again with nothing to do."""

import os
import re
import tempfile
import time
from pathlib import Path

from benchmarks.show import show
from tests.projects import tiny


def main() -> dict[str, float]:
    out: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        project = tiny(Path(folder) / "project")
        os.environ["PREFECT_HOME"] = str(Path(folder) / "prefect")
        os.environ.pop("PREFECT_API_URL", None)
        rows = []
        for name in ("cold", "nothing to do"):
            start = time.perf_counter()
            done = project.python("flows.pipeline")
            spent = time.perf_counter() - start
            if done.returncode:
                raise RuntimeError(done.stderr)
            out[f"{name}, seconds"] = spent
            stages = dict(re.findall(r"(\w+) (\d+) s[,.]", done.stdout.splitlines()[-1].partition(":")[2]))
            rows.append((name, f"{spent:.1f} s", ", ".join(f"{k} {v} s" for k, v in stages.items()) or "-"))
        show(
            "The pipeline with tiny parameters, server and MLflow included",
            ("run", "total", "of which in stages"),
            rows,
        )
    return out


if __name__ == "__main__":
    main()
