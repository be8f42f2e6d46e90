"""Target policies by PPO, batched over groups."""
