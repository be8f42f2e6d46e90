"""Time and peak memory of the exact oracle, K = 10: q, q_hat, mu and all relative variances."""

import resource
import time

from benchmarks.show import show
from manyfold import exact
from manyfold.envs import Gridworld
from manyfold.streams import stream


def main() -> dict[str, float]:
    rows, out = [], dict[str, float]()
    for m in (10, 30):
        mdp = Gridworld.draw(m, 0).mdp()
        base = stream("benchmark-exact", m).dirichlet([1] * 4, size=(1, m, m * m))
        policies = 0.9 * base + 0.1 * stream("benchmark-exact", m, 1).dirichlet([1] * 4, size=(10, m, m * m))
        start = time.perf_counter()
        q = exact.action_values(mdp, policies)
        q_hat = exact.second_moments(mdp, policies)
        exact.shared_behavior(policies, q_hat)
        exact.relative_variances(exact.estimator_variances(mdp, policies, q_hat, q))
        spent = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        out |= {f"Gridworld {m**3:,}, seconds": spent, f"Gridworld {m**3:,}, GiB": peak}
        rows.append((f"Gridworld {m**3:,}", f"{spent:.2f} s", f"{peak:.2f} GiB"))
    show("Exact oracle, K = 10: q, q_hat, mu, all relative variances", ("", "time", "peak memory"), rows)
    return out


if __name__ == "__main__":
    main()
