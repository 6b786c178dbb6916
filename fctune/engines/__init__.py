"""Engines that generate a model's answers to conversations, in this process or through a server."""
