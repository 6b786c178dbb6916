"""Rows in, supervised tokens out. Knows nothing of training."""
