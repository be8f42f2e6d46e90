"""manyfold: evaluate many policies with manyfold fewer episodes."""

import gymnasium

gymnasium.register("manyfold/Gridworld-v0", entry_point="manyfold.gridworld:GridworldEnv")
