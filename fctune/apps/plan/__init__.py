"""Planner of a run before its launch: time, cost and disk space of the layouts that fit.

Memory and speed of a layout are counted below (``fctune.parallel.memory``, ``fctune.parallel.speed``), for runs and
plans alike. Constants come from datasheets, papers, measured rows, and counts of the tensors that this project's blocks
keep and move; each states its source or that it is an assumption. Planned memory is compared with torch's memory
tracker and planned speed with the rows measured on an H100 (``benchmarks/planner.py``, docs/plan.md), both with
published figures (``tests/parallel/test_published_runs.py``). The allocator's losses are fitted to the latter, and the
rates of kernels to one profile on an H100.
"""
