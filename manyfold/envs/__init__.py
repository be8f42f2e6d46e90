"""Where episodes happen: Gridworld, MuJoCo with a binned action, a finite MDP, any Gymnasium environment, envpool's."""

import importlib
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym  # `gymnasium` is this package's own module

from manyfold.envs.base import Environment, Finite, Running
from manyfold.envs.binned_mujoco import BinnedMujoco
from manyfold.envs.envpool import EnvpoolEnvironment
from manyfold.envs.gridworld import Gridworld
from manyfold.envs.gymnasium import CRASHES, GymnasiumEnvironment

__all__ = [
    "BinnedMujoco",
    "Environment",
    "EnvpoolEnvironment",
    "Finite",
    "Gridworld",
    "GymnasiumEnvironment",
    "Running",
    "make",
]


def make(
    env: Environment | str | Callable[..., gym.Env[Any, Any]], horizon: int | None = None, **kwargs: Any
) -> Environment:
    """An environment from what people have.

    Args:
        env: an Environment; a Gymnasium id ("CartPole-v1", or "module:Name-v0", which imports the module first);
            "envpool:Hopper-v5" for envpool's; "module:function" or a function, which makes a `gymnasium.Env`.
        horizon: steps of an episode at most; the environment's own TimeLimit if left out.
        kwargs: for `gymnasium.make`, envpool or the function.
    """
    if isinstance(env, Environment):
        if kwargs or horizon not in (None, env.horizon):
            raise ValueError(
                f"{env.name} is made already, with horizon {env.horizon}; expected no horizon, no arguments"
            )
        return env
    function = _function(env) if isinstance(env, str) and not env.startswith("envpool:") else None
    if isinstance(env, str) and function is None and (own := kwargs.keys() & {"make", "id", "name"}):
        raise ValueError(
            f"environment {env!r}: {own.pop()} can't be passed on to it, expected other arguments, or module:function "
            "with a function of yours"
        )
    if isinstance(env, str) and env.startswith("envpool:"):
        return EnvpoolEnvironment(env.removeprefix("envpool:"), horizon, **kwargs)
    if isinstance(env, str):
        if function is None:
            return GymnasiumEnvironment(env, horizon, **kwargs)
        return _made(function, horizon, env, kwargs)
    if not callable(env):
        raise ValueError(f"env is {env!r:.60}, expected an Environment, a Gymnasium id or a function that makes one")
    return _made(env, horizon, str(getattr(env, "__name__", "environment")), kwargs)


def _made(
    function: Callable[..., gym.Env[Any, Any]], horizon: int | None, name: str, kwargs: dict[str, Any]
) -> Environment:
    made = GymnasiumEnvironment(partial(function, **kwargs), horizon, name)
    made.settings = dict(kwargs)
    return made


def _function(text: str) -> Callable[..., gym.Env[Any, Any]] | None:
    """What "module:function" names; None of a Gymnasium id."""
    module, _, name = text.partition(":")
    if not name or "/" in name:
        return None
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise ValueError(f"environment {text!r}: {error}; is the module in the current folder?") from None
    except CRASHES as error:  # whatever a user's own module raises
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"environment {text!r}: importing {module!r} failed ({said:.200}), expected a module"
        ) from error
    if not callable(found) and name not in gym.registry and not re.search(r"-v\d+$", name):
        raise ValueError(
            f"environment {text!r}: {module} has no function {name}, expected one that makes a gymnasium.Env"
        )
    return found if callable(found) else None
