"""One group of a study, and what earlier stages have made for it."""

from dataclasses import dataclass
from pathlib import Path

from manyfold import policies as policy_sets
from manyfold.data.transitions import Transitions
from manyfold.envs import Environment
from manyfold.files import with_ending
from manyfold.fqe.nets import ValueNets
from manyfold.policies import PolicySet
from tasks.studies import Study, group_name, make_environment


@dataclass(frozen=True)
class Group:
    """Group `number` of a study, in the folder of all data."""

    study: Study
    number: int
    data: Path

    def folder(self, stage: str) -> Path:
        return self.data / stage / self.study.name / group_name(self.number)

    def environment(self) -> Environment:
        return make_environment(self.study, self.number, self.folder("targets"))

    def policies(self) -> PolicySet:
        """The K targets."""
        return policy_sets.load(self.folder("targets") / "targets")

    def loggers(self) -> PolicySet:
        """The policies that log offline data: the history of a training, or the targets where there is none."""
        history = self.folder("targets") / "history"
        return policy_sets.load(history) if with_ending(history).exists() else self.policies()

    def transitions(self) -> Transitions:
        return Transitions(self.folder("offline"))

    def values(self, stage: str) -> ValueNets:
        """The fit of an earlier stage."""
        return ValueNets.load(self.folder(stage) / f"{stage}.safetensors")[0]
