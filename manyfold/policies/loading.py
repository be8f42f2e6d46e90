"""Checkpoints of any library as policies of ours."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from manyfold import policies as own
from manyfold.arrays import check_number
from manyfold.files import with_ending
from manyfold.policies.actors import ActorSet, Drawn
from manyfold.policies.base import PolicySet
from manyfold.policies.heads import Gaussian, Head
from manyfold.policies.imported import Imported, Options
from manyfold.policies.importing import load_files
from manyfold.policies.modules import ModulePolicySet
from manyfold.streams import stream


def load_policies(
    files: str | Path | Sequence[str | Path],
    *,
    greedy: bool = False,
    epsilon: float | None = None,
    activation: str | None = None,
    trust: bool = False,
    head: Head | None = None,
    normaliser: str | Path = "beside",
) -> PolicySet | ActorSet:
    """Policies from files: Stable-Baselines3 zips, CleanRL models, ONNX and torch.export programs, our own sets.

    No pickle is run: only weights and plain fields are read.

    Args:
        files: a file, a pattern such as "checkpoints/*.zip", a folder, or several of them.
        greedy: the most likely action instead of a sample; continuous ones have no density then.
        epsilon: of DQN's epsilon-greedy policies, instead of the file's.
        activation: of networks whose file does not say, instead of the library's default.
        trust: run code that a file brings along (torch.export, TorchScript).
        head: what the numbers mean that a network gives, where its file doesn't say: `mf.Gaussian(low, high)`,
            `mf.MultiCategorical(nvec)`; logits of one choice if left out.
        normaliser: "beside" looks for statistics next to each file, "none" does not; or one file for all.

    Returns:
        A PolicySet; an ActorSet where some policy has no density.
    """
    if epsilon is not None:
        check_number("epsilon", epsilon, 0, 1, whole=False)
    every = [files] if isinstance(files, str | Path) else list(files)
    if len(every) == 1 and Path(every[0]).name and with_ending(Path(every[0])).is_file():
        return own.load(every[0])
    options = Options(
        head=head, greedy=greedy, epsilon=epsilon, activation=activation, trust=trust, normaliser=normaliser
    )
    return together(load_files(every, options))


def together(found: Sequence[Imported]) -> PolicySet | ActorSet:
    """One set of all of them; of actors where they have no densities of the same variable."""
    greedy = {one.greedy for one in found}
    how = "greedy" if greedy == {True} else "stochastic" if greedy == {False} else "some greedy, some stochastic"
    normalised = sum(one.normaliser is not None for one in found)
    if normalised:
        how += ", observations normalised" + ("" if normalised == len(found) else f" of {normalised} of {len(found)}")
    squashed = {one.actions.squashed for one in found if isinstance(one.actions, Gaussian)}
    names, width = [one.name for one in found], found[0].width
    if len(squashed) == 2 and all(one.has_density for one in found):
        how += " (some actions clipped, others squashed: no ratios of their densities)"
    if len(squashed) == 2 or not all(one.has_density for one in found):
        alone = [ModulePolicySet([one.module], one.actions, width) for one in found]
        acts = [Drawn(a, one.greedy, stream("actor", one.name)) for a, one in zip(alone, found, strict=True)]
        made: PolicySet | ActorSet = ActorSet(acts, names, how, width)
    else:
        actions = next((one.actions for one in found if _bounded(one)), found[0].actions)
        made = ModulePolicySet([one.module for one in found], actions, width, names=names, how=how)
    made.imported = tuple(found)
    return made


def _bounded(one: Imported) -> bool:
    """Whether the file says the bounds of its actions."""
    return isinstance(one.actions, Gaussian) and bool(np.isfinite([*one.actions.low, *one.actions.high]).any())
