"""The command line of the robots' benchmarks."""

import argparse

from manyfold.envs.binned_mujoco import ROBOTS


def asked_for(about: str, default: tuple[str, ...]) -> list[str]:
    """The robots that were named, or `default`; another name is one line and exit code 2."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("robots", nargs="*", metavar="robot", help=f"of {', '.join(ROBOTS)}")
    robots: list[str] = parser.parse_args().robots
    for robot in robots:
        if robot not in ROBOTS:
            parser.exit(2, f"{robot!r}: no robot, expected some of {', '.join(ROBOTS)}\n")
    return robots or list(default)
