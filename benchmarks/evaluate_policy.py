"""Against what people do today: Stable-Baselines3's `evaluate_policy` for each checkpoint, as many episodes in all.

    python -m benchmarks.evaluate_policy                       # about 20 minutes; single runs stay in build/
    python -m benchmarks.evaluate_policy --repeats 2 --environments CartPole-v1

PPO's checkpoints come every 4,096 steps, eight of them, as they come; CheckpointCallback saves them. Both sides begin
with the files and end with means, intervals and a best policy, in one process and one thread; both draw actions
(`deterministic=False`: greedy is another policy). The truth are plain returns of other episodes of each policy's own.

`evaluate_policy` gives a mean and a standard deviation; what follows from them is Student's t: for each policy by
itself, with Sidak's level for all of them (they are independent), and Welch's tests of the highest mean against every
other one (Bonferroni) for whether it is the best. It runs an environment in as many slots as each policy has episodes,
25 at most, which is the fastest; with one slot, its default, it is timed in the first repeats only. *Bare* are
manyfold's episodes again, the same actions in the same environments and nothing else (`benchmarks.door_speed`).

The table: root mean squared error (the truth's own is taken off); how often 95% intervals hold (widened by the truth's
own error, which is as large as manyfold's with 800 episodes, and the same in all repeats), and half their width;
how often an estimate was flagged as not to be trusted (`evaluate_policy` has no flags), and how often the other
intervals hold; how often the highest mean is not the best policy's, and pairs are in the wrong order; how often a
policy is said to be the best with 95% confidence, and wrongly so. All shares in percent. Seconds are medians, with one
slot in brackets.
"""

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats

import manyfold as mf
from benchmarks.best_of_ten import better
from benchmarks.door_speed import recorded, replayed
from manyfold import envs
from manyfold.arrays import Array
from manyfold.files import write_json
from manyfold.streams import stream
from manyfold.tables import markdown, write_table

CHECKPOINTS, EVERY, UPDATE = 8, 4096, 1024  # how many, and after how many steps; steps of an update of PPO
SLOTS = 25
PART = 100  # episodes of each policy, of the truth at once
TIMED = 3  # repeats of the first budget in which one slot and the bare episodes are timed as well
ALPHA = 0.05
RESULTS = Path("data/door/evaluate_policy")
THEIRS, OURS = "evaluate_policy", "manyfold"


class Setting(NamedTuple):
    """How much is measured of an environment."""

    normalised: bool  # trained with VecNormalize, whose statistics lie beside each checkpoint
    truth: int  # episodes of each policy
    repeats: dict[int, int]  # by episodes of all policies together


SETTINGS = {
    "CartPole-v1": Setting(False, 3000, {200: 30, 800: 20}),
    "Hopper-v5": Setting(True, 1000, {200: 20}),
}


def train(id: str, folder: Path) -> list[Path]:
    """The checkpoints, unless they are there."""
    paths = [folder / f"ppo_{EVERY * i}_steps.zip" for i in range(1, CHECKPOINTS + 1)]
    if not paths[-1].exists():
        from stable_baselines3 import PPO
        from stable_baselines3.common.callbacks import CheckpointCallback
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.vec_env import VecNormalize

        single = make_vec_env(id, 1, seed=0)
        world = VecNormalize(single) if SETTINGS[id].normalised else single
        keep = CheckpointCallback(EVERY, str(folder), "ppo", save_vecnormalize=True)
        PPO("MlpPolicy", world, n_steps=UPDATE, seed=0, device="cpu").learn(EVERY * CHECKPOINTS, keep)
    return paths


def loaded(paths: list[Path]) -> mf.PolicySet:
    """As `mf.evaluate` takes them."""
    found = mf.load_policies(list(paths))
    assert isinstance(found, mf.PolicySet)
    return found


def truth(id: str, paths: list[Path], folder: Path) -> tuple[Array, Array]:
    """Values and their standard errors, `[K]` each, from episodes that nobody else sees."""
    parts = [folder / f"truth-{part}.json" for part in range(SETTINGS[id].truth // PART)]
    policies = loaded(paths)
    for number, path in enumerate(parts):
        if not path.exists():
            rng = stream("evaluate_policy-truth", id, number)
            found = mf.collect(envs.make(id), policies, PART * CHECKPOINTS, rng)
            write_json(path, [found.returns[found.logger == k].tolist() for k in range(CHECKPOINTS)])
    returns = np.concatenate([json.loads(path.read_text()) for path in parts], -1)
    return returns.mean(-1), returns.std(-1, ddof=1) / np.sqrt(returns.shape[-1])


def theirs(id: str, paths: list[Path], episodes: int, repeat: int, slots: int) -> list[Array]:
    """Returns of `evaluate_policy` for each checkpoint."""
    return [np.asarray(returns, dtype=np.float64) for returns, _ in played(id, paths, episodes, repeat, slots)]


def played(id: str, paths: list[Path], episodes: int, repeat: int, slots: int) -> list[tuple[list[float], list[int]]]:
    """Returns and lengths of `evaluate_policy`'s episodes for each checkpoint."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecEnv, VecNormalize

    out = []
    for k, path in enumerate(paths):
        seed = int(stream("evaluate_policy", id, episodes, repeat, k).integers(2**30))
        world: VecEnv = make_vec_env(id, slots, seed=seed)
        if SETTINGS[id].normalised:
            statistics = path.with_name(path.name.replace("ppo_", "ppo_vecnormalize_")).with_suffix(".pkl")
            world = VecNormalize.load(str(statistics), world)
            world.training = world.norm_reward = False
        model = PPO.load(path, device="cpu")
        torch.manual_seed(seed)
        found: Any = evaluate_policy(model, world, episodes // len(paths), False, return_episode_rewards=True)
        out.append(found)
        world.close()
    return out


def students(returns: list[Array]) -> dict[str, Any]:
    """What follows from each policy's own returns."""
    means = np.array([x.mean() for x in returns])
    errors = np.array([x.std(ddof=1) / np.sqrt(len(x)) for x in returns])
    freedom, top = len(returns[0]) - 1, int(means.argmax())
    sidak = 1 - (1 - ALPHA) ** (1 / len(returns))
    others = [x for k, x in enumerate(returns) if k != top]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of SciPy, where returns hardly vary
        known = all(better(returns[top], x) < ALPHA / len(others) for x in others)
    return {
        "mean": means.tolist(),
        "single": (stats.t.isf(ALPHA / 2, freedom) * errors).tolist(),
        "simultaneous": (stats.t.isf(sidak / 2, freedom) * errors).tolist(),
        "claimed": top if known else None,
        "warned": [False] * len(returns),
    }


def ours(id: str, paths: list[Path], episodes: int, repeat: int) -> dict[str, Any]:
    """The same of one `mf.evaluate`."""
    found = mf.evaluate(id, loaded(paths), episodes=episodes, seed=repeat)
    assert isinstance(found, mf.Estimate)
    decision, single = found.decide(ALPHA), mf.intervals.single(found.sample, ALPHA)
    return {
        "mean": found.mean.tolist(),
        "single": ((single.high - single.low) / 2).tolist(),
        "simultaneous": decision.half_width.tolist(),
        "claimed": decision.best,
        "warned": [bool(said) for said in found.warnings],
        "steps": found.steps,
    }


def bare(id: str, paths: list[Path], episodes: int) -> dict[str, float]:
    """Steps of manyfold's episodes, and their time without anything else."""
    env = envs.make(id)
    calls, again = recorded(env)
    steps = mf.collect(env, loaded(paths), episodes, stream("evaluate_policy-bare", id)).steps
    return {"steps": steps, "cpu": replayed(calls, again())}


class Clock:
    """Seconds since it was made: of the wall, and of this process's CPU time, in which other programs don't count."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def passed(self) -> dict[str, float]:
        return {"wall": time.perf_counter() - self.wall, "cpu": time.process_time() - self.cpu}


def measure(id: str, paths: list[Path], episodes: int, repeat: int) -> dict[str, Any]:
    """One repeat of both; few are timed with one slot and bare as well."""
    start = Clock()
    returns = theirs(id, paths, episodes, repeat, min(SLOTS, episodes // len(paths)))
    out: dict[str, Any] = {THEIRS: students(returns) | start.passed()}
    start = Clock()
    out[OURS] = ours(id, paths, episodes, repeat) | start.passed()
    if repeat < TIMED and episodes == min(SETTINGS[id].repeats):
        out["bare"] = bare(id, paths, episodes)
        start = Clock()
        theirs(id, paths, episodes, repeat, 1)
        out["one slot"] = start.passed()
    return out


def summary(runs: list[dict[str, Any]], who: str, known: Array, error: Array) -> dict[str, Any]:
    """What one method was right about; shares in percent. The truth's own error is not the method's."""
    of = [run[who] for run in runs]
    mean, single, joint = (np.array([run[name] for run in of]) for name in ("mean", "single", "simultaneous"))
    off, warned = np.abs(mean - known), np.array([run["warned"] for run in of])
    at_once = 1 - (1 - ALPHA) ** (1 / len(known))
    held = off <= np.hypot(single, stats.norm.isf(ALPHA / 2) * error)
    all_held = (off <= np.hypot(joint, stats.norm.isf(at_once / 2) * error)).all(-1)
    chosen, claimed = mean.argmax(-1), [run["claimed"] for run in of if run["claimed"] is not None]
    squared, (first, second) = (off**2 - error**2).mean(-1), np.triu_indices(len(known), 1)
    swapped = (mean[:, first] > mean[:, second]) != (known[first] > known[second])
    return {
        "rmse": float(np.sqrt(squared.mean())),
        "rmse_error": float(squared.std(ddof=1) / np.sqrt(len(of)) / 2 / np.sqrt(squared.mean())),
        "single": 100 * float(held.mean()),
        "single_each": (100 * held.mean(0)).tolist(),
        "simultaneous": 100 * float(all_held.mean()),
        "half_width": float(single.mean()),
        "warned": 100 * float(warned.mean()),
        "single_not_warned": 100 * float(held[~warned].mean()),
        "wrong_winner": 100 * float((chosen != known.argmax()).mean()),
        "wrong_pairs": 100 * float(swapped.mean()),
        "claimed": 100 * len(claimed) / len(of),
        "claimed_wrongly": 100 * sum(x != known.argmax() for x in claimed) / len(of),
        "wall": float(np.median([run["wall"] for run in of])),
        "cpu": float(np.median([run["cpu"] for run in of])),
    }


def timing(timed: list[dict[str, Any]]) -> dict[str, float]:
    """One slot's seconds, and manyfold's CPU time of a step over the bare episodes'."""
    slow = {f"one_slot_{name}": float(np.median([run["one slot"][name] for run in timed])) for name in ("wall", "cpu")}
    each = [run[OURS]["cpu"] / run[OURS]["steps"] / (run["bare"]["cpu"] / run["bare"]["steps"]) for run in timed]
    return slow | {"over_bare": float(np.median(each))}


HEADER = (
    "environment, episodes, repeats",
    "",
    "error",
    "single",
    "their half-width",
    "warned",
    "single, not warned",
    "all at once",
    "wrong winner",
    "wrong pairs",
    "claimed best",
    "wrongly",
    "seconds",
    "CPU",
)


def rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """Two of each environment and budget."""
    out = []
    for id, found in results.items():
        for episodes, both in found["budgets"].items():
            for who in (THEIRS, OURS):
                x = both[who]
                first = f"{id}, {episodes}, {both['repeats']}" if who == THEIRS else ""
                shares = "single", "half_width", "warned", "single_not_warned", "simultaneous", "wrong_winner"
                rest = "wrong_pairs", "claimed", "claimed_wrongly"
                times = f"{x['wall']:.1f}", f"{x['cpu']:.1f}"
                if who == THEIRS and "timing" in both:
                    slow = both["timing"]["one_slot_wall"], both["timing"]["one_slot_cpu"]
                    times = f"{times[0]} ({slow[0]:.1f})", f"{times[1]} ({slow[1]:.1f})"
                error = f"{x['rmse']:.2f} +- {x['rmse_error']:.2f}"
                out.append((first, who, error, *(f"{x[name]:.1f}" for name in (*shares, *rest)), *times))
    return out


def main(work: Path, ids: list[str], repeats: int | None) -> None:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for id in ids:
        folder = work / id
        paths = train(id, folder)
        known, error = truth(id, paths, folder)
        print(f"{id}: truth", ", ".join(f"{x:.4g} +- {e:.2g}" for x, e in zip(known, error, strict=True)), flush=True)
        results[id] = {"truth": known.tolist(), "truth_error": error.tolist(), "budgets": {}}
        for episodes, usual in SETTINGS[id].repeats.items():
            many, runs = repeats or usual, []
            for repeat in range(many):
                path = folder / f"{episodes}-{repeat}.json"
                if not path.exists():
                    write_json(path, measure(id, paths, episodes, repeat))
                runs.append(json.loads(path.read_text()))
            found: dict[str, Any] = {who: summary(runs, who, known, error) for who in (THEIRS, OURS)}
            found["repeats"], timed = many, [run for run in runs if "bare" in run]
            found["squared_error"] = (found[OURS]["rmse"] / found[THEIRS]["rmse"]) ** 2
            said = f"{id}, {episodes} episodes, {many} repeats: squared error {found['squared_error']:.3f} of theirs"
            if timed:
                found["timing"] = timing(timed)
                said += f"; manyfold's CPU time {found['timing']['over_bare']:.2f} times the bare episodes'"
            results[id]["budgets"][str(episodes)] = found
            print(said, flush=True)
    table = rows(results)
    print(markdown([HEADER, *table]))
    if set(ids) == set(SETTINGS) and repeats is None:
        write_json(RESULTS.with_suffix(".json"), results)
        write_table([HEADER, *table], RESULTS, ("md",))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/evaluate_policy"), help="checkpoints and single runs")
    parser.add_argument("--environments", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), metavar="ID")
    parser.add_argument("--repeats", type=int, help="instead of those that data/door has; nothing is written there")
    given = parser.parse_args()
    main(given.work, given.environments, given.repeats)
