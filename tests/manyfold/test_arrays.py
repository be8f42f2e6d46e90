"""The checks that every array and number passes, and division by a policy."""

import numpy as np
import pytest

from manyfold.arrays import check_actions, check_distributions, check_finite, check_number, check_shape, divide


@pytest.mark.parametrize("x", [1, 10, np.int64(3), np.int16(10)])
def test_whole_numbers_in_their_range_pass(x):
    check_number("x", x, 1, 10)


@pytest.mark.parametrize("x", [0.0, 1, 0.5, np.float32(0.25), np.int64(1)])
def test_numbers_in_their_range_pass(x):
    check_number("x", x, 0, 1, whole=False)


@pytest.mark.parametrize("x", [0, 11, -3, 2.0, np.float64(2), True, np.True_, "3", None, [3], 1e300, 10**40, "x" * 999])
def test_anything_else_is_refused_in_one_line(x):
    with pytest.raises(ValueError, match=r"^x is .{1,60}, expected a whole number from 1 to 10$"):
        check_number("x", x, 1, 10)


@pytest.mark.parametrize("x", [-0.1, 1.1, float("nan"), float("inf"), True, "0.5", "1e-3", None, np.float64("nan")])
def test_anything_else_than_a_number_is_refused_in_one_line(x):
    with pytest.raises(ValueError, match=r"^x is .{1,60}, expected a number from 0 to 1$"):
        check_number("x", x, 0, 1, whole=False)


def test_without_an_upper_bound_the_line_says_so():
    with pytest.raises(ValueError, match=r"^x is 0, expected a whole number of at least 1$"):
        check_number("x", 0, 1)
    check_number("x", 2**53, 1)
    with pytest.raises(ValueError, match="expected a whole number of at least 1"):
        check_number("x", 2**53 + 1, 1)  # from there on not every whole number is a float


def test_the_first_place_that_is_not_finite_is_named():
    x = np.zeros((2, 3))
    check_finite("x", x)
    x[1, 2] = -np.inf
    with pytest.raises(ValueError, match=r"^x\[1, 2\] is -inf, expected a finite number$"):
        check_finite("x", x)


def test_actions_out_of_range_are_refused():
    check_actions(np.array([0, 3]), 4)
    check_actions(np.array([], dtype=np.int64), 4)
    for actions in ([0, 4], [-1, 2]):
        with pytest.raises(ValueError, match=r"^actions run from -?\d to \d, expected 0 to 3$"):
            check_actions(np.array(actions), 4)


def test_a_shape_is_said_in_words():
    check_shape("x", np.zeros((2, 3)), (2, 3), "[T, A]")
    with pytest.raises(ValueError, match=r"^x has shape \[2\], expected \[2, 3\] = \[T, A\]$"):
        check_shape("x", np.zeros(2), (2, 3), "[T, A]")


def test_rows_must_be_distributions():
    check_distributions("pi", np.full((2, 4), 0.25), ("s", "a"))
    check_distributions("pi", np.full((2, 4), 0.25, dtype=np.float32), ("s", "a"))
    check_distributions("pi", np.empty((0, 4)), ("s", "a"))
    for row, message in (
        ([0.5, 0.4], r"pi: probabilities at s=1 sum to 0.9, expected 1; were they saved before softmax\?"),
        ([1.5, -0.5], "pi: probability -0.5 at s=1, a=1 is negative, expected 0 or more"),
        ([np.nan, 1.0], r"pi\[1, 0\] is nan, expected a finite number"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            check_distributions("pi", np.array([[0.5, 0.5], row]), ("s", "a"))


def test_a_ratio_to_a_probability_of_0_is_0():
    assert divide(np.array([[1.0, 2.0], [0.0, 3.0]]), np.array([2.0, 0.0])).tolist() == [[0.5, 0.0], [0.0, 0.0]]
