"""Fitted evaluation against exact dynamic programming."""

import dataclasses

import numpy as np
import pytest
import torch

from manyfold import exact
from manyfold.data.transitions import About, Transitions, Writer
from manyfold.envs.gridworld import Gridworld
from manyfold.exact import FiniteMDP
from manyfold.fqe import PAPER, engine
from manyfold.fqe.problems import look_up, moment_reward
from manyfold.rollout import rollout_tabular
from tests.crafted import craft
from tests.worlds import distributions

QUICK = engine.Config(learning_rate=1e-2, batch=512, updates_per_step=800)


def plain(n_policies):
    return lambda batch: np.repeat(batch.reward[None], n_policies, 0)


def logged(path, world, states=None, episodes=3000, seed=0):
    """Episodes of the uniform policy; `states [S, width]` says how a state is written, by default as its number."""
    states = np.arange(world.n_states)[:, None] if states is None else states
    horizon, n_actions = world.horizon, world.n_actions
    rng = np.random.default_rng(seed)
    found = rollout_tabular(world, np.full((horizon, world.n_states, n_actions), 1 / n_actions), episodes, rng)
    after, _ = world.step(found.states[:, -1], found.actions[:, -1], rng)
    steps = np.broadcast_to(np.arange(horizon), found.states.shape)
    with Writer(path, About("test", horizon, n_actions, states.shape[1], seed)) as writer:
        writer.write(
            {
                "episode": np.repeat(np.arange(episodes), horizon),
                "t": steps.ravel(),
                "state": states[found.states.ravel()],
                "action": found.actions.ravel(),
                "reward": found.rewards.ravel(),
                "next_state": states[np.column_stack([found.states[:, 1:], after]).ravel()],
                "terminated": (steps == horizon - 1).ravel(),
                "truncated": np.zeros(steps.size, dtype=bool),
            }
        )
    return Transitions(path)


def visits(mdp, policies):
    """How often each policy is at (t, s, a); `[K, T, S, A]`."""
    out = np.zeros_like(policies)
    at = np.broadcast_to(mdp.initial, (len(policies), mdp.n_states)).copy()
    for t in range(mdp.horizon):
        out[:, t] = at[..., None] * policies[:, t]
        at = mdp.push(out[:, t])
    return out / mdp.horizon


def relative_error(found, true, weight):
    """Weighted root mean square error over the weighted spread, the worst policy."""
    mean = (weight * true).sum((1, 2, 3), keepdims=True)
    spread = np.sqrt((weight * (true - mean) ** 2).sum((1, 2, 3)))
    return (np.sqrt((weight * (found - true) ** 2).sum((1, 2, 3))) / spread).max()


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    world = Gridworld.draw(4, 0)
    rng = np.random.default_rng(0)
    base = distributions(rng, (1, 4, 16, 4))
    policies = 0.8 * base + 0.2 * distributions(rng, (3, 4, 16, 4))
    data = logged(tmp_path_factory.mktemp("data") / "grid.parquet", world)
    q = engine.fit(data, plain(3), look_up(policies), np.random.default_rng(0), QUICK, n_states=16)
    return world.mdp(), policies, data, q


def test_q_is_the_exact_one(grid):
    mdp, policies, _, q = grid
    error = relative_error(q.nets.table(), exact.action_values(mdp, policies), visits(mdp, policies))
    assert error < 0.05


def test_q_hat_is_the_exact_one(grid):
    mdp, policies, data, q = grid
    found = engine.fit(data, moment_reward(q.nets), look_up(policies), np.random.default_rng(1), QUICK, n_states=16)
    error = relative_error(found.nets.table(), exact.second_moments(mdp, policies), visits(mdp, policies))
    assert error < 0.06


def test_the_variance_of_a_plan_is_predicted(grid):
    """m with weights pi^2 / mu, from the same data: the variance of MPE's mu before any episode is run."""
    mdp, policies, data, q = grid
    mu = exact.shared_behavior(policies, exact.second_moments(mdp, policies))
    weights = policies**2 / mu
    found = engine.fit(data, moment_reward(q.nets), look_up(weights), np.random.default_rng(2), QUICK, n_states=16)
    start = int(mdp.initial.argmax())
    second = (weights[:, 0, start] * found.nets.table()[:, 0, start]).sum(-1)
    mean = (policies[:, 0, start] * q.nets.table()[:, 0, start]).sum(-1)
    np.testing.assert_allclose(second - mean**2, exact.pdis_variance(mdp, policies, mu), rtol=0.1)


def test_the_held_out_error_falls_to_the_noise_of_the_environment(grid):
    mdp, policies, _, q = grid
    assert q.curves[-1].held_out < q.curves[0].held_out / 3
    assert [check.update for check in q.curves] == sorted(check.update for check in q.curves)
    # what is left is Var(v(S') | s, a), which no fit removes
    nu = exact.next_value_variances(mdp, policies)
    at = np.full((1, 4, 16, 4), 0.25)
    noise = (visits(mdp, at) * (nu / q.nets.scale.double().numpy()[:, None, None, None] ** 2)).sum((1, 2, 3)).mean()
    assert q.curves[-1].held_out == pytest.approx(noise, rel=0.3)


def test_vectors_as_states(tmp_path):
    """The same world written as (row, column) features that separate its states linearly enough."""
    world = Gridworld.draw(2, 3)
    policies = distributions(np.random.default_rng(1), (2, 2, 4, 4))
    features = np.array([[0.0, 5.0], [0.0, 9.0], [3.0, 5.0], [3.0, 9.0]])
    data = logged(tmp_path / "a.parquet", world, features)
    small = policies.astype(np.float32)

    def weights(states, t):
        numbers = (states[:, 0] > 1) * 2 + (states[:, 1] > 7)
        return small[:, t, numbers]

    config = dataclasses.replace(QUICK, updates_per_step=800)
    found = engine.fit(data, plain(2), weights, np.random.default_rng(0), config)
    table = np.stack([found.nets.predict(features, t) for t in range(2)], 1)
    mdp = world.mdp()
    assert relative_error(table, exact.action_values(mdp, policies), visits(mdp, policies)) < 0.08


def ones(states, t):
    return np.ones((1, len(states), 1))


def chain(path, weights=ones):
    """Two steps, one action, reward 1: q is 2, then 1; as vectors, a little."""
    n = 400
    with Writer(path, About("test", 2, 1, 1, 0)) as writer:
        t = np.arange(n) % 2
        writer.write(
            {
                "episode": np.arange(n) // 2,
                "t": t,
                "state": t[:, None],
                "action": np.zeros(n, dtype=int),
                "reward": np.ones(n),
                "next_state": t[:, None] + 1,
                "terminated": t == 1,
                "truncated": np.zeros(n, dtype=bool),
            }
        )
    config = dataclasses.replace(QUICK, hidden=8, updates_per_step=150, batch=64)
    return engine.fit(Transitions(path), plain(1), weights, np.random.default_rng(0), config)


def test_the_papers_setting_is_one_layer_of_64_at_a_rate_of_one_thousandth():
    assert (PAPER.layers, PAPER.hidden, PAPER.learning_rate, PAPER.relabel) == (1, 64, 1e-3, False)


def test_what_is_kept_of_the_rows_changes_no_number(tmp_path, monkeypatch):
    kept = chain(tmp_path / "a.parquet")
    monkeypatch.setattr(engine, "MOST_KNOWN", 0)
    asked_again = chain(tmp_path / "a.parquet")
    assert torch.equal(kept.nets.flat, asked_again.nets.flat)
    np.testing.assert_allclose(kept.nets.predict([[0], [1]], [0, 1])[0, :, 0], [2, 1], atol=0.05)


@pytest.mark.parametrize(("low", "high", "first"), [(0.0, 9.0, 2.0), (0.0, 0.4, 1.4), (3.0, 9.0, 4.0)])
@pytest.mark.parametrize("most", [0, engine.MOST_KNOWN])
def test_next_values_are_kept_inside_their_bounds(tmp_path, monkeypatch, low, high, first, most):
    """The last step's q is 1: what is carried back to the first one is that, or the bound in its way."""
    monkeypatch.setattr(engine, "MOST_KNOWN", most)
    found = chain(tmp_path / "a.parquet", lambda s, t: engine.Bounded(ones(s, t), low * ones(s, t), high * ones(s, t)))
    np.testing.assert_allclose(found.nets.predict([[0], [1]], [0, 1])[0, :, 0], [first, 1], atol=0.05)


@pytest.mark.parametrize("cosines", [0, 4])
def test_two_layers_find_the_exact_q_too(grid, cosines):
    mdp, policies, data, _ = grid
    config = dataclasses.replace(QUICK, hidden=32, layers=2, cosines=cosines)
    found = engine.fit(data, plain(3), look_up(policies), np.random.default_rng(0), config, n_states=16)
    assert relative_error(found.nets.table(), exact.action_values(mdp, policies), visits(mdp, policies)) < 0.06


def test_relabelled_rows_find_the_exact_q_of_steps_that_were_never_logged(tmp_path):
    """Only rows of the first and of the last step are there: q of the others comes from the first one's."""
    rng = np.random.default_rng(0)
    moves = distributions(rng, (3, 2, 3))
    mdp = FiniteMDP(moves, rng.standard_normal((3, 2)), [1 / 3] * 3, 4)
    policies, n = distributions(rng, (2, 4, 3, 2)), 6000
    state, action = rng.integers(3, size=n), rng.integers(2, size=n)
    after = (rng.random((n, 1)) > moves[state, action, :-1].cumsum(-1)).sum(-1)
    t = np.where(np.arange(n) % 4 == 3, 3, 0)
    no = np.zeros(n, dtype=bool)
    with Writer(tmp_path / "a.parquet", About("test", 4, 2, 1, 0)) as writer:
        columns = {"episode": np.arange(n), "t": t, "state": state[:, None], "action": action, "truncated": no}
        columns |= {"reward": mdp.rewards[state, action], "next_state": after[:, None], "terminated": t == 3}
        writer.write(columns)
    errors = []
    for relabel in (False, True):
        config = dataclasses.replace(QUICK, relabel=relabel)
        found = engine.fit(
            Transitions(tmp_path), plain(2), look_up(policies), np.random.default_rng(0), config, n_states=3
        )
        errors.append(relative_error(found.nets.table(), exact.action_values(mdp, policies), visits(mdp, policies)))
    assert errors[1] < 0.05 < 0.2 < errors[0]


def test_one_step_and_one_policy_is_the_reward(tmp_path):
    rng = np.random.default_rng(0)
    mdp = FiniteMDP(distributions(rng, (3, 2, 3)), rng.standard_normal((3, 2)), [1 / 3] * 3, 1)
    data = logged(tmp_path / "a.parquet", mdp)
    ones = np.full((1, 1, 3, 2), 0.5)
    config = dataclasses.replace(QUICK, updates_per_step=2000)
    found = engine.fit(data, plain(1), look_up(ones), rng, config, n_states=3)
    np.testing.assert_allclose(found.nets.table()[0, 0], mdp.rewards, atol=0.02)


def test_an_early_end_does_not_bootstrap_and_a_cut_does(tmp_path):
    """Two states that differ in how their step at t = 0 ended: terminated is worth 1, truncated 1 + what follows."""
    rows = 4000
    number = np.arange(rows)
    kind = number % 3  # 0: terminated at t = 0, 1: truncated at t = 0, 2: the last step, worth 10
    with Writer(tmp_path / "a.parquet", About("test", 2, 1, 1, 0)) as writer:
        writer.write(
            {
                "episode": number,
                "t": (kind == 2).astype(int),
                "state": kind[:, None],
                "action": np.zeros(rows),
                "reward": np.where(kind == 2, 10.0, 1.0),
                "next_state": np.full((rows, 1), 2),
                "terminated": kind == 0,
                "truncated": kind == 1,
            }
        )
    data = Transitions(tmp_path)
    ones = look_up(np.ones((1, 2, 3, 1)))
    config = dataclasses.replace(QUICK, updates_per_step=1500)
    table = engine.fit(data, plain(1), ones, np.random.default_rng(0), config, n_states=3).nets.table()
    np.testing.assert_allclose([table[0, 0, 0, 0], table[0, 0, 1, 0], table[0, 1, 2, 0]], [1, 11, 10], atol=0.3)


def test_the_same_seed_gives_the_same_fit(grid):
    _, policies, data, _ = grid
    config = dataclasses.replace(QUICK, updates_per_step=20)
    first, again = (
        engine.fit(data, plain(3), look_up(policies), np.random.default_rng(5), config, n_states=16) for _ in range(2)
    )
    assert torch.equal(first.nets.flat, again.nets.flat)


def begun(grid, **changes):
    _, policies, data, _ = grid
    config = dataclasses.replace(QUICK, **changes)
    return engine._Work(data, plain(3), look_up(policies), 7, config, 16)


def test_what_is_returned_is_the_best_of_the_second_half_on_held_out_rows(grid):
    """A rate so high that errors go up and down; it stops two checks after the best."""
    _, policies, data, _ = grid
    config = dataclasses.replace(QUICK, updates_per_step=200, learning_rate=0.1, average=0.0, patience=2)
    found = engine.fit(data, plain(3), look_up(policies), np.random.default_rng(0), config, n_states=16)
    later = [check.held_out for check in found.curves if check.update > 400]
    assert later[-1] > min(later)  # otherwise this shows nothing
    work = begun(grid)
    held_out, known = work.held_out
    rows = next(iter(data.batches(4 * 512, np.random.default_rng(0), "held_out")))
    np.testing.assert_array_equal(held_out.reward, rows.reward)
    out = found.nets.scaled(found.nets.inputs(rows.state, rows.t))
    taken = out[:, torch.arange(len(rows.t)), torch.from_numpy(rows.action.astype(np.int64))]
    work.average.flat.copy_(found.nets.flat)
    assert float((taken - work.target(rows, known)).square().mean()) == pytest.approx(min(later), rel=0.05)


def test_the_learning_rate_falls_in_the_second_half(grid):
    work = begun(grid, updates_per_step=25)
    rates, step = [], work.optimiser.step
    work.optimiser.step = lambda rate: (rates.append(rate), step(rate))
    assert len(list(work.checks())) == 50
    assert rates[:50] == [QUICK.learning_rate] * 50
    assert rates[-1] == pytest.approx(QUICK.learning_rate * 2 / 100)


def test_it_stops_when_nothing_improves(grid):
    work = begun(grid, updates_per_step=50, learning_rate=1e-9, patience=3, average=0.0)
    list(work.checks())
    assert work.curves[-1].update < 0.9 * work.updates


class Stop(Exception):
    pass


@pytest.mark.parametrize("options", [{}, {"layers": 2, "cosines": 3, "relabel": True}])
def test_a_fit_that_was_cut_off_goes_on_to_the_same_numbers(grid, tmp_path, options):
    """Cut off twice, once in the middle of a pass over the data and once after some checks of the second half."""
    _, policies, data, _ = grid
    config = dataclasses.replace(QUICK, updates_per_step=75, batch=100, **options)
    state = tmp_path / "state"

    def run(stop, path=None):
        def progress(check, updates):
            if check.update >= stop:
                raise Stop

        rng = np.random.default_rng(5)
        return engine.fit(data, plain(3), look_up(policies), rng, config, 16, progress, path, save_every=0)

    whole = run(10_000)
    for stop in (100, 250):
        with pytest.raises(Stop):
            run(stop, state)
    seen = []
    rng = np.random.default_rng(5)
    found = engine.fit(
        data, plain(3), look_up(policies), rng, config, 16, lambda check, _: seen.append(check.update), state, 0
    )
    assert seen[0] > 200  # it did go on, and not from the start
    assert torch.equal(found.nets.flat, whole.nets.flat)
    assert found.curves == whole.curves
    other = "state: the state of another fit; remove it to start over"
    with pytest.raises(ValueError, match=other):
        engine.fit(data, plain(3), look_up(policies), np.random.default_rng(6), config, 16, state=state)
    for spoil in (
        lambda about: about.pop("counts"),
        lambda about: about.update(counts=[]),
        lambda about: about.update(counts="1234567"),
        lambda about: about["counts"].__setitem__(1, "x"),
        lambda about: about["counts"].__setitem__(6, [[1, 2]]),
        lambda about: about.update(config=None),
    ):
        content = state.read_bytes()
        craft(state, spoil)
        with pytest.raises(ValueError, match=other):
            engine.fit(data, plain(3), look_up(policies), np.random.default_rng(5), config, 16, state=state)
        state.write_bytes(content)


@pytest.mark.parametrize(("layers", "cosines"), [(1, 0), (2, 0), (1, 3), (2, 3)])
def test_the_written_out_gradient_equals_autograds(grid, layers, cosines):
    _, _, data, _ = grid
    nets = begun(grid, layers=layers, cosines=cosines).nets
    batch = next(iter(data.batches(64, np.random.default_rng(0))))
    target = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    slots = {name: torch.zeros_like(x) for name, x in nets.parameters.items()}
    error = 0.0
    for rows in (slice(0, 50), slice(50, 64)):  # in two pieces
        piece = type(batch)._make(x[rows] for x in batch)
        error += engine._add_gradient(nets, slots, piece, target[:, rows], 64)
    free = {name: x.clone().requires_grad_() for name, x in nets.parameters.items()}
    states = torch.from_numpy(batch.state[:, 0].astype(np.int64))
    time = torch.from_numpy(batch.t.astype(np.int64))
    table = np.cos(np.pi * (np.arange(4)[:, None] + 0.5) / 4 * np.arange(3)).astype(np.float32)
    moments = torch.from_numpy(table) @ free["w1_time"] if cosines else free["w1_time"]  # [T, K * h]
    rows = (free["w1"][states] + moments[time]).view(64, 3, -1).transpose(0, 1)  # [K, N, h]
    h = torch.relu(rows)
    if layers == 2:
        h = torch.relu(h @ free["w_mid"] + free["b_mid"])
    out = h @ free["w2"].view(4, 3, -1).permute(1, 2, 0) + free["b2"]
    taken = out[:, torch.arange(64), torch.from_numpy(batch.action.astype(np.int64))]
    loss = ((taken - target) ** 2).mean(1).sum()
    loss.backward()
    assert error == pytest.approx(loss.item() / 3, rel=1e-4)
    for name, x in free.items():
        torch.testing.assert_close(slots[name], x.grad, rtol=1e-3, atol=1e-6)


def test_a_divergence_is_reported_not_returned(grid):
    """Next weights that sum to 40 make every step back 40 times larger."""
    _, policies, data, _ = grid
    with pytest.raises(ValueError, match="the fit diverged: held-out error"):
        engine.fit(data, plain(3), look_up(policies * 1e4), np.random.default_rng(0), QUICK, n_states=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 0}, "hidden is 0, expected a whole number from 1 to 100,000"),
        ({"learning_rate": 2}, "learning_rate is 2, expected a number from 0 to 1"),
        ({"learning_rate": 0}, "learning_rate is 0, expected a number between 0 and 1"),
        ({"learning_rate": float("nan")}, "learning_rate is nan, expected a number from 0 to 1"),
        ({"learning_rate": "1e-3"}, "learning_rate is '1e-3', expected a number from 0 to 1"),
        ({"batch": 10**9}, "batch is 1000000000, expected a whole number from 1 to 1e.07"),
        ({"most_updates": 10**12}, "most_updates is 1000000000000, expected a whole number from 1 to 1e.08"),
        ({"average": 1.0}, "average is 1.0, expected a number from 0 to below 1"),
        ({"cosines": 1}, "cosines is 1, expected 0 or at least 2: the first one is constant"),
        ({"layers": 3}, "layers is 3, expected a whole number from 1 to 2"),
        ({"relabel": 1}, "relabel is 1, expected true or false"),
    ],
)
def test_bad_hyperparameters_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(engine.Config(), **change)


def test_the_defaults_are_bounded_however_long_the_horizon():
    assert [engine.Config().updates(horizon) for horizon in (1, 10, 30, 500, 10_000)] == [150, 1500, 4500, 4500, 4500]


def test_fewer_updates_than_the_horizon_asks_for_still_carry_values_back(tmp_path):
    """A reward of 1 in each of 60 steps: q_t = 60 - t. At the old pace it would not get there."""
    horizon, rows = 60, 6000
    rng = np.random.default_rng(0)
    steps, state = rng.integers(horizon, size=rows), rng.normal(size=(rows, 1))
    with Writer(tmp_path / "data.parquet", About("chain", horizon, 1, 1, 0)) as writer:
        no = np.zeros(rows, dtype=bool)
        columns = {"episode": np.arange(rows), "t": steps, "state": state, "action": np.zeros(rows)}
        writer.write(columns | {"reward": np.ones(rows), "next_state": state, "terminated": no, "truncated": no})
    config = dataclasses.replace(QUICK, updates_per_step=200, most_updates=1200)
    assert (config.updates(horizon), config.updates(5)) == (1200, 1000)
    assert config.follow(5) == 1 - config.average
    assert config.follow(horizon) == pytest.approx(10 * (1 - config.average))

    def at_start(config):
        nets = engine.fit(Transitions(tmp_path), plain(1), lambda s, t: np.ones((1, len(t), 1)), rng, config).nets
        return float(nets.predict([[0.0]], 0)[0, 0, 0])

    assert at_start(config) == pytest.approx(horizon, rel=0.05)
    assert at_start(dataclasses.replace(config, updates_per_step=20)) < 0.9 * horizon


def test_too_few_rows_to_hold_any_out_are_one_line(tmp_path):
    row = {"episode": [0], "t": [0], "state": [[0.0]], "action": [0], "reward": [1.0], "next_state": [[0.0]]}
    columns = {name: np.array(x) for name, x in row.items()}
    with Writer(tmp_path / "one.parquet", About("one", 1, 1, 1, 0)) as writer:
        writer.write(columns | {"terminated": np.array([True]), "truncated": np.array([False])})
    with pytest.raises(ValueError, match="1 logged rows, expected more: some are held out, and none is left to fit"):
        engine.fit(
            Transitions(tmp_path),
            lambda b: b.reward[None],
            lambda s, t: np.ones((1, len(t), 1)),
            np.random.default_rng(0),
        )
