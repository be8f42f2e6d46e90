"""CartPole with Stable-Baselines3, from training to a page to show.

PPO learns CartPole-v1, CheckpointCallback saves it every 4,096 steps, and one call says how good each checkpoint is:
they run in turns, and every episode serves all of them.

    python examples/cartpole.py

writes cartpole/checkpoints/*.zip and cartpole/report.html. It takes about half a minute, most of it training. It
needs `pip install .` in a clone of this repository, and `pip install stable-baselines3`.
"""

import argparse
import time
from pathlib import Path

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import CheckpointCallback

import manyfold as mf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("cartpole"), help="where everything goes")
    parser.add_argument("--steps", type=int, default=32_768, help="of training")
    parser.add_argument("--every", type=int, default=4_096, help="steps from checkpoint to checkpoint")
    parser.add_argument("--update", type=int, default=1_024, help="steps of an update of PPO")
    parser.add_argument("--episodes", type=int, default=200, help="of all checkpoints together")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the networks are tiny

    # Train, and keep a checkpoint now and then.
    checkpoints = args.folder / "checkpoints"
    keep = CheckpointCallback(args.every, str(checkpoints), name_prefix="ppo")
    PPO("MlpPolicy", "CartPole-v1", n_steps=args.update, seed=0, device="cpu").learn(args.steps, keep)

    # Which one is the best? These are the policies as trained, which draw their actions; greedy=True asks for others.
    policies = mf.load_policies(checkpoints)
    start = time.perf_counter()
    result = mf.evaluate("CartPole-v1", policies, episodes=args.episodes)
    print(result)

    seconds = time.perf_counter() - start
    page = result.report(args.folder / "report.html", environment="CartPole-v1", seconds=seconds, seed=0)
    print(f"{page} has it all, with pictures.")


if __name__ == "__main__":
    main()
