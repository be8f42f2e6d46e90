"""What a small pilot says where logged data cannot tell: a prediction with measured variances in it.

The pilot of pooled evaluation is its own first rounds, all targets in turns: these episodes count in the end. That of
MPE is some episodes of mu.
"""

from collections.abc import Iterable

import numpy as np

from manyfold.arrays import Array, Ints
from manyfold.data.episodes import Padded
from manyfold.design.prediction import Predicted, Prediction
from manyfold.estimate import pooled
from manyfold.estimate.methods import baseline, pdis, pooled_columns


def pooled_variance(blocks: Iterable[Padded]) -> Array:
    """n Var of pooled evaluation as measured in episodes of all targets in turns; `[K]`."""
    return pooled.at_points(*_columns(blocks))[1]


def _columns(blocks: Iterable[Padded]) -> tuple[pooled.Columns, Ints]:
    """The columns of all episodes, and their number."""
    x = np.concatenate([pooled_columns(block) for block in blocks], -1)
    return pooled.Columns(x[0], x[1], x[2], x[3][None, None], x[4:, 0]), np.array([x.shape[-1]])


def after_pilot(prediction: Prediction, targets: Iterable[Padded] = (), mu: Iterable[Padded] = ()) -> Prediction:
    """The prediction with what the pilot measured: pooled from episodes of all targets in turns, MPE's from mu's.

    On-policy MC's variance stays as predicted unless it is unknown: logged data tell it better than a few episodes.
    """
    found: dict[Predicted, Array] = {}
    turns = list(targets)
    if turns:
        found["pooled"] = pooled_variance(turns)
        if not prediction.is_known("on_policy"):
            own = _columns(turns)[0].own  # K times the return in a target's own episodes
            k = len(own)
            found["on_policy"] = np.array([own[i, i::k].var(ddof=1) for i in range(k)]) / k**2
    shared = list(mu)
    if shared:
        found["mpe"] = np.concatenate([pdis(block) for block in shared], -1).var(-1, ddof=1)
        found["mpe_baseline"] = np.concatenate([baseline(block) for block in shared], -1).var(-1, ddof=1)
    known = {of: np.zeros(len(prediction.values), dtype=np.bool_) for of in found}
    return prediction._replace(**found, unknown={**prediction.unknown, **known})
