"""What the stage `evaluate` decides, of made-up values by the library itself."""

import json

import numpy as np

from manyfold.estimate.intervals import sample
from manyfold.estimate.ranking import decide, winner


def decisions(k, spread=1.0, episodes=1600, seed=0, names=None):
    """The content of decisions.json for K policies whose values lie `spread` apart in all."""
    rng = np.random.default_rng(seed)
    called = tuple(f"policy-{i}" for i in range(k)) if names is None else names
    truth = rng.permutation(np.linspace(0, spread, k)) if k > 1 else np.zeros(1)
    x = truth[:, None] + rng.standard_normal(episodes) + 0.7 * rng.standard_normal((k, episodes))
    logger = np.arange(episodes) % 2

    def look(n, anytime):
        found = decide(sample(x[:, :n], logger[:n], names=called), anytime=anytime)
        each = {"mean": found.sample.mean, "low": found.interval.low, "high": found.interval.high}
        each |= {"p_best": found.p_best, "may_be_best": found.may_be_best}
        return found, {"episodes": int(n), **{key: value.tolist() for key, value in each.items()}}

    final, said = look(episodes, False)
    low, high = final.ranks
    said |= {"difference_low": final.difference.low.tolist(), "difference_high": final.difference.high.tolist()}
    said |= {"rank_low": low.tolist(), "rank_high": high.tolist(), "best": final.best, "verdict": final.verdict}
    said |= {"rows": final.rows(), "winner": winner(x, logger)._asdict()}
    looks = [look(n, True)[1] for n in np.unique(np.geomspace(20, episodes, 16).astype(int) // 2 * 2)]
    found = {"policies": list(called), "alpha": 0.05, "estimator": "pooled", "looks": looks, "final": said}
    return json.loads(json.dumps(found))  # as a file would give it back
