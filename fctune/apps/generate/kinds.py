"""The kinds of rows; a module of its own, because the command line names them without the imports of the others."""

KINDS = {
    "one_call": 0.30,
    "several_calls": 0.12,
    "repeated_tool": 0.12,
    "dependent_calls": 0.12,
    "multi_turn": 0.12,
    "missing_value": 0.08,
    "no_tool": 0.10,
    "small_talk": 0.04,
}
"""Kinds of rows with their default shares."""
