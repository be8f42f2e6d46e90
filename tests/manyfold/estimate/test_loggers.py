"""Logged episodes, step by step against single rows computed by hand; tables and networks log the same."""

import numpy as np
import pytest
import torch
from scipy.stats import norm

from manyfold.data.episodes import Padded
from manyfold.design.behavior import FLOOR, Behavior
from manyfold.envs import BinnedMujoco, Environment, Gridworld, GymnasiumEnvironment
from manyfold.estimate import loggers as logging
from manyfold.estimate import runs
from manyfold.estimate.loggers import FittedLogging, TabularLogging, logging_of
from manyfold.estimate.methods import LOGGERS, METHODS, RETURNS
from manyfold.fqe.nets import Shape, ValueNets, size
from manyfold.policies.mlp import MlpPolicySet, Spec
from manyfold.rollout import rollout
from manyfold.streams import stream
from tests.networks import mlp_policies, value_nets, value_row

K, HIDDEN, BINS = 3, 8, 10
D_S, D_A = {"hopper": 11, "inverted-pendulum": 4}, {"hopper": 3, "inverted-pendulum": 1}
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
    return MlpPolicySet(tensors, Spec(env, "binned_gaussian", 100, BINS, names, 0, d, LOW[env], -LOW[env]))


def values(env, seed, scale, mean):
    g, width = torch.Generator().manual_seed(seed), D_S[env] + (0 if mean else D_A[env] - 1)
    shape = Shape(100, BINS, K, HIDDEN, 0, width)
    centre, spread = torch.randn(width, generator=g), 0.5 + torch.rand(width, generator=g)
    return ValueNets(shape, torch.randn(size(shape), generator=g), centre, spread, scale * (1 + torch.arange(K)))


def make(env, spread=0.1, alpha=0.0, mean=False):
    nets = (values(env, seed, scale, mean) for seed, scale in ((1, 5.0), (2, 40.0)))
    companion = policies(env, 1, 3, 0.1).companion(mean=mean)
    return FittedLogging(
        BinnedMujoco(env, companion, appended=not mean), Behavior(policies(env, K, 0, spread), *nets, alpha)
    )


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


@pytest.mark.parametrize(
    ("env", "alpha", "mean"), [("hopper", 0.0, False), ("hopper", 0.0, True), ("inverted-pendulum", 0.2, False)]
)
@pytest.mark.parametrize("loggers", LOGGERS)
def test_every_return_is_the_literal_one(env, alpha, mean, loggers, monkeypatch):
    """More episodes than slots, so that they run out of step; every number against single rows.

    Probabilities are those of the evaluated dimension alone, whether the companion samples or acts by its mean.
    """
    monkeypatch.setattr(Environment, "slots", 4)
    robot, episodes = make(env, alpha=alpha, mean=mean), 9
    many = 1 if loggers == "mu" else K
    (rows,) = rollout(robot.env, robot.choose(loggers), np.arange(episodes) % many, stream("test"), episodes)
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
        taken, expected = logged.baseline()
        np.testing.assert_allclose(taken[:, n, t], q[:, a], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(expected[:, n, t], (pi * q).sum(-1), rtol=1e-3, atol=1e-3)
    literal = literal_returns(robot, rows, loggers)
    for name, expected in literal.items():
        np.testing.assert_allclose(RETURNS[name](logged), expected, rtol=2e-3, atol=1e-2)
    columns = RETURNS["pooled"](logged)
    np.testing.assert_allclose(columns[1:3].sum(0), literal["balanced"], rtol=2e-3, atol=1e-2)
    np.testing.assert_allclose(columns[1:4].sum(0), literal["balanced_baseline"], rtol=2e-3, atol=1e-2)


@pytest.mark.parametrize("loggers", LOGGERS)
def test_blocks_change_no_return(loggers, monkeypatch):
    """Three blocks with the same number of each logger, or one: the balance heuristic sees the same shares."""
    robot = make("inverted-pendulum")
    (whole,) = robot.log(loggers, 24, stream("test"))
    monkeypatch.setattr(logging, "BLOCK", 10)
    parts = list(robot.log(loggers, 24, stream("test")))
    assert len(parts) == 3
    assert all(len(set(p.counts)) == 1 for p in parts)
    joined = runs.returns(parts, loggers)
    for key, x in runs.returns([whole], loggers).items():
        np.testing.assert_allclose(joined[key], x, rtol=1e-5 if "pooled" in key else 1e-12, atol=1e-9)  # float32 q
    lazy = np.concatenate([RETURNS["baseline"](p) for p in parts], -1)
    np.testing.assert_allclose(lazy, RETURNS["baseline"](whole), rtol=1e-5)  # float32 nets


def test_steps_behind_an_end_contribute_nothing():
    (logged,) = make("inverted-pendulum").log("targets", 12, stream("test"))
    behind = np.arange(logged.rewards.shape[1]) >= logged.lengths[:, None]
    assert behind.any()
    assert (logged.lengths == (~behind).sum(1)).all()
    b, v = logged.baseline()
    garbage = Padded(
        *(np.where(behind, 0.7, x) for x in (logged.rewards, logged.target_probs, logged.own_probs)),
        lambda: np.where(behind, 0.7, logged.logger_probs()),
        lambda: (np.where(behind, 7.0, b), np.where(behind, -7.0, v)),
        logged.counts,
        logged.lengths,
    )
    for returns in RETURNS.values():
        np.testing.assert_array_equal(returns(garbage), returns(logged))


def test_the_same_name_gives_the_same_episodes_and_another_gives_others():
    robot = make("hopper")
    first, again, other = (next(iter(robot.log("mu", 5, stream("test", i)))) for i in (0, 0, 1))
    np.testing.assert_array_equal(RETURNS["pdis"](first), RETURNS["pdis"](again))
    assert not np.array_equal(RETURNS["pdis"](first), RETURNS["pdis"](other))


def test_every_estimator_is_unbiased():
    """On short episodes with q and q_hat that know nothing: against plain Monte Carlo of other episodes."""
    robot, n = make("inverted-pendulum", spread=0.06), 6000
    truth = [RETURNS["pdis"](x) for x in robot.log("targets", n, stream("truth"))]
    means, error = runs.own_estimates(np.concatenate(truth, -1), np.array([n]))
    found: runs.Values = {}
    for loggers in LOGGERS:
        found |= runs.returns(robot.log(loggers, n, stream("test")), loggers)
    estimates, variances = runs.estimates(found, np.array([n]))
    pooled, pooled_error = runs.pooled_truth(robot.log("targets", n, stream("test")))
    assert (np.abs(pooled - means[0]) < 4 * np.sqrt(pooled_error**2 + error / n)).all()
    assert np.ptp(means) > 5 * np.sqrt(error.max() / n)  # the targets differ by more than would be forgiven
    for i, name in enumerate(METHODS):
        off = np.abs(estimates[i, 0] - means[0]) / np.sqrt((variances[i] + error) / n)
        assert off.max() < 4, name


# --- tables and networks ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grid():
    """A tiny Gridworld with targets and fits that are networks of indices: both kinds of logging can run it."""
    policies = mlp_policies(0, k=K, horizon=3, n_actions=4, n_states=9, scale=0.5, spread=0.15)
    behavior = Behavior(policies, value_nets(policies, 1), value_nets(policies, 2, scale=4.0), 0.1)
    return Gridworld.draw(3, 0), behavior


def test_tables_are_taken_where_states_can_be_counted_and_all_episodes_run_at_once(grid):
    env, behavior = grid
    found = logging_of(env, behavior)
    assert isinstance(found, TabularLogging)
    fitted, mu, odi = behavior.tables()
    for name, table in (("targets", fitted.policies), ("mu", mu), ("odi", odi), ("b", fitted.q)):
        np.testing.assert_array_equal(getattr(found, name), table)
    policies = mlp_policies(0, k=K, horizon=12, n_actions=4, n_states=16)
    lake = GymnasiumEnvironment("FrozenLake-v1", horizon=12)  # counted, but not all at once
    nets = value_nets(policies, 1)
    assert isinstance(logging_of(lake, Behavior(policies, nets, nets)), FittedLogging)


@pytest.mark.parametrize("loggers", LOGGERS)
def test_tables_and_networks_log_the_same_episodes_and_say_the_same_of_them(grid, loggers):
    """From the same generator, number by number: only the rounding of float32 networks lies between."""
    env, behavior = grid
    (table,) = logging_of(env, behavior).log(loggers, 150, stream("test"))
    (nets,) = FittedLogging(env, behavior).log(loggers, 150, stream("test"))
    np.testing.assert_array_equal(nets.rewards, table.rewards)
    np.testing.assert_array_equal(nets.counts, table.counts)
    assert (nets.lengths == 3).all()
    assert table.lengths is None
    for name in ("target_probs", "own_probs"):
        np.testing.assert_allclose(getattr(nets, name), getattr(table, name), rtol=1e-5)
    np.testing.assert_allclose(nets.logger_probs(), table.logger_probs(), rtol=1e-5)
    for one, other in zip(nets.baseline(), table.baseline(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    for returns in RETURNS.values():
        np.testing.assert_allclose(returns(nets), returns(table), rtol=1e-4, atol=1e-4)


def test_estimates_of_tables_and_networks_are_equal(grid):
    env, behavior = grid
    points = np.array([K, 30, 150])
    both = []
    for found in (logging_of(env, behavior), FittedLogging(env, behavior)):
        both.append(runs.run(lambda loggers, found=found: next(iter(found.log(loggers, 150, stream("test")))), points))
    np.testing.assert_allclose(both[0].estimates, both[1].estimates, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(both[0].variances, both[1].variances, rtol=1e-3)


@pytest.mark.parametrize("loggers", LOGGERS)
def test_every_logger_runs_its_share_in_turns(grid, loggers):
    """Episode i is of logger i mod J, whatever the block it is handed on in: its own probabilities say so."""
    env, behavior = grid
    many = 1 if loggers == "mu" else K
    blocks = list(FittedLogging(env, behavior).log(loggers, 450, stream("test")))
    assert len(blocks) == 3
    assert [len(block.rewards) for block in blocks] == ([200, 200, 50] if loggers == "mu" else [198, 198, 54])
    for block in blocks:
        assert block.counts.tolist() == [len(block.rewards) // many] * many
        every = block.logger_probs()
        own = np.stack([every[i % many, i] for i in range(len(block.rewards))])
        np.testing.assert_allclose(block.own_probs, own, rtol=1e-5)
