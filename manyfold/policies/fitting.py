"""Do these policies belong to this environment? What a checkpoint leaves open, the environment says."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from manyfold.envs.base import Environment
from manyfold.policies.actors import ActorSet, Drawn
from manyfold.policies.base import PolicySet
from manyfold.policies.heads import Gaussian, MultiCategorical
from manyfold.policies.imported import described
from manyfold.policies.layers import Image
from manyfold.policies.modules import ModulePolicySet


class OneHot(nn.Module):
    """An index `[N, 1]` as a vector of `size` numbers, which is how networks see counted states."""

    def __init__(self, size: int, module: nn.Module) -> None:
        super().__init__()
        self.size, self.module = size, module

    def forward(self, obs: Tensor) -> Any:
        return self.module((obs == torch.arange(self.size)).float())


def fitted(policies: PolicySet | ActorSet, env: Environment) -> PolicySet | ActorSet:
    """The same policies, ready for the environment; one line where they are of another one."""
    if isinstance(policies, PolicySet):
        return _fitted(policies, env)
    acts = [replace(x, policies=_fitted(x.policies, env)) if isinstance(x, Drawn) else x for x in policies.acts]
    one_hot = bool(env.n_states) and any(isinstance(x, Drawn) for x in acts)
    width = env.width if one_hot else policies.width
    _check_width(width, env)
    made = ActorSet(acts, policies.names, policies.how, width)
    made.imported = policies.imported
    return made


def _fitted(policies: PolicySet, env: Environment) -> PolicySet:
    if isinstance(policies, ModulePolicySet):
        policies = _completed(policies, env)
    _check_width(policies.width, env)
    _check_actions(policies, env)
    if policies.horizon < env.horizon:
        raise ValueError(
            f"the policies are defined up to step {policies.horizon}, {env.name} has {env.horizon}; "
            f"give horizon={policies.horizon}"
        )
    return policies


def _check_width(width: int, env: Environment) -> None:
    if width not in (0, env.width):
        raise ValueError(
            f"the policies take observations of {width} numbers, those of {env.name} have {env.width}; "
            "is it the environment they were trained in, with the same wrappers?"
        )


def _completed(policies: ModulePolicySet, env: Environment) -> ModulePolicySet:
    """One-hot inputs where states are counted, and the bounds of actions where the files don't say them."""
    modules, width, head = policies.modules, policies.width, policies.head
    if len(shape := env.observation_space.shape or ()) == 3:
        modules = [_with_axes(module, shape) for module in modules]
    if env.n_states and width == env.n_states > 1:
        modules, width = [OneHot(env.n_states, module) for module in modules], 1
    if isinstance(head, Gaussian) and isinstance(env.action_space, spaces.Box):
        low, high = np.ravel(env.action_space.low), np.ravel(env.action_space.high)
        if not np.isfinite([*head.low, *head.high]).any() and len(low) == len(head.low):
            head = replace(head, low=tuple(low.tolist()), high=tuple(high.tolist()))
    if modules is policies.modules and head == policies.head:
        return policies
    made = ModulePolicySet(modules, head or policies.n_actions, width, policies.horizon, policies.names, policies.how)
    made.imported = policies.imported
    return made


def _with_axes(module: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """A network that sees images `[channels, height, width]`, for an environment that gives `shape`."""
    height, width, channels = shape
    images = [part.shape for part in module.modules() if isinstance(part, Image)]
    if (channels, height, width) not in images or shape in images:
        return module
    module = copy.deepcopy(module)
    for part in module.modules():
        if isinstance(part, Image):
            part.channels_last = True
    return module


def _check_actions(policies: PolicySet, env: Environment) -> None:
    space, head = env.action_space, policies.head
    fits = {
        "an index": lambda: isinstance(space, spaces.Discrete) and int(space.n) == policies.n_actions,
        "normal": lambda: (
            isinstance(head, Gaussian) and isinstance(space, spaces.Box) and _size(space) == len(head.low)
        ),
        "choices": lambda: isinstance(head, MultiCategorical) and _choices(space) == head.nvec,
    }
    kind = "an index" if head is None else "normal" if isinstance(head, Gaussian) else "choices"
    if not fits[kind]():
        raise ValueError(
            f"the policies choose {described(head or policies.n_actions)}, {env.name} takes {space}; "
            "is it the environment they were trained in?"
        )


def _size(space: spaces.Box) -> int:
    return int(np.prod(space.shape))


def _choices(space: spaces.Space[Any]) -> tuple[int, ...]:
    if isinstance(space, spaces.MultiDiscrete):
        return tuple(int(n) for n in space.nvec.ravel())
    return (2,) * int(np.prod(space.shape)) if isinstance(space, spaces.MultiBinary) else ()
