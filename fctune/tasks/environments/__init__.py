"""Simulated tools with a state, in which a model's calls have effects that can be judged."""
