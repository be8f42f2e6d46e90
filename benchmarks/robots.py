"""What the robots' benchmarks share: the command line, and targets as the stages train them."""

import argparse

from manyfold.envs import BinnedMujoco
from manyfold.envs.binned_mujoco import ROBOTS
from manyfold.train import targets
from manyfold.train.targets import Drawn, Rule, Training

RULE = Rule(policies=10, start=(1000, 5000), width=8500, history=2)


def trained(robot: str) -> Drawn:
    """The first group of a robot."""
    env = BinnedMujoco(robot)
    training = Training(env, robot, [0], [targets.draw(RULE, targets.config(env), robot, 0)])
    while not training.finished:
        training.run_segment()
    (drawn,) = training.results()
    return drawn


def asked_for(about: str, default: tuple[str, ...]) -> tuple[str, ...]:
    """The robots that were named, or `default`; another name is one line and exit code 2."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("robots", nargs="*", metavar="robot", help=f"of {', '.join(ROBOTS)}")
    robots: list[str] = parser.parse_args().robots
    for robot in robots:
        if robot not in ROBOTS:
            parser.exit(2, f"{robot!r}: no robot, expected some of {', '.join(ROBOTS)}\n")
    return tuple(robots) or default
