"""Scores of an episode: distance of its final state from the task's goal, and economy of its calls."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fctune.tasks.environments.base import Task

ENVIRONMENT_PARTS: dict[str, str] = {
    "solved": "1 if the final state is the goal and the answer has the facts that were asked for",
    "progress": "share of the required changes and facts that were achieved, minus unwanted changes",
    "economy": "calls of the task's own solution divided by the calls made, at most 1; 0 unless solved",
    "validity": "share of the calls that match a tool and that the environment accepts; 0 without calls",
}
"""Parts of a reward in environments, each with its meaning."""

ENVIRONMENT_REWARD = {"solved": 0.8, "economy": 0.2}
"""The default weights: needless and refused calls cost up to a fifth."""

_NUMBER = re.compile(r"(?<![\w.:-])\d[\d,]*(?:\.\d+)?(?![\w:-]*\d)")
_LEADING_ZERO = re.compile(r"\b0(?=\d:\d\d)")


def score_episode(task: Task, state: Any, is_accepted: Sequence[bool], text: str) -> dict[str, float]:
    """Return every part of ``ENVIRONMENT_PARTS``; all are 0 if nothing was done.

    Args:
        task: The task.
        state: The final state.
        is_accepted: For each call made, whether it was accepted.
        text: The final answer, after the last call.
    """
    facts = task.spec.facts
    num_told = sum(has_fact(text, fact) for fact in facts) if any(is_accepted) else 0
    start, goal = _flatten(task.start), _flatten(task.goal)
    distance, left = _distance(start, goal), _distance(_flatten(state), goal)
    solved = left == 0 and num_told == len(facts) and any(is_accepted)
    due = distance + len(facts)
    done = distance - left + num_told
    num_calls = len(is_accepted)
    return {
        "solved": float(solved),
        "progress": max(0.0, done / due) if due and any(is_accepted) else 0.0,
        "economy": min(1.0, len(task.spec.calls) / num_calls) if solved else 0.0,
        "validity": sum(is_accepted) / num_calls if num_calls else 0.0,
    }


def has_fact(text: str, fact: str) -> bool:
    """Return True if a text contains a fact: a number in any notation, or words, whatever their case."""
    if _NUMBER.fullmatch(fact):
        wanted = float(fact.replace(",", ""))
        return any(float(found.replace(",", "")) == wanted for found in _NUMBER.findall(text))
    text, fact = (_LEADING_ZERO.sub("", one.lower()) for one in (text, fact))
    return re.search(rf"(?<!\w){re.escape(fact)}(?!\w)", text) is not None


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of a JSON value by their path; empty containers count as leaves."""
    if isinstance(value, dict) and value:
        found: dict[str, Any] = {}
        for key, item in value.items():
            found |= _flatten(item, f"{path}/{key}")
        return found
    if isinstance(value, list) and value:
        # Each item counts as one leaf, regardless of its position.
        texts = Counter(json.dumps(item, sort_keys=True) for item in value)
        return {f"{path}/{text}#{number}": True for text, count in texts.items() for number in range(count)}
    return {path: value}


def _distance(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Return the number of leaves that differ."""
    return sum(path not in one or path not in other or one[path] != other[path] for path in one.keys() | other.keys())
