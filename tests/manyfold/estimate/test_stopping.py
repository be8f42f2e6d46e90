"""Stopping rules: what they promise, held against exact values; and plain returns with common random numbers."""

import numpy as np
import pytest

import manyfold as mf
from benchmarks import gate
from manyfold import exact
from manyfold.envs import Finite
from manyfold.estimate import collecting, evaluation, intervals, ranking, sources, stopping
from manyfold.estimate.stopping import Part, Played, Returns, play, until
from manyfold.mdp import FiniteMDP
from manyfold.policies import ChosenPolicySet, TabularPolicySet


def normal(means, rng, shared=0.0):
    """A source of plain returns with known means; rounds may have something in common."""
    centre = np.asarray(means, dtype=np.float64)

    def run(which, rounds):
        noise = rng.standard_normal((len(which), rounds)) + shared * rng.standard_normal(rounds)
        return Played(centre[which][:, None] + noise, len(which) * rounds)

    return Returns([f"p{i}" for i in range(len(centre))], run)


def world(seed=0, far=0.5, policies=4, horizon=5):
    rng = np.random.default_rng(seed)
    transitions = rng.dirichlet(np.ones(5), size=(5, 3))
    mdp = FiniteMDP(transitions, rng.standard_normal((5, 3)) + 1, np.full(5, 0.2), horizon)
    base, own = rng.dirichlet(np.ones(3), size=(1, 1, 5)), rng.dirichlet(np.ones(3), size=(policies, 1, 5))
    return mdp, np.repeat((1 - far) * base + far * own, horizon, 1)


def test_the_best_is_found_and_hardly_ever_a_wrong_one():
    wrong, known = 0, 0
    for seed in range(200):
        found = until(normal([0, 0.1, 0.6, 0.8], np.random.default_rng(seed)), budget=2000)
        known += found.best is not None
        wrong += found.best not in (None, 3)
    assert known > 150
    assert wrong <= 10  # 5% of 200; 0.95 of all binomials with p = 0.025 are below


def test_of_equals_none_is_called_best_more_often_than_alpha():
    claimed = sum(until(normal([1, 1, 0], np.random.default_rng(s)), budget=1000).best is not None for s in range(200))
    assert claimed <= 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(gate.KINDS))
def test_one_of_two_is_called_better_or_worse_wrongly_with_alpha_at_most(kind):
    """What the command `manyfold gate` answers, with as many looks as it likes: neither of two equals is better."""
    runs = 40 if kind == "pooled" else 400
    for behind in (0.0, 0.1) if kind != "pooled" else (0.0,):
        better, worse, _ = gate.measure(kind, behind, runs)
        wrong = better + (0 if behind else worse)
        assert wrong / runs <= gate.ALPHA + 2 * np.sqrt(gate.ALPHA * (1 - gate.ALPHA) / runs)


def test_who_cannot_win_runs_no_more_and_the_others_stay_unbiased():
    """Two are dropped because of what was seen, two are equal: the means of what is joined must not move for it."""
    means = np.array([0.0, 0.2, 3.0, 3.0])
    found = [until(normal(means, np.random.default_rng(s)), budget=400) for s in range(300)]
    assert all(one.looks[0].running.tolist() == [0, 1, 2, 3] for one in found)
    dropped = [one for one in found if one.looks[-1].running.tolist() == [2, 3]]
    assert len(dropped) > 280
    for one in dropped:
        each = one.decision.sample.units_each
        assert each[0] == each[1] < each[2] == each[3]
        assert 4 * each[0] + 2 * (each[2] - each[0]) == one.episodes <= 400
    errors = np.array([one.mean - means for one in found])
    z = errors.mean(0) / (errors.std(0, ddof=1) / np.sqrt(len(errors)))
    assert np.abs(z[2:]).max() < 4


def test_nobody_is_dropped_before_a_segment_has_settled():
    """Two of four are far behind after a few rounds already, and the other two are equal."""
    found = until(normal([0, 0, 9, 9], np.random.default_rng(0)), budget=2000)
    first = [look for look in found.looks if len(look.running) == 4]
    assert first[-2].decision.may_be_best.sum() == 2
    assert [look.episodes >= 4 * stopping.SETTLED for look in first] == [False] * (len(first) - 1) + [True]
    assert len(found.looks) > len(first)


def test_segments_are_joined_by_hand():
    """Two rounds of two policies, then two of the first alone."""
    both = intervals.sample(np.array([[1.0, 3.0], [5.0, 5.0]]), names=("a", "b"))
    one = intervals.sample(np.array([[6.0, 8.0, 10.0, 12.0]]), names=("a",))
    joined = intervals.join([both, one])
    np.testing.assert_allclose(joined.mean, [(2 * 2 + 4 * 9) / 6, 5])
    variance = (2 / 6) ** 2 * 2 / 2 + (4 / 6) ** 2 * (20 / 3) / 4
    np.testing.assert_allclose(joined.covariance, [[variance, 0], [0, 0]])
    np.testing.assert_array_equal(joined.units_each, [6, 2])
    np.testing.assert_array_equal(joined.differences().units, [2])


def test_precision_and_order_stop_as_soon_as_they_are_reached():
    precise = until(normal([0, 5], np.random.default_rng(0)), stop=None, precision=0.3)
    assert precise.decision.half_width.max() <= 0.3 < precise.looks[-2].decision.half_width.max()
    assert precise.reason == "Stopped: every value is known to +- 0.3."
    ordered = until(normal([0, 1, 2], np.random.default_rng(0)), stop="order")
    assert ordered.decision.order_known
    assert not ordered.looks[-2].decision.order_known
    assert len(ordered.looks[-1].running) == 3  # an order needs all of them
    both = until(normal([0, 5], np.random.default_rng(0)), stop="best", precision=0.3)
    assert both.reason == "Stopped: the best policy is known and every value is known to +- 0.3."


def test_returns_that_hardly_vary_are_said_not_to_be_trusted():
    """Of all segments: b and d are dropped, a and c go on."""
    rng = np.random.default_rng(0)

    def run(which, rounds):
        often = np.where(rng.random((4, rounds)) < 0.02, 100.0, 500.0)
        often[1::2] = rng.normal(0, 1, (2, rounds))
        return Played(often[which])

    found = until(Returns("abcd", run), budget=150)
    assert [len(x) for x in found.own_returns] == found.decision.sample.units_each.tolist()
    assert len(found.own_returns[0]) > len(found.own_returns[1])
    assert [bool(said) for said in found.warnings] == [True, False, True, False]
    assert f"\na: not to be trusted: {found.warnings[0]}" in str(found)
    low, high = found.bounded(-10, 500)
    assert (low < [492, 0, 492, 0]).all()
    assert (high > [492, 0, 492, 0]).all()


def test_weights_of_all_segments_are_diagnosed():
    """As `Estimate.warnings` does it; a source without weights has no such warnings."""
    mdp, pi = world(far=1.0)

    class Heavy(sources.Pooling):
        def more(self, rounds, focus=None):
            part = super().more(rounds, focus)
            weights = part.log_weights.copy()
            weights[self.which == 2] = -np.inf
            return part._replace(log_weights=weights)

    found = until(Heavy(Finite(mdp), TabularPolicySet(pi), np.random.default_rng(0)))
    assert [said[:3] for said in found.warnings] == ["", "", "all", ""]
    assert "weights are 0: no episode says anything of" in found.warnings[2]


class Newcomer:
    """A store's episodes of `a`; those of `b`, who is better, never went where it goes, until it runs some itself."""

    names, known, selective = ("a", "b"), 60, True

    def __init__(self):
        self.rng, self.own = np.random.default_rng(0), 0

    def begin(self, which):
        assert which.tolist() == [0, 1]

    def more(self, rounds, focus=None):
        self.own += rounds if focus is None or 1 in focus else 0
        n = self.known + self.own
        a, b = self.rng.normal(5, 1, n), self.rng.normal(9 if self.own else 1, 1, n)
        log_w = np.zeros((2, n))
        log_w[1] = 0.0 if self.own else -3.0  # a mean weight of 0.05
        own = a[: self.known], b[self.known :]
        return Part(np.stack([a, b]), np.repeat([0, 1], [self.known, self.own]), np.zeros(n, int), n, n, own, log_w)


@pytest.mark.parametrize(("stop", "precision"), [("best", None), (None, 0.6), ("best", 0.6)])
def test_nobody_is_ruled_out_by_a_value_that_is_not_known_yet(stop, precision):
    """The first look knows b by others' episodes alone, surely worse than a: that must not be for good."""
    found = until(Newcomer(), stop, precision)
    first = found.looks[0].decision
    assert first.difference.low[0, 1] > 0
    assert first.may_be_best.all()
    assert found.best == 1
    assert found.decision.ranks[0].tolist() == [2, 1]


def test_looks_that_contradict_each_other_end_with_what_the_last_one_says():
    """A wrong claim was made, at one look or the other: the one with the most episodes counts, and fits its table."""

    class Turning(Newcomer):
        known, selective = 0, False

        def more(self, rounds, focus=None):
            self.own += rounds
            means = np.array([[5], [1 if self.own < 20 else 9]])
            values = self.rng.normal(means, 1, (2, self.own))
            return Part(values, None, None, values.size, values.size, tuple(values))

    found = until(Turning(), None, 0.5)
    assert 0 in [look.decision.best for look in found.looks]
    assert found.best == int(found.mean.argmax()) == 1


def test_a_budget_is_never_exceeded():
    for budget in (6, 7, 29, 100, 333):
        found = until(normal([1, 1, 1], np.random.default_rng(budget)), budget=budget)
        assert found.episodes <= budget
        assert found.episodes > 0.8 * budget - 3
        assert "budget" in found.reason
        assert [look.episodes for look in found.looks] == sorted({look.episodes for look in found.looks})


def test_one_policy_stops_by_precision_alone():
    found = until(normal([2], np.random.default_rng(0)), stop=None, precision=0.5)
    assert found.episodes < 100
    assert "One policy" in str(found)


def test_shared_rounds_need_far_fewer_episodes():
    alone = np.mean([until(normal([0, 0.5], np.random.default_rng(s))).episodes for s in range(20)])
    paired = []
    for s in range(20):
        rng = np.random.default_rng(s)

        def run(which, rounds, rng=rng):
            same = rng.standard_normal(rounds)
            noise = 0.3 * rng.standard_normal((len(which), rounds))
            return Played(np.array([0, 0.5])[which][:, None] + same + noise)

        paired.append(until(Returns("ab", run)).episodes)
    assert np.mean(paired) < 0.4 * alone


def test_pooled_evaluation_until_the_best_is_known():
    """Exact values of a random MDP; the right policy, the same seed the same answer."""
    mdp, pi = world(far=1.0)
    truth, env, policies = exact.values(mdp, pi), Finite(mdp), TabularPolicySet(pi)
    found = [mf.evaluate(env, policies, stop="best", seed=s) for s in range(20)]
    assert all(one.best == truth.argmax() for one in found)
    again = mf.evaluate(env, policies, stop="best", seed=3)
    np.testing.assert_array_equal(again.mean, found[3].mean)
    inside = [(one.decision.interval.low <= truth) & (truth <= one.decision.interval.high) for one in found]
    assert np.mean(inside) > 0.95
    assert "Stopped: the best policy is known." in str(found[0])
    narrow = mf.evaluate(env, policies, precision=0.2)
    assert narrow.decision.half_width.max() <= 0.2


def test_pooled_evaluation_with_q_of_those_that_are_left():
    mdp, pi = world(far=1.0, policies=6)
    q = exact.action_values(mdp, pi)

    class Table:
        def predict(self, states, t):
            return q[:, t, states[:, 0].astype(int)]

    with_q = mf.evaluate(Finite(mdp), TabularPolicySet(pi), stop="best", q=Table())
    assert with_q.best == exact.values(mdp, pi).argmax()
    part = sources.ChosenValues(Table(), np.array([4, 1])).predict(np.array([[2]]), np.array([0]))
    np.testing.assert_array_equal(part[:, 0], q[[4, 1], 0, 2])
    chosen = ChosenPolicySet(TabularPolicySet(pi), [4, 1])
    assert chosen.n_policies == 2
    np.testing.assert_array_equal(chosen.probs(np.array([2]), 0)[:, 0], pi[[4, 1], 0, 2])


def test_the_next_look_comes_when_half_of_what_is_missing_has_run():
    """20 own returns of variance 4, h = 2, V = 1/5 and X = 1: 4 (4 - 1) / (1/5) = 60 more by themselves, half is 30."""
    own, more = (np.tile([-1.0, 1.0], n // 2) * np.sqrt(4 * (n - 1) / n) for n in (20, 40))
    part = Part(np.zeros((2, 60)), None, None, 60, 60, (own, more))

    class Seen:
        half_width = np.array([2.0, 2.0])
        sample = intervals.Sample(("a", "b"), np.zeros(2), np.full((1, 2, 2), 0.2), np.array([19.0]), 40)

    one, both = np.array([0]), np.array([0, 1])
    assert stopping._ahead(Seen, part, 1.0, both[1:]) == 30
    assert stopping._ahead(Seen, part, 1.0, one) == 20  # no more than there are
    assert stopping._ahead(Seen, part, 1.0, both) == 20
    assert stopping._ahead(Seen, part, 2.0, both) == 0  # narrow enough
    Seen.half_width = np.array([np.inf, 2.0])
    assert stopping._ahead(Seen, part, 1.0, both) == 0
    few = part._replace(own_returns=(own[:4], own))
    assert stopping._ahead(Seen, few, 1.0, both) == 0  # nobody knows yet


def test_joined_densities_are_kept_once():
    """The targets are the first loggers: of all numbers these are the most."""
    mdp, pi = world()
    parts = [collecting.collect(Finite(mdp), TabularPolicySet(pi), 40, np.random.default_rng(n)) for n in range(2)]
    both = mf.Episodes.join(parts)
    assert np.shares_memory(both.log_targets, both.log_loggers)
    np.testing.assert_array_equal(both.log_targets, np.concatenate([part.log_targets for part in parts], -1))


def test_joined_episodes_are_pooled_as_if_run_at_once():
    mdp, pi = world()
    env, policies = Finite(mdp), TabularPolicySet(pi)
    parts = [collecting.collect(env, policies, n, np.random.default_rng(n)) for n in (40, 20)]
    both = mf.Episodes.join(parts)
    assert len(both.lengths) == 60
    np.testing.assert_array_equal(both.rewards, np.concatenate([p.rewards for p in parts]))
    np.testing.assert_array_equal(both.all_probs[:, -1], parts[1].all_probs[:, -1])
    assert np.abs(evaluation.pool(both).mean - exact.values(mdp, pi)).max() < 1.5


# --- plain returns ----------------------------------------------------------------------------------------------------


def test_played_rounds_begin_alike_and_count_their_steps():
    """A deterministic walk: the return is the start plus what the actor adds; far more rounds than slots."""
    start = np.zeros(5)
    start[[1, 3]] = 0.5
    stay = np.repeat(np.eye(5)[:, None], 3, 1)
    rewards = np.arange(5.0)[:, None] + 10 * np.arange(3.0)
    env = Finite(FiniteMDP(stay, rewards, start, 4))
    found = play(env, [lambda obs, t: np.zeros(len(t), int), lambda obs, t: (t > 1).astype(int)], 50)
    assert found.steps == 2 * 50 * 4
    assert set(found.returns[0]) == {4.0, 12.0}
    np.testing.assert_array_equal(found.returns[1] - found.returns[0], 20)
    decision = ranking.decide(intervals.sample(found.returns))
    assert decision.best == 1
    np.testing.assert_allclose([decision.difference.low[1, 0], decision.difference.high[1, 0]], 20)


def test_played_gymnasium_environments_share_their_seeds():
    env = mf.GymnasiumEnvironment("CartPole-v1", horizon=60)
    lean = [lambda obs, t: (obs[:, 2] > 0).astype(int), lambda obs, t: (obs[:, 2] > 0).astype(int)]
    found = play(env, lean, 130, seed=5)
    np.testing.assert_array_equal(*found.returns)
    assert found.steps == found.returns.sum()  # a reward a step
    np.testing.assert_array_equal(play(env, lean, 130, seed=5).returns, found.returns)
    assert not np.array_equal(play(env, lean, 130, seed=6).returns, found.returns)


def test_bad_input_gets_one_line():
    source = normal([0, 1], np.random.default_rng(0))
    with pytest.raises(ValueError, match='stop is \'soon\', expected "best" or "order"'):
        until(source, stop="soon")
    with pytest.raises(ValueError, match='expected "best" or "order", or a precision'):
        until(source, stop=None)
    with pytest.raises(ValueError, match="precision is -1, expected half the width"):
        until(source, precision=-1)
    with pytest.raises(ValueError, match="budget is 3, expected"):
        until(source, budget=3)
    with pytest.raises(ValueError, match="alpha is 1.5, expected"):
        until(source, alpha=1.5)
    with pytest.raises(ValueError, match="returns"):
        until(Returns("ab", lambda which, rounds: Played(np.zeros((2, 1)))))
    with pytest.raises(ValueError, match="not finite"):
        until(Returns("ab", lambda which, rounds: Played(np.full((2, rounds), np.nan))))
    mdp, pi = world()
    env, policies = Finite(mdp), TabularPolicySet(pi)
    with pytest.raises(ValueError, match="nothing says when to stop, expected episodes=200"):
        mf.evaluate(env, policies)
    with pytest.raises(ValueError, match="starts are of a fixed number"):
        mf.evaluate(env, policies, stop="best", starts=np.zeros((3, 1)))
    with pytest.raises(ValueError, match="an actor returned float64"):
        play(env, [lambda obs, t: np.zeros(len(t))], 3)
    with pytest.raises(ValueError, match="action"):
        play(env, [lambda obs, t: np.full(len(t), 7)], 3)
    with pytest.raises(ValueError, match="rounds"):
        play(env, [], 0)


def test_the_first_look_has_few_rounds_and_later_ones_grow():
    found = until(normal([1, 1], np.random.default_rng(1)), budget=1000)
    episodes = np.array([look.episodes for look in found.looks])
    assert episodes[0] == 2 * stopping.FIRST
    assert (np.diff(episodes) / episodes[:-1] < 0.35).all()
    seen = []
    until(normal([1, 1], np.random.default_rng(1)), budget=1000, progress=seen.append)
    assert [look.episodes for look in seen] == episodes.tolist()
