"""Flows: one Prefect flow per stage; they say when and where tasks run."""
