"""Peers at a glance, from what the benchmarks measured: `python -m benchmarks.glance`, after `make bench`.

Our ratio to what a user would pick instead, measured in one run with as many processes and threads; and the share that
is left of what nobody can beat: the same environments' bare steps. Where the ratio is below 5, why.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

from manyfold.tables import markdown, write_table

RESULTS = Path(__file__).parents[1] / "data/bench/bench.json"  # the table goes beside it: peers.md


class Row(NamedTuple):
    """Of the table."""

    what: str
    peer: str
    ratio: tuple[str, str]  # the benchmark, and the name of its number
    limit: tuple[str, str] | None = None
    of: str = ""  # what the limit is
    why: str = ""  # the ratio is below 5


SB3, VEC = "Stable-Baselines3", "SyncVectorEnv, its own actions"
ENVPOOL = "envpool's bare steps"
OWN = "evaluate_policy, times all"
ROWS = (
    Row("PPO, Gridworld 1,000", SB3, ("ppo_speed", "gridworld-1000, times Stable-Baselines3")),
    Row("PPO, inverted pendulum", SB3, ("ppo_speed", "inverted-pendulum, times Stable-Baselines3")),
    Row(
        "PPO, Hopper",
        SB3,
        ("ppo_speed", "hopper, times Stable-Baselines3"),
        ("ppo_speed", "hopper, share of envpool"),
        ENVPOOL,
        "physics is most of it, and both step it",
    ),
    Row(
        "PPO, Hopper",
        "SBX",
        ("ppo_speed", "hopper, times SBX"),
        ("ppo_speed", "hopper, share of envpool"),
        ENVPOOL,
        "physics is most of it, and both step it",
    ),
    Row("q and q_hat of 10 policies", "d3rlpy's DiscreteFQE", ("fqe_speed", "times d3rlpy")),
    Row("Gridworld 1,000, episodes", "SyncVectorEnv", ("gridworld", "1,000, 10,000 episodes, times SyncVectorEnv")),
    Row(
        "Gridworld 1,000, evaluation, one process",
        "SyncVectorEnv, which only steps",
        ("evaluate_speed", "one process, times SyncVectorEnv"),
    ),
    Row(
        "CartPole, a step of an evaluation, files to page",
        "`evaluate_policy`, files to means",
        ("door_speed", f"CartPole-v1, {OWN}"),
        ("door_speed", "CartPole-v1, share of bare"),
        "Gymnasium's bare steps, by the episodes",
        "both step one Python environment after the other; manyfold needs fewer episodes instead",
    ),
    Row(
        "Hopper, a step of an evaluation, files to page",
        "`evaluate_policy`, files to means",
        ("door_speed", f"Hopper-v5, {OWN}"),
        ("door_speed", "Hopper-v5, share of bare"),
        "Gymnasium's bare steps, by the episodes",
        "physics is most of it, and both step it",
    ),
    Row(
        "CartPole, episodes with all densities",
        VEC,
        ("door_speed", "CartPole-v1, share of vector API"),
        ("door_speed", "CartPole-v1, share of bare"),
        "Gymnasium's bare steps",
        "the densities of eight policies, where theirs is one",
    ),
    Row(
        "Hopper, episodes with all densities",
        VEC,
        ("door_speed", "Hopper-v5, share of vector API"),
        ("door_speed", "Hopper-v5, share of mj_step"),
        "`mujoco.mj_step` alone",
        "the densities of ten policies, where theirs is one",
    ),
    Row(
        "Hopper, episodes with all densities, through envpool",
        VEC,
        ("door_speed", "envpool:Hopper-v5, share of vector API"),
        ("door_speed", "envpool:Hopper-v5, share of bare"),
        ENVPOOL,
        "the same",
    ),
    Row(
        "Hopper, binned, logged episodes of mu",
        "envpool, which only steps",
        ("robots_speed", "hopper, share of envpool's CPU time"),
        ("robots_speed", "hopper, share of envpool's CPU time"),
        ENVPOOL,
        "the peer is the limit",
    ),
)
HEADER = ("", "peer", "ratio", "share of the limit", "limit", "below 5, why")


def rows(found: dict[str, dict[str, float]]) -> list[tuple[str, ...]]:
    """The table's; a number that was not measured is a dash."""

    def number(key: tuple[str, str] | None) -> float | None:
        return None if key is None else found.get(key[0], {}).get(key[1])

    out = []
    for row in ROWS:
        ratio, share = number(row.ratio), number(row.limit)
        out.append(
            (
                row.what,
                row.peer,
                "-" if ratio is None else f"{ratio:.1f}" if ratio >= 5 else f"{ratio:.2f}",
                "-" if share is None else f"{share:.0%}",
                row.of or "-",
                row.why if ratio is not None and ratio < 5 else "",
            )
        )
    return out


def main(results: Path = RESULTS) -> None:
    if not results.exists():
        raise SystemExit(f"{results}: not there, expected what `make bench` writes")
    table = [HEADER, *rows(json.loads(results.read_text()))]
    print(markdown(table))
    write_table(table, results.with_name("peers"), ("md",))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="FILE", help="instead of data/bench/bench.json"
    )
    main(parser.parse_args().results)
