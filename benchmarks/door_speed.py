"""What an evaluation costs beside its bare episodes, and from command to page: `python -m benchmarks.door_speed`.

Stable-Baselines3 checkpoints, ten of Hopper-v5 in all three dimensions (those of `benchmarks.vectors`) and eight of
CartPole-v1. All but the command runs in one process and one thread, in CPU time, in which other programs hardly count.
Two things can be meant by the bare episodes:

- *bare*: the same episodes again, the same actions in the same environments, and nothing else: nobody chooses;
- *vector API*: what people write: Gymnasium's SyncVectorEnv, one policy at a time, which chooses its own actions.

The first table has the rates of the episodes alone, with every action's density under every policy. The second one has
all parts of `manyfold evaluate`, in seconds and in times the bare episodes; beside it, per step, `evaluate_policy` of
Stable-Baselines3 for each checkpoint, as many episodes, 25 environments at once. The third is the command as it is
typed: by the clock with all cores, and the CPU time of one worker. *mj_step* is MuJoCo alone.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

import manyfold as mf
from benchmarks.show import show
from benchmarks.vectors import GROUPS, files, train
from manyfold import envs
from manyfold.estimate import sources
from manyfold.estimate.workers import Crew
from manyfold.streams import stream

ROUNDS = 3
EPISODES = {"CartPole-v1": 200, "Hopper-v5": 300}
PARTS = ("load the files", "episodes, all densities", "estimate", "decisions, table", "page")
THEIRS = "evaluate_policy, times all"  # of a step
Call = tuple[int, str, tuple[Any, ...], dict[str, Any]]  # which environment, what it was asked to do


class Recorder:
    """An environment, or an envpool, that remembers what it was asked to do."""

    def __init__(self, inner: Any, number: int, calls: list[Call]) -> None:
        self.inner, self.number, self.calls = inner, number, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((self.number, "reset", args, kwargs))
        return self.inner.reset(*args, **kwargs)

    def step(self, *args: Any) -> Any:
        self.calls.append((self.number, "step", args, {}))
        return self.inner.step(*args)


def recorded(env: mf.Environment) -> tuple[list[Call], Callable[[], list[Any]]]:
    """What `env` will be asked to do, and as many environments anew."""
    calls: list[Call] = []
    if isinstance(env, mf.GymnasiumEnvironment):
        plain, made = env._make, list[Recorder]()

        def make() -> Any:
            made.append(Recorder(plain(), len(made), calls))
            return made[-1]

        env._make = make
        return calls, lambda: [plain() for _ in made]
    opened: list[int] = []
    open_plainly = env.open

    def open_(n: int, rng: np.random.Generator) -> Any:
        running: Any = open_plainly(n, rng)
        opened.append(n)
        running._pool = Recorder(running._pool, 0, calls)
        return running

    def again() -> list[Any]:
        running: Any = open_plainly(opened[0], stream("benchmark-door", env.name))  # collect draws the seeds first
        return [running._pool]

    env.open = open_  # type: ignore[method-assign]
    return calls, again


def replayed(calls: list[Call], fresh: list[Any]) -> float:
    """CPU seconds of the same calls again."""
    start = time.process_time()
    for number, what, args, kwargs in calls:
        getattr(fresh[number], what)(*args, **kwargs)
    return time.process_time() - start


def rates(name: str, policies: mf.PolicySet, episodes: int) -> tuple[int, float, float, float]:
    """Steps, and steps/s: bare, the vector API, and manyfold's episodes with all densities."""
    found = []
    for _ in range(ROUNDS):
        start = time.process_time()
        steps = mf.collect(envs.make(name), policies, episodes, stream("benchmark-door", name)).steps
        ours = time.process_time() - start
        env = envs.make(name)
        calls, again = recorded(env)
        mf.collect(env, policies, episodes, stream("benchmark-door", env.name))
        found.append((steps / replayed(calls, again()), vector(name, policies, steps), steps / ours))
    return steps, *np.max(found, 0).tolist()


def vector(name: str, policies: mf.PolicySet, steps: int) -> float:
    """Steps/s of Gymnasium's SyncVectorEnv, the policies one after the other."""
    id, rng = name.removeprefix("envpool:"), np.random.default_rng(0)
    assert isinstance(policies, mf.ModulePolicySet)
    start, slots = time.process_time(), envs.GymnasiumEnvironment.slots
    vec = gymnasium.make_vec(id, num_envs=slots, vectorization_mode="sync")
    done = 0
    for module in policies.modules:
        alone = mf.ModulePolicySet([module], policies.head or policies.n_actions, policies.width)
        obs, _ = vec.reset(seed=0)
        for _ in range(max(1, steps // slots // policies.n_policies)):
            x, which = obs.astype(np.float64), np.zeros(slots, dtype=np.int64)
            if alone.head is None:
                actions: Any = alone.sample(which, x, 0, rng)
            else:
                actions = alone.head.sent(alone.head.draw(alone.parameters(x, 0)[0], rng)).astype(np.float32)
            obs, *_ = vec.step(actions)
            done += slots
    return done / (time.process_time() - start)


def parts(name: str, paths: list[Path], episodes: int) -> dict[str, float]:
    """CPU seconds of each part of an evaluation and of all of it, its steps, and the bare episodes' seconds."""
    spent = dict.fromkeys(PARTS, 0.0)

    def timed(part: str, f: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = f(*args, **kwargs)
            spent[part] += time.process_time() - start
            return result

        return wrapper

    pool, run = sources.pool, Crew.run
    sources.pool, Crew.run = timed(PARTS[2], pool), timed(PARTS[1], run)  # type: ignore[assignment, method-assign]
    try:
        start = time.process_time()
        policies = timed(PARTS[0], load)(paths)
        found = mf.evaluate(name, policies, episodes=episodes)
        assert isinstance(found, mf.Estimate)
        timed(PARTS[3], str)(found)
        with tempfile.TemporaryDirectory() as folder:
            timed(PARTS[4], found.report)(Path(folder) / "report.html")
        out = {**spent, "all": time.process_time() - start, "steps": found.steps}
        env = envs.make(name)
        calls, again = recorded(env)
        mf.evaluate(env, policies, episodes=episodes)
    finally:
        sources.pool, Crew.run = pool, run  # type: ignore[method-assign]
    return out | {"bare": replayed(calls, again())}


def evaluate_policy(name: str, paths: list[Path], episodes: int) -> float:
    """CPU seconds of a step of Stable-Baselines3's, of those that count."""
    from benchmarks.evaluate_policy import SLOTS, played

    start = time.process_time()
    found = played(name, paths, episodes, 0, min(SLOTS, episodes // len(paths)))
    return (time.process_time() - start) / sum(sum(lengths) for _, lengths in found)


def command(name: str, paths: list[Path], episodes: int, workers: int = 0) -> tuple[float, float]:
    """Seconds by the clock and of the CPU from the command to the page; 0 workers are as many as cores, the default."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        asked = ["--env", name, "--episodes", str(episodes), "--report", str(page), "--workers", str(workers)]
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        line = [sys.executable, "-m", "manyfold.cli", "evaluate", *asked, "--quiet", "--policies", *map(str, paths)]
        subprocess.run(line, check=True, capture_output=True)
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        assert page.stat().st_size > 0
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imported(what: str) -> float:
    """CPU seconds of Python and of an import."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", f"import {what}"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def mj_step(seconds: float = 2.0) -> float:
    """Hopper's steps/s, four of MuJoCo's each, in episodes of 50 random actions: nothing but physics."""
    import mujoco

    env: Any = gymnasium.make("Hopper-v5").unwrapped
    model, data, actions = env.model, env.data, np.random.default_rng(0).uniform(-1, 1, (50, 3))
    steps, start = 0, time.process_time()
    while (spent := time.process_time() - start) < seconds:
        mujoco.mj_resetData(model, data)
        for action in actions:
            data.ctrl[:] = action
            mujoco.mj_step(model, data, env.frame_skip)
        steps += len(actions)
    return steps / spent


def hopper(work: Path) -> list[Path]:
    """Ten checkpoints."""
    update, steps = GROUPS["3,000 steps, 2 updates, early"]
    folder = work / f"update-{update}" / "seed-0"
    train(folder, 0, update, steps)
    return [files(folder, step)[0] for step in steps]


def cartpole(work: Path) -> list[Path]:
    """Eight checkpoints, one every 4,096 steps."""
    paths = [work / "cartpole" / f"ppo_{4096 * i}_steps.zip" for i in range(1, 9)]
    if not paths[-1].exists():
        from stable_baselines3 import PPO

        model = PPO("MlpPolicy", "CartPole-v1", seed=0, device="cpu")
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            model.learn(4096, reset_num_timesteps=False).save(path)
    return paths


def load(paths: list[Path]) -> mf.PolicySet:
    """As the door reads them."""
    policies = mf.load_policies(list(paths))
    assert isinstance(policies, mf.PolicySet)
    return policies


def main(work: Path = Path("build/vectors"), episodes: dict[str, int] = EPISODES) -> dict[str, float]:
    torch.set_num_threads(1)
    paths, out = {"Hopper-v5": hopper(work), "CartPole-v1": cartpole(work)}, dict[str, float]()
    rows, choosing = [], dict[str, float]()
    for id, some in paths.items():
        policies = load(some)
        for name in (id, f"envpool:{id}"):
            steps, *found = rates(name, policies, episodes[id])
            bare, theirs, ours = found
            choosing[name] = 1 / theirs
            out |= {f"{name}, share of bare": ours / bare, f"{name}, share of vector API": ours / theirs}
            share = f"{ours / bare:.0%}", f"{ours / theirs:.0%}"
            rows.append((name, f"{policies.n_policies}", f"{steps:,}", *(f"{x:,.0f}" for x in found), *share))
    header = ("", "K", "steps", "bare, steps/s", "vector API", "manyfold", "share of bare", "of vector API")
    show("Episodes with all densities, one process, CPU time", header, rows)
    out["mj_step, Hopper-v5, steps/s"] = mj_step()
    out["Hopper-v5, share of mj_step"] = 1 / choosing["Hopper-v5"] / out["mj_step, Hopper-v5, steps/s"]
    out["Hopper-v5, share of mj_step"] *= out["Hopper-v5, share of vector API"]
    print(f"mujoco.mj_step alone, Hopper-v5: {out['mj_step, Hopper-v5, steps/s']:,.0f} steps/s")

    spent = {id: [parts(id, some, episodes[id]) for _ in range(ROUNDS)] for id, some in paths.items()}
    best = {id: min(found, key=lambda x: x["all"] / x["bare"]) for id, found in spent.items()}
    rows = []
    for what in ("bare", *PARTS, "all"):
        cells = [(f"{x[what]:.2f} s", f"{x[what] / x['bare']:.2f}") for x in best.values()]
        rows.append((what, *(cell for both in cells for cell in both)))
    for id, x in best.items():
        step, theirs = x["all"] / x["steps"], evaluate_policy(id, paths[id], episodes[id])
        out[f"{id}, all over bare"] = x["all"] / x["bare"]
        out[f"{id}, all over vector API"] = step / choosing[id]
        out[f"{id}, {THEIRS}"] = theirs / step
    for what, key in (("all, times vector API", "all over vector API"), (THEIRS, THEIRS)):
        rows.append((what, *(cell for id in best for cell in ("", f"{out[f'{id}, {key}']:.2f}"))))
    header = ("", *(cell for id in best for cell in (f"{id}, {episodes[id]} episodes", "times bare")))
    show(f"All of an evaluation, CPU time, the best of {ROUNDS}", header, rows)

    rows, cores = [], len(os.sched_getaffinity(0))
    for id, some in paths.items():
        wall = min(command(id, some, episodes[id])[0] for _ in range(ROUNDS))
        cpu = min(command(id, some, episodes[id], 1)[1] for _ in range(ROUNDS))
        out |= {f"{id}, command, seconds": wall, f"{id}, command, CPU seconds": cpu}
        rows.append((id, f"{wall:.1f} s", f"{cpu:.1f} s"))
    ours, theirs = (min(imported(x) for _ in range(ROUNDS)) for x in ("manyfold.door, manyfold.cli", "torch"))
    out |= {"imports, CPU seconds": ours, "of torch": theirs}
    rows.append(("of which imports (those of torch)", "", f"{ours:.1f} s ({theirs:.1f} s)"))
    show("From the command to the page", ("", f"by the clock, {cores} cores", "CPU time, 1 worker"), rows)
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/vectors"), help="checkpoints")
    main(parser.parse_args().work)
