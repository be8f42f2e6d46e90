"""What a checkpoint leaves open, the environment says; and whether they belong together."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from manyfold.envs.gymnasium import GymnasiumEnvironment
from manyfold.policies import CallablePolicySet, ModulePolicySet
from manyfold.policies.actors import ActorSet, Drawn
from manyfold.policies.fitting import fitted
from manyfold.policies.heads import Gaussian, MultiCategorical
from manyfold.policies.layers import FixedStd, Image
from tests.originals import BOX, VECTOR, World, spread

OPEN = Gaussian((-np.inf,) * 3, (np.inf,) * 3)
CLOSED = Gaussian(tuple(map(float, BOX.low)), tuple(map(float, BOX.high)))


def world(observations=VECTOR, actions=BOX):
    return GymnasiumEnvironment(lambda: World(observations, actions), horizon=5)


def modules(actions, width=5):
    outputs = actions if isinstance(actions, int) else actions.size
    return ModulePolicySet(
        [spread(nn.Linear(width, outputs), seed) for seed in range(2)], actions, width, names=["a", "b"]
    )


def test_open_bounds_become_the_environments():
    policies = modules(OPEN)
    ready = fitted(policies, world())
    assert ready.head == CLOSED
    assert ready.names == policies.names
    obs = np.random.default_rng(0).normal(size=(10, 5))
    np.testing.assert_array_equal(ready.parameters(obs, 0), policies.parameters(obs, 0))
    assert fitted(modules(CLOSED), world()).head == CLOSED


def test_bounds_may_be_open_on_one_side():
    half = spaces.Box(np.float32([-1, -2, 0]), np.float32([1, np.inf, 0.5]))
    ready = fitted(modules(OPEN), world(actions=half))
    sent = ready.head.sent(np.full((1, 3), 9.0))
    np.testing.assert_array_equal(sent, [[1, 9, 0.5]])


def test_greedy_actors_are_clipped_too():
    alone = ModulePolicySet([FixedStd(spread(nn.Linear(5, 3), scale=9.0), torch.zeros(3))], OPEN, 5)
    actors = ActorSet(
        [Drawn(alone, True, np.random.default_rng(0)), lambda obs, t: np.full((len(obs), 3), 9.0)], width=5
    )
    ready = fitted(actors, world())
    obs, t = np.random.default_rng(0).normal(size=(50, 5)), np.zeros(50, np.int64)
    mean = alone.parameters(obs, 0)[0, :, :3]
    assert (np.abs(mean) > 3).any()
    np.testing.assert_array_equal(ready.acts[0](obs, t), np.clip(mean, BOX.low, BOX.high))
    assert (ready.acts[1](obs, t) == 9).all()  # a user's own function is the user's


def test_states_that_are_counted_come_one_hot():
    policies, env = modules(4, width=6), world(spaces.Discrete(6), spaces.Discrete(4))
    expected = policies.probs(np.eye(6), 0)
    np.testing.assert_allclose(fitted(policies, env).probs(np.arange(6)[:, None], 0), expected, atol=1e-12)
    one = ModulePolicySet(policies.modules[:1], 4, 6)
    actors = fitted(ActorSet([Drawn(one, True, np.random.default_rng(0))], width=6), env)
    assert actors.width == 1
    assert actors.acts[0](np.arange(6)[:, None], np.zeros(6, np.int64)).shape == (6,)


class Sum(nn.Module):
    """Tells the axes of an image apart."""

    def forward(self, x):
        return (x * torch.arange(float(x[0].numel())).view(x.shape[1:])).flatten(1).sum(-1, keepdim=True) * torch.ones(
            4
        )


@pytest.mark.parametrize("last", [True, False])
def test_images_are_flattened_as_the_environment_gives_them(last):
    image = spaces.Box(0, 255, (4, 6, 3) if last else (3, 4, 6), np.uint8)
    module = nn.Sequential(Image((3, 4, 6), scaled=True), Sum())
    ready = fitted(ModulePolicySet([module], 4, 72), world(image, spaces.Discrete(4)))
    x = np.random.default_rng(0).integers(0, 256, (1, *image.shape)).astype(np.float32)
    first = x.transpose(0, 3, 1, 2) if last else x
    expected = (first.ravel() / 255 * np.arange(72)).sum()
    with torch.no_grad():
        assert ready.modules[0](torch.as_tensor(x.reshape(1, -1)))[0, 0] == pytest.approx(expected, rel=1e-5)
    assert not module[0].channels_last


@pytest.mark.parametrize(
    ("policies", "env", "message"),
    [
        (modules(OPEN), world(actions=spaces.Box(-1, 1, (2,))), "vectors of 3 numbers, .* takes Box"),
        (modules(OPEN), world(actions=spaces.Discrete(3)), "vectors of 3 numbers, .* takes Discrete"),
        (modules(4), world(actions=spaces.Discrete(3)), "one of 4 actions, .* takes Discrete.3."),
        (modules(4), world(), "one of 4 actions, .* takes Box"),
        (modules(MultiCategorical((2, 3))), world(actions=spaces.MultiDiscrete([3, 2])), "2 choices .2, 3., .* takes"),
        (modules(4, width=7), world(actions=spaces.Discrete(4)), "observations of 7 numbers, those of .* have 5"),
        (ActorSet([lambda obs, t: obs], width=7), world(), "observations of 7 numbers, those of .* have 5"),
        (ActorSet([Drawn(modules(4), True, None)]), world(), "one of 4 actions, .* takes Box"),
        (
            CallablePolicySet([lambda obs, t: np.ones((len(obs), 4)) / 4], 4, 5, horizon=3),
            world(actions=spaces.Discrete(4)),
            "defined up to step 3, .* has 5; give horizon=3",
        ),
    ],
)
def test_policies_of_another_environment_get_one_line(policies, env, message):
    with pytest.raises(ValueError, match=f"^[^\n]*{message}[^\n]*$"):
        fitted(policies, env)


def test_switches_are_pairs():
    env = world(actions=spaces.MultiBinary(3))
    assert fitted(modules(MultiCategorical((2, 2, 2))), env).head.nvec == (2, 2, 2)
