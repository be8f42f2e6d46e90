"""Tasks: one module per stage; they load, call manyfold, and save."""
