"""Planner of a run before its launch: memory, time, cost and disk space.

Constants come from datasheets, papers, and counts of the tensors that this project's blocks keep and move; each states
its source or that it is an assumption. Plans are validated against torch's memory tracker (``benchmarks/planner.py``)
and published figures (``tests/planner/test_plan.py``). Only one constant was fitted to them, the allocator's losses,
which says so. No GPU has been measured yet (``make bench-gpu``, row ``planner``).
"""
