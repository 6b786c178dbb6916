"""What a run will need, before it is launched: memory, time, money, room on disk.

Constants come from datasheets, papers and counts of what this project's own blocks keep and move; each says which, or
that it is an assumption. What plans are held to was not fitted, but for one assumption of the allocator's losses, which
says so: torch's memory tracker (``benchmarks/planner.py``) and published figures (``tests/planner/test_plan.py``). No
GPU has been measured yet (``make bench-gpu``, row ``planner``).
"""
