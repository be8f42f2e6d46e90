"""What decides an estimator's numbers: who logs its episodes, which of them it uses, and which return.

Loggers run their episodes in turns, so that each of K has n / K after every K episodes. How estimators are called and
drawn is in `registry`, apart from this: a colour must not make an evaluation stale.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from manyfold.arrays import Array
from manyfold.data.episodes import Episodes
from manyfold.estimate import estimators

Loggers = Literal["targets", "mu", "odi"]


def pdis(episodes: Episodes) -> Array:
    """Per-decision importance sampling; the plain Monte Carlo return of a target's own episodes; `[K, N]`."""
    return estimators.pdis(episodes.rewards, episodes.log_rho, episodes.lengths)


def baseline(episodes: Episodes) -> Array:
    """The baseline (doubly robust) return; `[K, N]`."""
    return estimators.baseline_return(episodes.rewards, episodes.log_rho, *episodes.baseline(), episodes.lengths)


def balanced(episodes: Episodes) -> Array:
    """Pooling by the prefix balance heuristic; `[K, N]`."""
    return estimators.balanced(
        episodes.rewards, episodes.target_probs, episodes.logger_probs(), episodes.counts, episodes.lengths
    )


def balanced_baseline(episodes: Episodes) -> Array:
    """The same with a baseline; `[K, N]`."""
    return estimators.balanced(
        episodes.rewards,
        episodes.target_probs,
        episodes.logger_probs(),
        episodes.counts,
        episodes.lengths,
        episodes.baseline(),
    )


RETURNS: dict[str, Callable[[Episodes], Array]] = {
    "pdis": pdis,
    "baseline": baseline,
    "balanced": balanced,
    "balanced_baseline": balanced_baseline,
}


@dataclass(frozen=True)
class Method:
    """One way to estimate all K policies from n episodes."""

    loggers: Loggers
    own: bool  # policy k uses the n / K episodes of logger k; otherwise all n
    returns: str  # a name in RETURNS


METHODS = {
    "on_policy": Method("targets", True, "pdis"),
    "mpe": Method("mu", False, "pdis"),
    "odi": Method("odi", True, "pdis"),
    "son": Method("targets", False, "pdis"),
    "sodi": Method("odi", False, "pdis"),
    "mpe_baseline": Method("mu", False, "baseline"),
    "son_balanced": Method("targets", False, "balanced"),
}
LOGGERS: tuple[Loggers, ...] = tuple(dict.fromkeys(method.loggers for method in METHODS.values()))


def n_loggers(loggers: Loggers, policies: int) -> int:
    """J: one mu, or one logger for each target."""
    return 1 if loggers == "mu" else policies
