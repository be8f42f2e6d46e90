"""The paper's seven environments by name, and what they have in common."""

import difflib

GRIDWORLDS = {"gridworld-1000": 10, "gridworld-27000": 30}  # name -> m
ROBOTS = ("ant", "hopper", "inverted-double-pendulum", "inverted-pendulum", "walker")
ENVS = (*GRIDWORLDS, *ROBOTS)
ROBOT_HORIZON = 100  # T of an evaluated episode; PPO trains on Gymnasium's own 1,000
BINS = 10  # of a robot's first action dimension


def check_env(name: str) -> None:
    """Refuses an unknown environment with the nearest valid name."""
    if name not in ENVS:
        near = difflib.get_close_matches(name, ENVS, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown environment {name!r}; did you mean {near!r}? (valid: {', '.join(ENVS)})")


def horizon(name: str) -> int:
    """T of an evaluated episode."""
    check_env(name)
    return GRIDWORLDS.get(name, ROBOT_HORIZON)
