"""mf.evaluate: what it takes, what it refuses, and what its first line says."""

import numpy as np
import pytest
from torch import nn

import manyfold as mf
from manyfold.door import title
from manyfold.envs import make
from tests import checkpoints, doors

ACT = mf.ActorSet([lambda obs, t: np.ones(len(obs), dtype=np.int64), lambda obs, t: np.zeros(len(obs), dtype=np.int64)])


def evaluate(*arguments, **more):
    return mf.evaluate(doors.make, *arguments, **{"horizon": doors.T, **more})


def test_five_lines_of_python(place, zips):
    policies = mf.load_policies(str(zips / "*.zip"))
    result = mf.evaluate(make("own:make"), policies, episodes=60)
    assert str(result).splitlines()[0] == "own:make: 3 policies, stochastic; pooled evaluation"
    assert result.names[result.best] == "a"
    assert str(mf.evaluate(make("own:make"), str(zips / "*.zip"), episodes=60)) == str(result)
    assert result.report(place / "report.html").stat().st_size > 1000
    greedy = mf.evaluate(make("own:make"), mf.load_policies(zips / "a.zip", greedy=True), episodes=10)
    assert str(greedy).splitlines()[0] == "own:make: 1 policy, greedy; pooled evaluation"
    assert greedy.mean == pytest.approx([checkpoints.T])


def test_the_same_seed_gives_the_same_numbers_for_modules_and_sets():
    modules = [doors.network(gain) for gain in doors.GAINS]
    one, other = evaluate(modules, 60, 3), evaluate(doors.policies(), 60, 3)
    np.testing.assert_array_equal(one.mean, other.mean)
    assert (evaluate(modules, 60, 4).mean != one.mean).any()


def test_alpha_and_the_number_of_episodes_are_those_asked_for():
    result = evaluate(doors.policies(), 61, alpha=0.2)
    assert (result.episodes, result.decide().alpha) == (61, 0.2)
    stopped = evaluate(doors.policies(), 90, precision=1e-3, alpha=0.2)
    assert stopped.episodes <= 90
    assert (stopped.decision.alpha, stopped.reason) == (0.2, "The budget of 90 episodes is spent.")


def test_policies_that_only_act_are_evaluated_by_their_returns():
    result = evaluate(ACT, 40)
    assert str(result).splitlines()[0] == "make: 2 policies, greedy; plain returns from common starts"
    assert result.episodes == 40
    np.testing.assert_allclose(result.mean, [x.mean() for x in result.own_returns])
    assert evaluate(ACT, stop="best").best == 0  # upwards


def test_progress_has_sentences():
    seen = []
    evaluate(doors.policies(), 60, progress=seen.append)
    assert str(seen[-1]) == "60 of 60 episodes"
    evaluate(doors.policies(), precision=2.0, progress=seen.append)
    assert "of 3 may be the best" in str(seen[-1])


@pytest.mark.parametrize(
    ("policies", "given", "line"),
    [
        (doors.policies(), {}, "nothing says when to stop, expected episodes=200"),
        (ACT, {}, "nothing says when to stop, expected episodes=200"),
        (doors.policies(), {"episodes": 5}, "episodes is 5, expected a whole number of at least 6"),
        (doors.policies(), {"episodes": 60, "alpha": 1.0}, "alpha is 1.0, expected the probability"),
        (doors.policies(), {"episodes": 60, "workers": 0}, "workers is 0, expected a whole number from 1"),
        (doors.policies(), {"stop": "worst"}, 'stop is \'worst\', expected "best" or "order"'),
        (doors.policies(), {"stop": "best", "starts": np.zeros((3, 1))}, "starts are of a fixed number of episodes"),
        (doors.policies(), {"episodes": 60, "q": object(), "data": "x.npz"}, "both q and data are given, expected one"),
        (ACT, {"episodes": 60, "store": "evals"}, "these policies only act, expected no q, starts, data or store"),
        ("a.zip", {"episodes": 60}, "a.zip"),
        (3, {"episodes": 60}, "policies are 3, expected those of load_policies"),
        ([], {"episodes": 60}, r"policies are \[\], expected those of load_policies"),
        ([nn.Linear(3, 2)] * 2, {"episodes": 60}, "expected"),
    ],
)
def test_what_is_refused(policies, given, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=line) as error:
        evaluate(policies, **given)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_title():
    assert title(make(doors.make, doors.T), doors.policies((0.0,))) == "make: 1 policy, stochastic; pooled evaluation"


def test_two_policies_of_one_name_are_refused_before_any_episode():
    """Names say which row is whose: with stop="best" one of the two once had the value 0."""
    pair = mf.JoinedPolicySet([doors.policies((0.0,)), doors.policies((1.0,))])
    with pytest.raises(ValueError, match="^two policies are called 'policy 0', expected a name of its own for each"):
        evaluate(pair, stop="best")
