"""Planner of a run before its launch: memory, time, cost and disk space.

Constants come from datasheets, papers, measured rows, and counts of the tensors that this project's blocks keep and
move; each states its source or that it is an assumption. Planned memory is compared with torch's memory tracker and
planned speed with the rows measured on an H100 (``benchmarks/planner.py``, docs/plan.md), both with published figures
(``tests/apps/plan/test_plan.py``). The allocator's losses are fitted to the latter, and the rates of kernels to one
profile on an H100 (``fctune.apps.plan.speed``).
"""
