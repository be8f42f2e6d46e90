"""Evaluation of any environment from nothing but its own episodes, against exact values."""

import gymnasium
import numpy as np
import pytest

import manyfold as mf
from manyfold import exact
from manyfold.data.episodes import Episodes
from manyfold.envs import Finite
from manyfold.estimate import baselines, collecting, evaluation, pooled, shares
from manyfold.mdp import FiniteMDP
from manyfold.policies import TabularPolicySet
from manyfold.rollout import rollout_tabular
from tests import doors


def world(seed=0, horizon=5, policies=4, far=0.5, states=5):
    rng = np.random.default_rng(seed)
    transitions = rng.dirichlet(np.ones(states), size=(states, 3))
    mdp = FiniteMDP(transitions, rng.standard_normal((states, 3)) + 1, np.full(states, 1 / states), horizon)
    base, own = rng.dirichlet(np.ones(3), size=(1, 1, states)), rng.dirichlet(np.ones(3), size=(policies, 1, states))
    return mdp, np.repeat((1 - far) * base + far * own, horizon, 1)


def logged(mdp, pi, n, rng, vectors=False):
    """Episodes of all policies in turns; states as indices, or as vectors of one number."""
    found, k, horizon = rollout_tabular(mdp, pi, n, rng), len(pi), mdp.horizon
    t, states, actions = np.tile(np.arange(horizon), n), found.states.ravel(), found.actions.ravel()
    probs = pi[:, t, states]
    taken = np.log(probs[:, np.arange(len(t)), actions])
    names = tuple("abcdefgh"[:k])
    x = states[:, None] * (0.3 if vectors else 1)
    lengths, n_states = np.full(n, horizon), 0 if vectors else mdp.n_states
    return Episodes(
        x,
        t,
        actions,
        found.rewards.ravel(),
        lengths,
        np.arange(n) % k,
        taken,
        taken,
        np.arange(k),
        names,
        horizon,
        n_states,
        probs,
    )


def changed(episodes, which, by=100.0):
    """The same with other rewards in one episode."""
    rewards = np.where(episodes.of_steps == which, episodes.rewards + by, episodes.rewards)
    return Episodes(**{**vars(episodes), "rewards": rewards})


@pytest.mark.parametrize("vectors", [False, True])
def test_an_episode_decides_nothing_about_its_own_fold(vectors):
    """Coefficients, recipes, scales and regressions of a fold come from the others: the rest of it keeps its values."""
    mdp, pi = world()
    episodes = logged(mdp, pi, 80, np.random.default_rng(0), vectors)
    before, after = evaluation.pool(episodes), evaluation.pool(changed(episodes, 7))
    same = before.fold == before.fold[7]
    same[7] = False
    np.testing.assert_array_equal(before.values[:, same], after.values[:, same])
    assert before.recipes[before.fold[7]] == after.recipes[before.fold[7]]
    others = before.fold != before.fold[7]
    assert not np.allclose(before.values[:, others], after.values[:, others])  # they do learn from it
    moved = Episodes(**{**vars(episodes), "states": np.where(episodes.of_steps[:, None] == 7, 4, episodes.states)})
    again = evaluation.pool(moved)
    np.testing.assert_array_equal(before.values[:, same], again.values[:, same])


@pytest.mark.parametrize(("far", "most"), [(0.05, 0.2), (1.0, 0.6)])
def test_estimates_are_unbiased_better_than_on_policy_mc_and_know_their_errors(far, most):
    """200 samples of 80 episodes, nothing logged."""
    mdp, pi = world(far=far)
    rng, j = np.random.default_rng(1), exact.values(*world(far=far))
    found = [evaluation.pool(logged(mdp, pi, 80, rng)) for _ in range(200)]
    errors = np.array([one.mean for one in found]) - j
    alone = np.array([[x.mean() for x in one.own_returns] for one in found]) - j
    z = errors.mean(0) / (errors.std(0, ddof=1) / np.sqrt(len(errors)))
    assert np.abs(z).max() < 4
    assert (errors**2).mean() < most * (alone**2).mean()
    claimed = np.array([one.standard_error for one in found])
    assert 0.8 < (claimed**2).mean() / (errors**2).mean() < 1.2
    covered = np.abs(errors) < 1.96 * claimed
    assert 0.9 < covered.mean() < 0.97


def test_too_few_rounds_are_on_policy_mc():
    mdp, pi = world()
    found = evaluation.pool(logged(mdp, pi, 12, np.random.default_rng(0)))
    np.testing.assert_allclose(found.mean, [x.mean() for x in found.own_returns])
    np.testing.assert_allclose(found.variance, found.on_policy_variance)
    assert found.recipes == ()


def test_an_exact_q_leaves_only_what_no_action_explains():
    """With q exact the variance is the theorem's; nothing fitted on 400 episodes gets far below it or above it."""
    mdp, pi = world(far=0.1)
    q = exact.action_values(mdp, pi)

    class Table:
        def predict(self, states, t):
            return q[:, t, states[:, 0].astype(int)]

    rng = np.random.default_rng(0)
    with_q = np.mean([evaluation.pool(logged(mdp, pi, 400, rng), Table()).variance for _ in range(5)], 0)
    without = np.mean([evaluation.pool(logged(mdp, pi, 400, rng)).variance for _ in range(5)], 0)
    assert (with_q < 1.1 * without).all()
    nu = exact.next_value_variances(mdp, pi)
    assert (with_q > 0.5 * mdp.horizon * nu.min()).all()


def test_other_starts_lower_the_variance_and_their_error_counts():
    """Rewards by state alone, so that v_0(S_0) is most of the return's variance; 400 samples of 60 episodes."""
    rng = np.random.default_rng(3)
    mdp, pi = world(horizon=2, far=0.2)
    rewards = np.repeat(10 * rng.standard_normal((5, 1)), 3, 1)
    mdp = FiniteMDP(mdp.transitions, rewards, mdp.initial, 2)
    j, errors, claimed = exact.values(mdp, pi), {0: [], 60: []}, {0: [], 60: []}
    for _ in range(400):
        episodes, first = logged(mdp, pi, 60, rng), rng.choice(5, size=(60, 1), p=mdp.initial)
        for m in errors:
            found = evaluation.pool(episodes, starts=first[:m] if m else None)
            errors[m].append(found.mean - j)
            claimed[m].append(found.variance / 60)
    squares = {m: (np.array(x) ** 2).mean() for m, x in errors.items()}
    assert squares[60] < 0.75 * squares[0]
    bias = np.array(errors[60]).mean(0) / (np.array(errors[60]).std(0, ddof=1) / 20)
    assert np.abs(bias).max() < 4
    assert 0.8 < np.mean(claimed[60]) / squares[60] < 1.25


def test_first_states_come_from_the_start_distribution():
    mdp, _ = world()
    found = collecting.first_states(Finite(mdp), 1000, np.random.default_rng(0))
    assert found.shape == (1000, 1)
    np.testing.assert_allclose(np.bincount(found[:, 0], minlength=5) / 1000, mdp.initial, atol=0.05)
    env = mf.GymnasiumEnvironment("CartPole-v1", horizon=10)
    several = collecting.first_states(env, 250, np.random.default_rng(0))  # more than there are slots
    assert several.shape == (250, 4)
    assert len(np.unique(several[:, 0])) == 250
    assert np.abs(several).max() <= 0.05


def test_turns_give_every_logger_its_share_at_any_time():
    who = collecting.turns(np.array([0.5, 0.25, 0.25, 0.0]), 8)
    assert np.bincount(who, minlength=4).tolist() == [4, 2, 2, 0]
    assert collecting.turns(np.full(3, 1 / 3), 7).tolist()[:3] in ([0, 1, 2], [1, 0, 2])
    for n in range(1, 40):
        counts = np.bincount(collecting.turns(np.array([0.6, 0.3, 0.1]), n), minlength=3)
        assert counts.sum() == n
        assert np.abs(counts - n * np.array([0.6, 0.3, 0.1])).max() <= 1
    with pytest.raises(ValueError, match="expected shares of the loggers that sum to 1"):
        collecting.turns(np.array([0.5, 0.4]), 10)


def test_evaluate_a_gymnasium_environment_and_repeat_it():
    env = mf.GymnasiumEnvironment("CartPole-v1", horizon=40)

    def policy(gain):
        def at(obs, t):
            p = 1 / (1 + np.exp(-gain * (obs[:, 2] + obs[:, 3])))
            return np.stack([1 - p, p], -1)

        return at

    policies = mf.CallablePolicySet([policy(g) for g in (0.5, 1.0, 2.0)], 2, 4, 40)
    found = mf.evaluate(env, policies, 90)
    again = mf.evaluate(env, policies, 90)
    np.testing.assert_array_equal(found.values, again.values)
    other = mf.evaluate(env, policies, 90, seed=1)
    assert not np.array_equal(found.values, other.values)
    assert found.variance.sum() < found.on_policy_variance.sum()
    text = str(found)
    assert "90 episodes" in text
    assert "relative variance" in text
    assert text.count("\n") >= 4
    with pytest.raises(ValueError, match="episodes is 5, expected a whole number of at least 6"):
        mf.evaluate(env, policies, 5)


def test_equal_returns_are_said_not_to_be_trusted():
    mdp, pi = world(policies=2)
    episodes = logged(mdp, pi, 40, np.random.default_rng(0))
    still = Episodes(**{**vars(episodes), "rewards": np.ones_like(episodes.rewards)})
    found = evaluation.pool(still)
    assert "all returns of a were equal: what is rarer than 1 in 6 may not have been seen" in str(found)
    np.testing.assert_allclose(found.mean, 5)
    np.testing.assert_allclose(found.variance, 0, atol=1e-12)
    low, high = found.bounded(0, 5)
    assert (high == 5).all()
    assert ((low > 2.5) & (low < 4.5)).all()


def test_cost_of_a_precision_by_hand():
    assert shares.cost_of(np.array([4.0, 9.0]), 20.0, 0.5) == (36, 720)
    with pytest.raises(ValueError, match="precision is 0, expected a number"):
        shares.cost_of(np.ones(1), 1.0, 0)


def test_a_plan_keeps_its_floor_prefers_the_noisy_and_is_paid_in_what_is_scarce():
    """Policies far apart, one of which has returns ten times as spread: it gets most of the episodes."""
    mdp, pi = world(far=1.0, horizon=3, policies=3)
    rng = np.random.default_rng(0)
    episodes = logged(mdp, pi, 600, rng)
    noisy = np.where(episodes.logger[episodes.of_steps] == 1, 10.0, 1.0) * rng.standard_normal(episodes.steps)
    pilot = Episodes(**{**vars(episodes), "rewards": noisy})
    found = evaluation.pool(pilot)
    result = shares.plan(pilot, found.values)
    np.testing.assert_allclose(result.alpha.sum(), 1)
    assert (result.alpha >= 0.25 / 3 - 1e-9).all()
    assert result.alpha.argmax() == 1
    np.testing.assert_allclose(result.equal, found.variance)  # at the pilot's own shares it is what was measured
    assert result.variance.sum() < found.variance.sum()
    assert result.length == pytest.approx(3)
    worst = shares.plan(pilot, found.values, "largest")
    assert worst.variance.max() <= result.variance.max() + 1e-9
    by_steps = shares.plan(pilot, found.values, cost="steps")
    np.testing.assert_allclose(by_steps.alpha, result.alpha, atol=1e-3)  # all episodes are as long


def test_the_planned_shares_are_better_when_run():
    """By simulation: 150 evaluations of 120 episodes with equal and with planned shares, on a set where it matters."""
    mdp, pi = world(far=1.0, horizon=3, policies=3)
    policies, rng = TabularPolicySet(pi), np.random.default_rng(0)
    scaled = FiniteMDP(mdp.transitions, mdp.rewards * np.array([1.0, 1, 8, 1, 1])[:, None], mdp.initial, 3)
    env, j = Finite(scaled), exact.values(scaled, pi)
    pilot = collecting.collect(env, policies, 900, rng)
    alpha = shares.plan(pilot, evaluation.pool(pilot).values).alpha
    errors = np.zeros(2)
    for _ in range(150):
        for i, use in enumerate((None, alpha)):
            found = evaluation.pool(collecting.collect(env, policies, 120, rng, alpha=use))
            errors[i] += ((found.mean - j) ** 2).sum()
    assert errors[1] < 1.05 * errors[0]


def test_other_loggers_join_and_stages_are_put_together():
    mdp, pi = world(far=0.3)
    policies, uniform = TabularPolicySet(pi), TabularPolicySet(np.full((1, *pi.shape[1:]), 1 / 3))
    rng, j = np.random.default_rng(0), exact.values(mdp, pi)
    env, errors, claimed = Finite(mdp), [], []
    for _ in range(150):
        first = evaluation.pool(collecting.collect(env, policies, 40, rng, uniform))
        second = evaluation.pool(collecting.collect(env, policies, 60, rng, uniform, [0.3, 0.2, 0.2, 0.3, 0.0]))
        both = evaluation.combine([first, second])
        np.testing.assert_allclose(both.mean, 0.4 * first.mean + 0.6 * second.mean)
        np.testing.assert_allclose(both.variance / 100, (0.16 * first.variance / 40 + 0.36 * second.variance / 60))
        errors.append(both.mean - j)
        claimed.append(both.variance / 100)
    errors = np.array(errors)
    assert np.abs(errors.mean(0) / (errors.std(0, ddof=1) / np.sqrt(150))).max() < 4
    assert 0.75 < np.mean(claimed) / (errors**2).mean() < 1.3
    with pytest.raises(ValueError, match="expected estimates of the same ones"):
        evaluation.combine([])


def test_features_by_hand():
    scale = baselines.Scale((1.0,), (2.0,))
    found = baselines.features(np.array([[5.0], [100.0]]), np.array([0, 2]), 4, scale)
    # s -> (5 - 1) / 2 = 2, t -> -1; products s s, s t, t t; then ReLUs
    np.testing.assert_allclose(found[0, :6], [1, 2, -1, 4, -2, 1])
    np.testing.assert_allclose(found[1, :3], [1, 3, 0])  # no further than three spreads
    assert found.shape == (2, 6 + baselines.DIRECTIONS)
    assert (found[:, 6:] >= 0).all()
    counted = baselines.features(np.array([[2]]), np.array([1]), 2, scale, n_states=3)
    np.testing.assert_allclose(counted, [[1, 0, 0, 0, 0, 1]])
    assert baselines.steps_of(np.array([0, 3]), 4).tolist() == [[1, 0, 0, 0], [0, 0, 0, 1]]
    assert baselines.steps_of(np.array([999]), 1000).argmax() == 63


def test_a_regression_is_that_of_the_other_folds_by_hand():
    """Two policies that never meet, T = 2: theta_t is the mean reward-to-go of a policy's own episodes elsewhere."""
    rewards = np.array([[1.0, 2], [10, 20], [3, 4], [30, 40], [5, 6], [50, 60]])  # policies 0 and 1 in turns
    logger, fold = np.arange(6) % 2, np.arange(6) // 2
    own = np.where(logger[:, None] == np.arange(2), 0.0, -np.inf).T.repeat(2, axis=1)  # log-probabilities [2, 12]
    t = np.tile(np.arange(2), 6)
    episodes = Episodes(
        np.zeros((12, 1)),
        t,
        np.zeros(12, int),
        rewards.ravel(),
        np.full(6, 2),
        logger,
        own,
        own,
        np.arange(2),
        ("a", "b"),
        2,
    )
    regression = baselines.Regression(episodes, fold, 3, baselines.steps_of(t[:0], 2))
    (block,) = episodes.blocks(1)
    w = np.where(logger == np.arange(2)[:, None], 2.0, 0.0).astype(np.float32)  # W_T
    flat = np.repeat(w[..., None], 2, -1)
    before = flat.copy()
    before[:, 0] += [1.0, 0.5]  # W_{t-1} - W_t of episode 0
    to_go = np.flip(np.cumsum(np.flip(rewards, -1), -1), -1).astype(np.float32)
    x = block.pad_rows(baselines.steps_of(t, 2))
    regression.add(block, x, to_go, flat, before, w)
    # as fold 1 sees it, episode 0 (fold 0) may use fold 2 alone; as fold 0 itself sees it, folds 1 and 2
    np.testing.assert_allclose(regression.controls(1)[0][:, 0], [11 + 0.5 * 6, 110 + 0.5 * 60], rtol=1e-3)
    expected = [(7 + 11) / 2 + 0.5 * (4 + 6) / 2, (70 + 110) / 2 + 0.5 * (40 + 60) / 2]
    np.testing.assert_allclose(regression.controls(0)[0][:, 0], expected, rtol=1e-3)


def test_ends_and_blocks_change_nothing(monkeypatch):
    """Ragged episodes in many blocks are those in one."""
    env = gymnasium.make("CartPole-v1")
    env.close()
    world_ = mf.GymnasiumEnvironment("CartPole-v1", horizon=60)
    policies = mf.CallablePolicySet(
        [lambda obs, t, g=g: np.stack([1 - (p := 1 / (1 + np.exp(-g * obs[:, 2]))), p], -1) for g in (1.0, 5.0)],
        2,
        4,
        60,
    )
    episodes = collecting.collect(world_, policies, 60, np.random.default_rng(0))
    assert len(np.unique(episodes.lengths)) > 5
    whole = evaluation.pool(episodes)
    monkeypatch.setattr("manyfold.data.episodes.BLOCK", 2**12)
    assert len(list(episodes.blocks(100))) > 3
    np.testing.assert_allclose(evaluation.pool(episodes).values, whole.values, rtol=1e-3, atol=1e-2)


def test_weights_never_exceed_one_over_the_share():
    mdp, pi = world(far=1.0)
    found = evaluation.pool(logged(mdp, pi, 80, np.random.default_rng(0)))
    assert np.exp(found.log_weights).max() <= 4 * (1 + 1e-9)
    assert found.diagnosis.effective_sample_size.shape == (4,)
    assert pooled.folds_of(found.logger)[1] == 5


def test_copies_of_one_policy_are_unbiased():
    """All weights are 1 up to rounding, which once passed for controls with a mean of 0: 0.9 too high, 40% outside."""
    gains = (1.0,) * 16
    truth = exact.values(doors.walk(), doors.tables(gains))[0]
    env, policies = Finite(doors.walk()), mf.TabularPolicySet(doors.tables(gains))
    found = [mf.evaluate(env, policies, 128, seed).mean for seed in range(40)]
    spread = np.std([x.mean() for x in found], ddof=1) / np.sqrt(40)
    assert abs(np.mean(found) - truth) < 4 * spread
