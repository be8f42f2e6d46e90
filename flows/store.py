"""Can MLflow's store be written? Asked before the first stage, without importing MLflow, which takes seconds."""

import contextlib
import os
import shutil
import sqlite3
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from tasks.params import ROOT

# Before mlflow is imported: a store that has died meanwhile is one line soon, not after seven ever longer retries.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")

ROOM = 4 << 20  # bytes that a new store and its journal need at least


def store_uri(root: Path = ROOT) -> str:
    """MLFLOW_TRACKING_URI, or SQLite in the repository."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root.resolve() / 'mlflow.db'}"


def check_store(uri: str, seconds: float = 5) -> None:
    """A RuntimeError in one line if nothing can be recorded there; other kinds of stores than these are not asked."""
    kind = urlsplit(uri).scheme
    if kind == "sqlite":
        _check_file(Path(uri.removeprefix("sqlite:///")), seconds)
    elif kind in ("http", "https"):
        _check_server(uri, seconds)


def _check_file(path: Path, seconds: float) -> None:
    what = "MLflow's store, expected a database that can be written; MLFLOW_TRACKING_URI names another"
    if not os.access(path.parent, os.W_OK):
        raise RuntimeError(f"{path}: its folder is not writable; {what}")
    if shutil.disk_usage(path.parent).free < ROOM:
        raise RuntimeError(f"{path}: no space left on its disk; {what}")
    if path.exists():
        try:
            with contextlib.closing(sqlite3.connect(path, timeout=seconds)) as store:
                store.execute("BEGIN IMMEDIATE")
                store.rollback()
        except sqlite3.Error as error:
            raise RuntimeError(f"{path}: {error}; {what}") from None


def _check_server(uri: str, seconds: float) -> None:
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=seconds):
            return
    except urllib.error.HTTPError as error:
        if error.code < 500:  # it answers; who may write is its own affair
            return
        said = str(error)
    except OSError as error:
        said = str(getattr(error, "reason", error))
    raise RuntimeError(f"{uri}: {said}; expected MLflow's server there: start it, or set MLFLOW_TRACKING_URI") from None
