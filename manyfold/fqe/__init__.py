"""Fitted evaluation: one engine, and q and q_hat as named problems of it."""

from manyfold.fqe.engine import PAPER, Bounded, Config, Diverged, Fit, Reward, Weights, fit
from manyfold.fqe.nets import Check, ValueNets
from manyfold.fqe.problems import Problem, moment_reward, policy_weights, q_hat_problem, q_problem

__all__ = [
    "PAPER",
    "Bounded",
    "Check",
    "Config",
    "Diverged",
    "Fit",
    "Problem",
    "Reward",
    "ValueNets",
    "Weights",
    "fit",
    "moment_reward",
    "policy_weights",
    "q_hat_problem",
    "q_problem",
]
