import os

from hypothesis import settings

# The same examples on every machine, and no time limit on a busy one; `make test-slow` looks at many more, at random.
settings.register_profile("default", deadline=None, derandomize=True)
settings.register_profile("slow", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
