"""The page that a result writes: one HTML file for people."""
