"""Callbacks of the training loop: checkpoints, evaluation, stop requests and the hang watch."""
