"""Answers of a model to conversations, behind one protocol."""
