import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples on every machine, and no time limit on a busy one; `make test-slow` looks at many more, at random.
settings.register_profile("default", deadline=None, derandomize=True)
settings.register_profile("slow", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# A job in the background ignores Ctrl-C, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

FLOWS = Path(__file__).parent / "flows"


@pytest.hookimpl(tryfirst=True)  # before xdist's, which reads the marks
def pytest_collection_modifyitems(items):
    """Of several processes (`-n 2 --dist loadgroup`) one gets a whole file, whose fixtures it makes once, and one all
    flows, whose Prefect server and finished project they share."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group("flows" if item.path.is_relative_to(FLOWS) else str(item.path)))
