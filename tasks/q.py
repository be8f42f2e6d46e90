"""Stage `q`: the K action values of each group, by fitted Q-evaluation on its offline data (Algorithm 1, line 3)."""

import sys

from manyfold.fqe import q_problem
from tasks.executor import stage_main
from tasks.fits import FitStage, own_section

STAGE = FitStage("q", ("targets", "offline"), lambda group: q_problem(group.policies()), "q", own_section("q"))

if __name__ == "__main__":
    sys.exit(stage_main("q"))
