"""Side-by-side runs against what a user would pick instead; ratios in one run. `make bench` runs them all."""
