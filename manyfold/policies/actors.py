"""K policies that only act: greedy actors, planners, a robot's operator. Nothing is known of their densities."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from manyfold.arrays import Ints, check_number
from manyfold.policies.base import PolicySet

if TYPE_CHECKING:
    from manyfold.policies.imported import Imported

Act = Callable[[NDArray[Any], Ints], ArrayLike]  # (observations [N, width], t [N]) -> actions [N] or [N, d]


@dataclass(frozen=True)
class Drawn:
    """A policy's actions as its environment takes them: the most likely ones, or draws.

    Args:
        policies: a set of one.
        greedy: it takes the most likely action.
        rng: for the draws.
    """

    policies: PolicySet
    greedy: bool
    rng: np.random.Generator

    def __call__(self, obs: NDArray[Any], t: Ints) -> ArrayLike:
        head = self.policies.head
        if head is None:
            return self.policies.sample(np.zeros(len(obs), dtype=np.int64), obs, t, self.rng)
        parameters = self.policies.parameters(obs, t)[0]
        return head.sent(head.greedy(parameters) if self.greedy else head.draw(parameters, self.rng))


class ActorSet:
    """K functions `(obs [N, width], t [N]) -> actions`, as the environment takes them.

    Episodes of one say nothing of another, so that they are evaluated by their plain returns.

    Args:
        acts: one for each policy.
        names: of the policies; their numbers if left out.
        how: why there are no densities, for the result's first line.
        width: numbers of an observation; 0 if any will do.
    """

    imported: "tuple[Imported, ...]" = ()  # what is known of the file of each, where they come from files

    def __init__(
        self, acts: Sequence[Act], names: Sequence[str] | None = None, how: str = "greedy", width: int = 0
    ) -> None:
        check_number("policies", len(acts), 1)
        if names is not None and len(names) != len(acts):
            raise ValueError(f"{len(names)} names for {len(acts)} policies, expected one for each")
        self.acts, self.how, self.width = list(acts), how, width
        self.names = tuple(names) if names is not None else tuple(f"policy {k}" for k in range(len(acts)))

    @property
    def n_policies(self) -> int:
        """K."""
        return len(self.acts)
