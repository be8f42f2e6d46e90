"""How alike the target policies are, and where the paper promises that sharing pays: eta, Theorems 3 and 4.

Everything here is computed from q, nu and q_hat, exact or fitted, so it can be known before any online episode.

The printed lemmas (T = 1) write (sum_a pi q)^2 where their proof has (sum_a pi |q|)^2; with rewards of both signs
the printed condition does not imply the inequality (a test shows a counter-example). We follow the proof.
"""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from manyfold.arrays import Array, Bools, divide
from manyfold.exact import shared_behavior
from manyfold.mdp import FiniteMDP

Scope = Literal["step", "state"]


def eta(policies: ArrayLike, q_hat: ArrayLike) -> Array:
    """eta_k = w_k / w_bar with w_k = pi_k^2 q_hat_k and w_bar its mean over k (Eq. def: et rl); `[K, T, S, A]`.

    1 everywhere for equal policies; NaN where w_bar = 0, as such an action counts for no policy.
    """
    shared_behavior(policies, q_hat)  # refuses bad input with the line that says why
    w = np.asarray(policies, dtype=np.float64) ** 2 * np.asarray(q_hat, dtype=np.float64)
    w_bar = np.broadcast_to(w.mean(0), w.shape)
    return np.divide(w, w_bar, out=np.full_like(w, np.nan), where=w_bar > 0)


def eta_spread(similarity: Array, scope: Scope = "step") -> Array:
    """sqrt(eta_max / eta_min) of an `eta`; `[K, T, S]`, infinite where some policy never takes what others do.

    Scope "step" takes the extremes over all k, s, a of a step t: the theorems as they are stated. Scope "state" takes
    them over the actions of one (k, t, s) alone, which is all that the proofs use: a sharper condition, as safe.
    """
    if scope not in ("step", "state"):
        raise ValueError(f"scope is {scope!r}, expected 'step' or 'state'")
    axes = {"step": (0, 2, 3), "state": (3,)}[scope]
    known = np.isfinite(similarity)
    highest = np.where(known, similarity, -np.inf).max(axes, keepdims=True)
    lowest = np.where(known, similarity, np.inf).min(axes, keepdims=True)
    ratio = np.where(lowest == 0, np.inf, 1.0)  # 1 where nothing counts
    np.divide(highest, lowest, out=ratio, where=(lowest > 0) & np.isfinite(lowest))
    return np.broadcast_to(np.sqrt(ratio), (*similarity.shape[:3], 1))[..., 0]


def theorem_4(policies: ArrayLike, q_hat: ArrayLike, scope: Scope = "step") -> Bools:
    """Condition of Theorem 4 (n against nK episodes) at every (k, t, s): `[K, T, S]`.

    spread_t (sum_a pi sqrt(q_hat))^2 <= sum_a pi q_hat
    """
    pi, moments = np.asarray(policies, dtype=np.float64), np.asarray(q_hat, dtype=np.float64)
    return _at_most(_bound(pi, moments, scope), (pi * moments).sum(-1))


def theorem_3(
    policies: ArrayLike, q: ArrayLike, nu: ArrayLike, q_hat: ArrayLike, share: ArrayLike, scope: Scope = "step"
) -> Bools:
    """Condition of Theorem 3 (equal total n, policy k's share n_k / n of it) at every (k, t, s): `[K, T, S]`.

    spread_t (sum_a pi sqrt(q_hat))^2 - (1 - n_k/n) Delta <= sum_a pi q_hat,
    Delta = E_mu[rho^2 nu] + Var_mu(rho q) under the shared mu.
    """
    pi, values, moments = (np.asarray(x, dtype=np.float64) for x in (policies, q, q_hat))
    mu = shared_behavior(pi, moments)
    rho = divide(pi, mu)
    centre = (pi * values).sum(-1, keepdims=True)
    delta = (pi * rho * np.asarray(nu) + mu * (rho * values - centre) ** 2).sum(-1)
    return _at_most(_bound(pi, moments, scope) - (1 - _shares(share, len(pi))) * delta, (pi * moments).sum(-1))


def lemma_4(policies: ArrayLike, q: ArrayLike, scope: Scope = "step") -> Bools:
    """Condition of Lemma 4, the single-step (T = 1) case of Theorem 4: `[K, 1, S]`."""
    pi, values = _single_step(policies, q)
    return theorem_4(pi, values**2, scope)


def lemma_3(policies: ArrayLike, q: ArrayLike, share: ArrayLike, scope: Scope = "step") -> Bools:
    """Condition of Lemma 3, single-step (T = 1), policy k's share n_k / n of the episodes: `[K, 1, S]`.

    spread (sum_a pi |q|)^2 - (n/n_k - 1) Delta <= sum_a pi q^2,  Delta = Var_pi(q)
    """
    pi, values = _single_step(policies, q)
    second = (pi * values**2).sum(-1)
    delta = (pi * (values - (pi * values).sum(-1, keepdims=True)) ** 2).sum(-1)
    return _at_most(_bound(pi, values**2, scope) - (1 / _shares(share, len(pi)) - 1) * delta, second)


def promised(mdp: FiniteMDP, policies: ArrayLike, holds: Bools) -> Bools:
    """Where the inequality follows: the condition holds there and wherever policy k can go from there; `[K, T, S]`."""
    pi = mdp.check_policies(policies)
    out = np.array(holds, dtype=np.bool_)
    if out.shape != pi.shape[:-1]:
        raise ValueError(f"holds has shape {list(out.shape)}, expected {list(pi.shape[:-1])} = [K, T, S]")
    for t in reversed(range(mdp.horizon - 1)):
        astray = mdp.expect((~out[:, t + 1]).astype(np.float64))  # [K, S, A]
        out[:, t] &= ~((pi[:, t] > 0) & (astray > 0)).any(-1)
    return out


def _at_most(left: Array, right: Array) -> Bools:
    """left <= right up to rounding: equal policies, or one action, meet the conditions with equality."""
    return left <= right + 1e-12 * np.abs(right)


def _bound(pi: Array, q_hat: Array, scope: Scope) -> Array:
    """spread (sum_a pi sqrt(q_hat))^2, which bounds E_mu[rho^2 q_hat]; infinity times nothing is nothing."""
    square = (pi * np.sqrt(q_hat)).sum(-1) ** 2
    return np.multiply(eta_spread(eta(pi, q_hat), scope), square, out=np.zeros_like(square), where=square > 0)


def _shares(share: ArrayLike, n_policies: int) -> Array:
    shares = np.broadcast_to(np.asarray(share, dtype=np.float64), (n_policies,))
    if not ((shares > 0) & (shares <= 1)).all():
        raise ValueError(f"share is {shares.tolist()}, expected n_k / n in (0, 1] for every policy")
    return shares[:, None, None]


def _single_step(policies: ArrayLike, q: ArrayLike) -> tuple[Array, Array]:
    pi, values = np.asarray(policies, dtype=np.float64), np.asarray(q, dtype=np.float64)
    if pi.ndim != 4 or pi.shape[1] != 1:
        raise ValueError(f"policies has shape {list(pi.shape)}, expected [K, 1, S, A]: the lemmas are for T = 1")
    return pi, values
