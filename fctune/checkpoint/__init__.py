"""Checkpoints: the state of a run, its formats on disk, asynchronous saving, and choosing one to resume from."""
