"""The training loop, once, for every recipe."""
