"""Does a q fitted from somebody's logged data help? Relative variance of pooled evaluation with and without it.

python -m benchmarks.logged_q Pendulum-v1                                  # trains PPO for two minutes, then measures
python -m benchmarks.logged_q Hopper-v5 --policies 'checkpoints/*.zip'     # of policies that are there

One of the policies logs episodes as people do: observations, actions as the environment got them, rewards and ends in
an npz file of D4RL's names. Both estimates are of the same episodes.
"""

import argparse
import tempfile
import time
from pathlib import Path

import gymnasium
import numpy as np
import torch

import manyfold as mf
from manyfold import envs
from manyfold.data.reading import fit_q
from manyfold.policies.base import PolicySet, sample_actions
from manyfold.policies.fitting import fitted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env")
    parser.add_argument("--policies", nargs="+", help="Stable-Baselines3 zips; trained here if left out")
    parser.add_argument("--steps", type=int, default=80_000, help="of training")
    parser.add_argument(
        "--every", type=int, default=4_096, help="steps between checkpoints, the last ten of which count"
    )
    parser.add_argument("--logged", type=int, default=200, help="episodes that one policy logs")
    parser.add_argument("--episodes", type=int, default=400, help="of the evaluation")
    parser.add_argument("--runs", type=int, default=3, help="evaluations with other seeds")
    parser.add_argument("--horizon", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        files = args.policies or train(args.env, args.steps, args.every, Path(folder))
        env = envs.make(args.env, args.horizon)
        policies = fitted(mf.load_policies(files), env)
        if not isinstance(policies, PolicySet):
            raise SystemExit("expected policies with densities")
        data = Path(folder) / "logged.npz"
        log(args.env, env.horizon, policies, policies.n_policies // 2, args.logged, data)
        begun = time.monotonic()
        q, card = fit_q(data, env, policies)
        print(f"{card}; fitted in {time.monotonic() - begun:.1f} s")
        for seed in range(args.runs):
            episodes = mf.collect(env, policies, args.episodes, np.random.default_rng(seed))
            for name, given in (("without q", None), ("with q", q)):
                found = mf.pool(episodes, given, policies)
                varies = found.on_policy_variance > 0
                relative = (found.variance / np.where(varies, found.on_policy_variance, 1))[varies]
                print(f"run {seed}, {name:9}: relative variance {relative.mean():.4f}, worst {relative.max():.4f}")


def train(env: str, steps: int, every: int, folder: Path) -> list[str]:
    """Ten PPO checkpoints."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import CheckpointCallback

    model = PPO("MlpPolicy", env, seed=0, device="cpu")
    model.learn(steps, callback=CheckpointCallback(every, str(folder)))
    return [str(folder / f"rl_model_{i * every}_steps.zip") for i in range(steps // every - 9, steps // every + 1)]


def log(name: str, horizon: int, policies: PolicySet, which: int, episodes: int, path: Path) -> None:
    """Episodes of one policy in a plain Gymnasium loop."""
    env, rng, head = gymnasium.make(name, max_episode_steps=horizon), np.random.default_rng(0), policies.head
    rows: dict[str, list[object]] = {
        x: [] for x in ("observations", "actions", "rewards", "next_observations", "terminals", "timeouts")
    }
    for seed in range(episodes):
        obs, ended, t = env.reset(seed=seed)[0], False, 0
        while not ended:
            if head is None:
                action = int(sample_actions(policies.probs(obs[None], t)[which], rng)[0])
            else:
                action = head.sent(head.draw(policies.parameters(obs[None], t)[which], rng))[0]
            after, reward, terminated, truncated, _ = env.step(action)
            for column, x in zip(rows, (obs, action, reward, after, terminated, truncated), strict=True):
                rows[column].append(x)
            obs, ended, t = after, terminated or truncated, t + 1
    np.savez(path, **{column: np.array(x) for column, x in rows.items()})


if __name__ == "__main__":
    main()
