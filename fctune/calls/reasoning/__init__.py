"""Reasoning in a model's text: how each family marks it, and the servers' parsers that take it out."""
