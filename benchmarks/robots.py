"""The command line of the robots' benchmarks."""

import argparse

from manyfold import environments


def asked_for(about: str, default: tuple[str, ...]) -> list[str]:
    """The robots that were named, or `default`; another name is one line and exit code 2."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("envs", nargs="*", metavar="robot", help=f"of {', '.join(environments.ROBOTS)}")
    envs: list[str] = parser.parse_args().envs
    for env in envs:
        if env not in environments.ROBOTS:
            parser.exit(2, f"{env!r}: no robot, expected some of {', '.join(environments.ROBOTS)}\n")
    return envs or list(default)
