"""The behavior policies of Algorithm 1, lines 7 and 8, from fitted q and q_hat: the shared mu (MPE) and the K of ODI.

A fit is never trusted to cover: q_hat is floored at q^2, below which no second moment can be, and at a small share of
its scale, so that every action that some target takes has a positive probability. A defensive mixture with weight alpha
keeps every one-step ratio at most K / alpha; alpha = 0 is the paper's.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from manyfold import exact, similarity
from manyfold.fqe import Bounded, Weights
from manyfold.mdp import Array, Ints
from manyfold.networks import NetworkPolicySet
from manyfold.values import ValueNets

FLOOR = 1e-3  # of q_hat's scale
MOST = 10.0  # times q_hat: no larger a second moment under mu is carried from state to state


def floored(q_hat: ArrayLike, q: ArrayLike, scale: ArrayLike) -> Array:
    """max(q_hat, q^2, FLOOR scale), `[K, ..., A]` with the policies' scales `[K]`."""
    moments, values, size = (np.asarray(x, dtype=np.float64) for x in (q_hat, q, scale))
    for name, x in (("q_hat", moments), ("q", values), ("scale", size)):
        if not np.isfinite(x).all():
            raise ValueError(f"{name}: NaN or infinity, expected finite numbers; did the fit diverge?")
    if moments.shape != values.shape or size.shape != moments.shape[:1] or (size <= 0).any():
        raise ValueError(
            f"q_hat has shape {list(moments.shape)}, q {list(values.shape)} and scale {list(size.shape)}, "
            "expected [K, ..., A] twice and K positive scales"
        )
    least = FLOOR * size.reshape(-1, *[1] * (moments.ndim - 1))
    return np.maximum(np.maximum(moments, values**2), least)


def mixed(mu: Array, policies: Array, alpha: float) -> Array:
    """The defensive mixture (1 - alpha) mu + alpha mean_k pi_k; `policies [K, ...]`."""
    return (1 - alpha) * mu + alpha * policies.mean(0) if alpha else mu


def covering(mu: Array, pi: Array) -> Array:
    """mu, and the smallest number there is where rounding has made it 0 although pi > 0."""
    return np.where((pi > 0) & (mu == 0), np.finfo(np.float64).tiny, mu)


class Fitted(NamedTuple):
    """Everything fitted at N states, `[K, N, A]` each."""

    policies: Array
    q: Array
    q_hat: Array  # floored


class Behavior:
    """Behavior policies at any states: `mu(states, t) -> [N, A]`, `odi(states, t) -> [K, N, A]`.

    Args:
        policies: the K targets.
        q, q_hat: their fits.
        alpha: weight of the defensive mixture.
    """

    def __init__(self, policies: NetworkPolicySet, q: ValueNets, q_hat: ValueNets, alpha: float = 0.0) -> None:
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 <= alpha <= 1:
            raise ValueError(f"alpha is {alpha!r}, expected a number from 0 to 1")
        for name, nets in (("q", q), ("q_hat", q_hat)):
            found = nets.shape.n_policies, nets.shape.n_actions, nets.shape.horizon
            expected = policies.n_policies, policies.n_actions, policies.horizon
            if found != expected:
                raise ValueError(f"{name} has (policies, actions, horizon) = {found}, expected the targets' {expected}")
        self.policies, self.q, self.q_hat, self.alpha = policies, q, q_hat, alpha
        self.scale: Array = q_hat.scale.double().numpy()

    def fitted(self, states: ArrayLike, t: int | ArrayLike) -> Fitted:
        """The targets and their fits at states `[N, width]` and steps t `[N]`."""
        x = np.asarray(states, dtype=np.float32)
        steps: Ints = np.broadcast_to(np.asarray(t, dtype=np.int64), (len(x),))
        obs: NDArray[np.generic] = x[:, 0].astype(np.int64) if self.policies.spec.n_cells else x
        q = self.q.predict(x, steps)
        return Fitted(self.policies.probs(obs, steps), q, floored(self.q_hat.predict(x, steps), q, self.scale))

    def mu(self, states: ArrayLike, t: int | ArrayLike) -> Array:
        """The shared behavior policy; `[N, A]`."""
        return self.design(self.fitted(states, t))

    def odi(self, states: ArrayLike, t: int | ArrayLike) -> Array:
        """A behavior policy for each target alone; `[K, N, A]`."""
        return self.design_odi(self.fitted(states, t))

    def design(self, fitted: Fitted) -> Array:
        """mu from what `fitted` gave; `[N, A]`."""
        pi, _, q_hat = fitted
        mu = exact.shared_behavior(pi[:, None], q_hat[:, None])[0]
        return mixed(covering(mu, pi.max(0)), pi, self.alpha)

    def design_odi(self, fitted: Fitted) -> Array:
        """ODI's policies from what `fitted` gave; `[K, N, A]`."""
        pi, _, q_hat = fitted
        alone = exact.odi_behaviors(pi[:, None], q_hat[:, None])[:, 0]
        return mixed(covering(alone, pi), pi[None], self.alpha)

    def tables(self) -> tuple[Fitted, Array, Array]:
        """Fits `[K, T, S, A]`, mu `[T, S, A]` and ODI's `[K, T, S, A]`, where states are cells."""
        cells = np.arange(self.policies.spec.n_cells, dtype=np.float32)[:, None]
        found = [self.fitted(cells, t) for t in range(self.policies.horizon)]
        mu = np.stack([self.design(fitted) for fitted in found])
        odi = np.stack([self.design_odi(fitted) for fitted in found], 1)
        return Fitted._make(np.stack(x, 1) for x in zip(*found, strict=True)), mu, odi


def plan_weights(behavior: Behavior) -> Weights:
    """pi_k^2 / mu: next weights with which `fqe.fit` finds the second moment of the PDIS return under mu.

    Where states are not cells, the moment is kept between q^2 and MOST q_hat. The lower bound holds for any second
    moment. The upper one says that a state is lost for sharing, without saying how far: logged data go where some
    target hardly shares an action with the others, and moments grow there with every step. Nets, unlike tables, would
    carry that to all other states.
    """

    def weights(pi: Array, mu: Array) -> Array:
        return np.divide(pi**2, mu, out=np.zeros_like(pi), where=np.broadcast_to(mu > 0, pi.shape))

    if behavior.policies.spec.n_cells:  # a look-up
        fitted, mu, _ = behavior.tables()
        table = weights(fitted.policies, mu).astype(np.float32)
        return lambda states, t: table[:, t, states[:, 0].astype(np.int64)]

    def at(states: NDArray[np.float32], t: Ints) -> Bounded:
        fitted = behavior.fitted(states, t)
        return Bounded(weights(fitted.policies, behavior.design(fitted)), fitted.q**2, MOST * fitted.q_hat)

    return at


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
        m: `fqe.fit` of the reward 2 r q - r^2 with `plan_weights(behavior)`.
        initial: states `[N, width]` at which episodes start.
    """
    fitted = behavior.fitted(initial, 0)
    pi, q, q_hat = fitted
    mu = behavior.design(fitted)
    moments = floored(m.predict(initial, 0), q, behavior.scale)
    values = (pi * q).sum(-1).mean(1)  # J
    rho_pi = np.divide(pi**2, mu, out=np.zeros_like(pi), where=np.broadcast_to(mu > 0, pi.shape))
    second_on, second = (pi * q_hat).sum(-1).mean(1), (rho_pi * moments).sum(-1).mean(1)
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
