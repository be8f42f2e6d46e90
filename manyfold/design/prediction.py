"""What logged data say of a plan before any online episode: its variance, where sharing must pay, a verdict."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from manyfold import similarity
from manyfold.arrays import Array, Ints, divide
from manyfold.design.behavior import Behavior, floored
from manyfold.fqe.engine import Bounded, Weights
from manyfold.fqe.nets import ValueNets
from manyfold.fqe.problems import Problem, look_up, moment_reward


def plan_weights(behavior: Behavior, cap: float = 10.0) -> Weights:
    """pi_k^2 / mu: next weights with which `fqe.fit` finds the second moment of the PDIS return under mu.

    Where states are vectors, the moment is kept between q^2 and `cap` times q_hat. The lower bound holds for any
    second moment. The upper one says that a state is lost for sharing, without saying how far: logged data go where
    some target hardly shares an action with the others, and moments grow there with every step. Nets, unlike tables,
    would carry that to all other states.
    """

    if behavior.policies.n_states:
        fitted, mu, _ = behavior.tables()
        return look_up(divide(fitted.policies**2, mu))

    def at(states: NDArray[np.float32], t: Ints) -> Bounded:
        fitted = behavior.fitted(states, t)
        return Bounded(divide(fitted.policies**2, behavior.design(fitted)), fitted.q**2, cap * fitted.q_hat)

    return at


def plan_problem(behavior: Behavior) -> Problem:
    """m(s, a) = E[(R + G')^2 | s, a], the second moment of the PDIS return under mu; its variance follows from it."""
    return Problem(moment_reward(behavior.q), plan_weights(behavior))


class Prediction(NamedTuple):
    """What logged data alone say of a plan; `[K]` each."""

    values: Array  # J(pi_k)
    on_policy: Array  # variance of one on-policy episode's return
    plan: Array  # of one episode of mu for each policy

    @property
    def relative(self) -> Array:
        """Var_mu / (K Var_on): the plan's variance relative to on-policy MC at equal cost."""
        return self.plan / (len(self.plan) * self.on_policy)


def predict(behavior: Behavior, m: ValueNets, initial: ArrayLike) -> Prediction:
    """The variances of on-policy MC and of mu before any episode is run.

    Args:
        m: `fqe.fit` of `plan_problem(behavior)`.
        initial: states `[N, width]` at which episodes start.
    """
    fitted = behavior.fitted(initial, 0)
    pi, q, q_hat = fitted
    mu = behavior.design(fitted)
    moments = floored(m.predict(initial, 0), q, behavior.scale)
    values = (pi * q).sum(-1).mean(1)  # J
    second_on, second = (pi * q_hat).sum(-1).mean(1), (divide(pi**2, mu) * moments).sum(-1).mean(1)
    least = 1e-6 * second_on  # a variance is positive, whatever the fits' errors say
    return Prediction(values, np.maximum(second_on - values**2, least), np.maximum(second - values**2, least))


class Similarity(NamedTuple):
    """How alike the targets are where logged data has been."""

    eta_spread: Array  # sqrt(eta_max / eta_min) over the actions of a state, median of each step; [K, T]
    theorem_3: Array  # share of the states of each step where its condition holds; [K, T]
    theorem_4: Array


def similar(behavior: Behavior, states: ArrayLike, t: ArrayLike, share: float) -> Similarity:
    """The conditions of Theorems 3 and 4 at N logged states and their steps; NaN at steps that have none.

    Taken state by state, which is all that the proofs use, and with nu = 0 in Theorem 3's: fits don't tell nu apart,
    and leaving it out makes the condition stricter, never wrong.

    Args:
        share: n_k / n, on-policy MC's share of the episodes for one target; 1 / K.
    """
    x, steps = np.asarray(states, dtype=np.float32), np.asarray(t)
    fitted = behavior.fitted(x, steps)
    pi, q, q_hat = (part[:, None] for part in fitted)  # [K, 1, N, A]
    spread = similarity.eta_spread(similarity.eta(pi, q_hat), "state")[:, 0]  # [K, N]
    third = similarity.theorem_3(pi, q, np.zeros_like(q), q_hat, share, "state")[:, 0]
    fourth = similarity.theorem_4(pi, q_hat, "state")[:, 0]
    out = np.full((3, behavior.policies.n_policies, behavior.policies.horizon), np.nan)
    for step in np.unique(steps):
        at = steps == step
        out[:, :, step] = np.median(spread[:, at], -1), third[:, at].mean(-1), fourth[:, at].mean(-1)
    return Similarity(*out)


def verdict(relative: Array, total: float, names: tuple[str, ...]) -> str:
    """One sentence that a person can act on.

    Args:
        relative: predicted relative variance of every policy, `[K]`.
        total: of all policies together; NaN where the fit of m ran away.
        names: of the policies.
    """
    if np.isnan(total):
        return "Expect an explosion: even the fit of the variance ran away. Evaluate these policies one by one."
    said = f"Expect {total:.0%} of on-policy's variance"
    odd = int(relative.argmax())
    if relative[odd] > 2 * max(total, float(np.median(relative))):
        said += f"; policy {odd} ({names[odd]}) is the odd one out: {relative[odd]:.0%}"
    if total >= 1:
        return said + ": sharing does not pay, evaluate these policies one by one or drop the odd ones."
    return said + "."
