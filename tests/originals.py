"""What other libraries say of their own checkpoints: the ground that importers are held to.

`tests.sb3_originals`, `tests.cleanrl_originals` and `tests.program_originals` make the checkpoints; the tests and
`python -m benchmarks.importers` compare.
"""

from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from manyfold.envs.gymnasium import GymnasiumEnvironment
from manyfold.policies.actors import ActorSet
from manyfold.policies.fitting import fitted
from manyfold.policies.imported import Options
from manyfold.policies.importing import load_files
from manyfold.policies.loading import together

BOX = spaces.Box(np.float32([-1, -2, 0]), np.float32([1, 3, 0.5]))  # bounds that differ, one of them not around 0
VECTOR = spaces.Box(-np.inf, np.inf, (5,))


class World(gymnasium.Env):
    """Random observations of a space; any action will do."""

    def __init__(self, observations=VECTOR, actions=BOX):
        self.observation_space, self.action_space = observations, actions

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), float(np.sum(action)), bool(self.np_random.random() < 0.1), False, {}


class Original(NamedTuple):
    """A checkpoint, and what the library that made it says at N observations."""

    path: Path
    env: Any  # a function that makes the environment it was trained in
    obs: NDArray[Any]  # [N, width], as manyfold's environment gives them
    expected: NDArray[Any]  # probabilities [N, A], log-densities [N] of `actions`, or actions sent [N, d] without any
    actions: NDArray[Any] | None = None  # [N, d], before they are clipped or squashed
    sent: NDArray[Any] | None = None  # [N, d], what the library sends to the environment then
    options: dict[str, Any] = {}  # noqa: RUF012 - what the importer must be told

    def policies(self, copies=1, **options):
        """Loaded as a user does it, for its environment; several copies are called as one batch."""
        found = load_files(self.path, Options(**{**self.options, **options}))
        return fitted(together(found * copies), GymnasiumEnvironment(self.env, horizon=5))


def deviations(original, copies=1):
    """The largest difference of probabilities, log-densities or actions, and that of the actions sent."""
    policies = original.policies(copies)
    if isinstance(policies, ActorSet):
        assert original.actions is None
        found = policies.acts[0](original.obs, np.zeros(len(original.obs), np.int64))
        return largest(found, original.expected), 0.0
    if policies.head is None:
        return largest(policies.probs(original.obs, 0)[0], original.expected), 0.0
    parameters = policies.parameters(original.obs, 0)
    found = policies.head.log_probs(parameters, original.actions)[0]
    return largest(found, original.expected), largest(policies.head.sent(original.actions), original.sent)


def largest(found, expected):
    """The largest absolute difference; shapes must agree."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float(np.abs(found - expected).max())


def spread(module, seed=0, scale=0.3):
    """Moves all weights away from where training begins, where policies hardly depend on what they see."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for x in module.parameters():
            x += scale / max(1, x[0].numel() if x.ndim > 1 else 1) ** 0.5 * torch.randn(x.shape, generator=generator)
    return module


def observations(space, n, seed=1):
    """n observations of a space, the unbounded ones with some far away."""
    if isinstance(space, spaces.Box) and not np.isfinite(space.low).any():
        x = np.random.default_rng(seed).standard_normal((n, *space.shape)).astype(np.float32)
        x[: n // 10] *= 5
        return x
    space.seed(seed)
    return np.stack([space.sample() for _ in range(n)])


def normal_log_probs(distribution, actions):
    """A torch Normal's own log-density, summed over dimensions; in double, as its float32 rounds to 1e-6 itself."""
    precise = torch.distributions.Normal(distribution.mean.double(), distribution.stddev.double())
    return precise.log_prob(actions.double()).sum(-1).numpy()
