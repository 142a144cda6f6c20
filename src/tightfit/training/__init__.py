"""Data, loop, checkpoints and evaluation: what happens once a plan has been chosen."""
