"""Flows: they say when and where stages run; a stage itself knows nothing of Prefect."""

import logging
import os
import warnings

# Before Prefect is imported: its own log lines would drown the progress bars and the one line that says what is wrong
# (PREFECT_LOGGING_LEVEL=INFO brings them back), and nothing is sent anywhere.
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
logging.getLogger("EventsWorker").setLevel(logging.CRITICAL)  # a logger that does not heed the level above
warnings.filterwarnings("ignore", "Failed to create the Prefect home directory")  # flows.server says so in one line
