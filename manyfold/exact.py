"""Exact dynamic programming on finite MDPs: the paper's quantities without sampling, the oracle of every test.

Symbols are the paper's: pi `[K, T, S, A]` are the target policies, mu `[T, S, A]` a behavior policy, b `[K, T, S, A]`
a baseline. The return that everything here is about is

    G_t = sum_a pi(a|S_t) b(S_t, a) + rho_t (R_{t+1} + G_{t+1} - b(S_t, A_t)),   G_T = 0,   rho_t = pi / mu,

the baseline (doubly robust) return; b = 0 makes it the per-decision importance sampling (PDIS) return of the paper.
It is unbiased for every b that does not depend on the episode. Where a function takes `b`, leaving it out means PDIS.
"""

import numpy as np
from numpy.typing import ArrayLike

from manyfold.arrays import Array, Bools, check_distributions, check_finite, check_shape, divide
from manyfold.mdp import FiniteMDP

__all__ = [
    "FiniteMDP",
    "action_values",
    "baseline_variance",
    "best_behavior",
    "conditional_variances",
    "estimator_variances",
    "lowest_variances",
    "next_value_variances",
    "odi_behaviors",
    "pdis_variance",
    "relative_variances",
    "second_moments",
    "second_moments_bellman",
    "shared_behavior",
    "state_values",
    "values",
]


# --- values -----------------------------------------------------------------------------------------------------------


def action_values(mdp: FiniteMDP, policies: ArrayLike) -> Array:
    """q_t(s, a) = r(s, a) + E[v_{t+1}(S') | s, a], with v_T = 0; `[K, T, S, A]`."""
    return _action_values(mdp, mdp.check_policies(policies))


def state_values(mdp: FiniteMDP, policies: ArrayLike) -> Array:
    """v_t(s) = sum_a pi_t(a|s) q_t(s, a); `[K, T, S]`."""
    pi = mdp.check_policies(policies)
    return (pi * _action_values(mdp, pi)).sum(-1)


def values(mdp: FiniteMDP, policies: ArrayLike) -> Array:
    """J(pi) = sum_s p_0(s) v_0(s); `[K]`."""
    return state_values(mdp, policies)[:, 0] @ mdp.initial


def next_value_variances(mdp: FiniteMDP, policies: ArrayLike) -> Array:
    """nu_t(s, a) = Var(v_{t+1}(S') | s, a), and 0 at t = T-1 (Eq. def:nu); `[K, T, S, A]`."""
    pi = mdp.check_policies(policies)
    return _next_value_variances(mdp, pi, _action_values(mdp, pi))


def _action_values(mdp: FiniteMDP, pi: Array, rewards: Array | None = None) -> Array:
    r = mdp.rewards if rewards is None else rewards
    q = np.empty_like(pi)
    q[:, -1] = r
    for t in reversed(range(mdp.horizon - 1)):
        v_tp1 = (pi[:, t + 1] * q[:, t + 1]).sum(-1)  # [K, S]
        q[:, t] = r + mdp.expect(v_tp1)
    return q


def _next_value_variances(mdp: FiniteMDP, pi: Array, q: Array) -> Array:
    nu = np.zeros_like(q)
    for t in range(mdp.horizon - 1):
        nu[:, t] = mdp.variance((pi[:, t + 1] * q[:, t + 1]).sum(-1))
    return nu


def _ingredients(mdp: FiniteMDP, policies: ArrayLike, b: ArrayLike | None) -> tuple[Array, Array, Array, Array]:
    """pi, q, d = q - b (q itself for PDIS) and nu, each `[K, T, S, A]`."""
    pi = mdp.check_policies(policies)
    q = _action_values(mdp, pi)
    d = q
    if b is not None:
        baseline = np.asarray(b, dtype=np.float64)
        check_shape("b", baseline, pi.shape, "[K, T, S, A]")
        check_finite("b", baseline)
        d = q - baseline
    return pi, q, d, _next_value_variances(mdp, pi, q)


# --- second moments ---------------------------------------------------------------------------------------------------


def second_moments(mdp: FiniteMDP, policies: ArrayLike, b: ArrayLike | None = None) -> Array:
    """q_hat = q^2 + nu + E[Var of the on-policy return from S'], by its definition (Eq. def q hat); `[K, T, S, A]`.

    It is E[G_t^2 | s, a] under the target policy itself. With a baseline, E[(R + G_{t+1} - b)^2 | s, a], which is
    (q - b)^2 + u with u = nu + E[Var of the baseline return from S']. `shared_behavior` of it is the best shared mu
    for the baseline return, by the same proof as Theorem 2.
    """
    pi, _, d, nu = _ingredients(mdp, policies, b)
    return _second_moments(mdp, pi, d, _return_variances(mdp, pi, pi, d, nu)[1])


def second_moments_bellman(mdp: FiniteMDP, policies: ArrayLike) -> Array:
    """q_hat by its Bellman equation: reward r_hat = 2 r q - r^2, next weights pi (Eq. recursive hat q).

    This is the equation that fitted evaluation solves from data. The definition (`second_moments`) sums non-negative
    terms only and is the more accurate of the two where q_hat is near 0.
    """
    pi = mdp.check_policies(policies)
    r = mdp.rewards
    q_hat = 2 * r * _action_values(mdp, pi) - r**2  # r_hat
    for t in reversed(range(mdp.horizon - 1)):
        q_hat[:, t] += mdp.expect((pi[:, t + 1] * q_hat[:, t + 1]).sum(-1))
    return q_hat


def _second_moments(mdp: FiniteMDP, pi: Array, d: Array, u: Array) -> Array:
    """d^2 + u, exactly 0 where that is only rounding: Theorem 2 must drop such an action, not take it once in 1e17."""
    moments = d**2 + u
    moments[moments <= _rounding(mdp, pi) ** 2] = 0.0
    return moments


def _rounding(mdp: FiniteMDP, pi: Array) -> Array:
    """A return below this is one whose rewards cancel: 1e-12 of the sum of their absolute values; `[K, T, S, A]`."""
    return 1e-12 * _action_values(mdp, pi, np.abs(mdp.rewards))


# --- behavior policies ------------------------------------------------------------------------------------------------


def shared_behavior(policies: ArrayLike, q_hat: ArrayLike) -> Array:
    """mu_t(a|s) ∝ sqrt(sum_k pi_k(a|s)^2 q_hat_k(s, a)), uniform where the sum is 0 (Theorem 2, MPE); `[T, S, A]`."""
    return _normalise(_norm_over_policies(_contributions(policies, q_hat)))


def odi_behaviors(policies: ArrayLike, q_hat: ArrayLike) -> Array:
    """mu_k ∝ pi_k sqrt(q_hat_k): Theorem 2 at K = 1, one behavior policy for each target (ODI); `[K, T, S, A]`."""
    return _normalise(_contributions(policies, q_hat))


def best_behavior(mdp: FiniteMDP, policies: ArrayLike, b: ArrayLike | None = None, max_sweeps: int = 200) -> Array:
    """The mu `[T, S, A]` that lowers sum_k Var(G_k) over whole episodes, not one step at a time as Theorem 2 does.

    Backward induction: given the later mu, the best mu_t(a|s) ∝ sqrt(sum_k c_k(t, s) pi_k^2 m_k(s, a)), where
    m_k = (q - b)^2 + nu + E[Var of G_k from S' under the later mu] and c_k(t, s) = E_mu[rho_k,0:t-1^2 1{S_t = s}] is
    how much policy k cares about that state. For K = 1 (or T = 1) c cancels and one pass gives the minimum. For more
    policies c depends on the earlier mu, so passes repeat until nothing improves: every pass lowers the sum, it starts
    from Theorem 2's mu, hence it is never worse. What it returns then is a fixed point of the pass, not a proven
    minimum: another start might end lower. The search space is the paper's Lambda-hat: mu > 0 wherever some
    pi_k q_hat_k > 0 (with a baseline, wherever its `second_moments` are), and 0 elsewhere. `lowest_variances` bounds
    from below what any mu in it could reach.
    """
    pi, _, d, nu = _ingredients(mdp, policies, b)
    moments = _second_moments(mdp, pi, d, _return_variances(mdp, pi, pi, d, nu)[1])
    counts = np.asarray((pi * moments > 0).any(0))  # [T, S, A]
    mu = shared_behavior(pi, moments)
    objective = np.inf
    for _ in range(max_sweeps):
        v_0, mu_next = _improve(mdp, pi, mu, d, nu, counts)
        if v_0 >= objective * (1 - 1e-12):
            break
        objective, mu = v_0, mu_next
    return mu


def _improve(mdp: FiniteMDP, pi: Array, mu: Array, d: Array, nu: Array, counts: Bools) -> tuple[float, Array]:
    """One backward pass of `best_behavior`: the objective it reaches and the mu that reaches it."""
    c = np.empty(pi.shape[:-1])  # [K, T, S]
    c[:, 0] = mdp.initial
    for t in range(mdp.horizon - 1):
        c_tp1 = mdp.push(c[:, t, :, None] * pi[:, t] * divide(pi[:, t], mu[t]))
        c[:, t + 1] = c_tp1 / (c_tp1.max() or 1.0)  # only proportions between policies matter
    # A state that nobody reaches is designed for all alike; one that some policy cannot reach still covers it.
    most = c.max(0)
    c = np.maximum(np.where(most > 0, c, 1.0), 1e-12 * most)

    better = np.empty_like(mu)
    v_tp1 = np.zeros((pi.shape[0], mdp.n_states))
    for t in reversed(range(mdp.horizon)):
        u = nu[:, t] + (mdp.expect(v_tp1) if t < mdp.horizon - 1 else 0.0)  # [K, S, A]
        weights = np.sqrt(c[:, t, :, None] * (d[:, t] ** 2 + u))
        better[t] = _normalise(_norm_over_policies(pi[:, t] * weights) * counts[t])
        v_tp1 = _variance_step(pi[:, t], better[t], d[:, t], u)
    return float((v_tp1 @ mdp.initial).sum()), better


def lowest_variances(mdp: FiniteMDP, policies: ArrayLike, b: ArrayLike | None = None) -> Array:
    """The smallest Var(G_k) that any behavior policy gives policy k when it serves k alone; `[K]`.

    Backward induction with mu_k ∝ pi_k sqrt(m_k) (see `best_behavior`), exact for each k within the same search space,
    so no shared mu of that space can go below. (A mu outside of it, which never takes some actions that matter, can be
    unbiased too where q = b happens to hold there exactly; no fitted b has that.)
    """
    pi, q, d, nu = _ingredients(mdp, policies, b)
    counts = _second_moments(mdp, pi, d, _return_variances(mdp, pi, pi, d, nu)[1]) > 0
    v_tp1 = np.zeros((pi.shape[0], mdp.n_states))
    for t in reversed(range(mdp.horizon)):
        u = nu[:, t] + (mdp.expect(v_tp1) if t < mdp.horizon - 1 else 0.0)  # [K, S, A]
        mu_t = _normalise(pi[:, t] * np.sqrt(d[:, t] ** 2 + u) * counts[:, t])  # [K, S, A]
        v_tp1 = _variance_step(pi[:, t], mu_t, d[:, t], u)
    return _with_initial_state(mdp, pi, q, v_tp1)


def _contributions(policies: ArrayLike, q_hat: ArrayLike) -> Array:
    pi, moments = np.asarray(policies, dtype=np.float64), np.asarray(q_hat, dtype=np.float64)
    if pi.ndim != 4 or 0 in pi.shape:
        raise ValueError(f"policies has shape {list(pi.shape)}, expected [K, T, S, A], none of them 0")
    check_distributions("policies", pi, ("k", "t", "s", "a"))
    check_shape("q_hat", moments, pi.shape, "the policies' shape")
    check_finite("q_hat", moments)
    if (moments < 0).any():
        where = np.unravel_index(int((moments < 0).argmax()), moments.shape)
        raise ValueError(
            f"q_hat[{', '.join(map(str, where))}] is {moments[where]:g}, expected 0 or more; "
            "floor a fitted q_hat at q^2"
        )
    return pi * np.sqrt(moments)


def _norm_over_policies(x: Array) -> Array:
    """sqrt(sum_k x_k^2) without underflow: a probability of 1e-200 must still be covered."""
    largest = x.max(0)
    scaled = np.divide(x, largest, out=np.zeros_like(x), where=largest > 0)
    return largest * np.sqrt((scaled**2).sum(0))


def _normalise(weights: Array) -> Array:
    total = weights.sum(-1, keepdims=True)
    return np.divide(weights, total, out=np.full_like(weights, 1 / weights.shape[-1]), where=total > 0)


# --- variances --------------------------------------------------------------------------------------------------------


def pdis_variance(mdp: FiniteMDP, policies: ArrayLike, mu: ArrayLike) -> Array:
    """Variance of one episode's PDIS return under mu, initial state included; `[K]`.

    Infinite where the squared ratios exceed what a float holds (mu below about 1e-154 where it matters).
    """
    return baseline_variance(mdp, policies, mu, None)


def baseline_variance(mdp: FiniteMDP, policies: ArrayLike, mu: ArrayLike, b: ArrayLike | None) -> Array:
    """Variance of one episode's baseline return under mu, initial state included; `[K]`."""
    pi = mdp.check_policies(policies)
    v_0 = conditional_variances(mdp, pi, mu, b)[:, 0]
    return _with_initial_state(mdp, pi, _action_values(mdp, pi), v_0)


def conditional_variances(mdp: FiniteMDP, policies: ArrayLike, mu: ArrayLike, b: ArrayLike | None = None) -> Array:
    """Var(G_t | S_t = s) under mu, by the paper's Lemma "Recursive Expression of Variance"; `[K, T, S]`.

    t = 0 is the variance per initial state. A mu that may bias G is refused: it must be positive where pi * q_hat > 0
    (the paper's search space Lambda-hat); with a baseline, where pi * second_moments(b) > 0.
    """
    pi, _, d, nu = _ingredients(mdp, policies, b)
    behavior = mdp.check_behavior(mu)
    needed = _second_moments(mdp, pi, d, _return_variances(mdp, pi, pi, d, nu)[1]) > 0
    gaps = (behavior == 0) & (pi > 0) & needed  # [K, T, S, A]
    if gaps.any():
        k, t, s, a = np.unravel_index(int(gaps.argmax()), gaps.shape)
        raise ValueError(
            f"mu does not cover policy k={k} at t={t}, s={s}, a={a}: mu = 0, pi = {pi[k, t, s, a]:.4g} and the return "
            "from there counts (q_hat > 0), so its estimate may be biased; give that action a positive probability"
        )
    return _return_variances(mdp, pi, behavior[None], d, nu)[0]


def _return_variances(mdp: FiniteMDP, pi: Array, mu: Array, d: Array, nu: Array) -> tuple[Array, Array]:
    """Var(G_t | s) `[K, T, S]` and u = Var(R + G_{t+1} | s, a) `[K, T, S, A]`; d = q - b; mu is `[K or 1, T, S, A]`."""
    u = nu.copy()
    v = np.empty(pi.shape[:-1])
    for t in reversed(range(mdp.horizon)):
        if t < mdp.horizon - 1:
            u[:, t] += mdp.expect(v[:, t + 1])
        v[:, t] = _variance_step(pi[:, t], mu[:, t], d[:, t], u[:, t])
    return v, u


@np.errstate(over="ignore", invalid="ignore")
def _variance_step(pi: Array, mu: Array, d: Array, u: Array) -> Array:
    """Var(G_t | s) = E_mu[rho^2 u] + Var_mu(rho d): both terms non-negative, nothing cancels; `[K, S]`.

    Infinite where it overflows, but not by an action that is never taken, nor by one whose d and u are 0.
    """
    rho = np.minimum(divide(pi, mu), np.finfo(np.float64).max)  # inf * 0 would be NaN
    centre = (pi * d).sum(-1, keepdims=True)
    later = pi * rho * u
    if np.isinf(u.max()):
        later = np.where(np.isinf(u), np.where(rho > 0, np.inf, 0.0), later)
    return (later + mu * (rho * d - centre) ** 2).sum(-1)


@np.errstate(over="ignore")
def _with_initial_state(mdp: FiniteMDP, pi: Array, q: Array, v_0: Array) -> Array:
    """The law of total variance at t = 0: E[Var(G | S_0)] + Var(v_0(S_0)); `[K]`."""
    value = (pi[:, 0] * q[:, 0]).sum(-1)  # [K, S]
    centred = value - (value @ mdp.initial)[:, None]
    return np.where(mdp.initial > 0, v_0 + centred**2, 0.0) @ mdp.initial  # no 0 * inf


# --- estimators at equal cost -----------------------------------------------------------------------------------------


@np.errstate(over="ignore")
def estimator_variances(
    mdp: FiniteMDP,
    policies: ArrayLike,
    q_hat: ArrayLike | None = None,
    b: ArrayLike | None = None,
    behaviors: tuple[Array, Array] | None = None,
) -> dict[str, Array]:
    """n times the variance of every estimator of J(pi_k) from n episodes in total; name -> `[K]`.

    on_policy     n/K episodes of each target policy for itself: K Var_on
    mpe           n episodes of the shared mu serve all: Var_mu
    odi           n/K episodes of each target's own mu_k: K Var_odi
    son           the on-policy episodes of all K shared by PDIS: mean_j Var under pi_j
    sodi          the same with the ODI policies' episodes: mean_j Var under mu_j
    mpe_baseline  the episodes of mpe with b as a baseline

    Args:
        q_hat: what the behavior policies are designed from; exact if left out, or a fitted one (floored at q^2).
        b: the baseline of mpe_baseline; the exact q if left out.
        behaviors: mu `[T, S, A]` and ODI's `[K, T, S, A]` to take instead of designing them from q_hat.

    A shared estimator is infinite for the policies that some logger does not cover: its estimate would be biased.
    """
    pi, q, d_b, nu = _ingredients(mdp, policies, b)
    v_on, u_on = _return_variances(mdp, pi, pi, q, nu)
    exact_moments = _second_moments(mdp, pi, q, u_on)
    moments = exact_moments if q_hat is None else q_hat
    d_b = np.zeros_like(q) if b is None else d_b
    needed_b = _second_moments(mdp, pi, d_b, _return_variances(mdp, pi, pi, d_b, nu)[1]) > 0

    def variance(mu: Array, d: Array = q, needed: Bools = exact_moments > 0) -> Array:  # mu [K or 1, T, S, A] -> [K]
        v_0 = _return_variances(mdp, pi, mu, d, nu)[0][:, 0]
        biased = ((mu == 0) & (pi > 0) & needed).any((1, 2, 3))
        return np.where(biased, np.inf, _with_initial_state(mdp, pi, q, v_0))

    var_on = _with_initial_state(mdp, pi, q, v_on[:, 0])
    rounding = (pi[:, 0] * _rounding(mdp, pi)[:, 0]).sum(-1).max(-1)  # [K]
    mu, mu_odi = behaviors or (shared_behavior(pi, moments), odi_behaviors(pi, moments))
    mu = mdp.check_behavior(mu)[None]
    return {
        "on_policy": len(pi) * np.where(var_on > rounding**2, var_on, 0.0),
        "mpe": variance(mu),
        "odi": len(pi) * variance(mu_odi),
        "son": np.mean([variance(pi_j[None]) for pi_j in pi], axis=0),
        "sodi": np.mean([variance(mu_j[None]) for mu_j in mu_odi], axis=0),
        "mpe_baseline": variance(mu, d_b, needed_b),
    }


@np.errstate(over="ignore")
def relative_variances(variances: dict[str, Array]) -> dict[str, float]:
    """The paper's table row: each estimator's variance, summed over the policies, divided by on-policy MC's."""
    if "on_policy" not in variances:
        raise ValueError(f"variances has {sorted(variances)}, expected on_policy among them to compare with")
    on_policy = variances["on_policy"].sum()
    if on_policy == 0:
        raise ValueError("on-policy MC has variance 0 for every policy: one episode each is exact, nothing to compare")
    return {name: float(variance.sum() / on_policy) for name, variance in variances.items()}
