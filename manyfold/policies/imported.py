"""What an importer makes of a file: one policy, by its module, its actions and what to know about it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from manyfold.policies.heads import Gaussian, Head, MultiCategorical
from manyfold.policies.layers import EpsilonGreedy, Normaliser, Parts

NO_DENSITY_NOTE = "TD3 and DDPG have no density: only its own episodes tell about it"
Actions = int | Head  # so many actions that are counted, or what parameters say of a vector


def described(actions: Actions) -> str:
    """The kind of actions in words."""
    if isinstance(actions, int):
        return f"one of {actions} actions"
    if isinstance(actions, Gaussian):
        return f"vectors of {len(actions.low)} numbers"
    return f"{len(actions.nvec)} choices {actions.nvec}" if isinstance(actions, MultiCategorical) else str(actions)


def size(actions: Actions) -> int:
    """How many numbers a module must give for each observation."""
    return actions if isinstance(actions, int) else actions.size


def unbounded(width: int) -> Gaussian:
    """Of a continuous action whose bounds the file doesn't say."""
    return Gaussian((-np.inf,) * width, (np.inf,) * width)


@dataclass(frozen=True)
class Imported:
    """One policy from one file.

    Attributes:
        name: what tells its path from the other files'.
        path: the file.
        kind: "sb3 PPO", "cleanrl ppo", "onnx", "torch.export", ...
        actions: how many there are to choose from; or a `Head`. Infinite bounds: the file doesn't say them.
        width: numbers of a flattened observation (one-hot where it is an index).
        module: obs `[N, width]` float32 -> logits `[N, A]`, or the head's parameters `[N, P]`.
        greedy: it takes its most probable action, always.
        files: it, and the normaliser's where one was read.
        sha256: of these files.
        options: it was read with.
        obs_low, obs_high: bounds of an observation, flattened, if known.
        notes: what a user should know, one line each.
    """

    name: str
    path: Path
    kind: str
    actions: Actions
    width: int
    module: nn.Module
    greedy: bool = False
    files: tuple[Path, ...] = ()
    sha256: tuple[str, ...] = ()
    options: "Options | None" = None
    obs_low: tuple[float, ...] | None = None
    obs_high: tuple[float, ...] | None = None
    notes: tuple[str, ...] = ()

    @property
    def has_density(self) -> bool:
        """Not a continuous action without noise."""
        return not (self.greedy and isinstance(self.actions, Gaussian))

    @property
    def normaliser(self) -> Normaliser | None:
        """Its normaliser, if it has statistics."""
        for part in self.module.modules():
            if isinstance(part, Normaliser):
                identity = not part.mean.any() and bool((part.std == 1).all()) and bool(part.clip.isinf())
                return None if identity else part
        return None


@dataclass(frozen=True)
class Options:
    """What the files don't say; None and False leave it to the importer.

    Args:
        head: what the numbers mean that a network gives, for files that don't say; logits of one choice if left out.
        greedy: the most probable action instead of a sample.
        epsilon: of an epsilon-greedy DQN, instead of the file's.
        activation: "tanh", "relu", ..., instead of the library's default or what the file says.
        trust: run code that a file brings along (torch.export and TorchScript programs).
        normaliser: "beside" looks for statistics next to a file, "none" doesn't; or the path of one file for all.
    """

    head: Head | None = None
    greedy: bool = False
    epsilon: float | None = None
    activation: str | None = None
    trust: bool = False
    normaliser: str | Path = "beside"


def parts(module: nn.Module, actions: Actions, greedy: bool) -> dict[str, Any]:
    """What `Imported` needs of a module that gives parameters: itself, or where actions are counted its greedy twin."""
    if greedy and isinstance(actions, int):
        module = EpsilonGreedy(module, 0.0)
    elif greedy and isinstance(actions, MultiCategorical):
        module = Parts(module, actions.nvec)
    return {"module": module.eval(), "actions": actions, "greedy": greedy}
