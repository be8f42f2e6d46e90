import sys

import pytest
import torch

from tests import checkpoints


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Two threads on small matrices are slower than one, and so is every worker set up."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def dask_scheduler():
    """The address of a real scheduler with two worker processes."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster:
        yield cluster.scheduler_address


@pytest.fixture(scope="session")
def zips(tmp_path_factory):
    """A folder of three checkpoints: a.zip is the best, b.zip chooses at random, c.zip is in between."""
    folder = tmp_path_factory.mktemp("zips")
    for name, gain in (("a", 4.0), ("b", 0.0), ("c", 0.3)):
        checkpoints.save(folder / f"{name}.zip", gain)
    return folder


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A current folder with the environment own:make."""
    (tmp_path / "own.py").write_text(checkpoints.OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    return tmp_path
