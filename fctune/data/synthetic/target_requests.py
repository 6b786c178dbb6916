"""Requests for target tools: a phrasing with its slots filled in, framed as a sentence."""

from __future__ import annotations

import random
import re
from typing import Any

from fctune.data.augment.spoken import join_words
from fctune.data.conversation import Call, Message
from fctune.data.synthetic.target_tools import Slot, TargetTool
from fctune.data.synthetic.values import Side, draw_target

_LEADS: dict[Side, tuple[str, ...]] = {
    "train": (
        *("", "", "", "", "", "", "Please ", "Hi, ", "Hey, ", "Can you help, ", "Now ", "Good morning, "),
        *("Quick one: ", "Right, ", "Well, ", "Next: ", "One question: ", "And ", "Also, ", "Hi there, "),
        *("Another thing: ", "Then "),
    ),
    "held_out": ("", "", "", "Hello, ", "Okay, ", "One thing: ", "So, "),
}
_ENDS: dict[Side, tuple[str, ...]] = {
    "train": ("", "", ".", ".", ".", "?", "?", "!", ", please.", ". Thanks!", " now.", ", thank you."),
    "held_out": ("", ".", ".", "?", ", thanks.", " please."),
}
_OPTIONAL = re.compile(r"\[([^\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")


def _draw_value(slot: Slot, side: Side, rng: random.Random) -> tuple[Any, str]:
    """Draw a value and its wording."""
    if slot.choices:
        value = rng.choice(slot.choices)
        return value, value
    if slot.kind == "flag":
        truth = rng.random() < 0.6
        return truth, rng.choice(slot.if_true if truth else slot.if_false)
    if slot.is_list:
        values = list(dict.fromkeys(draw_target(slot.kind, side, rng) for _ in range(rng.randint(1, 3))))
        return values, join_words(values)
    value = draw_target(slot.kind, side, rng)
    return value, str(value)


def draw_request(target: TargetTool, side: Side, rng: random.Random) -> tuple[str, Call]:
    """Draw a clause that asks for the target tool, and the expected call."""
    phrasing = rng.choice(target.train if side == "train" else target.held_out)
    phrasing = _OPTIONAL.sub(lambda match: match[1] if rng.random() < 0.5 else "", phrasing)
    arguments: dict[str, Any] = {}
    wording: dict[str, str] = {}
    named = set(_SLOT.findall(phrasing))
    for name, slot in target.slots.items():
        if name in named:
            arguments[name], wording[name] = _draw_value(slot, side, rng)
            while list(arguments.values()).count(arguments[name]) > 1:
                arguments[name], wording[name] = _draw_value(slot, side, rng)
    return phrasing.format(**wording), Call(target.name, arguments)


def frame_target_request(clause: str, side: Side, rng: random.Random) -> Message:
    """Turn the clause into a user message, with a lead and an ending of this side of the split."""
    sentence = rng.choice(_LEADS[side]) + clause
    return Message("user", sentence[0].upper() + sentence[1:] + rng.choice(_ENDS[side]))
