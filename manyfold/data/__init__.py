"""Logged data: transitions in Parquet, and the episodes that manyfold logs itself."""

from manyfold.data.transitions import About, Batch, Transitions, Writer

__all__ = ["About", "Batch", "Transitions", "Writer"]
