"""K policies at once, of any kind, behind one interface."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from manyfold.files import load_tensors, with_ending
from manyfold.policies.base import PolicySet
from manyfold.policies.mlp import MlpPolicySet
from manyfold.policies.modules import CallablePolicySet, ChosenPolicySet, JoinedPolicySet, ModulePolicySet
from manyfold.policies.saved import build as build_modules
from manyfold.policies.tabular import TabularPolicySet

__all__ = [
    "CallablePolicySet",
    "ChosenPolicySet",
    "JoinedPolicySet",
    "MlpPolicySet",
    "ModulePolicySet",
    "PolicySet",
    "TabularPolicySet",
    "load",
]

KINDS: dict[str, Callable[[Path, dict[str, Tensor], dict[str, Any]], PolicySet]] = {
    "mlp": MlpPolicySet.build,
    "tabular": TabularPolicySet.build,
    "modules": build_modules,
}


def load(path: Path | str) -> PolicySet:
    """A policy set that we saved; anything else is refused with one line."""
    file = with_ending(Path(path))
    tensors, about = load_tensors(file, "policies", 2)
    kind = about.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"{file}: kind is {kind!r:.40}, expected one of {', '.join(KINDS)}")
    return KINDS[kind](file, tensors, about)
