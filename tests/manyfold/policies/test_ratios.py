"""Mean ratios: right densities pass as often as promised, planted wrong ones are found."""

from dataclasses import dataclass

import numpy as np
import pytest
from scipy import integrate, stats

from manyfold.policies.base import sample_actions
from manyfold.policies.heads import Gaussian, MultiCategorical
from manyfold.policies.ratios import SHIFT, misfits, ratios
from tests.worlds import distributions

K, N, REPEATS = 3, 16, 32
BOX = Gaussian((-1.0, -2.0), (1.0, 2.0))
CHOICES = MultiCategorical((3, 2))
RNG = np.random.default_rng(0)
PROBS = distributions(RNG, (K, N, 3))
MEANS = np.concatenate([RNG.standard_normal((K, N, 2)), 0.5 * RNG.standard_normal((K, N, 2))], -1)
LOGITS = RNG.standard_normal((K, N, 5))
HEADS = {"counted": (None, PROBS), "normal": (BOX, MEANS), "choices": (CHOICES, LOGITS)}


def drawn(head, said, k, rng, repeats=REPEATS):
    rows = np.repeat(said[k], repeats, 0)
    return sample_actions(rows, rng) if head is None else head.draw(rows, rng)


@pytest.mark.parametrize("kind", HEADS)
def test_every_copy_has_the_promised_mean_and_variance_and_stays_below_2(kind):
    """By counting: 400,000 draws, against the formulas."""
    head, said = HEADS[kind]
    rows = np.repeat(said[0], 25_000, 0)
    actions = drawn(head, said, 0, np.random.default_rng(1), 25_000)
    every = ratios(head, rows, np.repeat(said[1], 25_000, 0), actions)
    assert len(every) == {"counted": 5, "normal": 4, "choices": 9}[kind]
    for r in every:
        assert r.values.mean() == pytest.approx(1, abs=5 * np.sqrt(r.variance / len(rows)))
        assert r.values.var() == pytest.approx(r.variance, rel=0.03)
        assert r.values.min() >= 0
        assert r.values.max() <= 2


@pytest.mark.parametrize("shift", [0.0, SHIFT])
def test_the_variance_of_a_normals_copies_by_quadrature(shift):
    def ratio(z):
        return stats.norm.pdf(z, shift, np.sqrt(0.5)) / stats.norm.pdf(z)

    (r,) = (r for r in ratios(BOX, np.zeros((1, 4)), None, np.zeros((1, 2))) if r.copy == f"number 0, {word(shift)}")
    second = integrate.quad(lambda z: ratio(z) ** 2 * stats.norm.pdf(z), -12, 12)[0]
    assert r.variance == pytest.approx(second - 1, rel=1e-9)
    assert ratio(np.linspace(-5, 5, 100_001)).max() < 2
    assert r.values[0] == pytest.approx(ratio(0.0))


def word(shift):
    return "shifted" if shift else "sharpened"


@pytest.mark.parametrize("kind", HEADS)
def test_right_densities_are_called_wrong_at_most_as_often_as_promised(kind):
    """1,000 repetitions of all three policies at a level of 0.2; Bernstein's bound leaves room below it."""
    head, said = HEADS[kind]
    rng, alarms, repetitions, level = np.random.default_rng(2), 0, 1000, 0.2
    for _ in range(repetitions):
        alarms += bool(misfits(head, said, lambda k: drawn(head, said, k, rng, 4), 4, level))
    assert alarms <= level * repetitions


def test_the_tolerance_is_hardly_wider_than_a_normals_at_the_level_and_number_of_draws_that_are_used():
    rows = np.repeat(MEANS[0], 256, 0)
    for r in ratios(BOX, rows, MEANS[1].repeat(256, 0), drawn(BOX, MEANS, 0, np.random.default_rng(3), 256)):
        normal = stats.norm.isf(1e-4 / 2) * np.sqrt(r.variance / len(rows))
        assert normal < r.tolerance(1e-4) < 1.3 * normal


@dataclass(frozen=True)
class TooWide(Gaussian):
    """Draws with a log_std that is 0.3 larger than its density's."""

    def draw(self, parameters, rng):
        return super().draw(parameters + np.array([0, 0, 0.3, 0.3]), rng)


@dataclass(frozen=True)
class OneNumber(Gaussian):
    """Only the second number's deviation is off, downwards."""

    def draw(self, parameters, rng):
        return super().draw(parameters - np.array([0, 0, 0, 0.3]), rng)


@dataclass(frozen=True)
class Forgetful(Gaussian):
    """A density without the deviations' logarithms."""

    def log_probs(self, parameters, actions):
        return super().log_probs(parameters, actions) + self.split(parameters)[1].sum(-1)


@dataclass(frozen=True)
class Warm(MultiCategorical):
    """Draws at temperature 2."""

    def draw(self, parameters, rng):
        return super().draw(parameters / 2, rng)


def warm(rows, rng):
    heated = rows ** (1 / 2)
    return sample_actions(heated / heated.sum(-1, keepdims=True), rng)


WRONG = {
    "log_std + 0.3": (TooWide(BOX.low, BOX.high), MEANS, None),
    "one log_std - 0.3": (OneNumber(BOX.low, BOX.high), MEANS, None),
    "no normalising constant": (Forgetful(BOX.low, BOX.high), MEANS, None),
    "choices at a temperature": (Warm((3, 2)), LOGITS, None),
    "actions at a temperature": (None, PROBS, lambda k, rng: warm(np.repeat(PROBS[k], 256, 0), rng)),
    "the next one's actions": (None, PROBS, lambda k, rng: drawn(None, PROBS, (k + 1) % K, rng, 256)),
    "the next one's choices": (CHOICES, LOGITS, lambda k, rng: drawn(CHOICES, LOGITS, (k + 1) % K, rng, 256)),
    "the next one's vectors": (BOX, MEANS, lambda k, rng: drawn(BOX, MEANS, (k + 1) % K, rng, 256)),
    "the first one's vectors": (BOX, MEANS, lambda k, rng: drawn(BOX, MEANS, 0, rng, 256)),
}


@pytest.mark.parametrize("name", WRONG)
def test_planted_wrong_densities_are_found(name):
    head, said, draw = WRONG[name]
    rng = np.random.default_rng(4)
    found = misfits(
        head, said, (lambda k: draw(k, rng)) if draw else lambda k: drawn(head, said, k, rng, 256), 256, 0.001
    )
    assert [m.policy for m in found] == ([1, 2] if name.startswith("the first") else [0, 1, 2])
    assert all(abs(m.mean - 1) > m.tolerance and m.draws == N * 256 for m in found)


def test_only_the_wrong_policy_is_named():
    rng = np.random.default_rng(5)
    (found,) = misfits(None, PROBS, lambda k: drawn(None, PROBS, 0 if k == 2 else k, rng, 256), 256, 0.001)
    assert found.policy == 2


def test_an_action_of_probability_0_is_found_however_rare():
    sure = np.tile([[1.0, 0.0]], (1, 4, 1))
    (found,) = misfits(None, sure, lambda k: np.eye(1, 4000, 7, dtype=np.int64)[0], 1000, 0.001)
    assert found.copy == "actions of probability 0 in 0.0% of draws"
    assert misfits(None, sure, lambda k: np.zeros(4000, dtype=np.int64), 1000, 0.001) == []


def test_errors_that_cancel_on_average_are_found():
    """Warm actions of balanced probabilities, and means that are off to both sides by 0.3 deviations."""
    rng = np.random.default_rng(6)
    balanced = np.tile([[0.8, 0.2], [0.2, 0.8]], (1, 8, 1))
    (found,) = misfits(None, balanced, lambda k: warm(np.repeat(balanced[0], 256, 0), rng), 256, 0.001)
    assert found.copy == "sharpened"
    means = np.zeros((2, 16, 4))
    means[1, ::2, 0], means[1, 1::2, 0] = 0.3, -0.3
    found = misfits(BOX, means, lambda k: drawn(BOX, means, 1 - k, rng, 256), 256, 0.001)
    assert [(m.policy, m.copy) for m in found] == [(0, "number 0, shifted"), (1, "number 0, shifted")]
