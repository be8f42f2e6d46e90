"""K policies made of other people's parts: torch modules, plain callables, and sets of different kinds side by side."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from manyfold.arrays import Array, Ints, check_distributions, check_finite, check_number, check_shape
from manyfold.policies.base import ENDLESS, PolicySet, check_indices, check_steps
from manyfold.policies.batching import networks
from manyfold.policies.heads import Head


class ModulePolicySet(PolicySet):
    """K torch modules, each `obs [N, width] -> logits [N, A]`; batched where their shapes agree, looped where not.

    Args:
        modules: one for each policy; a normaliser belongs inside. They are put into evaluation mode.
        n_actions: A; or a `Head`, where actions are vectors: the modules then give its parameters, `[N, P]`.
        width: of an observation vector.
        horizon: T, if they may be asked up to there only.
        names: of the policies; their numbers if left out.
        how: "stochastic" or "greedy", for the result's first line.
    """

    n_states = 0

    def __init__(
        self,
        modules: Sequence[nn.Module],
        n_actions: int | Head,
        width: int,
        horizon: int = ENDLESS,
        names: Sequence[str] | None = None,
        how: str = "stochastic",
    ) -> None:
        self.head = n_actions if isinstance(n_actions, Head) else None
        outputs = n_actions.size if isinstance(n_actions, Head) else n_actions
        for name, x in (("policies", len(modules)), ("n_actions", outputs), ("width", width), ("horizon", horizon)):
            check_number(name, x, 1, ENDLESS)
        for module in modules:
            if not isinstance(module, nn.Module):
                raise ValueError(f"{module!r:.60} is no torch module, expected some; CallablePolicySet takes functions")
        self.modules = [module.eval() for module in modules]
        self.names = _names(names, len(modules))
        self.n_actions = 0 if self.head else outputs
        self.width, self.horizon, self.how = width, horizon, how
        self._outputs, self._batched = outputs, _batched(self.modules, width)

    def probs(self, obs: ArrayLike, t: int | ArrayLike) -> Array:
        if self.head:
            raise ValueError("these actions are vectors, expected policies whose actions can be counted")
        return torch.softmax(self._call(obs, t).double(), -1).numpy()

    def parameters(self, obs: ArrayLike, t: int | ArrayLike) -> Array:
        return self._call(obs, t).double().numpy() if self.head else super().parameters(obs, t)

    @torch.no_grad()
    def _call(self, obs: ArrayLike, t: int | ArrayLike) -> Tensor:
        """What the modules say, `[K, N, A]` or `[K, N, P]`."""
        x = np.asarray(obs, dtype=np.float32)
        check_shape("obs", x, (*x.shape[:1], self.width), "[N, width]")
        check_steps(t, len(x), self.horizon)
        tensor = torch.from_numpy(x)
        try:
            each = self._batched(tensor) if self._batched else torch.stack([module(tensor) for module in self.modules])
        except RuntimeError as error:
            shapes = f"float32 [N, {self.width}] -> [N, {self._outputs}]"
            raise ValueError(f"a module failed ({str(error).splitlines()[0]}), expected {shapes}") from None
        found: Tensor = each
        expected = [self.n_policies, len(x), self._outputs]
        what = "parameters [K, N, P]" if self.head else "logits [K, N, A]"
        if list(found.shape) != expected:
            raise ValueError(f"the modules gave {list(found.shape)}, expected {what} = {expected}")
        finite = math.isfinite(found.sum().item())  # all of them, then; else one is not, or they are too large to sum
        if not finite and (bad := ~torch.isfinite(found).flatten(1).all(1)).any():
            name = self.names[int(bad.int().argmax())]
            raise ValueError(f"{name} gave NaN or infinity, expected finite {what}; are the observations finite?")
        return found

    def module(self) -> nn.Module:
        return StackedModules(self.modules)

    def __reduce__(self) -> tuple[Any, ...]:  # for other processes: they batch the modules again
        made = self.modules, self.head or self.n_actions, self.width, self.horizon, self.names, self.how
        return ModulePolicySet, made


class StackedModules(nn.Module):
    """Softmax of the logits of each module."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList([copy.deepcopy(module) for module in modules])

    def forward(self, obs: Tensor, t: Tensor) -> Tensor:
        return torch.softmax(torch.stack([part(obs) for part in self.parts]), -1)


class CallablePolicySet(PolicySet):
    """K functions `(obs, t [N]) -> probabilities [N, A]`; obs is `[N, width]`, or `[N]` where states are indices.

    Args:
        n_actions: A; or a `Head`, where actions are vectors: the functions then give its parameters, `[N, P]`.
    """

    def __init__(
        self,
        functions: Sequence[Callable[[Any, Ints], ArrayLike]],
        n_actions: int | Head,
        width: int,
        horizon: int = ENDLESS,
        names: Sequence[str] | None = None,
        n_states: int = 0,
    ) -> None:
        self.head = n_actions if isinstance(n_actions, Head) else None
        outputs = n_actions.size if isinstance(n_actions, Head) else n_actions
        for name, x in (("policies", len(functions)), ("n_actions", outputs), ("width", width), ("horizon", horizon)):
            check_number(name, x, 1, ENDLESS)
        self.functions, self.names = list(functions), _names(names, len(functions))
        self.n_actions, self._outputs = 0 if self.head else outputs, outputs
        self.width, self.horizon, self.n_states = width, horizon, n_states

    def probs(self, obs: ArrayLike, t: int | ArrayLike) -> Array:
        if self.head:
            raise ValueError("these actions are vectors, expected policies whose actions can be counted")
        return self._call(obs, t)

    def parameters(self, obs: ArrayLike, t: int | ArrayLike) -> Array:
        return self._call(obs, t) if self.head else super().parameters(obs, t)

    def _call(self, obs: ArrayLike, t: int | ArrayLike) -> Array:
        x = check_indices("obs", obs, self.n_states) if self.n_states else np.asarray(obs)
        if not self.n_states:
            check_shape("obs", x, (*x.shape[:1], self.width), "[N, width]")
        steps = check_steps(t, len(x), self.horizon)
        found = []
        for name, function in zip(self.names, self.functions, strict=True):
            one = np.asarray(function(x, steps), dtype=np.float64)
            check_shape(name, one, (len(x), self._outputs), "[N, P]" if self.head else "[N, A]")
            if self.head:
                check_finite(name, one)
            else:
                check_distributions(name, one, ("observation", "a"))
            found.append(one)
        return np.stack(found)


class JoinedPolicySet(PolicySet):
    """Sets of different kinds as one: each is batched in itself, and they are looped over."""

    def __init__(self, parts: Sequence[PolicySet]) -> None:
        check_number("parts", len(parts), 1)
        first = parts[0]
        for part in parts:
            for name in ("horizon", "n_actions", "n_states", "width", "head"):
                if getattr(part, name) != getattr(first, name):
                    raise ValueError(
                        f"{name} is {getattr(part, name)} in one set and {getattr(first, name)} in another"
                    )
        self.parts, self.names = list(parts), tuple(name for part in parts for name in part.names)
        self.horizon, self.n_actions, self.head = first.horizon, first.n_actions, first.head
        self.n_states, self.width = first.n_states, first.width
        self.how = " and ".join(dict.fromkeys(part.how for part in parts))

    def probs(self, obs: ArrayLike, t: int | ArrayLike) -> Array:
        return np.concatenate([part.probs(obs, t) for part in self.parts])

    def parameters(self, obs: ArrayLike, t: int | ArrayLike) -> Array:
        return np.concatenate([part.parameters(obs, t) for part in self.parts])

    def module(self) -> nn.Module:
        return JoinedModules([part.module() for part in self.parts])


class ChosenPolicySet(PolicySet):
    """Some policies of a set, by their numbers."""

    def __init__(self, policies: PolicySet, which: ArrayLike) -> None:
        self.policies, self.which = policies, np.asarray(which, dtype=np.int64)
        self.names = tuple(policies.names[k] for k in self.which)
        self.horizon, self.n_actions, self.head = policies.horizon, policies.n_actions, policies.head
        self.n_states, self.width, self.how = policies.n_states, policies.width, policies.how

    def probs(self, obs: ArrayLike, t: int | ArrayLike) -> Array:
        return self.policies.probs(obs, t)[self.which]

    def parameters(self, obs: ArrayLike, t: int | ArrayLike) -> Array:
        return self.policies.parameters(obs, t)[self.which]


class JoinedModules(nn.Module):
    """The probabilities of several sets, one after the other."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, obs: Tensor, t: Tensor) -> Tensor:
        return torch.cat([part(obs, t) for part in self.parts])


def _names(names: Sequence[str] | None, count: int) -> tuple[str, ...]:
    if names is not None and len(names) != count:
        raise ValueError(f"{len(names)} names for {count} policies, expected one for each")
    return tuple(names) if names is not None else tuple(f"policy {k}" for k in range(count))


def layout(module: nn.Module) -> list[Any] | None:
    """All that modules must share to be one batch: tensors by shape, parts by type, their other attributes by value.

    None where an attribute cannot be compared that way: a tensor that is neither parameter nor buffer.
    """
    found: list[Any] = [{name: (x.shape, x.dtype) for name, x in module.state_dict().items()}]
    for name, part in module.named_modules():
        plain = {key: x for key, x in vars(part).items() if not key.startswith("_")}
        if any(isinstance(x, Tensor | np.ndarray) for x in plain.values()):
            return None
        found.append((name, type(part), {key: repr(x) for key, x in plain.items()}))
    return found


def _batched(modules: Sequence[nn.Module], width: int) -> Callable[[Tensor], Tensor] | None:
    """All modules as one call `[N, width] -> [K, N, A]`, or None where their shapes or operations don't allow it."""
    if len(modules) == 1:
        return None  # alone it is called as it is, so that it gives the very numbers of the library it comes from
    if any(
        isinstance(part, torch.jit.ScriptModule | torch.fx.GraphModule)
        for module in modules
        for part in module.modules()
    ):
        return None  # programs, not modules of parameters
    layouts = [layout(module) for module in modules]
    if any(one is None or one != layouts[0] for one in layouts):
        return None
    every = networks(modules) or _mapped(modules)
    try:
        x = torch.linspace(-1, 1, 2 * width).view(2, width)
        with torch.no_grad():
            alone, found = torch.stack([module(x) for module in modules]), every(x)
            same = found.shape == alone.shape and torch.allclose(found, alone, atol=1e-5, rtol=1e-4)
            return every if same else None
    except (RuntimeError, ValueError, TypeError):
        return None


def _mapped(modules: Sequence[nn.Module]) -> Callable[[Tensor], Tensor]:
    """Modules of any one structure."""
    stacked = torch.func.stack_module_state(list(modules))
    skeleton = copy.deepcopy(modules[0]).to("meta")

    def one(state: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(skeleton, state, (x,))

    every = torch.vmap(one, in_dims=(0, None))

    def call(x: Tensor) -> Tensor:
        return every(stacked, x)

    return call
