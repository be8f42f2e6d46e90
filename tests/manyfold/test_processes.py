"""Worker processes: what Ctrl-C does to them while they start."""

import subprocess
import sys
from pathlib import Path

import pytest

BLOCKED = """
import signal
from multiprocessing import forkserver
from manyfold import processes

processes.context()
with open(f"/proc/{forkserver._forkserver._forkserver_pid}/status") as file:
    (mask,) = (int(line.split()[1], 16) for line in file if line.startswith("SigBlk"))
print(bool(mask >> (signal.SIGINT - 1) & 1), signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks /proc")
def test_ctrl_c_is_blocked_in_the_server_of_workers_and_not_here():
    """It imports torch for seconds, and ended in a traceback of its own."""
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=False)
    assert done.stdout == "True False\n", done.stderr
