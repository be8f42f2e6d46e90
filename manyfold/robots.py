"""Online episodes of a robot, logged by mu, by the targets or by ODI's policies, with all that a return needs."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from manyfold import estimators, slots
from manyfold.behavior import Behavior
from manyfold.evaluation import Logged, Loggers, n_loggers
from manyfold.mdp import Array, Ints
from manyfold.networks import NetworkPolicySet
from manyfold.slots import Choose, Note, Steps


@dataclass(frozen=True)
class Robot:
    """One group: the policies that can run its episodes."""

    env: str
    companion: NetworkPolicySet
    behavior: Behavior  # knows the targets, q, mu and ODI's policies

    def chooser(self, loggers: Loggers) -> Choose:
        """Loggers in turns; of every step all targets' probabilities are noted, under mu their q and v as well."""
        behavior, k = self.behavior, self.behavior.policies.n_policies

        def targets(states: Array, t: Ints, episode: Ints) -> tuple[Array, Note]:
            rows, pi = np.arange(len(t)), behavior.policies.probs(states, t)
            return pi[episode % k, rows], lambda actions: pi[:, rows, actions].T

        def mu(states: Array, t: Ints, episode: Ints) -> tuple[Array, Note]:
            rows, fitted = np.arange(len(t)), behavior.fitted(states, t)
            pi, q, _ = fitted
            v = (pi * q).sum(-1)
            return behavior.design(fitted), lambda a: np.concatenate([pi[:, rows, a], q[:, rows, a], v]).T

        def odi(states: Array, t: Ints, episode: Ints) -> tuple[Array, Note]:
            rows, fitted = np.arange(len(t)), behavior.fitted(states, t)
            own = behavior.design_odi(fitted)[episode % k, rows]
            return own, lambda actions: fitted.policies[:, rows, actions].T

        return {"targets": targets, "mu": mu, "odi": odi}[loggers]

    def log(self, loggers: Loggers, episodes: int, rng: np.random.Generator) -> Iterator[Logged]:
        """Episodes of these loggers in turns, in blocks in which all loggers have the same number."""
        world = slots.fill(self.env, self.companion, episodes, rng)
        many = n_loggers(loggers, self.behavior.policies.n_policies)
        steps = slots.play(world, episodes, self.chooser(loggers), rng)
        for rows in slots.blocks(steps, episodes, max(1, slots.BLOCK // many) * many):
            yield self.logged(rows, loggers)

    def logged(self, rows: Steps, loggers: Loggers) -> Logged:
        """Whole episodes, padded."""
        k = self.behavior.policies.n_policies
        many = n_loggers(loggers, k)
        lengths = np.bincount(rows.episode - rows.episode[0])
        first, *more = (estimators.pad(x, lengths) for x in np.split(rows.noted.T, rows.noted.shape[1] // k))
        owner = (rows.episode[0] + np.arange(len(lengths))) % many

        def taken(table: Array) -> Array:
            return estimators.pad(table[:, np.arange(len(rows.t)), rows.action], lengths)

        def logger_probs() -> Array:
            own = {"mu": lambda *at: self.behavior.mu(*at)[None], "odi": self.behavior.odi}
            return first if loggers == "targets" else taken(own[loggers](rows.state, rows.t))

        def b() -> tuple[Array, Array]:
            if more:
                return more[0], more[1]
            q = self.behavior.q.predict(rows.state, rows.t)
            v = (self.behavior.policies.probs(rows.state, rows.t) * q).sum(-1)
            return taken(q), estimators.pad(v, lengths)

        return Logged(
            estimators.pad(rows.reward, lengths),
            first,
            estimators.pad(rows.prob, lengths),
            logger_probs,
            b,
            np.bincount(owner, minlength=many),
            lengths,
        )
