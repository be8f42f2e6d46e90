import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Two threads on small matrices are slower than one, and so is every worker set up."""
    torch.set_num_threads(1)
