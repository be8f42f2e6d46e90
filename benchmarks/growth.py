"""Checkpoints that arrive one by one: how many episodes does a store need, and how many on-policy MC?

    python -m benchmarks.growth                 # all cases; what is there already is not run again
    python -m benchmarks.growth CartPole-v1

Stable-Baselines3's PPO learns with its defaults and keeps a checkpoint after each of its updates (2,048 steps), forty
in all. As each one arrives, `mf.evaluate(env, all so far, precision=X, store=folder)`: the values of all checkpoints so
far known to +- X, all of them at once, whenever one looks; X is 5% and 10% of the largest return. Episodes are counted
in the store.

On-policy MC is run as well, beside it: each checkpoint's own returns until its interval, of the same kind
(`intervals.anytime`) and at the same level (alpha over the number of checkpoints so far), is as narrow. It keeps its
episodes too, and adds to those of earlier checkpoints only what the stricter level asks for. *Each for itself* is
the same with level alpha: right about each checkpoint, but not about all of them at once.

At the end the store's values are compared with those of on-policy MC, whose episodes it never saw.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch

import manyfold as mf
from benchmarks.show import show
from manyfold import envs
from manyfold.arrays import Array
from manyfold.data.store import Store
from manyfold.estimate import intervals
from manyfold.estimate.stored import identities
from manyfold.files import atomic, write_json
from manyfold.streams import stream
from manyfold.tables import markdown
from tasks.figures import plt, save, style

MANY, EVERY = 40, 2048  # of the second, one update of PPO
ALPHA, BUDGET = 0.05, 20_000
SHARES = (0.05, 0.1)  # of the largest return
LARGEST = {"CartPole-v1": 500.0, "Acrobot-v1": 500.0}  # of its absolute value
FIRST, GROWTH = 5, 1.25  # of on-policy MC's looks: those of `stopping.until`
SHOWN = (1, 5, 10, 20, 30, 40)
OUT = Path("data/door/growth")
LINES = {  # Okabe-Ito: the colour-blind can tell them apart
    "store": ("the store", "#0072B2", "-"),
    "monte_carlo": ("on-policy MC, all at once", "#D55E00", "--"),
    "alone": ("on-policy MC, each for itself", "#009E73", ":"),
}


class Arrival(NamedTuple):
    """What had been spent when a checkpoint had been evaluated, all earlier ones included."""

    episodes: int
    steps: int
    of_new: int  # of the episodes since the last arrival, those of the checkpoint that arrived
    warned: int  # checkpoints whose estimate is said not to be trusted


def train(name: str, folder: Path) -> list[Path]:
    """All checkpoints, by their steps."""
    paths = [folder / f"{EVERY * i:06d}.zip" for i in range(1, MANY + 1)]
    if not all(path.exists() for path in paths):
        from stable_baselines3 import PPO

        model = PPO("MlpPolicy", name, seed=0, device="cpu")
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            model.learn(EVERY, reset_num_timesteps=False)
            with atomic(path) as part, part.open("wb") as file:
                model.save(file)
    return paths


# --- the store ---


def arrivals(name: str, files: list[Path], precision: float, work: Path) -> dict[str, Any]:
    """Every arrival; those that were counted before are not counted again."""
    kept = work / f"{precision:g}.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {"arrivals": []}
    before = found["arrivals"][-1][0] if found["arrivals"] else 0
    for k in range(len(found["arrivals"]) + 1, len(files) + 1):
        policies = mf.load_policies(list(files[:k]))
        assert isinstance(policies, mf.PolicySet)
        folder = work / f"store-{precision:g}"
        result = mf.evaluate(name, policies, BUDGET, precision=precision, store=folder, alpha=ALPHA)
        if result.decision.half_width.max() > precision:
            raise ValueError(f"{name}: {result.reason} Expected every value to +- {precision:g}; raise BUDGET")
        tables = [pq.read_table(file, columns=["steps"]) for file in (folder / "episodes").glob("*.parquet")]
        steps = np.concatenate([table["steps"].to_numpy() for table in tables])
        of_new = Store(folder, envs.make(name)).counts().get(identities(policies)[-1], 0)
        warned = sum(bool(said) for said in result.warnings)
        found["arrivals"].append(Arrival(len(steps), int(steps.sum()), of_new, warned))
        found["values"], found["errors"] = result.mean.tolist(), result.decision.sample.standard_error.tolist()
        write_json(kept, found)
        print(f"{name} +- {precision:g}: {k} checkpoints, {len(steps):,} episodes, {len(steps) - before:,} new")
        before = len(steps)
    return found


# --- on-policy MC ---


class Own:
    """The returns of one checkpoint's own episodes, run when they are asked for and kept in a file."""

    def __init__(self, name: str, file: Path, kept: Path) -> None:
        self.env, self.file, self.kept, self.policy = envs.make(name), file, kept, mf.load_policies(file)
        there = np.load(kept) if kept.exists() else np.empty((2, 0))
        self.returns, self.lengths = there[0], there[1].astype(np.int64)

    def first(self, n: int) -> Array:
        """n of them."""
        assert isinstance(self.policy, mf.PolicySet)
        if len(self.returns) < n:
            have, missing = len(self.returns), max(100, n - len(self.returns))
            episodes = mf.collect(self.env, self.policy, missing, stream("growth", self.file.stem, have))
            self.returns = np.concatenate([self.returns, episodes.returns])
            self.lengths = np.concatenate([self.lengths, episodes.lengths])
            with atomic(self.kept) as part, part.open("wb") as file:
                np.save(file, np.stack([self.returns, self.lengths]))
        return self.returns[:n]

    def needed(self, precision: float, level: float) -> int:
        """Episodes until the interval is as narrow; looked at as often as `stopping.until` does."""
        for n in looks():
            every = intervals.sample(self.first(n)).each()
            interval = intervals.anytime(every, level)
            if interval.high[0] - interval.low[0] <= 2 * precision:
                return n
        raise AssertionError  # looks never end


def looks() -> Iterator[int]:
    """5, 6, 8, 10, ... episodes."""
    n = FIRST
    while True:
        yield n
        n += max(1, round((GROWTH - 1) * n))


def monte_carlo(own: list[Own], precision: float) -> dict[str, Any]:
    """Episodes and steps after each arrival: all at once, and each for itself."""
    out: dict[str, list[tuple[int, int]]] = {"monte_carlo": [], "alone": []}
    for k in range(1, len(own) + 1):
        for way, level in (("monte_carlo", ALPHA / k), ("alone", ALPHA)):
            each = [one.needed(precision, level) for one in own[:k]]
            steps = sum(int(one.lengths[:n].sum()) for one, n in zip(own, each, strict=False))
            out[way].append((sum(each), steps))
    return out


# --- tables and the figure ---


def deviations(found: dict[str, Any], own: list[Own]) -> Array:
    """The store's values minus those of on-policy MC's episodes, over the error of both, `[K]`."""
    mean = np.array([one.returns.mean() for one in own])
    error = np.array([one.returns.std(ddof=1) / np.sqrt(len(one.returns)) for one in own])
    both = np.hypot(np.array(found["errors"]), error)
    return np.divide(np.array(found["values"]) - mean, both, out=np.zeros(len(own)), where=both > 0)


def rows(name: str, precision: str, found: dict[str, Any]) -> list[tuple[str, ...]]:
    """A line for each number of checkpoints that is shown."""
    out = []
    for k in SHOWN:
        store, own, alone = (found[way][k - 1] for way in ("arrivals", "monte_carlo", "alone"))
        numbers = (store[0], own[0], alone[0], store[1], own[1])
        ratio = f"{store[0] / own[0]:.2f}"
        out.append((f"{name}, +- {precision}", f"{k}", *(f"{x:,}" for x in numbers), ratio))
    return out


def judge(name: str, precision: str, found: dict[str, Any], own: list[Own]) -> tuple[str, ...]:
    """How many arrivals cost nothing, who ran the episodes, and how far the values are from on-policy MC's."""
    z, last = deviations(found, own), [0, *(one[0] for one in found["arrivals"])]
    free = int((np.diff(last) == 0).sum())
    earlier = last[-1] - sum(one[2] for one in found["arrivals"])
    share = f"{earlier / last[-1]:.0%}"
    far = f"{np.abs(z).max():.1f}", f"{np.sqrt((z**2).mean()):.2f}"
    return f"{name}, +- {precision}", f"{free}", share, *far, f"{found['arrivals'][-1][3]}"


def draw(results: dict[str, dict[str, Any]]) -> None:
    """Episodes against checkpoints, a panel for each environment and precision."""
    style()
    panels = [(name, precision, one) for name, every in results.items() for precision, one in every.items()]
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.6), squeeze=False, layout="constrained")
    for axis, (name, precision, one) in zip(axes[0], panels, strict=True):
        for way, (label, colour, dash) in LINES.items():
            episodes = [x[0] for x in one["arrivals" if way == "store" else way]]
            axis.plot(range(1, len(episodes) + 1), episodes, dash, color=colour, label=label, linewidth=2)
        axis.set(title=f"{name}, every value to ± {precision}", xlabel="checkpoints so far", yscale="log")
    axes[0, 0].set_ylabel("episodes in all")
    axes[0, 0].legend(fontsize=8)
    save(figure, OUT)


def main(names: list[str], work: Path) -> None:
    torch.set_num_threads(1)
    results: dict[str, dict[str, Any]] = {}
    table: list[tuple[str, ...]] = []
    judged: list[tuple[str, ...]] = []
    for name in names:
        files = train(name, work / name / "checkpoints")
        (work / name / "own").mkdir(exist_ok=True)
        own = [Own(name, file, work / name / "own" / f"{file.stem}.npy") for file in files]
        results[name] = {
            f"{x:g}": arrivals(name, files, x, work / name) | monte_carlo(own, x)
            for x in (share * LARGEST[name] for share in SHARES)
        }
        for precision, found in results[name].items():
            table += rows(name, precision, found)
            judged.append(judge(name, precision, found, own))
    write_json(OUT.with_suffix(".json"), results)
    draw(results)
    header = ("", "checkpoints", "episodes", "on-policy MC", "each for itself", "steps", "steps, MC", "episodes / MC")
    print(markdown([header, *table]))
    header = ("", "arrivals without episodes", "share of earlier checkpoints", "largest z", "rms z", "warnings")
    show("The store at the end, beside on-policy MC's own episodes", header, judged)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(LARGEST), help="environments")
    parser.add_argument("--work", type=Path, default=Path("build/growth"), help="checkpoints, stores, own episodes")
    given = parser.parse_args()
    main(given.names, given.work)
