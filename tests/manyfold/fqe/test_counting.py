"""Equations solved by counting, against dynamic programming and by hand."""

import numpy as np

from manyfold import exact
from manyfold.data.transitions import About, Transitions, Writer
from manyfold.fqe import Problem, q_problem
from manyfold.fqe.counting import count
from manyfold.mdp import FiniteMDP
from manyfold.policies import TabularPolicySet


def write(path, horizon, rows):
    """Rows (t, s, a, r, s', terminated) as Parquet."""
    t, state, action, reward, after, ended = (np.array(x) for x in zip(*rows, strict=True))
    columns = {"t": t, "action": action, "reward": reward, "terminated": ended, "truncated": ended & False}
    columns |= {"episode": np.arange(len(t)), "state": state[:, None], "next_state": after[:, None]}
    with Writer(path, About("small", horizon, 2, 1, 0)) as writer:
        writer.write(columns)
    return Transitions(path)


def test_all_rows_of_a_deterministic_world_give_its_values_at_every_step(tmp_path):
    """Each (s, a) is logged once, at step 0 only: a row serves every step."""
    after, rewards = np.array([[1, 2], [0, 2], [2, 1]]), np.arange(6.0).reshape(3, 2)
    rows = [(0, s, a, rewards[s, a], after[s, a], False) for s in range(3) for a in range(2)]
    mdp = FiniteMDP(np.eye(3)[after], rewards, np.eye(3)[0], 4)
    table = np.random.default_rng(0).dirichlet(np.ones(2), size=(2, 4, 3))
    found = count(write(tmp_path / "rows.parquet", 4, rows), q_problem(TabularPolicySet(table)), 3)
    np.testing.assert_allclose(found, exact.action_values(mdp, table), rtol=1e-6)


def test_ends_last_steps_and_cells_without_rows_by_hand(tmp_path):
    """T = 2, weights 1/2: state 0 goes to 1 and pays 1 or 3 by chance, state 1 ends; nobody logged (1, 1)."""
    rows = [(0, 0, 0, 1.0, 1, False), (0, 0, 0, 3.0, 1, False), (0, 0, 1, 4.0, 0, False), (0, 1, 0, 6.0, 0, True)]
    rows.append((1, 0, 1, 8.0, 1, True))  # the last step's row: of use at t = 1 alone
    half = Problem(lambda batch: batch.reward[None], lambda states, t: np.full((1, len(t), 2), 0.5))
    found = count(write(tmp_path / "rows.parquet", 2, rows), half, 2)
    unseen = (1 + 3 + 4 + 8 + 6) / 5
    np.testing.assert_allclose(found[0, 1], [[2, 6], [6, unseen]])
    v = 0.5 * found[0, 1].sum(-1)
    later = [[2 + v[1], 4 + v[0]], [6, (1 + v[1] + 3 + v[1] + 4 + v[0] + 6) / 4]]
    np.testing.assert_allclose(found[0, 0], later)
