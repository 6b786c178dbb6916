"""Checkpoints: what is saved, how it is published, and how a run goes on from it."""
