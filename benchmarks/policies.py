"""What does one more policy cost? Episodes in all that know EVERY policy equally well, for 2 to 100 checkpoints.

    python -m benchmarks.policies                      # all cases; what is there already is not run again
    python -m benchmarks.policies --only Gridworld

Stable-Baselines3's PPO learns, and a hundred of its policies are kept: near together (about 3,200 training steps, one
every few gradient steps) or over the whole run. K of them, evenly spread, are evaluated. The unit is what one policy
costs by itself: cost 1 is as many episodes as on-policy MC needs for the mean variance of the hundred, whatever the
precision. On-policy MC then costs the sum of its policies, each with as many episodes as it needs, or, in turns, K
times the worst policy's; who shares all episodes, run in turns, costs what the worst policy does, n Var / that mean.

Gridworld 1,000: on-policy MC and MPE are exact. MPE and *+ q* have the exact q (and q_hat) or fitted ones, counted from
1,000 logged episodes. Pooled evaluation is sampled, by what `Estimate.variance` says, averaged over repeats before the
worst is taken (which errs upwards), from at least ten episodes of each policy. CartPole and Hopper (T = 1,000, all
dimensions): nothing logged, nothing fitted.
Standard errors: over trainings, or a jackknife over repeats where there is one training.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import manyfold as mf
from benchmarks.pooled_sets import Table, logged
from manyfold import envs, exact
from manyfold.arrays import Array
from manyfold.design.behavior import floored
from manyfold.envs import Gridworld
from manyfold.files import atomic, write_json
from manyfold.fqe.counting import count
from manyfold.fqe.problems import Problem, look_up, q_problem
from manyfold.mdp import FiniteMDP
from manyfold.policies.tabular import TabularPolicySet
from manyfold.rollout import rollout_tabular
from manyfold.streams import stream
from manyfold.tables import markdown, write_table
from tasks.figures import plt, save, style

MANY, LOGGED, M = 100, 1000, 10
OUT = Path("data/scale/policies")
Costs = dict[str, list[float]]  # n Var of each policy, by the way it is evaluated


class World(NamedTuple):
    """An environment, how PPO learns there, and which gradient steps are kept."""

    env: str
    ppo: dict[str, Any]
    parallel: int  # environments of the training
    normalised: bool
    update: tuple[int, int]  # training steps and gradient steps of one update
    updates: int  # of the whole run
    near: int  # the update after which the near ones begin
    seeds: int
    repeats: int
    sizes: tuple[int, ...]
    episodes: Callable[[int], int]  # of an evaluation of K policies

    def kept(self, spread: str) -> list[int]:
        """Gradient steps."""
        steps, moves = self.update
        if spread == "near":
            first, width = self.near * moves, round(3200 / steps * moves)
            return (first + np.linspace(1, width, MANY).round().astype(int)).tolist()
        return np.linspace(moves, self.updates * moves, MANY).round().astype(int).tolist()


CLEANRL = {"n_steps": 128, "batch_size": 128, "n_epochs": 4, "learning_rate": 2.5e-4, "ent_coef": 0.01}
SPREADS = {"near": "3,200 training steps", "whole": "the whole run"}
WORLDS = {
    "Gridworld": World(
        "manyfold/Gridworld-v0", CLEANRL, 4, False, (512, 16), 156, 12, 3, 2, (2, 5, 10, 20, 50, 100), lambda k: 2000
    ),
    "CartPole": World(
        "CartPole-v1", {}, 1, False, (2048, 320), 40, 8, 1, 2, (2, 10, 30, 100), lambda k: max(1000, 20 * k)
    ),
    "Hopper": World("Hopper-v5", {}, 1, True, (2048, 320), 20, 10, 1, 2, (2, 10, 100), lambda k: max(600, 10 * k)),
}
LIMITS = {"near": (0.1, 200), "whole": (0.05, 2e6)}  # of the figure
LABELS = {  # Okabe-Ito: the colour-blind can tell them apart
    "monte carlo": ("on-policy MC", "#000000", "--"),
    "in turns": ("on-policy MC, in turns", "#000000", ":"),
    "mpe": ("MPE, exact q", "#D55E00", "-"),
    "mpe fitted": ("MPE, fitted q", "#E69F00", "--"),
    "mpe q": ("MPE + exact q", "#CC79A7", "-"),
    "pooled": ("pooled, nothing logged", "#0072B2", "-"),
    "pooled fitted": ("pooled + fitted q", "#56B4E9", "--"),
    "pooled q": ("pooled + exact q", "#009E73", "-"),
}


# --- policies ---


def train(world: World, seed: int, folder: Path) -> None:
    """All checkpoints of a training, unless they are there."""
    wanted = {step for spread in SPREADS for step in world.kept(spread)}
    if all(checkpoint(folder, step).exists() for step in wanted):
        return
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    arguments = {"m": M, "reward_seed": seed} if world.env.startswith("manyfold") else {}
    running = make_vec_env(world.env, world.parallel, seed, env_kwargs=arguments)
    running = VecNormalize(running) if world.normalised else running
    model: Any = PPO("MlpPolicy", running, seed=seed, device="cpu", **world.ppo)
    moved = 0  # gradient steps so far

    def after(*_: Any) -> None:
        nonlocal moved
        moved += 1
        if moved not in wanted:
            return
        path = checkpoint(folder, moved)
        if isinstance(running, VecNormalize):
            running.save(str(path.with_name(f"ppo_vecnormalize_{moved}_steps.pkl")))
        with atomic(path) as part, part.open("wb") as file:
            model.save(file)

    folder.mkdir(parents=True, exist_ok=True)
    model.policy.optimizer.register_step_post_hook(after)
    model.learn(max(world.updates * world.update[0], -(-max(wanted) // world.update[1]) * world.update[0]))


def checkpoint(folder: Path, moved: int) -> Path:
    """Named as Stable-Baselines3's CheckpointCallback would."""
    return folder / f"ppo_{moved}_steps.zip"


def chosen(k: int) -> list[int]:
    """K of the hundred, the first and the last among them."""
    return np.linspace(0, MANY - 1, k).round().astype(int).tolist()


def load(world: World, folder: Path, spread: str, which: list[int]) -> mf.PolicySet:
    steps = world.kept(spread)
    found = mf.load_policies([checkpoint(folder, steps[i]) for i in which])
    assert isinstance(found, mf.PolicySet)
    return found


# --- costs ---


def sampled(world: World, folder: Path, spread: str, seed: int, k: int, repeat: int) -> Costs:
    """Where only episodes can tell."""
    policies = load(world, folder, spread, chosen(k))
    env, rng = envs.make(f"envpool:{world.env}"), stream("benchmark-policies", world.env, spread, seed, k, repeat)
    found = mf.pool(mf.collect(env, policies, world.episodes(k), rng))
    return {"own": (found.on_policy_variance / k).tolist(), "pooled": found.variance.tolist()}


def tables(world: World, folder: Path, spread: str) -> Array:
    """All hundred policies, `[100, T, S, A]`."""
    policies = load(world, folder, spread, list(range(MANY)))
    cell, t = np.tile(np.arange(M * M), M), np.repeat(np.arange(M), M * M)
    obs = np.concatenate([cell[:, None] == np.arange(M * M), t[:, None] / M], 1, dtype=np.float32)
    found = policies.probs(obs, t).astype(np.float64).reshape(MANY, M, M * M, -1)
    return np.asarray(found / found.sum(-1, keepdims=True))


def fits(mdp: FiniteMDP, pi: Array, seed: int) -> tuple[Array, Array]:
    """q and q_hat counted from logged episodes of ten of the policies, a third of whose actions are random."""
    loggers = 2 / 3 * pi[chosen(10)] + 1 / 3 / pi.shape[-1]
    rows = rollout_tabular(mdp, loggers, LOGGED, stream("benchmark-policies", "logged", seed))
    after = np.concatenate([rows.states[:, 1:], rows.states[:, -1:]], 1)  # what follows the last step never counts
    n, horizon = rows.states.shape
    small, last = TabularPolicySet(pi), np.tile(np.arange(horizon) == horizon - 1, n)
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "rows.parquet"
        with mf.Writer(path, mf.About("gridworld-1000", horizon, pi.shape[-1], 1, 0)) as writer:
            columns = {"episode": np.repeat(np.arange(n), horizon), "t": np.tile(np.arange(horizon), n)}
            columns |= {"state": rows.states.reshape(-1, 1), "action": rows.actions.ravel()}
            columns |= {"reward": rows.rewards.ravel(), "next_state": after.reshape(-1, 1)}
            writer.write({**columns, "terminated": last, "truncated": np.zeros_like(last)})
        data = mf.Transitions(path)
        q = count(data, q_problem(small), mdp.n_states)

        def r_hat(batch: Any) -> Array:
            taken = q[:, batch.t, batch.state[:, 0].astype(np.int64), batch.action]
            return np.asarray(2 * batch.reward * taken - batch.reward**2)

        q_hat = count(data, Problem(r_hat, look_up(pi)), mdp.n_states)
    return q, floored(q_hat, q, np.abs(q_hat).mean((1, 2, 3)))


def exactly(world: World, folder: Path, spread: str, seed: int, work: Path) -> None:
    """Gridworld: all sizes and repeats of one training."""
    mdp, pi = Gridworld.draw(M, seed).mdp(), tables(world, folder, spread)
    q, q_hat = exact.action_values(mdp, pi), exact.second_moments(mdp, pi)
    fitted, fitted_hat = fits(mdp, pi, seed)
    own = np.array([exact.pdis_variance(mdp, one[None], one)[0] for one in pi])
    for k in world.sizes:
        which = chosen(k)
        some = pi[which]
        found = {"own": own[which].tolist()}
        for name, moments in (("mpe", q_hat), ("mpe fitted", fitted_hat)):
            mu = exact.shared_behavior(some, moments[which])
            mu = np.maximum(mu, 1e-300)
            found[name] = exact.pdis_variance(mdp, some, mu).tolist()
            if name == "mpe":
                found["mpe q"] = exact.baseline_variance(mdp, some, mu, q[which]).tolist()
        for repeat in range(world.repeats):
            if (path := work / f"{spread}-{seed}-{k}-{repeat}.json").exists():
                continue
            rng = stream("benchmark-policies", "gridworld", spread, seed, k, repeat)
            episodes = logged(mdp, some, world.episodes(k), rng)
            for name, baseline in (("pooled", None), ("pooled q", q), ("pooled fitted", fitted)):
                table = None if baseline is None else Table(baseline[which])
                found[name] = mf.pool(episodes, table).variance.tolist()
            write_json(path, found)


def measure(name: str, world: World, work: Path) -> None:
    """Every case that is not there yet."""
    for seed in range(world.seeds):
        folder = work / f"seed-{seed}"
        for spread in SPREADS:
            cases = [(k, repeat) for k in world.sizes for repeat in range(world.repeats)]
            paths = {case: work / f"{spread}-{seed}-{case[0]}-{case[1]}.json" for case in cases}
            if all(path.exists() for path in paths.values()):
                continue
            train(world, seed, folder)
            if name == "Gridworld":
                exactly(world, folder, spread, seed, work)
            for (k, repeat), path in paths.items():
                if not path.exists():
                    write_json(path, sampled(world, folder, spread, seed, k, repeat))
                    print(f"{name}, {spread}, seed {seed}: K = {k}, repeat {repeat}", flush=True)


def cost(way: str, runs: list[Costs], unit: float) -> float:
    """Of all policies, from all repeats of one training."""
    if way == "monte carlo":
        return float(np.mean([run["own"] for run in runs], 0).sum() / unit)
    if way == "in turns":
        return float(len(runs[0]["own"]) * np.mean([run["own"] for run in runs], 0).max() / unit)
    return float(np.mean([run[way] for run in runs], 0).max() / unit)


def costs(world: World, spread: str, work: Path) -> dict[str, dict[str, list[float]]]:
    """Cost and its standard error, of every way and K."""
    runs = {
        (seed, k): [json.loads((work / f"{spread}-{seed}-{k}-{r}.json").read_text()) for r in range(world.repeats)]
        for seed in range(world.seeds)
        for k in world.sizes
    }
    units = [float(np.mean([run["own"] for run in runs[seed, MANY]])) for seed in range(world.seeds)]
    out: dict[str, dict[str, list[float]]] = {}
    for way in LABELS:
        if way not in ("monte carlo", "in turns", *runs[0, MANY][0]):
            continue
        for k in world.sizes:
            each = [cost(way, runs[seed, k], unit) for seed, unit in enumerate(units)]
            if world.seeds > 1:
                error = np.std(each, ddof=1) / np.sqrt(len(each))
            else:
                some = runs[0, k]
                left = [cost(way, some[:r] + some[r + 1 :], units[0]) for r in range(len(some))]
                error = np.sqrt((len(left) - 1) * np.var(left))
            out.setdefault(way, {})[str(k)] = [float(np.mean(each)), float(error)]
    return out


# --- table and figure ---


def shown(value: float, error: float) -> str:
    if value >= 1e4 or not np.isfinite(value):
        return f"{value:.0e}"
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} +- {error:.{digits}f}"


def rows(results: dict[str, dict[str, dict[str, dict[str, list[float]]]]]) -> list[tuple[str, ...]]:
    """A line for every environment, spread and way."""
    sizes = (2, 10, 100)
    out: list[tuple[str, ...]] = [("environment, checkpoints from", "", *(f"K = {k}" for k in sizes))]
    for name, spreads in results.items():
        for spread, ways in spreads.items():
            for way, found in ways.items():
                cells = (shown(*found[str(k)]) for k in sizes)
                out.append((f"{name}, {SPREADS[spread]}", LABELS[way][0], *cells))
    return out


def draw(results: dict[str, dict[str, dict[str, dict[str, list[float]]]]]) -> None:
    """Cost against K: a column for each environment, near ones above."""
    style()
    figure, axes = plt.subplots(
        len(SPREADS), len(results), figsize=(3.4 * len(results), 6.6), squeeze=False, layout="constrained", sharex=True
    )
    for column, (name, spreads) in enumerate(results.items()):
        for row, (spread, ways) in enumerate(spreads.items()):
            axis = axes[row, column]
            for way, found in ways.items():
                label, colour, dash = LABELS[way]
                k = [int(x) for x in found]
                value = np.array([x[0] for x in found.values()])
                axis.plot(k, value, dash, color=colour, label=label, linewidth=2, marker="o", markersize=3)
            axis.set(xscale="log", yscale="log", title=f"{name}, {SPREADS[spread]}", ylim=LIMITS[spread])
            axis.set_xticks([2, 5, 10, 30, 100], ["2", "5", "10", "30", "100"])
            axis.minorticks_off()
            axis.axhline(1, color="grey", linewidth=0.8)
        axes[-1, column].set_xlabel("checkpoints evaluated, K")
    for axis in axes[:, 0]:
        axis.set_ylabel("cost of all, in policies run alone")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=min(4, 2 * len(results)))
    save(figure, OUT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(WORLDS), default=list(WORLDS), help="environments to run")
    parser.add_argument("--work", type=Path, default=Path("build/policies"), help="checkpoints and single cases")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = OUT.with_suffix(".json")
    known = json.loads(path.read_text()) if path.exists() else {}
    for name in args.only:
        work = args.work / name.lower()
        work.mkdir(parents=True, exist_ok=True)
        measure(name, WORLDS[name], work)
        known[name] = {spread: costs(WORLDS[name], spread, work) for spread in SPREADS}
        write_json(path, known)
    results = {name: known[name] for name in WORLDS if name in known}
    table = rows(results)
    print(markdown(table))
    write_table(table, OUT, ("md",))
    draw(results)


if __name__ == "__main__":
    main()
