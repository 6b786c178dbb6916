"""Agents as they are: programs that ask the policy through an OpenAI-compatible proxy."""
