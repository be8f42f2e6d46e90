"""Small random MDPs and policies for hypothesis, and the enumeration of all their trajectories."""

from itertools import product
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from manyfold.exact import FiniteMDP


class Case(NamedTuple):
    mdp: FiniteMDP
    policies: np.ndarray  # [K, T, S, A]
    rng: np.random.Generator


def distributions(rng, shape, kind="dense"):
    """Random rows of probabilities: all positive, some exactly 0, or deterministic."""
    p = rng.dirichlet(np.ones(shape[-1]), size=shape[:-1])
    if kind == "deterministic":
        return np.eye(shape[-1])[p.argmax(-1)]
    if kind == "zeros":
        p = np.where(rng.random(shape) < 0.4, 0.0, p)
        p[..., 0] += p.sum(-1) == 0
    return p / p.sum(-1, keepdims=True)


@st.composite
def cases(
    draw, max_states=3, max_actions=3, max_horizon=3, max_policies=3, policy_kinds=("dense", "zeros", "deterministic")
):
    """T = 1, K = 1, one state, zero probabilities, deterministic policies, zero and cancelling rewards included."""
    n_states, n_actions = draw(st.integers(1, max_states)), draw(st.integers(1, max_actions))
    horizon, n_policies = draw(st.integers(1, max_horizon)), draw(st.integers(1, max_policies))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rewards = {
        "normal": rng.standard_normal((n_states, n_actions)),
        "signs": rng.integers(-1, 2, (n_states, n_actions)),
        "zero": np.zeros((n_states, n_actions)),
        "shifted": rng.standard_normal((n_states, n_actions)) + 10,
    }[draw(st.sampled_from(["normal", "signs", "zero", "shifted"]))]
    transitions = distributions(
        rng, (n_states, n_actions, n_states), draw(st.sampled_from(["dense", "zeros", "deterministic"]))
    )
    initial = distributions(rng, (n_states,), draw(st.sampled_from(["dense", "deterministic"])))
    kinds = [draw(st.sampled_from(policy_kinds)) for _ in range(n_policies)]
    policies = np.stack([distributions(rng, (horizon, n_states, n_actions), kind) for kind in kinds])
    return Case(FiniteMDP(transitions, rewards, initial, horizon), policies, rng)


def trajectories(mdp, mu):
    """Every (probability, states, actions) that mu can produce, by brute force over all sequences."""
    p = mdp.transitions.toarray().reshape(mdp.n_states, mdp.n_actions, mdp.n_states)
    for states in product(range(mdp.n_states), repeat=mdp.horizon):
        for actions in product(range(mdp.n_actions), repeat=mdp.horizon):
            probability = mdp.initial[states[0]]
            for t in range(mdp.horizon):
                probability *= mu[t, states[t], actions[t]]
                if t + 1 < mdp.horizon:
                    probability *= p[states[t], actions[t], states[t + 1]]
            if probability > 0:
                yield probability, states, actions


def enumerated_moments(mdp, mu, value):
    """Mean and variance over all trajectories of mu of `value(states, actions)`, computed from its definition."""
    rows = [(probability, value(states, actions)) for probability, states, actions in trajectories(mdp, mu)]
    weight = np.array([row[0] for row in rows])
    x = np.array([row[1] for row in rows])
    assert abs(weight.sum() - 1) < 1e-9
    mean = weight @ x / weight.sum()
    return mean, weight @ (x - mean) ** 2


def recursive_return(mdp, pi, mu, b=None):
    """The return of one trajectory by its recursion, one step after the other: `value` for `enumerated_moments`."""

    def value(states, actions):
        g = 0.0
        for t in reversed(range(mdp.horizon)):
            s, a = states[t], actions[t]
            base = 0.0 if b is None else b[t, s, a]
            expected = 0.0 if b is None else sum(pi[t, s, i] * b[t, s, i] for i in range(mdp.n_actions))
            g = expected + pi[t, s, a] / mu[t, s, a] * (mdp.rewards[s, a] + g - base)
        return g

    return value
