"""Stable-Baselines3's PPO, or SBX's, the same in JAX, with the hyperparameters of `manyfold.train`."""

import importlib
from typing import Any

import manyfold  # noqa: F401 - registers the Gridworld
from manyfold.envs import BinnedMujoco, Environment, Gridworld
from manyfold.envs.binned_mujoco import ROBOTS
from manyfold.train import targets


def make_environment(name: str) -> Environment:
    """Gridworld 1,000, or a robot by its name."""
    return Gridworld.draw(10, 0) if name == "gridworld-1000" else BinnedMujoco(name)


def make_model(name: str, seed: int, total_steps: int, library: str = "stable_baselines3") -> Any:
    """A model that is to be trained for `total_steps`: its learning rate falls as ours, over our own total.

    SBX does not clip the value function's loss.
    """
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    environment = make_environment(name)
    config = targets.config(environment)
    if isinstance(environment, Gridworld):
        options: dict[str, Any] = {"m": environment.m, "reward_seed": seed}
        envs = make_vec_env("manyfold/Gridworld-v0", config.envs, seed, env_kwargs=options)
    else:
        single = make_vec_env(ROBOTS[name].id, config.envs, seed, env_kwargs=ROBOTS[name].gymnasium)
        envs = VecNormalize(single, gamma=config.gamma)
    more: dict[str, Any] = {} if library == "sbx" else {"clip_range_vf": config.clip, "stats_window_size": 20}
    return importlib.import_module(library).PPO(
        "MlpPolicy",
        envs,
        learning_rate=lambda left: config.learning_rate * (1 - (1 - left) * total_steps / config.total_steps),
        n_steps=config.steps,
        batch_size=config.batch // config.minibatches,
        n_epochs=config.epochs,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        clip_range=config.clip,
        ent_coef=config.entropy,
        vf_coef=config.value,
        max_grad_norm=config.max_grad_norm,
        seed=seed,
        device="cpu",
        **more,
    )
