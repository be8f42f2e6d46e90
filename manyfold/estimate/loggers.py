"""The policies that log an evaluation's episodes (the targets, mu, ODI's), and what is noted of every step."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from manyfold.arrays import Array, Ints
from manyfold.data.episodes import Padded
from manyfold.design.behavior import Behavior
from manyfold.envs.base import Environment
from manyfold.estimate import estimators
from manyfold.estimate.methods import Loggers, n_loggers
from manyfold.rollout import BLOCK, Choice, Choose, Noted, Steps, rollout, rollout_tabular


class Logging(Protocol):
    """Can run the episodes of any set of loggers."""

    def log(self, loggers: Loggers, episodes: int, rng: np.random.Generator) -> Iterator[Padded]:
        """Episodes of these loggers in turns, in blocks in which all loggers have the same number."""


@dataclass(frozen=True)
class TabularLogging:
    """Where states can be counted: everything is a look-up in tables `[.., T, S, A]`, made after the episodes."""

    env: Environment
    targets: Array
    mu: Array
    odi: Array
    b: Array  # the baseline, fitted q

    def log(self, loggers: Loggers, episodes: int, rng: np.random.Generator) -> Iterator[Padded]:
        table = {"targets": self.targets, "mu": self.mu[None], "odi": self.odi}[loggers]
        found = rollout_tabular(self.env, table, episodes, rng)
        target_probs = found.probs(self.targets)
        yield Padded(
            found.rewards,
            target_probs,
            found.own_probs(table),
            lambda: target_probs if loggers == "targets" else found.probs(table),
            lambda: (found.probs(self.b), found.at((self.targets * self.b).sum(-1))),
            np.bincount(np.arange(episodes) % len(table)),
        )


@dataclass(frozen=True)
class FittedLogging:
    """Any environment: the networks are evaluated at every step, and what they said is noted then."""

    env: Environment
    behavior: Behavior  # knows the targets, q, mu and ODI's policies

    def choose(self, loggers: Loggers) -> Choose:
        """How these loggers choose; all targets' probabilities are noted, under mu their q and v as well."""
        behavior = self.behavior

        def targets(obs: NDArray[Any], t: Ints, who: Ints) -> Choice:
            rows, pi = np.arange(len(t)), behavior.policies.probs(obs, t)
            return Choice(pi[who, rows], lambda actions: {"target_probs": pi[:, rows, actions].T})

        def mu(obs: NDArray[Any], t: Ints, who: Ints) -> Choice:
            rows, fitted = np.arange(len(t)), behavior.fitted(obs, t)
            pi, q, _ = fitted

            def note(actions: Ints) -> Noted:
                return {
                    "target_probs": pi[:, rows, actions].T,
                    "q": q[:, rows, actions].T,
                    "v": (pi * q).sum(-1).T,
                }

            return Choice(behavior.design(fitted), note)

        def odi(obs: NDArray[Any], t: Ints, who: Ints) -> Choice:
            rows, fitted = np.arange(len(t)), behavior.fitted(obs, t)
            own = behavior.design_odi(fitted)[who, rows]
            return Choice(own, lambda actions: {"target_probs": fitted.policies[:, rows, actions].T})

        return {"targets": targets, "mu": mu, "odi": odi}[loggers]

    def log(self, loggers: Loggers, episodes: int, rng: np.random.Generator) -> Iterator[Padded]:
        many = n_loggers(loggers, self.behavior.policies.n_policies)
        size = max(1, BLOCK // many) * many
        for rows in rollout(self.env, self.choose(loggers), np.arange(episodes) % many, rng, size):
            yield self.episodes(rows, loggers)

    def episodes(self, rows: Steps, loggers: Loggers) -> Padded:
        """Whole episodes, padded."""
        many, lengths = n_loggers(loggers, self.behavior.policies.n_policies), rows.lengths
        noted = {name: estimators.pad(x.T, lengths) for name, x in rows.noted.items()}  # [K, N, T] each
        owner = (rows.episode[0] + np.arange(len(lengths))) % many

        def taken(table: Array) -> Array:
            return estimators.pad(table[:, np.arange(len(rows.t)), rows.action], lengths)

        def logger_probs() -> Array:
            if loggers == "targets":
                return noted["target_probs"]
            at = rows.state, rows.t
            return taken(self.behavior.mu(*at)[None] if loggers == "mu" else self.behavior.odi(*at))

        def baseline() -> tuple[Array, Array]:
            if "q" in noted:
                return noted["q"], noted["v"]
            q = self.behavior.q.predict(rows.state, rows.t)
            v = (self.behavior.policies.probs(rows.state, rows.t) * q).sum(-1)
            return taken(q), estimators.pad(v, lengths)

        return Padded(
            estimators.pad(rows.reward, lengths),
            noted["target_probs"],
            estimators.pad(rows.prob, lengths),
            logger_probs,
            baseline,
            np.bincount(owner, minlength=many),
            lengths,
        )


def logging_of(env: Environment, behavior: Behavior) -> TabularLogging | FittedLogging:
    """By tables where states can be counted and all episodes run at once, by networks elsewhere."""
    if env.n_states and not env.slots:
        (targets, q, _), mu, odi = behavior.tables()
        return TabularLogging(env, targets, mu, odi, q)
    return FittedLogging(env, behavior)
