"""Planner of a run before its launch: memory, time, cost and disk space.

Constants come from datasheets, papers, and counts of the tensors that this project's blocks keep and move; each states
its source or that it is an assumption. Plans are validated against torch's memory tracker (``benchmarks/planner.py``)
and published figures (``tests/planner/test_plan.py``). The allocator's losses are fitted to these, and the rates of
kernels to one profile on an H100 (``fctune.planner.kernel_times``). Planned and measured peaks were not compared on a
GPU systematically yet (``make bench-gpu``, row ``planner``).
"""
