"""Flows: one Prefect flow per stage; they say when and where tasks run."""

import os

# Before Prefect is imported: its own log lines would drown the progress bar, and nothing is sent anywhere.
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
