"""Pickles that do something when they are loaded."""

import os
import pickle


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def proof(folder):
    """A payload, and the folder that it would create; loaded by pickle it does."""
    made = folder / "it-ran"
    pickle.loads(pickle.dumps(Payload(made)))
    assert made.is_dir()
    made.rmdir()
    return Payload(made), made
