"""How time and memory grow with the policies and the steps: K = 10, 30, 100 and T = 100, 300, 1,000.

    python -m benchmarks.scale                       # 2,000 episodes each; about 20 minutes
    python -m benchmarks.scale --episodes 400 --policies 10 30 --horizons 100

Networks of two layers of 64 over vectors of 8 numbers, actions of two dimensions, in an environment that costs next to
nothing: what is measured is ours. Every case is a process of its own with one thread; seconds are of CPU time. Fits are
of q for as many networks, from 20,000 logged tuples with four counted actions. An exponent of 1 means proportional.
The defaults are written to data/scale; a case that is there is not run again (`--again` runs all).
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

import manyfold as mf
from manyfold.arrays import Array, Bools, Ints
from manyfold.envs.base import Environment, Observations
from manyfold.estimate.sources import Pooling
from manyfold.files import write_json
from manyfold.policies.layers import FixedStd
from manyfold.streams import stream
from manyfold.tables import markdown, write_table

WIDTH, ACTIONS, LOGGED = 8, 2, 20_000
OUT = Path("data/scale/time.json")
PARTS = "rollouts", "estimates", "decisions"


class Drift(Environment):
    """s' = 0.95 s + (a, 0, ...) + noise, paid -|s|^2; never ends by itself."""

    def __init__(self, horizon: int) -> None:
        self.name, self.horizon = "drift", horizon
        self.observation_space = spaces.Box(-np.inf, np.inf, (WIDTH,), np.float64)
        self.action_space = spaces.Box(-1.0, 1.0, (ACTIONS,), np.float64)

    def open(self, n: int, rng: np.random.Generator) -> "Drifting":
        return Drifting(self.horizon, n, rng)


class Drifting:
    """N episodes of it."""

    def __init__(self, horizon: int, n: int, rng: np.random.Generator) -> None:
        self.horizon, self.n, self.rng = horizon, n, rng
        self.t: Ints = np.zeros(n, dtype=np.int64)
        self.done: Bools = np.ones(n, dtype=np.bool_)
        self.state: Array = np.zeros((n, WIDTH))

    def reset(self, slots: Ints) -> Observations:
        self.state = self.state.copy()
        self.state[slots] = self.rng.standard_normal((len(slots), WIDTH))
        self.t[slots], self.done[slots] = 0, False
        return self.state

    def step(self, actions: Array) -> tuple[Observations, Array, Bools, Bools]:
        going = ~self.done
        after = 0.95 * self.state + 0.1 * self.rng.standard_normal(self.state.shape)
        after[:, :ACTIONS] += 0.1 * actions
        self.state = np.where(going[:, None], after, self.state)
        self.t[going] += 1
        truncated = going & (self.t >= self.horizon)
        self.done = self.done | truncated
        return self.state, -(self.state**2).sum(-1) * going, np.zeros(self.n, dtype=np.bool_), truncated


def networks(k: int, outputs: int) -> list[nn.Module]:
    """A training run's checkpoints: each a small step from the last one."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
    found = []
    for _ in range(k):
        with torch.no_grad():
            for x in first.parameters():
                x += 0.002 * torch.randn_like(x)
        copy = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
        copy.load_state_dict(first.state_dict())
        found.append(copy)
    return found


def evaluation(k: int, horizon: int, episodes: int) -> dict[str, float]:
    """Seconds of an evaluation: all of it, and the decision."""
    modules: list[nn.Module] = [FixedStd(module, torch.full((ACTIONS,), -1.0)) for module in networks(k, ACTIONS)]
    policies = mf.ModulePolicySet(modules, mf.Gaussian((-1.0,) * ACTIONS, (1.0,) * ACTIONS), WIDTH)
    env = Drift(horizon)
    source = Pooling(env, policies, stream("scale"))
    spent = dict.fromkeys(("rollouts", "estimates"), 0.0)
    run, pooled = source._execute, source._pooled

    def timed(name, function):  # type: ignore[no-untyped-def]
        def call(*arguments):  # type: ignore[no-untyped-def]
            start = time.process_time()
            found = function(*arguments)
            spent[name] += time.process_time() - start
            return found

        return call

    source._execute, source._pooled = timed("rollouts", run), timed("estimates", pooled)  # type: ignore[method-assign]
    result = source.fixed(episodes)
    start = time.process_time()
    result.decide()
    relative = float((result.variance / result.on_policy_variance).mean())
    return {**spent, "decisions": time.process_time() - start, "relative": relative}


def fits(k: int) -> dict[str, float]:
    """Seconds of a fit of q."""
    rng = stream("scale-fits")
    policies = mf.ModulePolicySet(networks(k, 4), 4, WIDTH, 100)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        with mf.Writer(path, mf.About("drift", 100, 4, WIDTH, 0)) as writer:
            state = rng.standard_normal((LOGGED, WIDTH))
            writer.write(
                {
                    "episode": np.arange(LOGGED) // 100,
                    "t": np.arange(LOGGED) % 100,
                    "state": state,
                    "action": rng.integers(4, size=LOGGED),
                    "reward": -(state**2).sum(-1),
                    "next_state": 0.95 * state,
                    "terminated": np.zeros(LOGGED, dtype=bool),
                    "truncated": np.arange(LOGGED) % 100 == 99,
                }
            )
        start = time.process_time()
        mf.fit(mf.Transitions(path), *mf.q_problem(policies), rng, mf.FitConfig(updates_per_step=10))
    return {"fits": time.process_time() - start}


def case(k: int, horizon: int, episodes: int) -> dict[str, float]:
    """In a process of its own, whose peak memory counts; T = 0 is the fit."""
    command = [sys.executable, "-m", "benchmarks.scale", "--case", str(k), str(horizon), str(episodes)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def exponent(sizes: list[int], seconds: list[float]) -> str:
    return f"{np.polyfit(np.log(sizes), np.log(seconds), 1)[0]:.2f}" if len(sizes) > 1 else ""


def evaluations(cases: dict[str, dict[str, float]], policies: list[int], horizons: list[int]) -> list[tuple[str, ...]]:
    """The table of evaluations: every case, and how each part grows."""
    rows: list[tuple[str, ...]] = [("", "T", *PARTS, "peak memory", "relative variance")]
    for horizon in horizons:
        each = [cases[f"K={k} T={horizon}"] for k in policies]
        for k, found in zip(policies, each, strict=True):
            seconds = (f"{found[name]:.2f} s" for name in PARTS)
            rows.append((f"K = {k}", f"{horizon:,}", *seconds, f"{found['GiB']:.2f} GiB", f"{found['relative']:.3f}"))
        grown = (exponent(policies, [found[name] for found in each]) for name in PARTS)
        rows.append(("exponent in K", f"{horizon:,}", *grown, "", ""))
        times = (f"{each[-1][name] / each[0][name]:.1f}" for name in PARTS)
        rows.append((f"K = {policies[-1]} over {policies[0]}", f"{horizon:,}", *times, "", ""))
    for k in policies[-1:] if len(horizons) > 1 else []:
        each = [cases[f"K={k} T={horizon}"] for horizon in horizons]
        grown = (exponent(horizons, [found[name] for found in each]) for name in PARTS)
        rows.append((f"exponent in T, K = {k}", "", *grown, "", ""))
    return rows


def fitted(cases: dict[str, dict[str, float]], policies: list[int]) -> list[tuple[str, ...]]:
    """The table of fits."""
    each = [cases[f"K={k} T=0"] for k in policies]
    rows = [("", "fits", "peak memory")]
    rows += [(f"K = {k}", f"{x['fits']:.1f} s", f"{x['GiB']:.2f} GiB") for k, x in zip(policies, each, strict=True)]
    rows.append(("exponent in K", exponent(policies, [x["fits"] for x in each]), ""))
    return [*rows, (f"K = {policies[-1]} over {policies[0]}", f"{each[-1]['fits'] / each[0]['fits']:.1f}", "")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--policies", type=int, nargs="+", default=[10, 30, 100])
    parser.add_argument("--horizons", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--again", action="store_true", help="run cases that are in data/scale, too")
    parser.add_argument("--case", type=int, nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.case:
        k, horizon, episodes = args.case
        found = evaluation(k, horizon, episodes) if horizon else fits(k)
        found["GiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps(found))
        return
    kept = args.episodes == parser.get_default("episodes")
    cases = json.loads(OUT.read_text()) if kept and OUT.exists() and not args.again else {}
    for horizon in [0, *args.horizons]:
        for k in args.policies:
            if (name := f"K={k} T={horizon}") not in cases:
                cases[name] = case(k, horizon, args.episodes)
                if kept:
                    write_json(OUT, cases)
    tables = {"time": evaluations(cases, args.policies, args.horizons), "fits": fitted(cases, args.policies)}
    for name, rows in tables.items():
        print(markdown(rows))
        if kept and args.policies == parser.get_default("policies") and args.horizons == parser.get_default("horizons"):
            write_table(rows, OUT.with_name(name), ("md",))


if __name__ == "__main__":
    main()
