"""Preflight: every node of a run checks itself, the nodes compare, and the head downloads what the run needs."""
