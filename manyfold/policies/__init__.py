"""K policies at once, of any kind, behind one interface."""

from pathlib import Path

from manyfold.files import load_tensors, with_ending
from manyfold.policies.base import PolicySet
from manyfold.policies.mlp import MlpPolicySet
from manyfold.policies.modules import CallablePolicySet, ChosenPolicySet, JoinedPolicySet, ModulePolicySet
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

KINDS: dict[str, type[MlpPolicySet] | type[TabularPolicySet]] = {"mlp": MlpPolicySet, "tabular": TabularPolicySet}


def load(path: Path | str) -> MlpPolicySet | TabularPolicySet:
    """A policy set that `save` wrote; anything else is refused with one line."""
    file = with_ending(Path(path))
    tensors, about = load_tensors(file, "policies", 2)
    kind = about.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"{file}: kind is {kind!r:.40}, expected one of {', '.join(KINDS)}")
    return KINDS[kind].build(file, tensors, about)
