"""Answers of a model to conversations, behind one protocol."""

from fctune.generation.engine import Answer, Engine, Sampling

__all__ = ["Answer", "Engine", "Sampling"]
