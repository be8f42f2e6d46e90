"""Flows: one Prefect flow per stage; they say when and where tasks run."""

import logging
import os

PARENT = os.getppid()  # whoever started this process; looked up before anything can take its time

# Before Prefect is imported: its own log lines would drown the progress bar and the one line that says what is wrong
# (PREFECT_LOGGING_LEVEL=INFO brings them back), and nothing is sent anywhere.
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
logging.getLogger("EventsWorker").setLevel(logging.ERROR)  # a logger that does not heed the level above
