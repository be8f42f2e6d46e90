"""Linear q of vectors, against values by hand and by exact dynamic programming."""

import itertools

import numpy as np
import pytest

import manyfold as mf
from manyfold import exact
from manyfold.estimate.baselines import Scale
from manyfold.fqe import linear as linear_q
from manyfold.fqe.linear import LinearValues, Tuples, fit_linear, taken
from tests.manyfold.estimate.test_vectors import GAINS, linear, value

T = 2  # so that features that are linear in t can be any function of it


def quadratic_rows(n, rng):
    """x' = u, reward -(x^2 + x u / 2 + u^2 / 10); any t, x and u, not those of a policy."""
    t, x, u = rng.integers(0, T, n), *rng.uniform(-1.5, 1.5, (2, n, 1))
    return Tuples(t, x, u, -(x**2 + x * u / 2 + u**2 / 10)[:, 0], u, np.zeros(n, dtype=np.bool_))


def test_q_of_a_linear_quadratic_problem_by_hand():
    rng, std, gains = np.random.default_rng(0), 0.5, np.array([0.2, 0.9])
    head = mf.Gaussian((-1e3,), (1e3,))  # never clipped
    functions = [lambda obs, t, g=g: np.column_stack([-g * obs, np.full(len(obs), np.log(std))]) for g in gains]
    policies = mf.CallablePolicySet(functions, head, 1, T)
    q = fit_linear(quadratic_rows(3000, rng), policies, head, T)

    def last(second):  # E[r] where u = -g x + std e and E[x^2] is given
        g = gains[:, None]
        return -(1 - g / 2 + g**2 / 10) * second - std**2 / 10

    rows = quadratic_rows(200, rng)
    np.testing.assert_allclose(
        taken(q, rows, head), rows.reward + (rows.t == 0) * last(rows.next_state[:, 0] ** 2), atol=1e-4
    )
    second = rows.state[:, 0] ** 2
    v = last(second) + (rows.t == 0) * last(gains[:, None] ** 2 * second + std**2)
    w, f = q.weights(rows.state, rows.t), head.expected(policies.parameters(rows.state, rows.t))
    np.testing.assert_allclose(w[..., 0] + (w[..., 1:] * f).sum(-1), v, atol=1e-4)


def choices():
    """A random MDP of 3 states and two binary choices that add up: rewards and next states, and all its tuples."""
    rng = np.random.default_rng(1)
    rewards = rng.normal(size=(3, 2, 2))  # of state, choice, what was chosen
    targets = rng.integers(0, 3, (3, 2, 2, 2))  # each choice leads to one of two states, one of four after all
    actions = list(itertools.product(range(2), repeat=2))
    r, p, rows = np.zeros((3, 4)), np.zeros((3, 4, 3)), []
    for s, a in itertools.product(range(3), range(4)):
        first, second = actions[a]
        r[s, a] = rewards[s, 0, first] + rewards[s, 1, second]
        for after in [*targets[s, 0, first], *targets[s, 1, second]]:
            p[s, a, after] += 0.25
            rows += [(t, s, actions[a], r[s, a], after) for t in range(T)]
    t, s, a, reward, after = (np.array(x) for x in zip(*rows, strict=True))
    eye = np.eye(3)
    return mf.FiniteMDP(p, r, np.full(3, 1 / 3), T), Tuples(t, eye[s], a, reward, eye[after], np.zeros(len(t), bool))


@pytest.mark.parametrize(("residual", "error"), [(0.0, 1e-4), (linear_q.RESIDUAL, 0.01)])
def test_q_of_a_finite_mdp_with_two_choices_at_once(monkeypatch, residual, error):
    """Exact as a fixed point; what holds it against running away costs little where next states are random."""
    monkeypatch.setattr(linear_q, "RESIDUAL", residual)
    mdp, rows = choices()
    logits = np.random.default_rng(2).normal(size=(3, 3, 4))  # [K, S, P]
    head = mf.MultiCategorical((2, 2))
    policies = mf.CallablePolicySet([lambda obs, t, x=x: obs @ x for x in logits], head, 3, T)
    q = fit_linear(rows, policies, head, T)

    each = np.exp(logits).reshape(3, 3, 2, 2)
    each /= each.sum(-1, keepdims=True)
    table = np.einsum("ksa,ksb->ksab", each[:, :, 0], each[:, :, 1]).reshape(3, 1, 3, 4)
    truth = exact.action_values(mdp, np.broadcast_to(table, (3, T, 3, 4)))  # [K, T, S, A]
    index, state = rows.action @ [2, 1], rows.state.argmax(-1)
    np.testing.assert_allclose(taken(q, rows, head), truth[:, rows.t, state, index], atol=error)


def test_nothing_follows_a_terminal_step_or_the_last_one():
    rows = quadratic_rows(2000, np.random.default_rng(0))
    head = mf.Gaussian((-2.0,), (2.0,))
    policies = mf.CallablePolicySet([lambda obs, t: np.zeros((len(obs), 2))], head, 1, T)
    ended = rows._replace(terminated=np.ones(2000, dtype=np.bool_))
    np.testing.assert_allclose(taken(fit_linear(ended, policies, head, T), rows, head)[0], rows.reward, atol=1e-3)
    one = rows._replace(t=np.zeros(2000, dtype=np.int64))
    np.testing.assert_allclose(taken(fit_linear(one, policies, head, 1), one, head)[0], rows.reward, atol=1e-3)


def test_values_are_held_against_running_away(monkeypatch):
    """Few tuples of an unstable system and loggers far from the policies."""
    head, horizon = mf.Gaussian((-1.0,), (1.0,)), 100
    functions = [lambda obs, t, g=g: np.column_stack([g * obs.sum(1), np.full(len(obs), -1.0)]) for g in (0, 1, 2, -2)]
    policies = mf.CallablePolicySet(functions, head, 2, horizon)

    def unstable(n, rng):
        x, u = rng.uniform(-1, 1, (n, 2)), rng.normal(size=(n, 1))
        after = np.clip(1.1 * x + 0.3 * u * np.array([1, -1]) + 0.1 * rng.normal(size=(n, 2)), -2, 2)
        return Tuples(rng.integers(0, horizon, n), x, u, x[:, 0], after, np.zeros(n, dtype=np.bool_))

    def largest(seed):
        rng = np.random.default_rng(seed)
        rows, others = unstable(500, rng), unstable(1000, rng)
        return np.abs(taken(fit_linear(rows, policies, head, horizon), others, head)).max(1).mean()

    held = np.mean([largest(seed) for seed in range(3)])
    monkeypatch.setattr(linear_q, "RESIDUAL", 0.0)
    assert held < 0.85 * np.mean([largest(seed) for seed in range(3)])


def test_a_useless_q_of_vectors_leaves_the_estimate_unbiased():
    env, policies = linear()
    b, rng = policies.head.n_features, np.random.default_rng(0)
    none = LinearValues(rng.normal(size=(4, 70)) * 10, rng.normal(size=(4, b, 5)), Scale((0.0,), (1.0,)), 10)
    found = [mf.pool(mf.collect(env, policies, 80, rng), none, policies) for _ in range(60)]
    means = np.stack([one.mean for one in found])
    z = (means.mean(0) - [value(g) for g in GAINS]) / (means.std(0, ddof=1) / np.sqrt(len(means)))
    assert np.abs(z).max() < 3.5


def test_q_of_the_wrong_kind_is_refused():
    env, policies = linear()
    episodes = mf.collect(env, policies, 40, np.random.default_rng(0))

    class Counted:
        def predict(self, states, t):
            return np.zeros((4, len(t), 2))

    class Narrow:
        def weights(self, states, t):
            return np.zeros((4, len(t), 2))

    with pytest.raises(ValueError, match=r"expected weights\(states, t\)"):
        mf.pool(episodes, Counted(), policies)
    with pytest.raises(ValueError, match=r"weights of q has shape \[4, 400, 2\], expected \[4, 400, 5\]"):
        mf.pool(episodes, Narrow(), policies)
