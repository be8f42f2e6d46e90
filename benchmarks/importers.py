"""Importers against the libraries that wrote the files: the largest deviation on the same observations.

python -m benchmarks.importers [--observations 1000]

Of probabilities where actions are counted; of log-densities (or log-probabilities) of actions that the original drew
where they are vectors; of actions where there is no density. Beside it, what reaches the environment for the same draw
(clipped or squashed), and the deviation when two policies are called as one batch: float32 rounds otherwise there.
"""

import argparse
import tempfile
import warnings
from pathlib import Path

import torch

from benchmarks.show import show
from tests import cleanrl_originals, program_originals, sb3_originals
from tests.originals import deviations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--observations", type=int, default=1000)
    n = parser.parse_args().observations
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # Stable-Baselines3's, about spaces that nobody trains in
    rows = []
    for library in (sb3_originals, cleanrl_originals, program_originals):
        for name in library.CASES:
            with tempfile.TemporaryDirectory() as folder:
                original = library.make(name, Path(folder), n)
                found, sent = deviations(original)
                batched, _ = deviations(original, copies=2)
            shown = "" if original.sent is None else f"{sent:.0e}"
            rows.append((name, f"{len(original.obs):,}", f"{found:.0e}", shown, f"{batched:.0e}"))
    show(
        "Largest deviation from the original library",
        ("file", "observations", "deviation", "of what is sent", "in a batch of two"),
        rows,
    )


if __name__ == "__main__":
    main()
