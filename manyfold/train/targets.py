"""Target policies: which checkpoints of PPO a group evaluates, and the training that yields them.

The rule is one for all environments. A group's seed draws an interval of training steps, K checkpoints inside it, and
the companion that moves a robot's other action dimensions. Checkpoints may fall between the epochs of an update: after
`epoch` of update `update`, training has come to step `batch * (update - 1 + epoch / epochs)`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyfold.arrays import check_number
from manyfold.envs.base import Environment
from manyfold.envs.binned_mujoco import BinnedMujoco
from manyfold.policies.mlp import MlpPolicySet
from manyfold.streams import stream
from manyfold.train import ppo
from manyfold.train.ppo import Config, Position
from manyfold.train.vector_envs import policy_spec, vector_envs

MOST_STEPS = 10**9  # of training


@dataclass(frozen=True)
class Rule:
    """How a group's targets are drawn."""

    policies: int  # K
    start: tuple[float, float]  # the interval's first training step is drawn uniformly from here
    width: float  # training steps of the interval
    history: int  # checkpoints spread evenly from the first step to the interval's end, to log offline data with

    def __post_init__(self) -> None:
        check_number("targets.policies", self.policies, 1, 10_000)
        check_number("targets.history", self.history, 2, 10_000)
        if not isinstance(self.start, tuple) or len(self.start) != 2:
            raise ValueError(f"targets.start is {self.start!r}, expected [low, high]")
        for low, x in ((0, self.start[0]), (self.start[0], self.start[1])):
            check_number("targets.start", x, low, MOST_STEPS, whole=False)
        check_number("targets.width", self.width, 1, MOST_STEPS, whole=False)


class Plan(NamedTuple):
    """What is taken from one group's training."""

    interval: tuple[float, float]  # training steps
    targets: tuple[Position, ...]  # K, in order
    companion: Position
    history: tuple[Position, ...]

    @property
    def last(self) -> int:
        """The last update that anything needs."""
        return max(position.update for position in (*self.targets, self.companion, *self.history))


@singledispatch
def config(env: Environment) -> Config:
    """PPO's hyperparameters for a kind of environment: CleanRL's discrete defaults, or the continuous ones."""
    return ppo.DISCRETE


@config.register
def _(env: BinnedMujoco) -> Config:
    return ppo.CONTINUOUS


def step_of(position: Position, config: Config) -> float:
    """The training step of a checkpoint."""
    return config.batch * (max(position.update - 1, 0) + position.epoch / config.epochs)


def draw(rule: Rule, cfg: Config, name: str, group: int) -> Plan:
    """One group's plan; the same for the same rule, study's name and group."""
    if rule.start[1] + rule.width > cfg.total_steps:
        raise ValueError(
            f"targets.start + width reach step {rule.start[1] + rule.width:g}, expected {cfg.total_steps} at most"
        )
    rng = stream("targets", name, group)
    first = float(rng.uniform(*rule.start))
    end = first + rule.width
    candidates = [
        Position(0, 0),
        *(Position(u, e) for u in range(1, int(end // cfg.batch) + 2) for e in range(1, cfg.epochs + 1)),
    ]
    inside = [position for position in candidates if first <= step_of(position, cfg) <= end]
    if len(inside) < rule.policies:
        raise ValueError(
            f"targets.width {rule.width:g} holds {len(inside)} checkpoints of {name}, expected {rule.policies} or more "
            f"(one every {cfg.batch / cfg.epochs:g} steps)"
        )
    targets = tuple(inside[i] for i in sorted(rng.choice(len(inside), rule.policies, replace=False)))
    companion = inside[int(rng.integers(len(inside)))]
    up_to = [position for position in candidates if step_of(position, cfg) <= end]
    if rule.history > len(up_to):
        raise ValueError(
            f"targets.history is {rule.history}, expected {len(up_to)} at most: there are no more checkpoints"
        )
    spread = np.linspace(0, len(up_to) - 1, rule.history).round().astype(int)
    return Plan((first, end), targets, companion, tuple(up_to[i] for i in spread))


class Drawn(NamedTuple):
    """One group's policies."""

    plan: Plan
    targets: MlpPolicySet  # K
    companion: MlpPolicySet  # 1
    history: MlpPolicySet
    returns: NDArray[np.float64]  # mean return of the newest episodes after each update of PPO


class Training:
    """Trains some groups of one environment until everything their plans name has been taken.

    Runs segment by segment; `save` between segments is all that `load` needs to resume to the same numbers.
    """

    def __init__(self, env: Environment, name: str, groups: list[int], plans: list[Plan]) -> None:
        self.env, self.name, self.groups, self.plans, self.config = env, name, groups, plans, config(env)
        self.envs = vector_envs(env, groups, self.config.envs, self.config.gamma)
        self.learner = ppo.Learner(self.envs, self.config, [(name, group) for group in groups])
        self.wanted = [{*plan.targets, plan.companion, *plan.history} for plan in plans]
        self.taken: dict[tuple[int, Position], dict[str, Tensor]] = {}  # (index of the group, position) -> actor
        self.last = max(plan.last for plan in plans)
        self.returns: list[NDArray[np.float64]] = []  # of each update, [G]

    @property
    def finished(self) -> bool:
        return self.learner.update >= self.last

    def run_segment(self, tick: Callable[[], None] = lambda: None) -> None:
        """Trains up to the next moment at which `save` is possible; `tick` is called after every update."""
        self.learner.run_segment(self.last, self.wanted, self._record, lambda: self._ended(tick))

    def _ended(self, tick: Callable[[], None]) -> None:
        self.returns.append(self.envs.mean_returns().copy())
        tick()

    def _record(self, position: Position, groups: list[int], tensors: dict[str, Tensor]) -> None:
        for i, group in enumerate(groups):
            self.taken[group, position] = {name: x[i].clone() for name, x in tensors.items()}

    def save(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        tensors, text = self.learner.save()
        tensors["returns"] = torch.from_numpy(np.stack(self.returns))
        for (group, position), actor in self.taken.items():
            tensors |= {f"taken/{group}/{position.update}/{position.epoch}/{name}": x for name, x in actor.items()}
        return tensors, text

    def load(self, tensors: dict[str, Tensor], text: dict[str, str]) -> None:
        self.learner.load(tensors, text)
        self.returns = list(tensors["returns"].numpy())
        self.taken = {}
        for key, x in tensors.items():
            if key.startswith("taken/"):
                _, group, update, epoch, name = key.split("/")
                self.taken.setdefault((int(group), Position(int(update), int(epoch))), {})[name] = x

    def results(self) -> list[Drawn]:
        """Every group's policies, in the order of `groups`."""
        drawn = []
        for i, plan in enumerate(self.plans):
            targets, companion, history = (
                self._policies(i, list(p)) for p in (plan.targets, [plan.companion], plan.history)
            )
            returns = np.stack(self.returns)[: plan.last, i]  # others of the shard may have trained on
            drawn.append(Drawn(plan, targets, companion, history, returns))
        return drawn

    def _policies(self, index: int, positions: list[Position]) -> MlpPolicySet:
        taken = [self.taken[index, position] for position in positions]
        tensors = {name: torch.stack([one[name] for one in taken]) for name in taken[0]}
        names = tuple(f"step {step_of(position, self.config):g}" for position in positions)
        return MlpPolicySet(tensors, policy_spec(self.env, self.name, names))
