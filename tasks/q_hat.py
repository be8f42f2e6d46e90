"""Stage `q_hat`: the K second moments of each group, the same engine on r_hat = 2 r q - r^2 (Algorithm 1, lines 4-6).

What is saved is the fit itself: q_hat is at least q^2, and whoever uses the fit floors it there.
"""

import sys

from manyfold.fqe import Problem, q_hat_problem
from tasks.executor import stage_main
from tasks.fits import FitStage, own_section
from tasks.groups import Group


def problem(group: Group) -> Problem:
    """r_hat with the fitted q of the group; weights pi."""
    return q_hat_problem(group.policies(), group.values("q"))


STAGE = FitStage("q_hat", ("targets", "offline", "q"), problem, "q_hat", own_section("q_hat"))

if __name__ == "__main__":
    sys.exit(stage_main("q_hat"))
