import numpy as np
import pytest

from manyfold.streams import stream


def test_streams_are_the_same_on_every_machine():
    assert stream("gridworld-1000", 3, "mpe", 7).integers(1 << 30) == 90805342
    assert stream("1", 2).random() != stream(1, 2).random()
    assert stream("a", np.int64(2)).random() == stream("a", 2).random()
    with pytest.raises(ValueError, match="expected words and whole numbers"):
        stream("a", None)
