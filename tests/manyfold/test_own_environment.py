"""A user's own environment and policies through the library alone: logged data, q, q_hat, mu, episodes, estimates."""

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

import manyfold as mf
from manyfold.estimate.loggers import logging_of
from manyfold.estimate.runs import estimates, returns
from manyfold.rollout import Choice
from tests.networks import mlp_policies

K, T, HIDDEN = 4, 20, 8


def mlps(width, actions, seed):
    """K random softmax policies, near to one another."""
    options = {"horizon": T, "n_actions": actions, "n_features": width, "hidden": (HIDDEN, HIDDEN)}
    return mlp_policies(seed, k=K, scale=0.5, spread=0.1, **options)


def modules(width, actions, seed):
    """The same as torch modules of different widths, two by two."""
    generator = torch.Generator().manual_seed(seed)
    networks = []
    for hidden in (6, 6, 9, 9):
        networks.append(nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, actions)))
        for x in networks[-1].parameters():
            x.data = 0.3 * torch.randn(x.shape, generator=generator)
    return mf.ModulePolicySet(networks, actions, width, T)


def callables(width, actions, seed):
    weights = 0.5 * np.random.default_rng(seed).standard_normal((width, actions))

    def policy(k):
        def probs(obs, t):
            z = np.exp(obs @ weights + 0.1 * k * np.cos(t)[:, None] * np.arange(actions))
            return z / z.sum(-1, keepdims=True)

        return probs

    return mf.CallablePolicySet([policy(k) for k in range(K)], actions, width, T)


def literal_returns(env, policies, k, episodes, rng):
    """Policy k's returns on the real environment, one episode and one step at a time."""
    out = []
    for _ in range(episodes):
        state, _ = env.reset(seed=int(rng.integers(2**31)))
        total = 0.0
        for t in range(T):
            probs = policies.probs(state[None].astype(np.float64), t)[k, 0]
            state, reward, terminated, _, _ = env.step(int(rng.choice(len(probs), p=probs)))
            total += reward
            if terminated:
                break
        out.append(total)
    return np.array(out)


@pytest.mark.parametrize(
    ("name", "make", "seed"), [("CartPole-v1", mlps, 0), ("MountainCar-v0", modules, 1), ("Acrobot-v1", callables, 2)]
)
def test_every_step_works_and_the_estimates_are_right(name, make, seed, tmp_path):
    env, rng = mf.GymnasiumEnvironment(name, horizon=T), np.random.default_rng(seed)
    targets = make(env.width, env.n_actions, seed)

    def noisy(obs, t, loggers):
        return Choice(0.5 * targets.probs_of(loggers, obs, t) + 0.5 / env.n_actions)

    # logged by noisy targets, written as Parquet
    about = mf.About(name, T, env.n_actions, env.width, 0)
    with mf.Writer(tmp_path / "transitions.parquet", about) as writer:
        for rows in mf.rollout.rollout(env, noisy, np.arange(300) % K, rng):
            writer.write(vars(rows))
    data = mf.Transitions(tmp_path)
    # q, q_hat and mu
    config = mf.FitConfig(hidden=16, learning_rate=0.01, batch=256, updates_per_step=20, average=0.95)
    q = mf.fit(data, *mf.q_problem(targets), np.random.default_rng(0), config).nets
    q_hat = mf.fit(data, *mf.q_hat_problem(targets, q), np.random.default_rng(1), config).nets
    behavior = mf.Behavior(targets, q, q_hat)
    # 400 episodes of every kind of logger estimate each target, within their errors of what it gives by itself
    logging, found = logging_of(env, behavior), {}
    for loggers in ("targets", "mu", "odi"):
        found |= returns(logging.log(loggers, 400, rng), loggers)
    means, variances = estimates(found, np.array([400]))
    truth, error = mf.pooled_truth(logging.log("targets", 400, rng))
    for k in range(K):
        alone = literal_returns(gymnasium.make(name), targets, k, 200, rng)
        own = alone.var(ddof=1) / 200
        assert abs(truth[k] - alone.mean()) < 4 * np.sqrt(error[k] ** 2 + own) + 1e-6
        for i, method in enumerate(mf.METHODS):
            off = abs(means[i, 0, k] - alone.mean())
            assert off < 4 * np.sqrt(variances[i, k] / 400 + own) + 1e-6, method
