"""Hopper-v5 in all three dimensions of its actions, no bins, with the normalisation that it was trained with.

PPO learns with VecNormalize: the policy sees normalised observations, so the statistics are a part of it.
CheckpointCallback saves them beside each checkpoint, `mf.load_policies` finds them there, and each policy gets its own.

    python examples/hopper.py

writes hopper/checkpoints/ (ppo_*_steps.zip, ppo_vecnormalize_*_steps.pkl) and hopper/report.html. It takes about one
minute. It
needs `pip install '.[mujoco]'` in a clone of this repository, and `pip install stable-baselines3`.
"""

import argparse
from pathlib import Path

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import CheckpointCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

import manyfold as mf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("hopper"), help="where everything goes")
    parser.add_argument("--steps", type=int, default=40_960, help="of training")
    parser.add_argument("--every", type=int, default=4_096, help="steps from checkpoint to checkpoint")
    parser.add_argument("--update", type=int, default=2_048, help="steps of an update of PPO")
    parser.add_argument("--episodes", type=int, default=400, help="of all checkpoints together")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the networks are tiny

    # Train, and keep checkpoints with their statistics.
    checkpoints = args.folder / "checkpoints"
    envs = VecNormalize(make_vec_env("Hopper-v5", 1, seed=0))
    keep = CheckpointCallback(args.every, str(checkpoints), name_prefix="ppo", save_vecnormalize=True)
    PPO("MlpPolicy", envs, n_steps=args.update, seed=0, device="cpu").learn(args.steps, keep)

    # They are densities of three torques. Nothing is unpickled: of the statistics only numbers are read.
    policies = mf.load_policies(checkpoints)
    low, high = policies.head.low, policies.head.high
    print(f"{policies.n_policies} policies; actions of {len(low)} dimensions, from {low} to {high}")
    for policy in policies.imported:
        print(f"{policy.name}: normalised by {policy.files[1].name}")

    # The plain environment: rewards and observations as they are; each policy normalises for itself.
    result = mf.evaluate("Hopper-v5", policies, episodes=args.episodes)
    print(result)
    print(f"{result.report(args.folder / 'report.html', environment='Hopper-v5', seed=0)} has it all, with pictures.")


if __name__ == "__main__":
    main()
