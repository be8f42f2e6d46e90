"""Where episodes happen: Gridworld, MuJoCo with a binned action, any finite MDP, any Gymnasium environment."""

from manyfold.envs.base import Environment, Finite, Running
from manyfold.envs.binned_mujoco import BinnedMujoco
from manyfold.envs.gridworld import Gridworld
from manyfold.envs.gymnasium import GymnasiumEnvironment

__all__ = ["BinnedMujoco", "Environment", "Finite", "Gridworld", "GymnasiumEnvironment", "Running"]
