"""A training loop that evaluates as it goes, and gets cheaper while it does.

PPO learns CartPole-v1. After every few updates the new checkpoint is evaluated to a precision, with a store: it is
estimated from the episodes of all earlier checkpoints first, and only episodes that are missing are run. A new policy
is much like the last one, so these are few.

    python examples/while_training.py

prints a line for each checkpoint, then all of them ranked. It takes about a minute. It needs
`pip install .` in a clone of this repository, and `pip install stable-baselines3`.
"""

import argparse
from pathlib import Path

import torch
from stable_baselines3 import PPO

import manyfold as mf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("while_training"), help="where everything goes")
    parser.add_argument("--checkpoints", type=int, default=12, help="how many")
    parser.add_argument("--every", type=int, default=1_024, help="steps from checkpoint to checkpoint")
    parser.add_argument("--update", type=int, default=512, help="steps of an update of PPO")
    parser.add_argument("--precision", type=float, default=10.0, help="half the width of each interval")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the networks are tiny
    if args.folder.exists():
        parser.error(
            f"{args.folder} is there already, expected a new folder: this counts what is stored from the start"
        )

    model = PPO("MlpPolicy", "CartPole-v1", n_steps=args.update, seed=0, device="cpu")
    checkpoints, store, stored = args.folder / "checkpoints", args.folder / "store", 0
    checkpoints.mkdir(parents=True)
    for number in range(1, args.checkpoints + 1):
        model.learn(args.every, reset_num_timesteps=False)
        path = checkpoints / f"ppo_{number * args.every}_steps.zip"
        model.save(path)

        found = mf.evaluate("CartPole-v1", mf.load_policies(path), precision=args.precision, store=store, seed=number)
        value, width = found.mean[0], found.decision.half_width[0]
        run, stored = found.episodes - stored, found.episodes
        print(
            f"{found.names[0]}: {value:.1f} +- {width:.1f}; {run} episodes run, {stored - run} were there", flush=True
        )

    # All of them at the end, all at once: again only what is missing for that.
    print(mf.evaluate("CartPole-v1", mf.load_policies(checkpoints), precision=args.precision, store=store))


if __name__ == "__main__":
    main()
