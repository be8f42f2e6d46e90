"""Checkpoints of Stable-Baselines3, by the library itself."""

import warnings

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.wrappers import FlattenObservation
from stable_baselines3 import A2C, DDPG, DQN, PPO, SAC, TD3
from stable_baselines3.common.distributions import StateDependentNoiseDistribution
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import nn

from tests.originals import BOX, VECTOR, Original, World, normal_log_probs, observations, spread

PIXELS = spaces.Box(0, 255, (36, 40, 3), np.uint8)  # the smallest images that NatureCNN takes, and not square
SHORT = {
    PPO: {"n_steps": 16, "batch_size": 16, "n_epochs": 1},
    A2C: {"n_steps": 8},
    **{kind: {"learning_starts": 4, "batch_size": 4, "buffer_size": 100} for kind in (DQN, SAC, TD3, DDPG)},
}


def trained(
    algorithm, observation_space=VECTOR, action_space=BOX, policy="MlpPolicy", normalised=False, scale=0.3, **options
):
    """A model after a few steps, with its weights spread; and its VecNormalize."""
    envs = DummyVecEnv([lambda: World(observation_space, action_space)])
    if normalised:
        envs = VecNormalize(envs, clip_obs=2.0, epsilon=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about spaces that nobody would train in
        model = algorithm(policy, envs, seed=0, device="cpu", **SHORT[algorithm], **options)
        model.learn(16)
    spread(model.policy, scale=scale)
    model.policy.set_training_mode(False)
    if normalised:
        envs.obs_rms.mean, envs.obs_rms.var = np.linspace(-1, 5, 5), np.linspace(0.1, 9, 5)
    return model, envs if normalised else None


def save(model, normaliser, folder):
    """The model's zip, and VecNormalize's pickle beside it."""
    if normaliser is not None:
        normaliser.save(str(folder / "vecnormalize.pkl"))
    model.save(folder / "model.zip")
    return folder / "model.zip"


def original(folder, n, *arguments, **options):
    """A checkpoint and what Stable-Baselines3 says of it, for any of its algorithms."""
    model, normaliser = trained(*arguments, **options)
    path = save(model, normaliser, folder)
    space = arguments[1] if len(arguments) > 1 else VECTOR
    raw = observations(space, n)
    obs = normaliser.normalize_obs(raw) if normaliser else raw
    flat, make = raw.reshape(n, -1).astype(np.float32), lambda: World(space, model.action_space)
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        flat = np.stack([spaces.flatten(space, x) for x in raw]).astype(np.float32)
        make = lambda: FlattenObservation(World(space, model.action_space))  # noqa: E731
    if isinstance(model, DQN):
        best, _ = model.predict(obs, deterministic=True)
        actions = int(model.action_space.n)
        expected = model.exploration_rate / actions + (1 - model.exploration_rate) * np.eye(actions)[best]
        return Original(path, make, flat, expected)
    if isinstance(model, TD3):
        return Original(path, make, flat, model.predict(obs, deterministic=True)[0])
    with torch.no_grad():
        return Original(path, make, flat, *_says(model, obs))


def _says(model, obs):
    """Probabilities; or log-densities, actions and what is sent for them."""
    torch.manual_seed(1)
    sent, _ = model.predict(obs)
    torch.manual_seed(1)  # the same draws again, as they are before they are clipped or squashed
    found = _distribution(model, obs)
    inner = found.distribution
    if isinstance(found, StateDependentNoiseDistribution):
        actions = inner.mean + found.get_noise(found._latent_sde)
        return normal_log_probs(inner, actions), actions.numpy(), sent
    if isinstance(inner, torch.distributions.Normal):
        actions = inner.rsample()
        return normal_log_probs(inner, actions), actions.numpy(), sent
    if isinstance(model.action_space, spaces.Discrete):
        return (inner.probs.numpy(),)
    actions = torch.as_tensor(sent)
    return found.log_prob(actions).numpy(), actions.long().numpy(), sent


def _distribution(model, obs):
    tensor, _ = model.policy.obs_to_tensor(obs)
    if not isinstance(model, SAC):
        return model.policy.get_distribution(tensor)
    mean, log_std, latent = model.actor.get_action_dist_params(tensor)
    return model.actor.action_dist.proba_distribution(mean, log_std, **latent)


DISCRETE, SEVERAL, SWITCHES = spaces.Discrete(4), spaces.MultiDiscrete([2, 3, 4]), spaces.MultiBinary(3)
CASES = {
    "SB3 PPO, Discrete": (PPO, VECTOR, DISCRETE),
    "SB3 PPO, Discrete, ReLU, 32-16": (
        (PPO, VECTOR, DISCRETE),
        {"policy_kwargs": {"activation_fn": nn.ReLU, "net_arch": {"pi": [32, 16], "vf": [8]}}},
    ),
    "SB3 PPO, Discrete, no hidden layers": ((PPO, VECTOR, DISCRETE), {"policy_kwargs": {"net_arch": []}}),
    "SB3 PPO, Discrete, observations Discrete": (PPO, spaces.Discrete(6), DISCRETE),
    "SB3 PPO, Discrete, observations MultiDiscrete": (PPO, SEVERAL, DISCRETE),
    "SB3 PPO, Discrete, observations MultiBinary": (PPO, SWITCHES, DISCRETE),
    "SB3 PPO, Discrete, observations of two axes": (PPO, spaces.Box(-np.inf, np.inf, (2, 3)), DISCRETE),
    "SB3 PPO, MultiDiscrete": (PPO, VECTOR, SEVERAL),
    "SB3 PPO, MultiBinary": (PPO, VECTOR, SWITCHES),
    "SB3 PPO, Box": (PPO,),
    "SB3 PPO, Box, ELU, 400-300": (
        (PPO,),
        {"policy_kwargs": {"activation_fn": nn.ELU, "net_arch": [400, 300], "log_std_init": -1.0}},
    ),
    "SB3 PPO, Box, VecNormalize": ((PPO,), {"normalised": True}),
    "SB3 PPO, Box, gSDE": ((PPO,), {"use_sde": True}),
    "SB3 PPO, Box, gSDE, squashed": ((PPO,), {"use_sde": True, "policy_kwargs": {"squash_output": True}}),
    "SB3 PPO, Box, gSDE, expln, one std": (
        (PPO,),
        {"use_sde": True, "policy_kwargs": {"use_expln": True, "full_std": False, "log_std_init": 0.1}},
    ),
    "SB3 PPO, CnnPolicy, Discrete": ((PPO, PIXELS, DISCRETE), {"policy": "CnnPolicy"}),
    "SB3 PPO, CnnPolicy, Box, two extractors": (
        (PPO, PIXELS),
        {"policy": "CnnPolicy", "policy_kwargs": {"share_features_extractor": False, "features_extractor_kwargs": {}}},
    ),
    "SB3 PPO, MlpPolicy on images": (PPO, PIXELS, DISCRETE),
    "SB3 PPO, MlpPolicy on images as numbers": (
        (PPO, PIXELS, DISCRETE),
        {"policy_kwargs": {"normalize_images": False}},
    ),
    "SB3 A2C, Discrete": (A2C, VECTOR, DISCRETE),
    "SB3 A2C, MultiDiscrete": (A2C, VECTOR, SEVERAL),
    "SB3 A2C, MultiBinary": (A2C, VECTOR, SWITCHES),
    "SB3 A2C, Box": (A2C,),
    "SB3 A2C, Box, gSDE": ((A2C,), {"use_sde": True}),
    "SB3 SAC": (SAC,),
    "SB3 SAC, Tanh, 32-16, VecNormalize": (
        (SAC,),
        {"normalised": True, "policy_kwargs": {"activation_fn": nn.Tanh, "net_arch": [32, 16]}},
    ),
    "SB3 SAC, gSDE": ((SAC,), {"use_sde": True, "scale": 3.0}),  # means that are clipped
    "SB3 SAC, gSDE, means not clipped, expln": (
        (SAC,),
        {"use_sde": True, "policy_kwargs": {"clip_mean": 0.0, "use_expln": True}},
    ),
    "SB3 SAC, CnnPolicy": ((SAC, PIXELS), {"policy": "CnnPolicy"}),
    "SB3 DQN": ((DQN, VECTOR, DISCRETE), {"exploration_final_eps": 0.2}),
    "SB3 DQN, CnnPolicy": ((DQN, PIXELS, DISCRETE), {"policy": "CnnPolicy"}),
    "SB3 TD3": (TD3,),
    "SB3 TD3, VecNormalize": ((TD3,), {"normalised": True}),
    "SB3 DDPG": (DDPG,),
}


def make(name, folder, n=1000):
    """The checkpoint of that name in the folder, and what the library says at n observations."""
    case = CASES[name]
    arguments, options = case if isinstance(case[0], tuple) else (case, {})
    return original(folder, n, *arguments, **options)
