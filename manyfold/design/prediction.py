"""What logged data say before any online episode: the variances of four estimators, what a precision costs, a verdict.

With the residual d = R + v(S') - q(s, a), each variance has a Bellman equation of its own, so that nothing large is
subtracted from anything large (J^2 is up to 700 times a variance):

    on_policy     reward d^2 + Var_pi(q(S', A'))        next weights pi          Var(R + G' | s, a), on-policy
    mpe           reward d^2 + Var_mu(rho q(S', A'))    next weights pi^2 / mu   Var(R + G' | s, a), PDIS under mu
    mpe_baseline  reward d^2                            next weights pi^2 / mu   the same with q as a baseline
    pooled        reward w_k(t) d^2                     next weights pi          sum_t E_pi[W_t d_t^2]

Where q is a fit, d^2 holds its errors as far as logged rows show them: with a baseline it counts as much larger as it
is in rows that q was not fitted to (`optimism`). W_t, the balance weight of pooled evaluation, depends on the whole
episode: w_k(t) = E_pi[W_t] is taken at logged states instead (`mixture_weights`).
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from manyfold import similarity
from manyfold.arrays import Array, Bools, Ints, check_number, divide
from manyfold.data.transitions import Batch, Part, Transitions
from manyfold.design.behavior import Behavior, Fitted
from manyfold.fqe.counting import count
from manyfold.fqe.engine import PAPER, Bounded, Config, Diverged, fit
from manyfold.fqe.nets import Check
from manyfold.fqe.problems import Problem
from manyfold.policies.base import PolicySet

Predicted = Literal["on_policy", "mpe", "mpe_baseline", "pooled"]
LABELS: dict[Predicted, str] = {
    "on_policy": "on-policy MC",
    "mpe": "MPE",
    "mpe_baseline": "MPE + q",
    "pooled": "pooled",
}
CAPS = (0.5, 1.5)  # of MPE's variance, times q_hat: two fits, whose agreement says whether logged data can tell
DISAGREE = 2.0  # a prediction that the caps move by more is unknown
# Pooled n Var over the variance of an on-policy episode, below which what a fitted q leaves is mostly its own errors,
# and logged rows don't tell them well: Hopper's 3 groups were above (0.60 to 0.92), 6 of the pendulums below (0.16 to
# 0.34), where half of the policies were predicted within 30%. On other groups it let two pass that it should not have
# (docs/robots.md).
TOLD = 0.45
STARTS = 8192  # logged first states
PILOT = 30  # rounds after which the measured variance of pooled evaluation is within 30% for most policies
Look = Callable[[NDArray[np.float32], Ints], tuple[Fitted, Array]]  # (states, t) -> what is fitted there, and mu
Solved = Callable[[NDArray[np.float32], Ints], NDArray[Any]]  # (states [N, width], t [N]) -> f [K, N, A]


# --- Bellman equations of variances -----------------------------------------------------------------------------------


def variance_problem(behavior: Behavior, of: Predicted, cap: float = CAPS[0], factors: Array | None = None) -> Problem:
    """The reward and the next weights of one line of the module's table.

    Where states are vectors, the function is kept between 0 and a bound: q_hat for on-policy MC (a variance is at most
    the second moment), `cap` times q_hat under mu, K q_hat for pooled. A state above the cap is lost for sharing,
    without saying how far: logged data go where some target hardly shares an action with the others, variances grow
    there with every step, and nets, unlike tables, would carry that to all other states.

    Args:
        factors: of d^2, such as w_k(t) of pooled evaluation, `[K, T]`; 1 if left out.
    """
    at, k = _look(behavior), behavior.policies.n_policies
    most = {"on_policy": 1.0, "mpe": cap, "mpe_baseline": cap, "pooled": float(k)}[of]
    plain = of in ("on_policy", "mpe")

    def reward(batch: Batch) -> Array:
        squares, fitted, mu, goes_on = _squares(at, batch, behavior.policies.horizon)
        if factors is not None:
            squares = squares * factors[:, batch.t]
        return squares + goes_on * _spread(fitted, _weights(of, fitted, mu)) if plain else squares

    def weights(states: NDArray[np.float32], t: Ints) -> NDArray[Any] | Bounded:
        fitted, mu = at(states, t)
        found = _weights(of, fitted, mu)
        if behavior.policies.n_states:
            return found
        return Bounded(found, np.zeros_like(found), most * fitted.q_hat)

    return Problem(reward, weights)


def length_problem(behavior: Behavior) -> Problem:
    """Steps to the end of an episode of each target and of mu, `K + 1` functions."""
    at, horizon = _look(behavior), behavior.policies.horizon

    def weights(states: NDArray[np.float32], t: Ints) -> Bounded:
        fitted, mu = at(states, t)
        found = np.concatenate([fitted.policies, mu[None]])
        left = np.broadcast_to((horizon - np.asarray(t, dtype=np.float64))[:, None], found.shape)
        return Bounded(found, np.zeros_like(found), np.array(left))

    return Problem(lambda batch: np.ones((behavior.policies.n_policies + 1, len(batch.t))), weights)


def optimism(behavior: Behavior, rows: Transitions, most: int = 2**15) -> Array:
    """How much larger d^2 is in rows that were held out of q's fit than in those it saw, 1 or more; `[K]`.

    1 where states are indices: fits of tables have few free numbers, and on the Gridworlds the ratio was noise.
    """
    if behavior.policies.n_states:
        return np.ones(behavior.policies.n_policies)
    at, means = _look(behavior), []
    parts: tuple[Part, ...] = ("held_out", "train")
    for part in parts:
        batch = next(iter(rows.batches(most, np.random.default_rng(0), part)), None)
        if batch is None:  # nothing is held out of so few rows
            return np.ones(behavior.policies.n_policies)
        means.append(_squares(at, batch, behavior.policies.horizon)[0].mean(1))
    return np.maximum(divide(means[0], means[1]), 1.0)


def _squares(at: Look, batch: Batch, horizon: int) -> tuple[Array, Fitted, Array, Bools]:
    """d^2 `[K, N]`; what is fitted at the next states, mu there, and whether the episode goes on."""
    t = batch.t.astype(np.int64)
    goes_on = ~batch.terminated & (t < horizon - 1)
    fitted, mu = at(batch.next_state, np.minimum(t + 1, horizon - 1))
    q = at(batch.state, t)[0].q[:, np.arange(len(t)), batch.action]
    return (batch.reward + goes_on * _values(fitted) - q) ** 2, fitted, mu, goes_on


def _look(behavior: Behavior) -> Look:
    """(states, t) -> what is fitted there, and mu; a look-up where states are indices."""
    if not behavior.policies.n_states:

        def compute(states: NDArray[np.float32], t: Ints) -> tuple[Fitted, Array]:
            fitted = behavior.fitted(states, t)
            return fitted, behavior.design(fitted)

        return compute
    tables, mu, _ = behavior.tables()
    return lambda states, t: (Fitted._make(_rows(x, states, t) for x in tables), _rows(mu[None], states, t)[0])


def _rows(table: Array, states: NDArray[np.float32], t: Ints) -> Array:
    """Rows of a table `[K, T, S, A]`; `[K, N, A]`."""
    return table[:, t, states[:, 0].astype(np.int64)]


def _weights(of: Predicted, fitted: Fitted, mu: Array) -> Array:
    """pi^2 / mu for episodes of mu, pi for those of the targets; `[K, N, A]`."""
    return divide(fitted.policies**2, mu) if of in ("mpe", "mpe_baseline") else fitted.policies


def _values(fitted: Fitted) -> Array:
    """v, `[K, N]`."""
    return (fitted.policies * fitted.q).sum(-1)


def _spread(fitted: Fitted, weights: Array) -> Array:
    """Var_mu(rho q(s, A)), Var_pi(q(s, A)) with weights pi; `[K, N]`."""
    return np.maximum((weights * fitted.q**2).sum(-1) - _values(fitted) ** 2, 0.0)


def mixture_weights(policies: PolicySet, rows: Transitions, rng: np.random.Generator, samples: int = 256) -> Array:
    """w_k(t) = E_pi[W_t], W_t = prod pi_k / mean_j prod pi_j, from 1 (all alike) to K (nothing shared); `[K, T]`.

    Actions are drawn from target k at logged states of every step, as if those were one episode. True episodes go
    elsewhere, but how fast policies drift apart depends on that far less than on the policies.
    """
    batch = next(iter(rows.batches(2**17, rng)))
    states, steps = [], []
    for t in range(policies.horizon):
        there = np.flatnonzero(batch.t == t)
        if not len(there):
            break
        states.append(batch.state[rng.choice(there, samples)])
        steps.append(np.full(samples, t))
    if not states:
        raise ValueError("no logged row with t = 0, expected some: episodes start there")
    k, reached = policies.n_policies, len(states)
    pi = policies.probs(np.concatenate(states), np.concatenate(steps)).reshape(k, reached, samples, -1)
    out = np.empty((k, policies.horizon))
    for i in range(k):
        until = pi[i].cumsum(-1)
        action = (rng.random((reached, samples, 1)) * until[..., -1:] > until).sum(-1)
        taken = np.take_along_axis(pi, action[None, ..., None], -1)[..., 0]  # [K, t, samples]
        with np.errstate(divide="ignore"):
            density = np.cumsum(np.log(taken), 1)
        mixture = np.logaddexp.reduce(density, 0) - np.log(k)
        out[i, :reached] = np.exp(density[i] - mixture).mean(-1)
        out[i, reached:] = out[i, reached - 1]
    return out


def ends_early(rows: Transitions) -> bool:
    """Whether some logged episode terminated before the horizon."""
    batches = rows.batches(2**18, np.random.default_rng(0))
    return any(bool((batch.terminated & (batch.t < rows.about.horizon - 1)).any()) for batch in batches)


def problems(behavior: Behavior, rows: Transitions, rng: np.random.Generator) -> dict[str, Problem]:
    """Every equation that `predict` asks to be solved, by name."""
    unseen, weights = optimism(behavior, rows)[:, None], mixture_weights(behavior.policies, rows, rng)
    out = {
        "on_policy": variance_problem(behavior, "on_policy"),
        "mpe": variance_problem(behavior, "mpe"),
        "mpe_baseline": variance_problem(behavior, "mpe_baseline", factors=unseen * np.ones_like(weights)),
        "pooled": variance_problem(behavior, "pooled", factors=unseen * weights),
    }
    if not behavior.policies.n_states:
        out["mpe_loose"] = variance_problem(behavior, "mpe", CAPS[1])
    if ends_early(rows):
        out["lengths"] = length_problem(behavior)
    return out


# --- predictions ------------------------------------------------------------------------------------------------------


class Prediction(NamedTuple):
    """What logged data alone say of each policy; `[K]` each. n Var is n times the variance of an estimate from n."""

    values: Array  # J(pi_k)
    on_policy: Array  # variance of one on-policy episode's return; K times it is on-policy MC's n Var
    mpe: Array  # n Var
    mpe_baseline: Array
    pooled: Array
    unknown: Mapping[Predicted, Bools]  # for which policies logged data cannot tell
    lengths: Array  # mean steps of an episode of each target and of mu, [K + 1]; NaN: unknown

    @property
    def n_var(self) -> dict[Predicted, Array]:
        """n Var of each estimator at equal cost."""
        k = len(self.values)
        return {
            "on_policy": k * self.on_policy,
            "mpe": self.mpe,
            "mpe_baseline": self.mpe_baseline,
            "pooled": self.pooled,
        }

    @property
    def relative(self) -> Array:
        """MPE's variance relative to on-policy MC's at equal cost."""
        return self.mpe / self.n_var["on_policy"]

    def total(self, of: Predicted) -> float:
        """An estimator's variance over on-policy MC's, of all policies together; NaN where its prediction is."""
        return float(self.n_var[of].sum() / self.n_var["on_policy"].sum())

    def is_known(self, of: Predicted) -> bool:
        """Whether logged data tell this estimator's variance for all policies."""
        return not self.unknown[of].any()

    def steps(self, of: Predicted) -> float:
        """Mean steps of one of its episodes."""
        return float(self.lengths[-1] if of in ("mpe", "mpe_baseline") else self.lengths[:-1].mean())


def predict(behavior: Behavior, solved: Mapping[str, Solved], initial: ArrayLike) -> Prediction:
    """The variances of four estimators before any episode is run.

    Args:
        solved: the solutions of `variance_problem` for on_policy, mpe (with the first cap), mpe_loose (mpe with the
            second cap, where states are vectors), mpe_baseline and pooled, and of `length_problem` as lengths unless
            all episodes are as long as the horizon. One that is missing (its fit ran away) makes its estimator unknown.
        initial: states `[N, width]` at which episodes start.
    """
    x = np.asarray(initial, dtype=np.float32)
    fitted = behavior.fitted(x, 0)
    mu, start, k = behavior.design(fitted), np.zeros(len(x), dtype=np.int64), behavior.policies.n_policies
    v = _values(fitted)  # [K, N]

    def variance(name: str, of: Predicted) -> Array:
        if name not in solved:
            return np.full(k, np.nan)
        weights = _weights(of, fitted, mu)
        later = (weights * np.maximum(solved[name](x, start), 0.0)).sum(-1)
        here = _spread(fitted, weights) if of in ("on_policy", "mpe") else 0.0
        least = 1e-6 * (fitted.policies * fitted.q_hat).sum(-1).mean(1)  # positive, whatever the fits' errors say
        return np.maximum((later + here).mean(1) + v.var(1), least)

    found: dict[Predicted, Array] = {of: variance(of, of) for of in LABELS}
    loose = found["mpe"] if behavior.policies.n_states else variance("mpe_loose", "mpe")
    apart = ~(np.maximum(loose / found["mpe"], found["mpe"] / loose) <= DISAGREE)
    unknown = {of: np.isnan(x) | (apart & (of in ("mpe", "mpe_baseline"))) for of, x in found.items()}
    if not behavior.policies.n_states and not found["pooled"].sum() >= TOLD * found["on_policy"].sum():
        unknown |= {of: np.ones(k, dtype=np.bool_) for of in ("mpe_baseline", "pooled")}
    lengths = np.full(k + 1, float(behavior.policies.horizon))
    if "lengths" in solved:
        chosen = np.concatenate([fitted.policies, mu[None]])
        lengths = (chosen * solved["lengths"](x, start)).sum(-1).mean(1)
    return Prediction(v.mean(1), **found, unknown=unknown, lengths=lengths)


def forecast(
    behavior: Behavior,
    rows: Transitions,
    rng: np.random.Generator,
    config: Config = PAPER,
    progress: Callable[[float, Check], None] = lambda done, check: None,
    state: Callable[[str], Path | None] = lambda name: None,
) -> Prediction:
    """Solves all of `problems`, by counting where states are indices and by fits elsewhere, and predicts.

    Args:
        progress: sees the share that is done, and every check of a fit.
        state: the file in which the unfinished fit of this name is saved.
    """
    solved: dict[str, Solved] = {}
    every = problems(behavior, rows, rng)
    for i, (name, problem) in enumerate(every.items()):
        if behavior.policies.n_states:
            solved[name] = partial(_rows, count(rows, problem, behavior.policies.n_states))
            continue

        def tick(check: Check, of: int, before: int = i) -> None:
            progress((before + check.update / of) / len(every), check)

        with suppress(Diverged):  # what ran away is unknown
            solved[name] = fit(rows, *problem, rng, config, 0, tick, state(name)).nets.predict
    return predict(behavior, solved, rows.initial_states(STARTS))


class Cost(NamedTuple):
    """What a precision takes."""

    episodes: int
    steps: float  # NaN where lengths are unknown


def cost(prediction: Prediction, of: Predicted, standard_error: ArrayLike) -> Cost:
    """Episodes in total, and their steps, until every policy's standard error is at most this one (`[K]` or a number).

    A half width h of 95% intervals is a standard error of h / 1.96. Estimators whose loggers run in turns need whole
    rounds.
    """
    wanted = np.asarray(standard_error, dtype=np.float64)
    if not (wanted > 0).all():
        raise ValueError(f"standard_error is {wanted.min():g}, expected a positive number")
    if not prediction.is_known(of):
        raise ValueError(f"the variance of {LABELS[of]} is unknown, expected a pilot of {PILOT} rounds first")
    each = 1 if of in ("mpe", "mpe_baseline") else len(prediction.values)
    rounds = max(2, int(np.ceil((prediction.n_var[of] / wanted**2).max() / each - 1e-9)))
    return Cost(rounds * each, rounds * each * prediction.steps(of))


def recommend(prediction: Prediction, clearly: float = 0.7) -> Predicted | None:
    """Pooled, unless another one is known to take less than `clearly` of its steps; None: a pilot of pooled must tell.

    Pooled evaluation cannot fail as the others can, so a small predicted advantage is not enough, and neither is one
    that is unknown.
    """

    def steps(of: Predicted) -> float:
        return prediction.total(of) * (1.0 if np.isnan(prediction.lengths).any() else prediction.steps(of))

    known = [of for of in LABELS if prediction.is_known(of)]
    best = min(known, key=steps, default=None)
    if best is None or steps(best) > clearly * steps("pooled"):
        return "pooled" if "pooled" in known else None
    return best


def verdict(prediction: Prediction, names: tuple[str, ...], match: int = 1000) -> str:
    """What to run and what it will give, in words that a person can act on.

    Args:
        names: of the policies.
        match: episodes of on-policy MC whose precision is wanted.
    """
    check_number("match", match, 1)

    def say(of: Predicted) -> str:
        total, pilot = prediction.total(of), f"unknown, run a pilot of {PILOT} rounds"
        if prediction.is_known(of):
            return f"{LABELS[of]} {total:.0%}"
        return f"{LABELS[of]} {pilot}" if np.isnan(total) else f"{LABELS[of]} roughly {total:.0%} ({pilot})"

    def spend(episodes: int, of: Predicted, word: str = "episodes") -> str:
        steps = episodes * prediction.steps(of)
        return f"{episodes:,} {word}" + ("" if np.isnan(steps) else f" ({steps:,.0f} steps)")

    text = f"Expect of on-policy's variance: {say('pooled')}, {say('mpe_baseline')}, {say('mpe')}."
    relative, odd = prediction.relative, int(np.nan_to_num(prediction.relative).argmax())
    if prediction.is_known("mpe") and relative[odd] > 2 * max(prediction.total("mpe"), float(np.median(relative))):
        text += f" For MPE, policy {odd} ({names[odd]}) is the odd one out: {relative[odd]:.0%}."
    chosen = recommend(prediction)
    if chosen is None:
        first = spend(PILOT * len(names), "pooled")
        return f"{text} Run the policies in turns for {PILOT} rounds, {first}, and decide then; they count."
    if chosen == "on_policy":
        return f"{text} Sharing does not pay: evaluate these policies one by one."
    ours = cost(prediction, chosen, np.sqrt(prediction.n_var["on_policy"] / match)).episodes
    gain = f"give every policy the precision of {spend(match, 'on_policy', 'on-policy ones')}"
    return f"{text} Run {LABELS[chosen]}: {spend(ours, chosen)} {gain}."


# --- similarity -------------------------------------------------------------------------------------------------------


class Similarity(NamedTuple):
    """How alike the targets are where logged data has been."""

    eta_spread: Array  # sqrt(eta_max / eta_min) over the actions of a state, median of each step; [K, T]
    theorem_3: Array  # share of the states of each step where its condition holds; [K, T]
    theorem_4: Array


def similar(behavior: Behavior, states: ArrayLike, t: ArrayLike, share: float) -> Similarity:
    """The conditions of Theorems 3 and 4 at N logged states and their steps; NaN at steps that have none.

    Taken state by state, which is all that the proofs use, and with nu = 0 in Theorem 3's: fits don't tell nu apart,
    and leaving it out makes the condition stricter, never wrong.

    Args:
        share: n_k / n, on-policy MC's share of the episodes for one target; 1 / K.
    """
    x, steps = np.asarray(states, dtype=np.float32), np.asarray(t)
    fitted = behavior.fitted(x, steps)
    pi, q, q_hat = (part[:, None] for part in fitted)  # [K, 1, N, A]
    spread = similarity.eta_spread(similarity.eta(pi, q_hat), "state")[:, 0]  # [K, N]
    third = similarity.theorem_3(pi, q, np.zeros_like(q), q_hat, share, "state")[:, 0]
    fourth = similarity.theorem_4(pi, q_hat, "state")[:, 0]
    out = np.full((3, behavior.policies.n_policies, behavior.policies.horizon), np.nan)
    for step in np.unique(steps):
        at = steps == step
        out[:, :, step] = np.median(spread[:, at], -1), third[:, at].mean(-1), fourth[:, at].mean(-1)
    return Similarity(*out)
