"""Online runs: every estimator is unbiased, and its spread is what exact dynamic programming says."""

import numpy as np
import pytest

from manyfold import exact
from manyfold.data.episodes import Padded
from manyfold.envs.gridworld import Gridworld
from manyfold.estimate import runs
from manyfold.estimate.loggers import TabularLogging
from manyfold.estimate.methods import METHODS, RETURNS
from manyfold.rollout import rollout_tabular
from manyfold.streams import stream
from tests.worlds import distributions

K, M = 4, 4


@pytest.fixture(scope="module")
def world():
    """Four targets that are alike, so that SON's and SODI's variances can be seen in a sample."""
    rng = np.random.default_rng(0)
    base = distributions(rng, (1, M, M * M, 4))
    targets = 0.85 * base + 0.15 * distributions(rng, (K, M, M * M, 4))
    grid = Gridworld.draw(M, 0)
    mdp = grid.mdp()
    q, q_hat = exact.action_values(mdp, targets), exact.second_moments(mdp, targets)
    b = q + 0.3 * rng.standard_normal(q.shape)  # a poor baseline is unbiased too
    mu, odi = exact.shared_behavior(targets, q_hat), exact.odi_behaviors(targets, q_hat)
    return mdp, TabularLogging(grid, targets, mu, odi, b)


def logged(logging, loggers, episodes, rng):
    """All episodes, which a table logs in one block."""
    (found,) = logging.log(loggers, episodes, rng)
    return found


def test_loggers_take_turns():
    """Logger j always takes action j: episode i has action i mod J."""
    loggers = np.broadcast_to(np.eye(4)[:3, None, None], (3, M, M * M, 4))
    found = rollout_tabular(Gridworld.draw(M, 0), loggers, 10, stream("test"))
    np.testing.assert_array_equal(found.actions, np.repeat(np.arange(10) % 3, M).reshape(10, M))


def test_one_logger_among_others_runs_the_same_episodes_as_alone(world):
    _, tables = world
    alone = rollout_tabular(tables.env, tables.mu, 50, stream("test"))
    same = rollout_tabular(tables.env, np.stack([tables.mu] * 3), 50, stream("test"))
    assert all(np.array_equal(a, b) for a, b in zip(alone, same, strict=True))


def test_every_estimator_is_unbiased_and_has_the_exact_variance(world):
    mdp, tables = world
    count, points = 40, np.array([K, 400, 4000])
    found = []
    for r in range(count):
        found.append(runs.run(lambda name, r=r: logged(tables, name, 4000, stream("test-run", name, r)), points))
    estimates = np.stack([f.estimates for f in found])  # [R, E, points, K]
    variances = np.stack([f.variances for f in found])  # [R, E, K]
    truth = exact.values(mdp, tables.targets)
    known = exact.estimator_variances(mdp, tables.targets, b=tables.b, behaviors=(tables.mu, tables.odi))
    for i, name in enumerate(METHODS):
        for j, n in enumerate(points):
            error = estimates[:, i, j] - truth  # [R, K]
            se = error.std(0, ddof=1) / np.sqrt(count)
            assert (np.abs(error.mean(0)) < 4.5 * se).all(), (name, n)
        seen = variances[:, i].mean(0)
        if name in known:
            se = variances[:, i].std(0, ddof=1) / np.sqrt(count)
            assert (np.abs(seen - known[name]) < 4.5 * se).all(), name
            np.testing.assert_allclose(seen, known[name], rtol=0.15)
        # and what is said of the variance is that of the estimates themselves
        ratio = 4000 * estimates[:, i, -1].var(0, ddof=1) / seen
        assert 0.4 < ratio.mean() < 1.8, name


def test_on_policy_is_plain_monte_carlo(world):
    _, tables = world
    points = np.array([20, 40])
    episodes = {name: logged(tables, name, 40, stream("test")) for name in ("targets", "mu", "odi")}
    found = runs.run(lambda name: episodes[name], points)
    returns = episodes["targets"].rewards.sum(-1)
    for k in range(K):
        np.testing.assert_allclose(found.estimates[0, :, k], [returns[k:20:K].mean(), returns[k::K].mean()])
    assert next(iter(METHODS)) == "on_policy"


def test_estimates_and_variances_by_hand():
    values = np.array([[1.0, 2.0, 3.0, 6.0], [0.0, 10.0, 0.0, 20.0]])
    points = np.array([2, 4])
    estimates, variances = runs.own_estimates(values, points)
    np.testing.assert_allclose(estimates, [[1.0, 10.0], [2.0, 15.0]])
    np.testing.assert_allclose(variances, [2 * 2.0, 2 * 50.0])  # K times the variance of 1, 3 and of 10, 20
    estimates, variances = runs.pooled_estimates(values, points, 2)
    np.testing.assert_allclose(estimates, [[1.5, 5.0], [3.0, 7.5]])
    np.testing.assert_allclose(variances, [(2.0 + 8.0) / 2, (0.0 + 50.0) / 2])  # within loggers only
    _, variances = runs.pooled_estimates(values, points, 1)
    np.testing.assert_allclose(variances, values.var(1, ddof=1))


@pytest.mark.parametrize("loggers", ["targets", "mu", "odi"])
def test_ratios_are_to_the_logger_that_ran_the_episode(world, loggers):
    _, tables = world
    episodes = logged(tables, loggers, 10, stream("test"))
    every = episodes.logger_probs()
    assert len(every) == len(episodes.counts) == (1 if loggers == "mu" else K)
    own = np.stack([every[i % len(every), i] for i in range(10)])
    np.testing.assert_array_equal(episodes.own_probs, own)
    np.testing.assert_allclose(np.exp(episodes.log_rho), episodes.target_probs / own)
    taken, expected = episodes.baseline()
    found = rollout_tabular(tables.env, getattr(tables, loggers), 10, stream("test"))
    for k, n, t in ((0, 0, 0), (3, 7, 2), (1, 9, 3)):
        s, a = found.states[n, t], found.actions[n, t]
        assert taken[k, n, t] == tables.b[k, t, s, a]
        assert expected[k, n, t] == pytest.approx(tables.targets[k, t, s] @ tables.b[k, t, s])
        assert episodes.target_probs[k, n, t] == tables.targets[k, t, s, a]


@pytest.mark.parametrize("returns", RETURNS)
def test_nothing_behind_an_early_end_counts(returns):
    """Two loggers, the first episode ends after two of three steps; what stands behind is garbage."""
    rng = np.random.default_rng(0)
    target, loggers = rng.uniform(0.1, 1, (3, 2, 3)), rng.uniform(0.1, 1, (2, 2, 3))
    rewards, taken, expected = rng.standard_normal((2, 3)), *rng.standard_normal((2, 3, 2, 3))
    values = []
    for garbage in (0.3, 0.9):
        t, j, r, b, e = (x.copy() for x in (target, loggers, rewards, taken, expected))
        for x in (t, j, r, b, e):
            x[..., 0, 2] = garbage
        own = np.stack([j[0, 0], j[1, 1]])
        episodes = Padded(r, t, own, lambda j=j: j, lambda b=b, e=e: (b, e), np.array([1, 1]), np.array([2, 3]))
        values.append(RETURNS[returns](episodes))
    np.testing.assert_array_equal(*values)


def test_the_balance_heuristic_bounds_what_pooling_explodes():
    """Two targets that hardly share an action."""
    table = np.array([[0.97, 0.01, 0.01, 0.01], [0.01, 0.97, 0.01, 0.01]])
    targets = np.broadcast_to(table[:, None, None], (2, M, M * M, 4))
    tables = TabularLogging(Gridworld.draw(M, 1), targets, targets.mean(0), targets, np.zeros(targets.shape))
    found = runs.run(lambda name: logged(tables, name, 2000, stream("test", name)), np.array([2, 2000]))
    names = list(METHODS)
    assert (found.variances[names.index("son_balanced")] < 0.3 * found.variances[names.index("son")]).all()


def test_points_are_multiples_of_the_targets_and_increase():
    assert runs.check_points([4, 12, 100], 4).tolist() == [4, 12, 100]


@pytest.mark.parametrize("points", [[], [3], [4, 4], [0, 8], [4]])
def test_bad_points_are_refused(points):
    with pytest.raises(ValueError, match="points are .*, expected"):
        runs.check_points(np.array(points, dtype=int), 4)


def test_a_draw_takes_no_episode_twice_and_keeps_the_loggers_turns():
    """Values say which episode they are; targets 0, 1 and 2 log in turns."""
    numbers = np.tile(np.arange(60.0), (3, 1))
    values = {("targets", "pdis"): numbers, ("targets", "balanced"): -numbers}
    values["mu", "pdis"] = 100 + numbers
    drawn = runs.draw(values, 30, stream("test"))
    found = drawn["targets", "pdis"]
    assert found.shape == (3, 30)
    assert len(np.unique(found[0])) == 30
    np.testing.assert_array_equal(found[0] % 3, np.arange(30) % 3)
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_array_equal(drawn["targets", "balanced"], -found)  # the same episodes
    assert not np.array_equal(found[0][0::3] // 3, found[0][1::3] // 3)  # each logger's in an order of its own
    other = drawn["mu", "pdis"][0] - 100
    assert len(np.unique(other)) == 30
    assert len(set(other % 3)) == 3
    all_of_them = runs.draw(values, 60, stream("test"))["mu", "pdis"][0]
    np.testing.assert_array_equal(np.sort(all_of_them), values["mu", "pdis"][0])


def test_runs_of_a_large_enough_pool_are_disjoint_parts_of_it():
    numbers = np.tile(np.arange(60.0), (3, 1))
    values = {("targets", "pdis"): numbers, ("targets", "balanced"): -numbers, ("mu", "pdis"): numbers}
    found = list(runs.draws(values, 15, 4, stream("test")))
    assert len(found) == 4
    for key in values:
        np.testing.assert_array_equal(np.sort(np.concatenate([one[key][0] for one in found])), np.sort(values[key][0]))
    for one in found:
        np.testing.assert_array_equal(one["targets", "pdis"][0] % 3, np.arange(15) % 3)  # loggers still in turns
        np.testing.assert_array_equal(one["targets", "balanced"], -one["targets", "pdis"])
    overlapping = [one["mu", "pdis"][0] for one in runs.draws(values, 30, 3, stream("test"))]
    assert [len(np.unique(one)) for one in overlapping] == [30, 30, 30]
    assert len(np.intersect1d(overlapping[0], overlapping[1])) > 0
    again = runs.draw(values, 30, stream("test"))["mu", "pdis"][0]
    np.testing.assert_array_equal(overlapping[0], again)


@pytest.mark.parametrize(("episodes", "pool"), [(63, 60), (31, 60), (30, 61)])
def test_a_draw_that_the_pool_cannot_give_is_refused(episodes, pool):
    with pytest.raises(ValueError, match=f"{episodes} episodes of a pool of {pool}, expected at most all, both mult"):
        runs.draw({("targets", "pdis"): np.zeros((3, pool))}, episodes, stream("test"))


def test_the_truth_from_pooled_episodes_is_the_exact_one_with_its_error(world):
    """J within its standard error of the exact values, the error as large as many repetitions say, and below MC's.

    6,000 episodes leave it under a fifth of the best estimator's error at 200, for the mean policy.
    """
    mdp, tables = world
    exactly = exact.values(mdp, tables.targets)
    found = [runs.pooled_truth(tables.log("targets", 400, stream("truth", r))) for r in range(60)]
    means, errors = (np.stack(x) for x in zip(*found, strict=True))  # [60, K]
    z = (means - exactly) / errors
    assert (np.abs(z.mean(0)) < 4 / np.sqrt(60)).all()
    np.testing.assert_allclose(z.std(0, ddof=1), 1, atol=4 / np.sqrt(120))
    on_policy = np.array([exact.pdis_variance(mdp, tables.targets[[k]], tables.targets[k])[0] for k in range(K)])
    assert (errors.mean(0) < 0.7 * np.sqrt(on_policy / (400 / K))).all()
    long = runs.pooled_truth(tables.log("targets", 6000, stream("truth")))
    assert (np.abs(long[0] - exactly) < 4 * long[1]).all()
    run = runs.run(lambda name: logged(tables, name, 6000, stream("best", name)), np.array([K, 6000]))
    best = np.sqrt(run.variances / 200).mean(-1).min()
    assert long[1].mean() < best / 5


def test_the_truth_does_not_depend_on_how_episodes_are_cut_into_blocks(world):
    _, tables = world
    whole = logged(tables, "targets", 40, stream("test"))

    def part(first, last):
        probs, every, (b, v) = whole.target_probs, whole.logger_probs(), whole.baseline()
        return Padded(
            whole.rewards[first:last],
            probs[:, first:last],
            whole.own_probs[first:last],
            lambda: every[:, first:last],
            lambda: (b[:, first:last], v[:, first:last]),
            np.full(K, (last - first) // K),
        )

    together = runs.pooled_truth([whole])
    apart = runs.pooled_truth([part(0, 16), part(16, 40)])
    np.testing.assert_allclose(apart, together, rtol=1e-12)


def test_returns_are_named_and_only_those_that_some_estimator_takes(world):
    _, tables = world
    episodes = logged(tables, "targets", 8, stream("test"))
    found = runs.returns([episodes], "targets")
    assert set(found) == {("targets", "pdis"), ("targets", "balanced"), ("targets", "pooled")}
    for (_, name), x in found.items():
        np.testing.assert_array_equal(x, RETURNS[name](episodes))
