"""Our returns against offline_rl_ope 7.0.0 on the same ragged episodes.

It can't be a dependency (it needs d3rlpy, which pins Gymnasium 1.0.0), so `benchmarks.peers` runs it, and the numbers
that it gives for the smallest example stand here.
"""

import numpy as np

from benchmarks import peers

PER_DECISION = [
    [16.815335488, -10.729684706, -0.921343535, 0.077459328],
    [4.656688401, -0.569915097, -4.21147487, -0.173398887],
]
DOUBLY_ROBUST = [
    [35.248680737, -20.140133736, -1.977325146, 1.309759237],
    [6.301823285, -0.580297421, -3.424123947, -1.086453408],
]


def test_returns_are_those_that_offline_rl_ope_gave():
    example = peers.example(0)
    assert len(set(example.lengths)) > 1  # ragged
    pdis, robust = peers.ours(example)
    np.testing.assert_allclose(pdis, PER_DECISION, atol=1e-8)
    np.testing.assert_allclose(robust, DOUBLY_ROBUST, atol=1e-8)
