"""Training rows strengthened by changed and added ones: see ``data.augment`` in a config."""
