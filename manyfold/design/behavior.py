"""The behavior policies of Algorithm 1, lines 7 and 8, from fitted q and q_hat: the shared mu (MPE) and the K of ODI.

A fit is never trusted to cover: q_hat is floored at q^2, below which no second moment can be, and at a small share of
its scale, so that every action that some target takes has a positive probability. A defensive mixture with weight alpha
keeps every one-step ratio at most K / alpha; alpha = 0 is the paper's.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from manyfold import exact
from manyfold.arrays import Array, check_number
from manyfold.fqe.nets import ValueNets
from manyfold.policies.base import PolicySet, check_steps

FLOOR = 1e-3  # of q_hat's scale


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

    def __init__(self, policies: PolicySet, q: ValueNets, q_hat: ValueNets, alpha: float = 0.0) -> None:
        check_number("alpha", alpha, 0, 1, whole=False)
        for name, nets in (("q", q), ("q_hat", q_hat)):
            shape = nets.shape
            found = shape.n_policies, shape.n_actions, shape.horizon, shape.n_states
            expected = policies.n_policies, policies.n_actions, policies.horizon, policies.n_states
            if found != expected:
                raise ValueError(
                    f"{name} has (policies, actions, horizon, states) = {found}, expected the targets' {expected}"
                )
        self.policies, self.q, self.q_hat, self.alpha = policies, q, q_hat, alpha
        self.scale: Array = q_hat.scale.double().numpy()

    def fitted(self, states: ArrayLike, t: int | ArrayLike) -> Fitted:
        """The targets and their fits at states `[N, width]` and steps t `[N]`."""
        x = np.asarray(states, dtype=np.float32)
        steps = check_steps(t, len(x), self.policies.horizon)
        q = self.q.predict(x, steps)
        return Fitted(self.policies.probs(x, steps), q, floored(self.q_hat.predict(x, steps), q, self.scale))

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
        """Fits `[K, T, S, A]`, mu `[T, S, A]` and ODI's `[K, T, S, A]`, where states are indices."""
        states = np.arange(self.policies.n_states, dtype=np.float32)[:, None]
        found = [self.fitted(states, t) for t in range(self.policies.horizon)]
        mu = np.stack([self.design(fitted) for fitted in found])
        odi = np.stack([self.design_odi(fitted) for fitted in found], 1)
        return Fitted._make(np.stack(x, 1) for x in zip(*found, strict=True)), mu, odi
