"""The project's own files: DVC is set up as documented, and quiet."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def dvc(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "dvc", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_dvc_is_initialised_without_analytics_and_update_checks():
    assert dvc("config", "core.analytics").stdout.strip() == "false"
    assert dvc("config", "core.check_update").stdout.strip() == "false"


def test_dvc_reads_the_pipeline():
    done = dvc("stage", "list", "--name-only")
    assert done.returncode == 0, done.stderr
    assert "targets@hopper" in done.stdout.split()
