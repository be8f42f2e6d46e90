"""The registry of studies: the one place where a name such as `hopper` becomes objects.

A study is a section of params.yaml: which environment, where its targets and offline data come from, and what it
overrides of each stage's defaults. After this module there are objects; nobody else asks for a name.
"""

import difflib
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gymnasium import spaces

from manyfold import policies as policy_sets
from manyfold.envs import BinnedMujoco, Environment, Gridworld, GymnasiumEnvironment
from manyfold.policies import MlpPolicySet
from tasks.params import ROOT
from tasks.params import read as read_params

OURS = {"targets": "manyfold/train/ppo.py", "offline": "manyfold/data/offline.py"}  # the sources that are our own code
STAGES = ("targets", "offline", "q", "q_hat", "behavior", "evaluate")  # with a section of their own


@dataclass(frozen=True)
class Study:
    """One study, as params.yaml has it."""

    name: str
    title: str
    environment: dict[str, Any]  # {kind: its arguments}
    params: dict[str, dict[str, Any]]  # every stage's section with the study's overrides
    paper: dict[str, Any] | None = None  # the paper's numbers, where it has this environment
    root: Path = ROOT
    own: dict[str, Any] = field(default_factory=dict)  # by stage, what its section says itself

    def section(self, stage: str) -> dict[str, Any]:
        """The parameters of a stage, without where its inputs come from."""
        return {name: x for name, x in self.params[stage].items() if name != "source"}

    def source(self, stage: str) -> Path | None:
        """The user's files that a stage imports; None where it makes its own."""
        found = self.params[stage].get("source")
        if not isinstance(found, str):
            raise ValueError(f"studies.{self.name}.{stage}.source is {found!r:.60}, expected a path")
        if found == OURS[stage]:
            return None
        if found.endswith(".py"):
            raise ValueError(
                f"studies.{self.name}.{stage}.source is {found!r:.60}, expected {OURS[stage]} or your files"
            )
        return self.root / found


def names(path: Path = ROOT / "params.yaml") -> list[str]:
    """All studies, in their order."""
    return list(_sections(read_params(path), path))


def read(name: str, path: Path = ROOT / "params.yaml") -> Study:
    """One study, or a ValueError in one line."""
    return study_of(read_params(path), name, path)


def study_of(params: dict[str, Any], name: str, path: Path = ROOT / "params.yaml") -> Study:
    """The same of what the file at `path` says, or is to say."""
    sections = _sections(params, path)
    if name not in sections:
        near = difflib.get_close_matches(name, sections, n=1, cutoff=0.75)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown study {name!r}{hint} ({path.name} has: {', '.join(sections)})")
    own, merged = sections[name], {}
    known = {"title", "environment", "paper", *STAGES}
    for unknown in sorted(map(str, own.keys() - known)):
        raise ValueError(f"{path.name}: studies.{name}.{unknown} is unknown, expected {', '.join(sorted(known))}")
    for stage in STAGES:
        for where, found in ((stage, params.get(stage)), (f"studies.{name}.{stage}", own.get(stage))):
            if not isinstance(found, dict):
                raise ValueError(f"{path.name}: expected a section {where!r}, found {found!r:.40}")
        merged[stage] = _merged(params[stage], own[stage])
    if not isinstance(own.get("paper", {}), dict):
        raise ValueError(f"{path.name}: studies.{name}.paper is {own['paper']!r:.40}, expected numbers by estimator")
    environment = own.get("environment")
    if not isinstance(environment, dict) or len(environment) != 1 or next(iter(environment)) not in ENVIRONMENTS:
        raise ValueError(
            f"{path.name}: studies.{name}.environment is {environment!r:.60}, expected one of "
            f"{', '.join(ENVIRONMENTS)} with its arguments"
        )
    title, said = str(own.get("title", name)), {stage: own[stage] for stage in STAGES}
    return Study(name, title, environment, merged, own.get("paper"), path.resolve().parent, said)


def _sections(params: dict[str, Any], path: Path) -> dict[str, dict[str, Any]]:
    found = params.get("studies")
    if not isinstance(found, dict) or not found or not all(isinstance(x, dict) for x in found.values()):
        raise ValueError(f"{path.name}: expected a section 'studies' with one or more studies, found {found!r:.40}")
    for name in found:  # it names folders
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", str(name)):
            raise ValueError(f"{path.name}: study {name!r:.60}, expected a name of letters, digits, dots, dashes and _")
    return {str(name): section for name, section in found.items()}


def _merged(defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A stage's defaults with a study's overrides, section by section."""
    inner = [name for name, x in own.items() if isinstance(x, dict) and isinstance(defaults.get(name), dict)]
    both = {name: _merged(defaults[name], own[name]) for name in inner}
    return {**defaults, **own, **both}


# --- environments -----------------------------------------------------------------------------------------------------


def _gridworld(group: int, targets: Path | None, m: int) -> Environment:
    """Rewards by the group's seed."""
    return Gridworld.draw(m, group)


def _mujoco(group: int, targets: Path | None, companion: str = "sample", **arguments: Any) -> Environment:
    """With the group's companion, which the stage `targets` has saved; it acts by its mean, or samples."""
    if companion not in ("mean", "sample"):
        raise ValueError(f"environment.mujoco.companion is {companion!r:.40}, expected mean or sample")
    mean, acting = companion == "mean", None
    if targets is not None:
        saved = policy_sets.load(targets / "companion")
        if not isinstance(saved, MlpPolicySet):
            raise ValueError(f"{targets / 'companion'}: expected networks, found a table")
        acting = saved.companion(mean=mean) if saved.tensors["log_std"].shape[-1] > 1 else None
    return BinnedMujoco(companion=acting, appended=not mean, **arguments)


def _gymnasium(
    group: int,
    targets: Path | None,
    id: str | None = None,
    factory: str | None = None,
    horizon: int | None = None,
    kwargs: dict[str, Any] | None = None,
) -> Environment:
    """By its id, or by a function `module:name`."""
    if (id is None) == (factory is None):
        raise ValueError("environment.gymnasium: expected either id or factory")
    make: str | Callable[..., Any] = id or ""
    if factory is not None:
        module, _, function = str(factory).partition(":")
        try:
            made = getattr(importlib.import_module(module), function)
        except Exception as error:  # whatever a user's module raises
            raise ValueError(f"environment.gymnasium.factory {factory!r}: {error}; expected module:function") from None
        env = GymnasiumEnvironment(lambda: made(**(kwargs or {})), horizon, str(factory))
    else:
        env = GymnasiumEnvironment(make, horizon, **(kwargs or {}))
    if not isinstance(env.action_space, spaces.Discrete):
        raise ValueError(
            f"{env.name}: actions are {env.action_space}, expected a Discrete space: mu is designed from "
            "probabilities; `manyfold evaluate` compares policies over vectors"
        )
    return env


ENVIRONMENTS: dict[str, Callable[..., Environment]] = {
    "gridworld": _gridworld,
    "mujoco": _mujoco,
    "gymnasium": _gymnasium,
}


def make_environment(study: Study, group: int, targets: Path | None = None) -> Environment:
    """The environment of one group.

    Args:
        targets: the group's folder of the stage `targets`, from which episodes can be run; None before it exists.
    """
    ((kind, arguments),) = study.environment.items()
    if not isinstance(arguments, dict):
        raise ValueError(f"studies.{study.name}.environment.{kind} is {arguments!r:.40}, expected its arguments")
    try:
        return ENVIRONMENTS[kind](group, targets, **arguments)
    except ValueError:
        raise
    except Exception as error:  # whatever a user's environment raises
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"studies.{study.name}.environment.{kind}: {said}") from None


def group_name(group: int) -> str:
    """The folder of a group."""
    return f"group-{group:02d}"
