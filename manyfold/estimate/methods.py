"""What decides an estimator's numbers: who logs its episodes, which of them it uses, and which return.

Loggers run their episodes in turns, so that each of K has n / K after every K episodes. How estimators are called and
drawn is in `registry`, apart from this: a colour must not make an evaluation stale.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from manyfold.arrays import Array
from manyfold.data.episodes import Padded
from manyfold.estimate import estimators, pooled

Loggers = Literal["targets", "mu", "odi"]


def pdis(episodes: Padded) -> Array:
    """Per-decision importance sampling; the plain Monte Carlo return of a target's own episodes; `[K, N]`."""
    return estimators.pdis(episodes.rewards, episodes.log_rho, episodes.lengths)


def baseline(episodes: Padded) -> Array:
    """The baseline (doubly robust) return; `[K, N]`."""
    return estimators.baseline_return(episodes.rewards, episodes.log_rho, *episodes.baseline(), episodes.lengths)


def balanced(episodes: Padded) -> Array:
    """Pooling by the prefix balance heuristic; `[K, N]`."""
    return estimators.balanced(
        episodes.rewards, episodes.target_probs, episodes.logger_probs(), episodes.counts, episodes.lengths
    )


def balanced_baseline(episodes: Padded) -> Array:
    """The same with a baseline; `[K, N]`."""
    return estimators.balanced(
        episodes.rewards,
        episodes.target_probs,
        episodes.logger_probs(),
        episodes.counts,
        episodes.lengths,
        episodes.baseline(),
    )


def pooled_columns(episodes: Padded) -> Array:
    """What pooled evaluation makes its values of, own, whole, decisions, D and the loggers; `[4 + J, K, N]`.

    Own is on-policy MC where the loggers are the targets themselves, whole elsewhere.
    """
    (k, n, horizon), j = episodes.target_probs.shape, len(episodes.counts)
    logger, shares = np.arange(n) % j, np.repeat((episodes.counts / n)[:, None], n, 1)
    ends = np.full(n, horizon) if episodes.lengths is None else episodes.lengths
    inside = np.arange(horizon) < ends[:, None]
    log_pi, log_mu = (
        estimators.log_probs(x, episodes.lengths) for x in (episodes.target_probs, episodes.logger_probs())
    )
    log_w, log_w_loggers = pooled.log_weights(log_pi, log_mu, shares)
    taken, expected = (np.where(inside, x, 0.0) for x in episodes.baseline())
    own = np.arange(k) if j == k else np.full(k, -1)
    rewards = np.where(inside, episodes.rewards, 0.0)
    found = pooled.columns(rewards, log_w, log_w_loggers, logger, own, shares, [(taken, expected)])
    loggers = np.broadcast_to(found.loggers[:, None], (j, k, n))
    return np.concatenate([np.stack([found.own, found.whole, found.decisions, found.baselines[0, 0]]), loggers])


def log_weights(episodes: Padded) -> Array:
    """log rho of whole episodes, to the logger that ran them; `[K, N]`."""
    return np.asarray(episodes.log_rho.sum(-1))


def log_balanced(episodes: Padded) -> Array:
    """log W of whole episodes, to the mixture of all loggers; `[K, N]`."""
    n = len(episodes.rewards)
    log_pi, log_mu = (
        estimators.log_probs(x, episodes.lengths) for x in (episodes.target_probs, episodes.logger_probs())
    )
    return pooled.log_weights(log_pi, log_mu, np.repeat((episodes.counts / n)[:, None], n, 1))[0][..., -1]


def steps(episodes: Padded) -> Array:
    """What an episode costs; `[1, N]`."""
    n, horizon = episodes.rewards.shape
    return np.full((1, n), float(horizon)) if episodes.lengths is None else episodes.lengths[None].astype(np.float64)


RETURNS: dict[str, Callable[[Padded], Array]] = {
    "pdis": pdis,
    "baseline": baseline,
    "balanced": balanced,
    "balanced_baseline": balanced_baseline,
    "pooled": pooled_columns,
}
HEALTH = {"log_weights": log_weights, "log_balanced": log_balanced, "steps": steps}  # of the episodes, not returns


@dataclass(frozen=True)
class Method:
    """One way to estimate all K policies from n episodes."""

    loggers: Loggers
    own: bool  # policy k uses the n / K episodes of logger k; otherwise all n
    returns: str  # a name in RETURNS; "pooled" gives columns, whose coefficients come from all episodes of a run

    @property
    def weights(self) -> str:
        """Which weights of whole episodes tell whether it can be trusted; a name in HEALTH."""
        return "log_balanced" if self.returns in ("balanced", "balanced_baseline", "pooled") else "log_weights"


METHODS = {
    "on_policy": Method("targets", True, "pdis"),
    "mpe": Method("mu", False, "pdis"),
    "odi": Method("odi", True, "pdis"),
    "son": Method("targets", False, "pdis"),
    "sodi": Method("odi", False, "pdis"),
    "mpe_baseline": Method("mu", False, "baseline"),
    "son_balanced": Method("targets", False, "balanced"),
    "pooled": Method("targets", False, "pooled"),
}
LOGGERS: tuple[Loggers, ...] = tuple(dict.fromkeys(method.loggers for method in METHODS.values()))


def n_loggers(loggers: Loggers, policies: int) -> int:
    """J: one mu, or one logger for each target."""
    return 1 if loggers == "mu" else policies
