"""A few steps of an environment with each of K policies: where they are asked, before any episode is spent."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from manyfold.arrays import Array, Ints
from manyfold.envs.base import Environment
from manyfold.policies.actors import ActorSet
from manyfold.policies.base import PolicySet
from manyfold.streams import stream

PROBES, LEAST = 400, 4  # steps of the environment in all, and of one policy
PLACES = 64  # of them, where policies draw many actions


@dataclass(frozen=True)
class Probes:
    """Steps of short episodes of every policy, one after the other."""

    obs: NDArray[Any]  # [N, width]
    t: Ints  # [N]
    which: Ints  # the policy that was there, [N]
    sent: list[Any]  # what the environment got
    ended: int  # episodes that ended by themselves
    episodes: int

    @property
    def places(self) -> Ints:
        """At most PLACES of the rows, spread over the episodes of all policies."""
        return np.unique(np.linspace(0, len(self.t) - 1, PLACES).astype(np.int64))


class PolicyFailed(ValueError):
    """A policy, not the environment, could not go on."""


def probe(env: Environment, policies: PolicySet | ActorSet, seed: int) -> Probes:
    """PROBES steps in turns, a policy after the other; what the environment raises is let through."""
    running, rng = env.open(1, stream("check", env.name, seed, "env")), stream("check", env.name, seed, "actions")
    rows: list[tuple[NDArray[Any], int, int, Any]] = []
    ended = episodes = 0
    first = np.zeros(1, dtype=np.int64)
    for k in range(policies.n_policies):
        obs = running.reset(first)
        episodes += 1
        for left in range(max(LEAST, PROBES // policies.n_policies) - 1, -1, -1):
            t = running.t.copy()
            sent = _sent(policies, env, k, obs, t, rng)
            rows.append((obs[0].copy(), int(t[0]), k, sent))
            obs, _, terminated, truncated = running.step(sent)
            ended += int(terminated[0] or (truncated[0] and running.t[0] < env.horizon))
            if running.done[0] and left:
                obs = running.reset(first)
                episodes += 1
    states, t_s, which, sents = zip(*rows, strict=True)
    return Probes(np.stack(states), np.array(t_s), np.array(which), list(sents), ended, episodes)


def _sent(
    policies: PolicySet | ActorSet, env: Environment, k: int, obs: NDArray[Any], t: Ints, rng: np.random.Generator
) -> NDArray[Any]:
    """What policy k sends to the environment, `[1]` or `[1, d]`."""
    if isinstance(policies, ActorSet):
        act = policies.acts[k]
        actions = np.asarray(asked(lambda: act(obs, t), policies.names[k]))
        space, counted = env.action_space, isinstance(env.action_space, spaces.Discrete)
        fits = np.issubdtype(actions.dtype, np.integer if counted else np.number) and np.isfinite(actions).all()
        if actions.shape != (1, *(space.shape or ())) or not fits:
            raise PolicyFailed(f"{policies.names[k]} gave {actions!r:.60} for one observation, expected {space}")
        return actions
    head, who = policies.head, "a policy" if policies.n_policies > 1 else policies.names[0]  # all are asked together
    if head is None:
        return np.asarray(asked(lambda: policies.sample(np.array([k]), obs, t, rng), who))
    return np.asarray(asked(lambda: head.sent(head.draw(policies.parameters(obs, t)[k], rng)), who))


def asked(ask: Callable[[], Any], name: str) -> Any:
    """The answer of somebody's policy, or one line."""
    try:
        return ask()
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise PolicyFailed(f"{name} failed at an observation of the environment: {kind}{said}") from error


def said_at(policies: PolicySet, obs: NDArray[Any], t: Ints) -> Array:
    """Probabilities `[K, N, A]`, or parameters `[K, N, P]` of actions that are vectors."""
    ask = policies.probs if policies.head is None else policies.parameters
    return np.asarray(asked(lambda: ask(obs, t), "a policy"))
