"""`make paper` in one go, on tiny parameters."""

import time

import psutil
import pytest

from tasks import studies
from tests.projects import tiny, wait_until

GIB = 2**30


@pytest.mark.parametrize(
    "names", [("gridworld-1000", "hopper"), pytest.param(tuple(studies.names()), marks=pytest.mark.slow)]
)
def test_the_paper_is_made_in_one_go_and_in_little_memory(names, tmp_path):
    """From PPO to the joined report; all of its processes together, a server and a store among them."""
    project = tiny(tmp_path / "paper", names)
    process = project.start("flows.pipeline", "--all", PREFECT_API_URL="", PREFECT_HOME=str(tmp_path / "prefect"))
    most = 0
    while process.poll() is None:
        most = max(most, sum(memory(pid) for pid, _ in project.processes()))
        time.sleep(0.5)
    printed, error = process.communicate()
    assert process.returncode == 0, error
    assert most < 4 * GIB
    for name in names:
        assert (project.data / "report" / name / "relative_variance.md").exists()
        assert f"report@{name}:" in (project.folder / "dvc.lock").read_text()
    joined = (project.data / "report" / "all" / "relative_variance.md").read_text()
    for name in names:
        assert f"| {studies.read(name).title}, ours |" in joined
    assert "Spent" in printed
    assert wait_until(lambda: not project.processes())


def memory(pid):
    """Bytes of a process that no other one has; 0 of one that has ended."""
    try:
        return psutil.Process(pid).memory_full_info().uss
    except psutil.Error:
        return 0
