"""Engines that generate a model's answers to conversations, in this process or through a server."""

from fctune.engines.engine import Answer, Engine, Prompt, Sampling

__all__ = ["Answer", "Engine", "Prompt", "Sampling"]
