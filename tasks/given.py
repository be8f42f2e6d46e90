"""The user's own policies, as the stage `targets` takes them: our sets, or checkpoints of any library.

A `.safetensors` file of ours is one group, a folder of them has a group for each. Anything else that
`manyfold.load_policies` reads (Stable-Baselines3 zips, CleanRL models, ONNX graphs) is one group of all its policies.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from manyfold import policies as policy_sets
from manyfold.envs import Environment
from manyfold.files import sha256, with_ending
from manyfold.policies import MlpPolicySet, ModulePolicySet, PolicySet, TabularPolicySet
from manyfold.policies.fitting import fitted
from manyfold.policies.importing import find_files
from manyfold.policies.loading import load_policies
from manyfold.policies.saved import save as save_modules
from tasks.studies import Study, make_environment

OPTIONS = ("greedy", "epsilon", "activation")  # of `load_policies`, beside `source` in a study's section `targets`


@dataclass(frozen=True)
class Given:
    """One group.

    Attributes:
        policies: ready for the environment.
        sums: checksums of all their files, normalisers included.
        options: they were read with.
        about: what plan.json says of them.
    """

    policies: PolicySet
    sums: tuple[str, ...]
    options: dict[str, Any]
    about: dict[str, Any]

    def save(self, path: Path) -> None:
        """Writes `path`.safetensors, which later stages read."""
        if isinstance(self.policies, MlpPolicySet | TabularPolicySet):
            self.policies.save(path)
        elif isinstance(self.policies, ModulePolicySet):
            save_modules(self.policies, path)


def given(study: Study, source: Path) -> list[Given]:
    """The user's groups, checked against the environment; anything that doesn't fit is refused with one line."""
    files = own_sets(source)
    options = {name: study.params["targets"][name] for name in OPTIONS if name in study.params["targets"]}
    if files and options:
        raise ValueError(f"studies.{study.name}.targets.{next(iter(options))} is for checkpoints, {source} is a set")
    if not files:
        return [_checkpoints(make_environment(study, 0), source, options)]
    found = []
    for group, file in enumerate(files):
        one = policy_sets.load(file)
        check_fits(make_environment(study, group), file, one)
        found.append(Given(one, (sha256(file),), {}, {"source": file.name}))
    return found


def own_sets(source: Path) -> list[Path]:
    """Files of ours at a path; none where it has checkpoints of other libraries."""
    if source.is_dir():
        return sorted(source.glob("*.safetensors"))
    file = with_ending(source)
    if file.exists():
        return [file]
    if not source.exists():
        raise ValueError(f"{source}: no such file or folder, expected policies: .safetensors of ours, or checkpoints")
    return []


def check_fits(env: Environment, file: Path, found: PolicySet) -> None:
    """Refuses a set of ours where it is not of the study's environment."""
    for name in ("n_actions", "n_states", "width", "horizon"):
        if getattr(found, name) != getattr(env, name):
            raise ValueError(
                f"{file}: its {name} is {getattr(found, name)}, expected {getattr(env, name)} as {env.name} has"
            )


def _checkpoints(env: Environment, source: Path, options: dict[str, Any]) -> Given:
    """All checkpoints of a file or folder, for this environment and its horizon."""
    read = load_policies(find_files(source), **options)
    found = fitted(read, env)
    assert isinstance(found, ModulePolicySet)  # as all checkpoints of counted actions are, which `fitted` has checked
    each = [{"name": one.name, "kind": one.kind, "sha256": list(one.sha256)} for one in read.imported]
    sums = tuple(check for one in read.imported for check in one.sha256)
    return Given(_until(found, env), sums, options, {"source": source.name, "policies": each})


def _until(found: ModulePolicySet, env: Environment) -> PolicySet:
    """The same policies for T steps; as a table where states are counted, as all stages have them there."""
    made = ModulePolicySet(found.modules, found.n_actions, found.width, env.horizon, found.names, found.how)
    if not env.n_states:
        return made
    each = made.probs(np.arange(env.n_states)[:, None], 0)  # [K, S, A]
    return TabularPolicySet(np.repeat(each[:, None], env.horizon, 1), made.names)
