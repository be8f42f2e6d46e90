"""K policies as one table; an observation is a state's index."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from manyfold.arrays import Array, Ints, check_distributions
from manyfold.files import field, save_tensors, with_ending
from manyfold.policies.base import PolicySet, check_indices, check_steps


class TabularPolicySet(PolicySet):
    """K policies `[K, T, S, A]`.

    Args:
        table: probabilities.
        names: of the policies; their numbers if left out.
    """

    kind = "tabular"
    width = 1

    def __init__(self, table: ArrayLike, names: tuple[str, ...] | None = None) -> None:
        self._table: Array = np.array(table, dtype=np.float64)
        if self._table.ndim != 4 or 0 in self._table.shape:
            raise ValueError(f"table has shape {list(self._table.shape)}, expected [K, T, S, A], none of them 0")
        check_distributions("table", self._table, ("k", "t", "s", "a"))
        count, self.horizon, self.n_states, self.n_actions = self._table.shape
        self.names = names or tuple(f"policy {k}" for k in range(count))
        if len(self.names) != count:
            raise ValueError(f"{len(self.names)} names for {count} policies, expected one for each")

    def probs(self, obs: ArrayLike, t: int | ArrayLike) -> Array:
        states = check_indices("state", obs, self.n_states)
        return self._table[:, check_steps(t, len(states), self.horizon), states]

    def probs_of(self, which: Ints, obs: ArrayLike, t: int | ArrayLike) -> Array:
        states = check_indices("state", obs, self.n_states)
        rows = (which * self.horizon + check_steps(t, len(states), self.horizon)) * self.n_states + states
        return self._table.reshape(-1, self.n_actions).take(rows, axis=0)

    def table(self) -> Array:
        return self._table

    def module(self) -> nn.Module:
        return TableModule(torch.from_numpy(self._table).float())

    def save(self, path: Path | str) -> None:
        """One safetensors file."""
        tensors = {"table": torch.from_numpy(self._table)}
        save_tensors(with_ending(Path(path)), tensors, "policies", 2, {"kind": self.kind, "names": self.names})

    @classmethod
    def build(cls, path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> "TabularPolicySet":
        """The set that a file describes; anything else is refused with one line."""
        if tensors.keys() != {"table"}:
            raise ValueError(f"{path}: tensors are {sorted(tensors)}, expected table alone")
        names = tuple(map(str, field(path, about, "names", list)))
        try:
            return cls(tensors["table"].double().numpy(), names)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


class TableModule(nn.Module):
    """A look-up in a table `[K, T, S, A]`."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, obs: Tensor, t: Tensor) -> Tensor:
        return self.table[:, t, obs[:, 0].long()]
