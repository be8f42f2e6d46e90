import numpy as np
import pytest
import torch

from manyfold.envs.binned_mujoco import ROBOTS, BinnedMujoco
from manyfold.envs.gridworld import Gridworld
from manyfold.envs.gymnasium import GymnasiumEnvironment
from manyfold.train import ppo, targets
from manyfold.train.ppo import Position
from manyfold.train.targets import Plan, Rule, Training

GRID = Gridworld.draw(10, 0)
ENVS = {
    "gridworld-1000": GRID,
    "gridworld-27000": Gridworld.draw(30, 0),
    **{name: BinnedMujoco(name) for name in ROBOTS},
}
RULE = Rule(policies=10, start=(3000, 7000), width=8000, history=6)


@pytest.mark.parametrize("name", ENVS)
def test_plans_lie_in_their_interval_and_follow_from_the_seed(name):
    config = targets.config(ENVS[name])
    starts = []
    for group in range(30):
        plan = targets.draw(RULE, config, name, group)
        assert plan == targets.draw(RULE, config, name, group)
        low, high = plan.interval
        assert high - low == pytest.approx(8000)
        steps = [targets.step_of(position, config) for position in plan.targets]
        assert len(set(steps)) == 10
        assert steps == sorted(steps)
        assert low <= steps[0]
        assert steps[-1] <= high
        assert low <= targets.step_of(plan.companion, config) <= high
        assert plan.history[0] == Position(0, 0)
        assert high - targets.step_of(plan.history[-1], config) < config.batch / config.epochs
        assert plan.last == max(p.update for p in (*plan.targets, plan.companion, *plan.history))
        starts.append(low)
    assert min(starts) >= 3000
    assert max(starts) <= 7000
    assert np.ptp(starts) > 2000  # 30 draws from a range of 4,000


def test_steps_of_positions_by_hand():
    config = targets.config(GRID)  # 512 steps an update, 4 epochs
    assert targets.step_of(Position(0, 0), config) == 0
    assert targets.step_of(Position(1, 1), config) == 128
    assert targets.step_of(Position(3, 4), config) == 3 * 512
    assert targets.step_of(Position(2, 5), targets.config(ENVS["hopper"])) == 2048 * 1.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policies": 0}, "targets.policies is 0, expected a whole number from 1 to 10,000"),
        ({"policies": 2.5}, "targets.policies is 2.5, expected a whole number"),
        ({"policies": 10**9}, "targets.policies is 1000000000, expected a whole number from 1 to 10,000"),
        ({"history": 1}, "targets.history is 1, expected a whole number from 2 to 10,000"),
        ({"width": -5}, "targets.width is -5, expected a number from 1 to 1e.09"),
        ({"width": float("nan")}, "targets.width is nan, expected a number from 1 to 1e.09"),
        ({"width": "1e3"}, "targets.width is '1e3', expected a number from 1 to 1e.09"),
        ({"start": (5, 3)}, "targets.start is 3, expected a number from 5 to 1e.09"),
        ({"start": (-1, 3)}, "targets.start is -1, expected a number from 0 to 1e.09"),
        ({"start": (1, 2, 3)}, r"targets.start is \(1, 2, 3\), expected \[low, high\]"),
        ({"start": 5}, r"targets.start is 5, expected \[low, high\]"),
        ({"start": (True, True)}, "targets.start is True, expected a number from 0 to 1e.09"),
        ({"start": (1, "x")}, "targets.start is 'x', expected a number from 1 to 1e.09"),
        ({"start": ("x", 1)}, "targets.start is 'x', expected a number from 0 to 1e.09"),
    ],
)
def test_rules_out_of_range_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Rule(**{"policies": 10, "start": (0, 1), "width": 100, "history": 6, **change})


def test_intervals_that_cannot_be_met_are_refused():
    with pytest.raises(
        ValueError, match=r"targets.width 500 holds . checkpoints of gridworld-1000, expected 10 or more"
    ):
        targets.draw(Rule(10, (1000, 1000), 500, 2), ppo.DISCRETE, "gridworld-1000", 0)
    with pytest.raises(ValueError, match="targets.history is 5000, expected .. at most"):
        targets.draw(Rule(10, (1000, 1000), 8000, 5000), ppo.DISCRETE, "gridworld-1000", 0)
    with pytest.raises(ValueError, match="reach step 600000, expected 500000 at most"):
        targets.draw(Rule(10, (0, 100_000), 500_000, 2), ppo.DISCRETE, "gridworld-1000", 0)


def test_a_kind_of_environment_has_its_hyperparameters_and_others_are_not_trained_here():
    assert targets.config(GRID) == ppo.DISCRETE
    assert targets.config(ENVS["ant"]) == ppo.CONTINUOUS
    plan = Plan((0.0, 1.0), (Position(1, 1),), Position(1, 1), (Position(0, 0), Position(1, 1)))
    with pytest.raises(ValueError, match="^CartPole-v1: PPO here trains Gridworlds and robots; give its policies as"):
        Training(GymnasiumEnvironment("CartPole-v1"), "my-study", [0], [plan])


def test_training_stops_at_the_last_step_needed_and_yields_what_was_planned():
    rule = Rule(policies=3, start=(600, 900), width=700, history=3)
    groups = [0, 1]
    plans = [targets.draw(rule, ppo.DISCRETE, "gridworld-1000", group) for group in groups]
    training = Training(GRID, "gridworld-1000", groups, plans)
    while not training.finished:
        training.run_segment()
    assert training.learner.update == max(plan.last for plan in plans)
    first, second = training.results()
    assert first.targets.n_policies == 3
    assert first.companion.n_policies == 1
    assert first.history.n_policies == 3
    assert first.targets.spec.names[0] == f"step {targets.step_of(plans[0].targets[0], training.config):g}"
    # the initial policy of the history is nearly uniform, and the same position is the same policy wherever it is used
    np.testing.assert_allclose(first.history.table()[0], 0.25, atol=0.02)
    assert not np.allclose(first.targets.table()[0], second.targets.table()[0])
    alone = Training(GRID, "gridworld-1000", [1], [plans[1]])
    while not alone.finished:
        alone.run_segment()
    np.testing.assert_allclose(alone.results()[0].targets.table(), second.targets.table(), atol=1e-5)


def test_an_interrupted_training_yields_the_same_policies():
    last = Position(22, 4)  # a segment of Gridworld is 20 updates
    plan = Plan((0.0, 1.0), (Position(3, 2), last), Position(3, 2), (Position(0, 0), last))
    whole, first, second = (Training(GRID, "gridworld-1000", [5], [plan]) for _ in range(3))
    while not whole.finished:
        whole.run_segment()
    first.run_segment()
    second.load(*first.save())
    assert not second.finished
    second.run_segment()
    assert second.finished
    for name, x in whole.results()[0].targets.tensors.items():
        assert torch.equal(x, second.results()[0].targets.tensors[name])


def test_a_checkpoint_keeps_the_statistics_of_its_own_moment():
    """Taken after update 1 and looked at after update 2: it must act as the learner did then, not as it does now."""
    early, late = Position(1, 10), Position(2, 10)
    training = Training(
        ENVS["inverted-pendulum"],
        "inverted-pendulum",
        [0],
        [Plan((0.0, 1.0), (early, late), early, (Position(0, 0), late))],
    )
    moments = []

    def watch():
        statistics = {name: x.copy() for name, x in training.envs.normaliser().items()}
        raw = statistics["obs_mean"] + 0.3
        z = (raw - statistics["obs_mean"]) / np.sqrt(statistics["obs_var"] + 1e-8)
        inputs = torch.from_numpy(np.clip(z, -10, 10).astype(np.float32))[:, None]
        moments.append((raw, training.learner.networks.act(inputs)[0, 0].clone()))

    training.run_segment(watch)
    policies = training.results()[0].targets
    for k, (raw, mean) in enumerate(moments):
        torch.testing.assert_close(policies.outputs(raw, 0)[k, 0], mean, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(policies.tensors["obs_mean"][0], policies.tensors["obs_mean"][1])


def test_a_robots_policies_carry_their_normalisation():
    plan = Plan((0.0, 1.0), (Position(1, 1), Position(1, 2)), Position(1, 2), (Position(0, 0), Position(1, 2)))
    training = Training(ENVS["hopper"], "hopper", [0], [plan])
    training.run_segment()
    (drawn,) = training.results()
    assert drawn.targets.spec.kind == "binned_gaussian"
    assert (drawn.targets.spec.low, drawn.targets.spec.high, drawn.targets.n_actions) == (-1.0, 1.0, 10)
    statistics = training.envs.normaliser()
    np.testing.assert_array_equal(drawn.targets.tensors["obs_mean"].numpy(), np.repeat(statistics["obs_mean"], 2, 0))
    assert drawn.targets.tensors["obs_mean"].abs().max() > 0.1
    probs = drawn.targets.probs(np.tile(statistics["obs_mean"], (2, 1)), 0)
    np.testing.assert_allclose(probs.sum(-1), 1)
    rest = drawn.companion.companion()(np.tile(statistics["obs_mean"], (4, 1)), np.random.default_rng(0))
    assert rest.shape == (4, 2)
