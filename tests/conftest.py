import os
import signal

import pytest
from hypothesis import settings

# The same examples on every machine, and no time limit on a busy one; `make test-slow` looks at many more, at random.
settings.register_profile("default", deadline=None, derandomize=True)
settings.register_profile("slow", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# A job in the background ignores Ctrl-C, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Of several processes (`--numprocesses 2`) one gets a whole file, whose fixtures it makes once, and one all flows,
    whose Prefect server and finished project they share. (Marks for `--dist loadgroup` do nothing with pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = nodeid.split("::")[0]
            return "flows" if path.startswith("tests/flows/") else path

    return Groups(config, log)
