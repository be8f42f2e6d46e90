"""Pooled evaluation over vectors, against a linear-quadratic problem whose values are known."""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import manyfold as mf
from manyfold.policies.heads import Gaussian, MultiCategorical

T, NOISE, STD = 10, 0.1, 0.5
FREE = (-1e6, 1e6)  # bounds that never clip


class Linear(gymnasium.Env):
    """x' = 0.9 x + u . (1, 0.5) + noise, reward -(x^2 + 0.1 |u|^2), x_0 normal."""

    observation_space, action_space = spaces.Box(-np.inf, np.inf, (1,)), spaces.Box(*FREE, (2,))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.np_random.normal()
        return np.array([self.x]), {}

    def step(self, u):
        reward = -(self.x**2 + 0.1 * float(u @ u))
        self.x = 0.9 * self.x + u[0] + 0.5 * u[1] + NOISE * self.np_random.normal()
        return np.array([self.x]), reward, False, False, {}


def policy(gain):
    log_std = np.log(STD)
    return lambda obs, t: np.column_stack([-gain * obs, 0.2 * gain * obs, np.full((len(obs), 2), log_std)])


def value(gain):
    """J by hand: u = gain (-1, 0.2) x + STD e, so x' = (0.9 - 0.9 gain) x + noise; E[x_t^2] follows step by step."""
    second, total = 1.0, 0.0
    for _ in range(T):
        total -= second + 0.1 * (gain**2 * (1 + 0.04) * second + 2 * STD**2)
        second = (0.9 - 0.9 * gain) ** 2 * second + STD**2 * (1 + 0.25) + NOISE**2
    return total


GAINS = (0.3, 0.4, 0.5, 0.6)


def linear(gains=GAINS):
    env = mf.GymnasiumEnvironment(Linear, T, "linear")
    head = Gaussian((FREE[0],) * 2, (FREE[1],) * 2)
    return env, mf.CallablePolicySet([policy(g) for g in gains], head, 1, T)


def test_values_of_a_linear_quadratic_problem():
    env, policies = linear()
    result = mf.evaluate(env, policies, episodes=1200, seed=1)
    z = (result.mean - [value(g) for g in GAINS]) / result.standard_error
    assert np.abs(z).max() < 3.5
    assert (result.variance < 0.6 * result.on_policy_variance).all()


def test_intervals_of_a_linear_quadratic_problem_hold():
    env, policies = linear((0.3, 0.6))
    truth, held, errors = np.array([value(0.3), value(0.6)]), [], []
    for seed in range(60):
        found = mf.evaluate(env, policies, episodes=80, seed=seed)
        one = found.sample.each()
        held.append(np.abs(one.estimate - truth) <= 2.0 * one.error)
        errors.append((found.mean - truth) / found.standard_error)
    assert np.mean(held) > 0.88  # 120 of 0.95; six standard deviations below is 0.83
    assert np.abs(np.mean(errors, 0)).max() < 0.6


def test_a_regression_on_the_action_helps():
    env, policies = linear()
    episodes = mf.collect(env, policies, 400, np.random.default_rng(0))
    with_actions, without = mf.pool(episodes), mf.pool(replace(episodes, features=None, expected=None))
    assert (with_actions.variance < without.variance).mean() >= 0.75


class Choices(gymnasium.Env):
    """One step; the reward is what two independent choices are worth."""

    observation_space, action_space = spaces.Box(0, 1, (1,)), spaces.MultiDiscrete([2, 3], start=[0, 1])

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1), {}

    def step(self, action):
        return np.zeros(1), float(action[0] * 2 + action[1] ** 2), True, False, {}


def test_several_choices_at_once():
    logits = [np.log([0.5, 0.5, 0.2, 0.3, 0.5]), np.log([0.9, 0.1, 0.6, 0.3, 0.1])]
    head = MultiCategorical((2, 3))
    functions = [lambda obs, t, x=x: np.tile(x, (len(obs), 1)) for x in logits]
    env = mf.GymnasiumEnvironment(Choices, 1, "choices")
    result = mf.evaluate(env, mf.CallablePolicySet(functions, head, 1), episodes=2000)
    truth = [2 * np.exp(x[1]) + np.exp(x[2:]) @ np.array([1, 4, 9]) for x in logits]
    assert np.abs((result.mean - truth) / result.standard_error).max() < 3.5
    assert (result.variance < 0.1 * result.on_policy_variance).all()  # all that varies is the action


def test_actions_of_one_policy_in_bounds():
    env = mf.GymnasiumEnvironment("Pendulum-v1", 20)
    policies = mf.CallablePolicySet([lambda obs, t: np.tile([5.0, 0.0], (len(obs), 1))], Gaussian((-2.0,), (2.0,)), 3)
    result = mf.evaluate(env, policies, episodes=10)
    assert np.isfinite(result.mean).all()


def test_policies_that_give_nan_are_named():
    env, _ = linear()
    head = Gaussian((FREE[0],) * 2, (FREE[1],) * 2)
    bad = mf.CallablePolicySet([policy(0.3), lambda obs, t: np.full((len(obs), 4), np.nan)], head, 1, names=("a", "b"))
    with pytest.raises(ValueError, match=r"b\[0, 0\] is nan, expected a finite number"):
        mf.evaluate(env, bad, episodes=20)
