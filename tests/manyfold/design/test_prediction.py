"""What logged data say of a plan: predictions against exact variances, the theorems' conditions, the verdict."""

import numpy as np
import pytest
from hypothesis import given

from manyfold import exact
from manyfold.data.transitions import About, Batch, Transitions, Writer, _held_out
from manyfold.design.behavior import Behavior
from manyfold.design.prediction import (
    CAPS,
    LABELS,
    Prediction,
    cost,
    forecast,
    length_problem,
    mixture_weights,
    optimism,
    predict,
    recommend,
    similar,
    variance_problem,
    verdict,
)
from manyfold.fqe import Bounded
from manyfold.fqe.nets import Shape
from manyfold.mdp import FiniteMDP
from manyfold.policies import TabularPolicySet
from manyfold.policies.mlp import MlpPolicySet
from tests.networks import constant_nets, mlp_policies, nets_from_table, value_nets
from tests.worlds import cases, trajectories

STATES, HORIZON, ACTIONS = 16, 4, 4


def softmax_policies(k=3, seed=0, sharpness=1.0):
    policies = mlp_policies(seed, k=k, horizon=HORIZON, n_actions=ACTIONS, n_states=STATES)
    policies.tensors["w3"] *= sharpness
    return policies


def every_row(mdp, t):
    """Rows of all (s, a, s') at step t as logged data would hold them, and the probability of each given (s, a)."""
    p = mdp.transitions.toarray().reshape(mdp.n_states, mdp.n_actions, mdp.n_states)
    s, a, after = (x.ravel() for x in np.indices(p.shape))
    no, column = np.zeros(len(s), dtype=bool), np.float32
    rows = Batch(
        np.full(len(s), t), s[:, None].astype(column), a, mdp.rewards[s, a], after[:, None].astype(column), no, no
    )
    return rows, p.ravel()


def solved_exactly(mdp, problem):
    """f = reward + E[sum_a' weights f(S', a')] by backward induction over all rows."""
    states, later, found = np.arange(mdp.n_states, dtype=np.float32)[:, None], None, []
    for t in reversed(range(mdp.horizon)):
        rows, p = every_row(mdp, t)
        x = problem.reward(rows)
        if later is not None:
            x = x + later[:, rows.next_state[:, 0].astype(int)]
        f = (x * p).reshape(len(x), mdp.n_states, mdp.n_actions, mdp.n_states).sum(-1)
        weights = problem.weights(states, np.full(mdp.n_states, t))
        later = ((weights.weights if isinstance(weights, Bounded) else weights) * f).sum(-1)
        found.insert(0, f)
    table = np.stack(found, 1)
    return lambda states, t: table[:, t, np.asarray(states)[:, 0].astype(int)]


def starts(mdp):
    """States as often as episodes start there, where that is a multiple of 1 / 60."""
    return np.repeat(np.arange(mdp.n_states), np.round(60 * mdp.initial).astype(int))[:, None]


@given(cases(policy_kinds=("dense", "zeros")))
def test_with_exact_values_every_variance_is_that_of_dynamic_programming(case):
    """On-policy MC, MPE and MPE + q for b = q; pooled is the sum over steps of w_k(t) E_pi[d_t^2], by visits."""
    mdp, table = case.mdp, case.policies
    mdp = exact.FiniteMDP(mdp.transitions, mdp.rewards, np.eye(mdp.n_states)[mdp.initial.argmax()], mdp.horizon)
    q, q_hat = exact.action_values(mdp, table), exact.second_moments(mdp, table)
    behavior = Behavior(TabularPolicySet(table), nets_from_table(q), nets_from_table(q_hat))
    mu, k = behavior.tables()[1], len(table)
    factors = 1 + case.rng.random((k, mdp.horizon))
    problems = {of: variance_problem(behavior, of) for of in ("on_policy", "mpe", "mpe_baseline")}
    problems |= {"pooled": variance_problem(behavior, "pooled", factors=factors), "lengths": length_problem(behavior)}
    found = predict(behavior, {of: solved_exactly(mdp, problem) for of, problem in problems.items()}, starts(mdp))
    near = {"rtol": 1e-3, "atol": 1e-4 * (1 + (q**2).max())}  # nets are float32
    known = exact.estimator_variances(mdp, table, q_hat, q, (mu, table))
    for of in ("on_policy", "mpe", "mpe_baseline"):
        np.testing.assert_allclose(found.n_var[of], known[of], **near)
    np.testing.assert_allclose(found.values, exact.values(mdp, table), **near)
    np.testing.assert_allclose(found.lengths, mdp.horizon, rtol=1e-6)
    nu, at, pooled = exact.next_value_variances(mdp, table), np.tile(mdp.initial, (k, 1)), np.zeros(k)
    for t in range(mdp.horizon):
        visits = at[..., None] * table[:, t]
        pooled += factors[:, t] * (visits * nu[:, t]).sum((1, 2))
        at = mdp.push(visits)
    np.testing.assert_allclose(found.pooled, pooled, **near)
    assert all(found.is_known(of) for of in LABELS)


def test_starts_that_vary_count():
    """Two starts with values 1 and 3 and no other randomness: the variance of J's estimate is 1 for every estimator."""
    policies = softmax_policies(k=1)
    q = np.ones((1, HORIZON, STATES, ACTIONS))
    q[:, :, 1] = 3
    designed = Behavior(policies, nets_from_table(q), nets_from_table(q**2))
    found = predict(designed, dict.fromkeys(LABELS, nothing), np.array([[0.0], [1.0]]))
    assert found.values[0] == pytest.approx(2)
    for of in LABELS:
        assert found.n_var[of][0] == pytest.approx(1, rel=1e-5), of


def nothing(states, t):
    return np.zeros((1, len(states), ACTIONS))


def test_a_variance_stays_positive_and_what_was_not_solved_is_unknown():
    policies = softmax_policies(k=1)
    q = np.ones((1, HORIZON, STATES, ACTIONS))
    designed = Behavior(policies, nets_from_table(q), nets_from_table(q**2))
    found = predict(designed, {"on_policy": lambda s, t: nothing(s, t) - 5, "pooled": nothing}, np.array([[0.0]]))
    assert found.on_policy[0] == pytest.approx(1e-6, rel=1e-3)  # of the second moment, 1
    assert [of for of in LABELS if not found.is_known(of)] == ["mpe", "mpe_baseline"]
    assert np.isnan(found.total("mpe"))
    assert found.lengths.tolist() == [HORIZON] * 2  # nothing ends early
    with pytest.raises(ValueError, match="the variance of MPE is unknown, expected a pilot of 30 rounds first"):
        cost(found, "mpe", 0.1)


def mixture_by_enumeration(mdp, table):
    """E_pi[W_t] of every target, and sum_t E_pi[W_t d_t^2] with exact q; `[K, T]` and `[K]`."""
    nu, k = exact.next_value_variances(mdp, table), len(table)
    weights, terms = np.zeros((k, mdp.horizon)), np.zeros(k)
    for i in range(k):
        for probability, s, a in trajectories(mdp, table[i]):
            prefix = np.cumprod([table[:, t, s[t], a[t]] for t in range(mdp.horizon)], 0)  # [T, K]
            w = prefix[:, i] / prefix.mean(1)
            weights[i] += probability * w
            terms[i] += probability * sum(w[t] * nu[i, t, s[t], a[t]] for t in range(mdp.horizon))
    return weights, terms


@pytest.mark.parametrize("seed", range(4))
def test_pooled_is_foreseen_from_logged_rows_of_a_uniform_policy(seed, tmp_path):
    """Everything by counting from 4,000 logged episodes; true q and q_hat; the truth by enumeration of all episodes."""
    rng = np.random.default_rng(seed)
    mdp = FiniteMDP(rng.dirichlet(np.ones(3), size=(3, 2)), rng.standard_normal((3, 2)), np.eye(3)[0], 4)
    table = rng.dirichlet(np.full(2, 2.0), size=(3, 4, 3))
    rows = logged(tmp_path / "rows.parquet", mdp, 4000, rng)
    q, q_hat = exact.action_values(mdp, table), exact.second_moments(mdp, table)
    behavior = Behavior(TabularPolicySet(table), nets_from_table(q), nets_from_table(q_hat))
    weights, terms = mixture_by_enumeration(mdp, table)
    np.testing.assert_allclose(mixture_weights(behavior.policies, rows, rng, 4000), weights, rtol=0.1)
    found = forecast(behavior, rows, rng)
    np.testing.assert_allclose(found.pooled, terms, rtol=0.15)
    known = exact.estimator_variances(mdp, table, q_hat, q, (behavior.tables()[1], table))
    for of in ("on_policy", "mpe", "mpe_baseline"):
        np.testing.assert_allclose(found.n_var[of], known[of], rtol=0.1)


def logged(path, mdp, episodes, rng):
    """Episodes of a policy that takes all actions alike, as Parquet."""
    p = mdp.transitions.toarray().reshape(mdp.n_states, mdp.n_actions, mdp.n_states)
    rows, state = [], rng.choice(mdp.n_states, size=episodes, p=mdp.initial)
    for t in range(mdp.horizon):
        action = rng.integers(mdp.n_actions, size=episodes)
        after = (rng.random((episodes, 1)) > p[state, action].cumsum(-1)).sum(-1)
        last = np.full(episodes, t == mdp.horizon - 1)
        columns = {"t": np.full(episodes, t), "state": state[:, None], "action": action, "truncated": last}
        columns |= {"reward": mdp.rewards[state, action], "next_state": after[:, None], "terminated": last & ~last}
        rows.append({"episode": np.arange(episodes), **columns})
        state = after
    with Writer(path, About("small", mdp.horizon, mdp.n_actions, 1, 0)) as writer:
        for columns in rows:
            writer.write(columns)
    return Transitions(path)


def test_mixture_weights_are_1_for_equal_policies_and_k_for_strangers(tmp_path):
    rng = np.random.default_rng(0)
    mdp = FiniteMDP(rng.dirichlet(np.ones(2), size=(2, 3)), rng.standard_normal((2, 3)), np.eye(2)[0], 3)
    rows = logged(tmp_path / "rows.parquet", mdp, 50, rng)
    same = np.repeat(rng.dirichlet(np.ones(3), size=(1, 3, 2)), 4, 0)
    np.testing.assert_allclose(mixture_weights(TabularPolicySet(same), rows, rng), 1)
    strangers = np.broadcast_to(np.eye(3)[:, None, None], (3, 3, 2, 3))
    np.testing.assert_allclose(mixture_weights(TabularPolicySet(strangers), rows, rng), 3)


@pytest.mark.parametrize(("of", "most"), [("on_policy", 1.0), ("mpe", 0.5), ("mpe_baseline", 0.5), ("pooled", 3.0)])
def test_in_vector_states_a_variance_is_kept_between_0_and_a_multiple_of_q_hat(of, most):
    policies = mlp_policies(0, kind="binned_gaussian", horizon=9, n_actions=10, n_features=5, scale=0.4)
    q, q_hat = value_nets(policies, 1, width=7, scale=5.0), value_nets(policies, 2, width=7, scale=40.0)
    behavior = Behavior(policies, q, q_hat)
    states, t = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32), np.arange(5)
    weights, low, high = variance_problem(behavior, of).weights(states, t)
    fitted = behavior.fitted(states, t)
    shared = fitted.policies**2 / behavior.design(fitted)
    np.testing.assert_allclose(weights, shared if of.startswith("mpe") else fitted.policies, rtol=1e-9)
    assert not low.any()
    np.testing.assert_allclose(high, most * fitted.q_hat, rtol=1e-6)
    loose = variance_problem(behavior, "mpe", CAPS[1]).weights(states, t)
    np.testing.assert_allclose(loose.high, 1.5 * fitted.q_hat, rtol=1e-6)


def test_the_reward_of_a_vector_state_by_hand():
    """d^2 + Var_mu(rho q(s', A')) where the episode goes on, (r - q)^2 where it ends."""
    policies = mlp_policies(0, kind="binned_gaussian", horizon=9, n_actions=10, n_features=5, scale=0.4)
    q, q_hat = value_nets(policies, 1, width=7, scale=5.0), value_nets(policies, 2, width=7, scale=40.0)
    behavior = Behavior(policies, q, q_hat)
    states = np.random.default_rng(0).standard_normal((3, 7)).astype(np.float32)
    after, no = states[::-1].copy(), np.zeros(3, dtype=bool)
    rows = Batch(
        np.array([2, 2, 8]), states, np.array([1, 0, 4]), np.array([1.0, 2, 3]), after, np.array([0, 1, 0]) > 0, no
    )
    found = variance_problem(behavior, "mpe").reward(rows)
    taken = np.stack([q.predict(states[[i]], rows.t[i])[:, 0, rows.action[i]] for i in range(3)], 1)  # [K, 3]
    np.testing.assert_allclose(found[:, 1:], (rows.reward - taken)[:, 1:] ** 2, rtol=1e-6)
    pi, values, _ = (x[:, 0] for x in behavior.fitted(after[[0]], 3))
    v, mu = (pi * values).sum(-1), behavior.mu(after[[0]], 3)[0]
    spread = (mu * (pi / mu * values - v[:, None]) ** 2).sum(-1)
    np.testing.assert_allclose(found[:, 0], (1 + v - taken[:, 0]) ** 2 + spread, rtol=1e-6)


def test_two_caps_that_disagree_make_mpe_unknown_and_nothing_else():
    policies = mlp_policies(0, kind="binned_gaussian", horizon=9, n_actions=10, n_features=5, scale=0.4)
    nets = value_nets(policies, 1, width=7, scale=5.0), value_nets(policies, 2, width=7, scale=40.0)
    behavior, states = Behavior(policies, *nets), np.zeros((1, 7))
    some = {of: lambda s, t: np.full((3, len(s), 10), 1e4) for of in LABELS}  # pooled as large as on-policy MC's
    agree = predict(behavior, {**some, "mpe_loose": lambda s, t: np.full((3, len(s), 10), 1.5e4)}, states)
    assert all(agree.is_known(of) for of in LABELS)
    loose = np.array([1e4, 9e4, 1e4])[:, None, None]
    apart = predict(behavior, {**some, "mpe_loose": lambda s, t: np.broadcast_to(loose, (3, len(s), 10))}, states)
    assert apart.unknown["mpe"].tolist() == apart.unknown["mpe_baseline"].tolist() == [False, True, False]
    assert apart.is_known("pooled")
    assert apart.is_known("on_policy")


def test_what_a_fitted_q_hardly_leaves_is_its_own_error_and_unknown():
    policies = mlp_policies(0, kind="binned_gaussian", horizon=9, n_actions=10, n_features=5, scale=0.4)
    nets = value_nets(policies, 1, width=7, scale=0.1), value_nets(policies, 2, width=7, scale=0.1)
    behavior, states = Behavior(policies, *nets), np.zeros((1, 7))
    solved = {of: lambda s, t: np.full((3, len(s), 10), 1e4) for of in (*LABELS, "mpe_loose")}
    for pooled, known in ((0.5e4, True), (0.4e4, False)):
        found = predict(behavior, {**solved, "pooled": lambda s, t, x=pooled: np.full((3, len(s), 10), x)}, states)
        assert [found.is_known(of) for of in LABELS] == [True, True, known, known]


def test_residuals_count_as_in_rows_that_q_has_not_seen(tmp_path):
    """q is 0, rewards are 1 where rows are fitted and 2 where they are held out: d^2 is 4 times as large there."""
    path = tmp_path / "rows.parquet"
    n, about = 2000, About("small", 2, 10, 7, 0)
    policies = mlp_policies(0, kind="binned_gaussian", horizon=2, n_actions=10, n_features=5, scale=0.4)
    zero = constant_nets(0.0, Shape(2, 10, 3, 2, 0, 7))
    columns = {"episode": np.arange(n), "t": np.ones(n), "state": np.zeros((n, 7)), "next_state": np.zeros((n, 7))}
    columns |= {"action": np.zeros(n), "terminated": np.ones(n) > 0, "truncated": np.zeros(n) > 0}
    with Writer(path, about) as writer:
        writer.write({**columns, "reward": 1.0 + _held_out(0, n)})
    np.testing.assert_allclose(optimism(Behavior(policies, zero, zero), Transitions(path)), 4)


def test_theorem_4_is_the_stricter_condition():
    """Theorem 4 compares n with nK episodes, Theorem 3 equal n: where 4 holds 3 does, and not the other way round."""
    rng = np.random.default_rng(1)
    q = rng.standard_normal((3, HORIZON, STATES, ACTIONS))
    designed = Behavior(softmax_policies(sharpness=0.2), nets_from_table(q), nets_from_table(q**2 + 0.1))
    found = similar(designed, np.arange(STATES)[:, None], np.arange(STATES) % HORIZON, 1 / 3)
    assert (found.theorem_3 >= found.theorem_4).all()
    assert found.theorem_3.mean() > found.theorem_4.mean()


def test_equal_policies_meet_every_condition_and_different_ones_do_not():
    same = softmax_policies(k=3)
    same = MlpPolicySet({name: x[[0, 0, 0]] for name, x in same.tensors.items()}, same.spec)
    rng = np.random.default_rng(0)
    q = np.repeat(rng.standard_normal((1, HORIZON, STATES, ACTIONS)), 3, 0)
    states, t = np.arange(STATES)[:, None], np.arange(STATES) % (HORIZON - 1)
    alike = similar(Behavior(same, nets_from_table(q), nets_from_table(q**2 + 1)), states, t, 1 / 3)
    np.testing.assert_allclose(alike.eta_spread[:, :3], 1, rtol=1e-4)
    assert (alike.theorem_3[:, :3] == 1).all()
    assert (alike.theorem_4[:, :3] == 1).all()
    assert np.isnan(alike.eta_spread[:, 3]).all()  # no state was logged at the last step
    apart = Behavior(softmax_policies(sharpness=5.0), nets_from_table(q), nets_from_table(q**2 + 1))
    unlike = similar(apart, states, t, 1 / 3)
    assert np.nanmedian(unlike.eta_spread) > 2
    assert np.nanmean(unlike.theorem_4) < 0.5


def prediction(on_policy=1.0, mpe=0.4, mpe_baseline=0.2, pooled=0.2, lengths=(5.0, 5.0, 8.0), unknown=()):
    """Of two policies with these n Var, of each or of both, relative to 1 for one on-policy episode."""
    variances = {"on_policy": on_policy, "mpe": mpe, "mpe_baseline": mpe_baseline, "pooled": pooled}
    known = {of: np.full(2, of in unknown) for of in LABELS}
    arrays = {of: np.broadcast_to(np.asarray(x, dtype=float), 2) for of, x in variances.items()}
    return Prediction(np.zeros(2), **arrays, unknown=known, lengths=np.array(lengths))


def test_costs_by_hand():
    """n = n Var / se^2 for the worst policy, in whole rounds where loggers run in turns; steps by mean lengths."""
    found = prediction(pooled=[0.2, 0.5], on_policy=[1.0, 3.0])
    assert cost(found, "mpe", 0.1) == (40, 320.0)
    assert cost(found, "pooled", 0.1) == (50, 250.0)
    assert cost(found, "pooled", [0.1, 0.4]) == (20, 100.0)
    assert cost(found, "on_policy", 0.1) == (600, 3000.0)
    assert cost(found, "mpe", 0.0999)[0] == 41
    assert cost(found, "pooled", 10.0) == (4, 20.0)  # two rounds at least: one has no standard error
    assert np.isnan(cost(prediction(lengths=[np.nan] * 3), "mpe", 0.1).steps)
    with pytest.raises(ValueError, match="standard_error is 0, expected a positive number"):
        cost(found, "mpe", 0.0)


@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        ({}, "pooled"),
        ({"mpe_baseline": 0.15}, "pooled"),  # fewer episodes, but longer ones
        ({"mpe_baseline": 0.05}, "mpe_baseline"),  # 0.25 of the episodes, 0.4 of the steps
        ({"mpe_baseline": 0.05, "unknown": ("mpe_baseline",)}, "pooled"),
        ({"unknown": ("pooled", "mpe_baseline")}, None),  # MPE is known, and worse than what pooled roughly gives
        ({"pooled": np.nan, "unknown": ("pooled", "mpe_baseline")}, "mpe"),
        ({"mpe": 0.05, "unknown": ("pooled", "mpe_baseline")}, "mpe"),
        ({"unknown": tuple(LABELS)}, None),
        ({"mpe_baseline": 0.05, "lengths": [np.nan] * 3}, "mpe_baseline"),
        ({"pooled": 9.0, "mpe": 9.0, "mpe_baseline": 9.0}, "on_policy"),
    ],
)
def test_pooled_is_recommended_unless_another_is_clearly_and_knowably_better(change, chosen):
    assert recommend(prediction(**change)) == chosen


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {},
            "Expect of on-policy's variance: pooled 10%, MPE + q 10%, MPE 20%. Run pooled: 100 episodes (500 steps) "
            "give every policy the precision of 1,000 on-policy ones (5,000 steps).",
        ),
        (
            {"unknown": ("mpe", "mpe_baseline"), "mpe": np.nan, "lengths": [np.nan] * 3},
            "Expect of on-policy's variance: pooled 10%, MPE + q roughly 10% (unknown, run a pilot of 30 rounds), MPE "
            "unknown, run a pilot of 30 rounds. Run pooled: 100 episodes give every policy the precision of 1,000 "
            "on-policy ones.",
        ),
        (
            {"unknown": ("pooled", "mpe_baseline")},
            "Expect of on-policy's variance: pooled roughly 10% (unknown, run a pilot of 30 rounds), MPE + q roughly "
            "10% (unknown, run a pilot of 30 rounds), MPE 20%. Run the policies in turns for 30 rounds, 60 episodes "
            "(300 steps), and decide then; they count.",
        ),
        (
            {"pooled": 4.0, "mpe": 4.0, "mpe_baseline": 4.0},
            "Expect of on-policy's variance: pooled 200%, MPE + q 200%, MPE 200%. Sharing does not pay: evaluate these "
            "policies one by one.",
        ),
    ],
)
def test_the_verdict_says_what_to_run(change, said):
    assert verdict(prediction(**change), ("a", "b")) == said


def test_the_verdict_names_the_odd_one_out():
    odd = prediction()._replace(
        **{of: np.array([1.0, 1.0, 1.0]) for of in ("values", "on_policy", "mpe_baseline", "pooled")},
        mpe=np.array([0.3, 9.0, 0.3]),
        unknown={of: np.zeros(3, dtype=bool) for of in LABELS},
    )
    assert "For MPE, policy 1 (b) is the odd one out: 300%." in verdict(odd, tuple("abc"))
