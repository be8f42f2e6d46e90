"""Tasks: one module per stage; they load, call manyfold, and save."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: two threads on small matrices are slower
PARENT = os.getppid()  # who started this process, looked up before anything can take its time
