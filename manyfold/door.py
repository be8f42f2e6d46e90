"""The door: anyone's environment, anyone's policies, one call.

policies = mf.load_policies("checkpoints/*.zip")
result = mf.evaluate("CartPole-v1", policies, episodes=200)     # or precision=5.0, or stop="best"
print(result)
result.report("report.html")
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
from numpy.typing import ArrayLike
from threadpoolctl import threadpool_limits
from torch import nn

from manyfold import envs
from manyfold.arrays import check_distinct, check_number
from manyfold.data.reading import fit_q
from manyfold.envs.base import Environment
from manyfold.estimate import plain
from manyfold.estimate.baselines import ActionValues
from manyfold.estimate.evaluation import Estimate
from manyfold.estimate.intervals import check_alpha
from manyfold.estimate.sources import Pooling
from manyfold.estimate.stopping import BUDGET, Stopped, until
from manyfold.estimate.stored import Stored
from manyfold.estimate.workers import Crew
from manyfold.policies.actors import ActorSet
from manyfold.policies.base import PolicySet
from manyfold.policies.fitting import fitted
from manyfold.policies.loading import load_policies
from manyfold.policies.modules import ModulePolicySet
from manyfold.streams import stream

Anything = str | Path | PolicySet | ActorSet | Sequence[nn.Module]
NO_END = 'nothing says when to stop, expected episodes=200, precision=0.5 or stop="best"'


def evaluate(
    env: Environment | str | Callable[[], gymnasium.Env[Any, Any]],
    policies: Anything,
    episodes: int | None = None,
    seed: int = 0,
    q: ActionValues | None = None,
    starts: ArrayLike | None = None,
    *,
    stop: str | None = None,
    precision: float | None = None,
    alpha: float = 0.05,
    horizon: int | None = None,
    data: str | Path | None = None,
    store: str | Path | None = None,
    workers: int = 1,
    dask: str | None = None,
    progress: Callable[[Any], None] = lambda what: None,
) -> Estimate | Stopped:
    """Runs the policies in turns and estimates all of them from all episodes.

    Policies without densities (an `ActorSet`) are evaluated by their plain returns, from common starts.

    Args:
        env: an Environment, a Gymnasium id, or a function that makes a `gymnasium.Env`.
        policies: of `load_policies`, or the files that it takes; any PolicySet or ActorSet; or torch modules, which
            give logits.
        episodes: in all, of all policies together; with `stop` or `precision` at most so many, 10,000 if left out.
        seed: the same seed gives the same result.
        q: fitted from logged data, if there are any; without it, baselines come from the episodes themselves.
        starts: first observations from elsewhere, `[m, width]`, of the SAME distribution of starts; see `first_states`.
        stop: "best" or "order": as soon as it is known.
        precision: as soon as every value is known to +- so much, all at once.
        alpha: the probability of a wrong claim, whenever one stops.
        horizon: steps of an episode at most; the environment's own TimeLimit if left out.
        data: logged data, from which a q is fitted; see `manyfold.data.reading`.
        store: a folder that keeps all episodes. Those that are there serve as well, whoever ran them, and only missing
            ones are run.
        workers: processes that run episodes; more than one need `if __name__ == "__main__":` in scripts.
        dask: the address of a Dask scheduler that runs them instead.
        progress: sees what is known so far, which has a sentence as its string.
    """
    if episodes is None and stop is None and precision is None:
        raise ValueError(NO_END)
    if q is not None and data is not None:
        raise ValueError("both q and data are given, expected one of them: data are what a q is fitted from")
    if starts is not None and (stop is not None or precision is not None):
        raise ValueError("starts are of a fixed number of episodes, expected none with stop or precision")
    world = envs.make(env, horizon)
    ready = fitted(_set_of(policies, world), world)
    check_distinct(ready.names)
    if isinstance(ready, ActorSet):
        if any(x is not None for x in (q, starts, data, store)):
            raise ValueError(
                "these policies only act, expected no q, starts, data or store: their episodes say nothing of others"
            )
        return replace(_act(world, ready, episodes, seed, stop, precision, alpha, progress), title=title(world, ready))
    if stop is None and precision is None and episodes is not None:
        check_number("episodes", episodes, 2 * ready.n_policies)
    check_alpha(alpha)
    # Matrices are small: more threads of BLAS would wait for each other, many times as long on a busy machine.
    with threadpool_limits(1, "blas"), Crew(workers, dask) as crew:
        stored = None if store is None else Stored(store, world, ready, seed, crew, progress)
        notes: tuple[str, ...] = ()
        if data is not None:
            q, card = fit_q(data, world, ready, seed, progress)
            notes = (f"{data}: {card}",)
        source = Pooling(world, ready, stream("evaluate", world.name, seed), q, crew, stored, progress)
        said = title(world, ready)
        if source.known:
            said += f"; {source.known:,} stored episodes"
        notes += tuple(stored.notes) if stored else ()
        found: Estimate | Stopped
        if stop is None and precision is None and episodes is not None:
            found = replace(source.fixed(episodes, starts), alpha=alpha)
            if crew.interrupted:
                notes = (*notes, f"Interrupted: {found.episodes:,} of {episodes:,} episodes had ended.")
        else:
            budget = BUDGET if episodes is None else episodes
            found = until(source, stop, precision, budget, alpha, progress=progress)
    return replace(found, title=said, notes=notes)


def title(env: Environment, policies: PolicySet | ActorSet) -> str:
    """The first line of a result: what was evaluated, and greedy or stochastic."""
    k = policies.n_policies
    means = "plain returns from common starts" if isinstance(policies, ActorSet) else "pooled evaluation"
    return f"{env.name}: {k} {'policy' if k == 1 else 'policies'}, {policies.how}; {means}"


def _set_of(policies: Anything, env: Environment) -> PolicySet | ActorSet:
    if isinstance(policies, PolicySet | ActorSet):
        return policies
    if isinstance(policies, str | Path):
        return load_policies(policies)
    found = list(policies) if isinstance(policies, Sequence) else []
    modules = [policy for policy in found if isinstance(policy, nn.Module)]
    if found and len(modules) == len(found):
        return ModulePolicySet(modules, env.n_actions, env.width)
    raise ValueError(
        f"policies are {policies!r:.60}, expected those of load_policies, a PolicySet, an ActorSet or torch modules"
    )


def _act(
    env: Environment,
    actors: ActorSet,
    episodes: int | None,
    seed: int,
    stop: str | None,
    precision: float | None,
    alpha: float,
    progress: Callable[[Any], None],
) -> Estimate | Stopped:
    if stop is not None or precision is not None:
        source = plain.returns(env, actors, seed)
        return until(source, stop, precision, BUDGET if episodes is None else episodes, alpha, progress=progress)
    if episodes is None:
        raise ValueError(NO_END)
    found = plain.plain(env, actors, episodes, seed, lambda done: progress(f"{done:,} of {episodes:,} episodes"))
    return replace(found, alpha=alpha)
