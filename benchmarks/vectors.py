"""What pooled evaluation leaves of the variance where actions are vectors: `python -m benchmarks.vectors`.

Stable-Baselines3's PPO learns Hopper-v5, with VecNormalize, for 500,000 steps; its zips and statistics stay in a work
folder, and a seed that is there already is not trained again. Groups of ten checkpoints: within 3,000 training steps,
early and later, where an update of PPO takes its default of 2,048 steps (checkpoints between its epochs) or 320 (after
each); and 50,000 steps apart. `mf.load_policies` reads them; their Gaussians have all three dimensions and T = 1,000.
Nothing is logged, no q is fitted.

On-policy MC's variance is that of 100 own episodes a policy and known to 10 to 30% only, so both variances are averaged
over repeats before they are divided; the standard error is a jackknife's over repeats. Side by side, from the same
episodes: weights alone, regressions of the reward-to-go on (s, t), and on the action's features as well.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import manyfold as mf
from benchmarks.show import show
from manyfold.arrays import Array
from manyfold.data.episodes import Episodes
from manyfold.envs import make
from manyfold.estimate import pooled
from manyfold.files import write_json
from manyfold.streams import stream

BATCH, EPOCHS = 64, 10  # Stable-Baselines3's defaults
SHORT, LONG = 320, 2048  # steps of an update of PPO: ten updates within 3,000 steps, or its default


class Group(NamedTuple):
    """Ten checkpoints of one training."""

    update: int  # steps of an update
    steps: list[int]  # of training; after SHORT's rollouts and between LONG's epochs, a tenth of an update each


GROUPS = {
    "3,000 steps, 2 updates, early": Group(LONG, [round(LONG * e / EPOCHS) for e in np.linspace(20, 34, 10).round()]),
    "3,000 steps, 2 updates, later": Group(LONG, [round(LONG * e / EPOCHS) for e in np.linspace(250, 264, 10).round()]),
    "3,000 steps, 10 updates, early": Group(SHORT, [3_200 + SHORT * i for i in range(10)]),
    "3,000 steps, 10 updates, later": Group(SHORT, [50_240 + SHORT * i for i in range(10)]),
    "50,000 steps apart": Group(SHORT, [round(50_000 * i / SHORT) * SHORT for i in range(1, 11)]),
}
EPISODES = 1000
RESULTS = Path("data/vectors/hopper.json")


def train(folder: Path, seed: int, update: int, steps: list[int]) -> None:
    """All of these checkpoints of a seed, unless they are there."""
    if all(path.exists() for step in steps for path in files(folder, step)):
        return
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    moved = 0  # gradient steps so far

    class Keep(BaseCallback):
        def _on_step(self) -> bool:
            if update == SHORT:
                keep(self.num_timesteps)
            return True

    def keep(step: int) -> None:
        if step in steps:
            policy, statistics = files(folder, step)
            model.save(policy)
            envs.save(str(statistics))

    def between(*_: Any) -> None:
        nonlocal moved
        moved += 1
        epochs, rest = divmod(moved, LONG // BATCH)
        if not rest:
            keep(round(LONG * epochs / EPOCHS))

    folder.mkdir(parents=True, exist_ok=True)
    envs = VecNormalize(make_vec_env("Hopper-v5", 1, seed))
    model: Any = PPO("MlpPolicy", envs, n_steps=update, batch_size=BATCH, n_epochs=EPOCHS, seed=seed, device="cpu")
    if update == LONG:
        model.policy.optimizer.register_step_post_hook(between)
    model.learn(max(steps), callback=Keep())


def files(folder: Path, step: int) -> tuple[Path, Path]:
    """A checkpoint and its statistics, named as Stable-Baselines3's CheckpointCallback names them."""
    return folder / f"ppo_{step}_steps.zip", folder / f"ppo_vecnormalize_{step}_steps.pkl"


def weights_alone(episodes: Episodes) -> Array:
    """The variance without any baseline: whole-episode or per-decision weights and weight controls, `[K]`."""
    logger, (fold, folds) = episodes.logger, pooled.folds_of(episodes.logger)
    share = pooled.shares_of(logger, fold, episodes.n_loggers)
    parts = []
    for block in episodes.blocks(len(episodes.names) + episodes.n_loggers):
        here = block.episodes
        log_w = pooled.log_weights(block.pad(episodes.log_targets), block.pad(episodes.log_loggers), share[:, here])
        parts.append(pooled.columns(block.pad(episodes.rewards), *log_w, logger[here], episodes.own, share[:, here]))
    found = pooled.Columns(*(np.concatenate(columns, -1) for columns in zip(*parts, strict=True)))
    return pooled.within(pooled.combine(found, logger, fold, folds, []).values, logger, fold)


def measure(policies: mf.PolicySet, seed: int, group: str, repeat: int) -> dict[str, Any]:
    """Variances of one evaluation by all three ways, `[K]` each, and what goes with them."""
    env = make("envpool:Hopper-v5")
    episodes = mf.collect(env, policies, EPISODES, stream("benchmark-vectors", group, seed, repeat))
    found = mf.pool(episodes)
    by_state = mf.pool(replace(episodes, features=None, expected=None))
    names, counts = np.unique([name for fold in found.recipes for name in fold], return_counts=True)
    return {
        "on policy": found.on_policy_variance.tolist(),
        "weights alone": weights_alone(episodes).tolist(),
        "on (s, t)": by_state.variance.tolist(),
        "on (s, t, a)": found.variance.tolist(),
        "mean": found.mean.tolist(),
        "own mean": [x.mean() for x in found.own_returns],
        "effective": (found.diagnosis.effective_sample_size / EPISODES).tolist(),
        "steps": episodes.steps,
        "warnings": sum(bool(said) for said in found.warnings),
        "recipes": dict(zip(names.tolist(), counts.tolist(), strict=True)),
    }


WAYS = "weights alone", "on (s, t)", "on (s, t, a)"


def relative(runs: list[dict[str, Any]], way: str) -> tuple[Array, Array]:
    """The relative variance of every policy, of the mean over policies and of the worst, and their standard errors."""

    def ratio(some: list[dict[str, Any]]) -> Array:
        each = np.mean([run[way] for run in some], 0) / np.mean([run["on policy"] for run in some], 0)
        return np.append(each, [each.mean(), each.max()])

    n, value = len(runs), ratio(runs)
    if n == 1:
        return value, np.full_like(value, np.nan)
    without = np.array([ratio(runs[:i] + runs[i + 1 :]) for i in range(n)])
    return value, np.sqrt((n - 1) / n * ((without - without.mean(0)) ** 2).sum(0))


def rows(results: dict[str, dict[str, list[dict[str, Any]]]]) -> list[tuple[str, ...]]:
    """One for each group and seed."""
    out = []
    for group, seeds in results.items():
        for seed, runs in seeds.items():
            effective = np.mean([run["effective"] for run in runs], 0)
            length = np.mean([run["steps"] for run in runs]) / EPISODES
            means = [f"{relative(runs, way)[0][-2]:.3f}" for way in WAYS[:-1]]
            (*_, mean, worst), (*_, mean_error, worst_error) = relative(runs, WAYS[-1])
            found = f"{mean:.3f} +- {mean_error:.3f}", f"{worst:.2f} +- {worst_error:.2f}"
            share = f"{effective.min():.2f}-{effective.max():.2f}"
            out.append((f"{group}, seed {seed}", f"{length:.0f}", share, *means, *found))
    return out


def main(work: Path, seeds: int, repeats: int, groups: list[str]) -> None:
    torch.set_num_threads(1)
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for group in groups:
        for seed in range(seeds):
            update, steps = GROUPS[group]
            folder = work / f"update-{update}" / f"seed-{seed}"
            every = [step for name in groups if GROUPS[name].update == update for step in GROUPS[name].steps]
            train(folder, seed, update, every)
            policies = mf.load_policies([files(folder, step)[0] for step in steps])
            assert isinstance(policies, mf.PolicySet)
            for repeat in range(repeats):
                path = folder / f"{group} {repeat}.json"
                if not path.exists():
                    write_json(path, measure(policies, seed, group, repeat))
                results.setdefault(group, {}).setdefault(str(seed), []).append(json.loads(path.read_text()))
    write_json(RESULTS, results)
    header = ("", "steps", "eff. share", "weights", "on (s, t)", "on (s, t, a)", "worst policy")
    title = (
        f"Variance relative to on-policy MC, {EPISODES:,} episodes of ten checkpoints of Hopper-v5, {repeats} repeats"
    )
    show(title, header, rows(results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/vectors"), help="checkpoints and single runs")
    parser.add_argument("--seeds", type=int, default=2, help="of training")
    parser.add_argument("--repeats", type=int, default=3, help="evaluations of each group")
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS), metavar="GROUP")
    given = parser.parse_args()
    main(given.work, given.seeds, given.repeats, given.groups)
