"""A conversation in the terminal with a model that may call tools."""
