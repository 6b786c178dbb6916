"""The gate: base and result on the same cases, so that nothing that gets worse is released.

    from fctune.apps.gate import run_gate

    report = run_gate(base, tuned, out, cases="held_out.jsonl", config=GateConfig(thorough=True))
    report.verdict      # "safe", "worse" or "undecided"
    report.lines        # each with .verdict, .comparison, .interval, .p_adjusted, .smallest_fall, .remedies
    report.not_run      # {line: reason}; never counted as passed
    report.is_blocked   # worse, or undecided where config.require_safe is set

A model is a directory, a run, an adapter, ``hf:NAME`` or a server's address. ``out`` gets ``gate.json`` (the report),
``gate.xml`` (JUnit), ``gate.html`` and the answers, with which the same call resumes. A blocked result is marked (see
``fctune.runs.release``); a gate that clears each line of the mark removes it. ``fctune gate`` prints the report and
exits with 1 if the result is blocked.
"""

from fctune.apps.gate.gate import run_gate
from fctune.apps.gate.report import GateReport

__all__ = ["GateReport", "run_gate"]
