"""A robot's logged episodes, step by step against single rows computed by hand."""

import numpy as np
import pytest
import torch
from scipy.stats import norm

from manyfold import evaluation, slots
from manyfold.behavior import FLOOR, MOST, Behavior, plan_weights
from manyfold.evaluation import ESTIMATORS, LOGGERS
from manyfold.networks import NetworkPolicySet, Spec
from manyfold.robots import Robot
from manyfold.streams import stream
from manyfold.values import Shape, ValueNets, size

K, HIDDEN, BINS = 3, 8, 10
D_S, D_A = {"hopper": 11, "inverted-pendulum": 4}, {"hopper": 3, "inverted-pendulum": 1}
RETURNS = (evaluation.pdis, evaluation.baseline, evaluation.balanced, evaluation.balanced_baseline)
LOW = {"hopper": -1.0, "inverted-pendulum": -3.0}


def policies(env, many, seed, spread):
    """Alike, `spread` apart."""
    g, d, out = torch.Generator().manual_seed(seed), D_S[env], D_A[env]
    shapes = {"w1": (d, HIDDEN), "b1": (1, HIDDEN), "w2": (HIDDEN, HIDDEN), "b2": (1, HIDDEN), "w3": (HIDDEN, out)}
    shapes |= {"b3": (1, out), "log_std": (1, out)}
    tensors = {
        name: 0.4 * torch.randn(1, *shape, generator=g) + spread * torch.randn(many, *shape, generator=g)
        for name, shape in shapes.items()
    }
    tensors |= {"obs_mean": 0.1 * torch.randn(many, d, generator=g), "obs_var": 0.5 + torch.rand(many, d, generator=g)}
    names = tuple(f"policy {i}" for i in range(many))
    return NetworkPolicySet(tensors, Spec(env, "binned_gaussian", 100, BINS, 0, d, LOW[env], -LOW[env], names))


def values(env, seed, scale):
    g, width = torch.Generator().manual_seed(seed), D_S[env] + D_A[env] - 1
    shape = Shape(100, BINS, K, HIDDEN, 0, width)
    centre, spread = torch.randn(width, generator=g), 0.5 + torch.rand(width, generator=g)
    return ValueNets(shape, torch.randn(size(shape), generator=g), centre, spread, scale * (1 + torch.arange(K)))


def make(env, spread=0.1, alpha=0.0):
    behavior = Behavior(policies(env, K, 0, spread), values(env, 1, 5.0), values(env, 2, 40.0), alpha)
    return Robot(env, policies(env, 1, 3, 0.1), behavior)


# --- one row at a time, from the definitions ---------------------------------------------------------------------


def pi_row(robot, k, state):
    """pi_k(a|s): a tanh network on the normalised observation, and the Gaussian's mass in each bin."""
    p = {name: x[k].double().numpy() for name, x in robot.behavior.policies.tensors.items()}
    spec = robot.behavior.policies.spec
    z = np.clip((state[: spec.n_features] - p["obs_mean"]) / np.sqrt(p["obs_var"] + 1e-8), -10, 10)
    h = np.tanh(np.tanh(z @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"])
    mean, std = (h @ p["w3"] + p["b3"])[0, 0], np.exp(p["log_std"][0, 0])
    cdf = norm.cdf(np.linspace(spec.low, spec.high, BINS + 1), mean, std)
    cdf[0], cdf[-1] = 0, 1
    return np.diff(cdf)


def value_row(nets, k, state, t):
    """f_k(t, s, .): one hidden layer of ReLUs, policy k's columns."""
    p, columns = nets.parameters, slice(k * HIDDEN, (k + 1) * HIDDEN)
    z = np.clip((state - nets.centre.double().numpy()) / nets.spread.double().numpy(), -10, 10)
    h = np.maximum(z @ p["w1"][:, columns].double().numpy() + p["w1_time"][t, columns].double().numpy(), 0)
    out = p["w2"][:, columns].double().numpy() @ h + p["b2"][k, 0].double().numpy()
    return float(nets.scale[k]) * out


def at(robot, state, t):
    """pi, q, mu and ODI's policies at one state, `[K, A]` or `[A]`."""
    behavior = robot.behavior
    pi = np.array([pi_row(robot, k, state) for k in range(K)])
    q = np.array([value_row(behavior.q, k, state, t) for k in range(K)])
    q_hat = np.array([value_row(behavior.q_hat, k, state, t) for k in range(K)])
    for k in range(K):
        for a in range(BINS):
            q_hat[k, a] = max(q_hat[k, a], q[k, a] ** 2, FLOOR * float(behavior.q_hat.scale[k]))
    mu = np.sqrt(sum(pi[k] ** 2 * q_hat[k] for k in range(K)))
    mu = (1 - behavior.alpha) * mu / mu.sum() + behavior.alpha * pi.mean(0)
    odi = []
    for k in range(K):
        alone = pi[k] * np.sqrt(q_hat[k])
        odi.append((1 - behavior.alpha) * alone / alone.sum() + behavior.alpha * pi[k])
    return pi, q, mu, np.array(odi)


def literal_returns(robot, rows, loggers):
    """The four returns of every episode and policy by their recursions: name -> `[K, N]`."""
    episodes = rows.episode.max() + 1
    out = {name: np.zeros((K, episodes)) for name in ("pdis", "baseline", "balanced", "balanced_baseline")}
    for n in range(episodes):
        mine = [i for i in range(len(rows.t)) if rows.episode[i] == n]
        found = [at(robot, rows.state[i], rows.t[i]) for i in mine]
        every = {"mu": lambda x: x[2][None], "targets": lambda x: x[0], "odi": lambda x: x[3]}[loggers]
        own = [every(x)[n % len(every(x))] for x in found]  # loggers in turns
        for k in range(K):
            pdis = baseline = 0.0
            for i, x, mu in reversed(list(zip(mine, found, own, strict=True))):
                a, r = rows.action[i], rows.reward[i]
                rho = x[0][k][a] / mu[a]
                pdis = rho * (r + pdis)
                baseline = x[0][k] @ x[1][k] + rho * (r + baseline - x[1][k][a])
            balanced, both, up, down = 0.0, 0.0, 1.0, np.ones(len(every(found[0])))
            for i, x in zip(mine, found, strict=True):
                a = rows.action[i]
                both += up / down.mean() * (x[0][k] @ x[1][k])
                up, down = up * x[0][k][a], down * every(x)[:, a]
                balanced += up / down.mean() * rows.reward[i]
                both += up / down.mean() * (rows.reward[i] - x[1][k][a])
            for name, value in zip(out, (pdis, baseline, balanced, both), strict=True):
                out[name][k, n] = value
    return out


@pytest.mark.parametrize(("env", "alpha"), [("hopper", 0.0), ("inverted-pendulum", 0.2)])
@pytest.mark.parametrize("loggers", LOGGERS)
def test_every_return_is_the_literal_one(env, alpha, loggers, monkeypatch):
    """More episodes than slots, so that they run out of step; every number against single rows."""
    monkeypatch.setattr(slots, "SLOTS", 4)
    robot, episodes = make(env, alpha=alpha), 9
    rng = stream("test")
    world = slots.fill(env, robot.companion, episodes, rng)
    (rows,) = slots.blocks(slots.play(world, episodes, robot.chooser(loggers), rng), episodes, episodes)
    (logged,) = robot.log(loggers, episodes, stream("test"))  # the same episodes
    assert len(set(logged.lengths)) > 2
    for i in range(len(rows.t)):
        pi, q, mu, odi = at(robot, rows.state[i], rows.t[i])
        n, t, a = rows.episode[i], rows.t[i], rows.action[i]
        own = {"mu": mu, "targets": pi[n % K], "odi": odi[n % K]}[loggers]
        assert logged.rewards[n, t] == rows.reward[i]
        np.testing.assert_allclose(logged.own_probs[n, t], own[a], rtol=1e-4)
        np.testing.assert_allclose(logged.target_probs[:, n, t], pi[:, a], rtol=1e-4)
        every = {"mu": mu[None], "targets": pi, "odi": odi}[loggers]
        np.testing.assert_allclose(logged.logger_probs()[:, n, t], every[:, a], rtol=1e-4)
        taken, expected = logged.b()
        np.testing.assert_allclose(taken[:, n, t], q[:, a], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(expected[:, n, t], (pi * q).sum(-1), rtol=1e-3, atol=1e-3)
    literal = literal_returns(robot, rows, loggers)
    for returns in RETURNS:
        np.testing.assert_allclose(returns(logged), literal[returns.__name__], rtol=2e-3, atol=1e-2)


@pytest.mark.parametrize("loggers", LOGGERS)
def test_blocks_change_no_return(loggers, monkeypatch):
    """Three blocks with the same number of each logger, or one: the balance heuristic sees the same shares."""
    robot = make("inverted-pendulum")
    (whole,) = robot.log(loggers, 24, stream("test"))
    monkeypatch.setattr(slots, "BLOCK", 10)
    parts = list(robot.log(loggers, 24, stream("test")))
    assert len(parts) == 3
    assert all(len(set(p.counts)) == 1 for p in parts)
    for key, x in evaluation.returns(whole, loggers).items():
        joined = np.concatenate([evaluation.returns(p, loggers)[key] for p in parts], -1)
        np.testing.assert_allclose(joined, x, rtol=1e-12)
    lazy = np.concatenate([evaluation.baseline(p) for p in parts], -1)
    np.testing.assert_allclose(lazy, evaluation.baseline(whole), rtol=1e-5)  # float32 nets


def test_steps_behind_an_end_contribute_nothing():
    (logged,) = make("inverted-pendulum").log("targets", 12, stream("test"))
    behind = np.arange(logged.rewards.shape[1]) >= logged.lengths[:, None]
    assert behind.any()
    assert (logged.lengths == (~behind).sum(1)).all()
    b, v = logged.b()
    garbage = evaluation.Logged(
        *(np.where(behind, 0.7, x) for x in (logged.rewards, logged.target_probs, logged.own_probs)),
        lambda: np.where(behind, 0.7, logged.logger_probs()),
        lambda: (np.where(behind, 7.0, b), np.where(behind, -7.0, v)),
        logged.counts,
        logged.lengths,
    )
    for returns in RETURNS:
        np.testing.assert_array_equal(returns(garbage), returns(logged))


def test_the_same_name_gives_the_same_episodes_and_another_gives_others():
    robot = make("hopper")
    first, again, other = (next(iter(robot.log("mu", 5, stream("test", i)))) for i in (0, 0, 1))
    np.testing.assert_array_equal(evaluation.pdis(first), evaluation.pdis(again))
    assert not np.array_equal(evaluation.pdis(first), evaluation.pdis(other))


def test_every_estimator_is_unbiased():
    """On short episodes with q and q_hat that know nothing: against plain Monte Carlo of other episodes."""
    robot, n = make("inverted-pendulum", spread=0.06), 6000
    truth = [evaluation.pdis(x) for x in robot.log("targets", n, stream("truth"))]
    means, error = evaluation.own_estimates(np.concatenate(truth, -1), np.array([n]))
    found: evaluation.Values = {}
    for loggers in LOGGERS:
        parts = [evaluation.returns(x, loggers) for x in robot.log(loggers, n, stream("test"))]
        found |= {key: np.concatenate([p[key] for p in parts], -1) for key in parts[0]}
    estimates, variances = evaluation.estimates(found, np.array([n]))
    pooled = [evaluation.balanced_baseline(x) for x in robot.log("targets", n, stream("test"))]
    both, both_variances = evaluation.pooled_estimates(np.concatenate(pooled, -1), np.array([n]), K)
    assert (np.abs(both[0] - means[0]) < 4 * np.sqrt((both_variances + error) / n)).all()
    assert np.ptp(means) > 5 * np.sqrt(error.max() / n)  # the targets differ by more than would be forgiven
    for i, name in enumerate(ESTIMATORS):
        off = np.abs(estimates[i, 0] - means[0]) / np.sqrt((variances[i] + error) / n)
        assert off.max() < 4, name


def test_the_second_moment_under_mu_is_kept_between_q_squared_and_a_multiple_of_q_hat():
    behavior = make("hopper").behavior
    states, t = np.random.default_rng(0).standard_normal((5, 13)).astype(np.float32), np.arange(5)
    weights, low, high = plan_weights(behavior)(states, t)
    fitted = behavior.fitted(states, t)
    np.testing.assert_allclose(weights, fitted.policies**2 / behavior.design(fitted), rtol=1e-9)
    for i in range(5):
        for k in range(K):
            q, q_hat = (value_row(nets, k, states[i], t[i]) for nets in (behavior.q, behavior.q_hat))
            least = np.maximum(np.maximum(q_hat, q**2), FLOOR * float(behavior.q_hat.scale[k]))
            np.testing.assert_allclose(low[k, i], q**2, rtol=1e-3, atol=1e-2)
            np.testing.assert_allclose(high[k, i], MOST * least, rtol=1e-3, atol=1e-2)
