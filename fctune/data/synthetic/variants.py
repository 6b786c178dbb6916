"""Curriculum tools that do what a target tool does, under other names and with another schema.

A base model has seen its language before it is fine-tuned: people asking about weather, money and parcels. Here it sees
the training phrasings with tools that share neither their name nor their property names with a target tool.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from fctune.data.conversation import Tool
from fctune.data.synthetic.target_requests import draw_request
from fctune.data.synthetic.target_tools import TargetTool, load_target_tools
from fctune.data.synthetic.words import NOUNS, VERBS, make_word, split_words

_PROPERTY_WORDS = split_words(
    "where_to place_name spot area who someone whom which_one kind_of sort choice option setting variant how_many "
    "how_much number_of total_of figure quantity_of value_of size_of on_day day_of moment hour_of begin_at until "
    "from_where to_where via first_one second_one third_one thing entry field_a field_b input_a input_b content words "
    "name_of things all_of members_of state is_set wanted enabled flag_a marked"
)
_DESCRIPTIONS = ("{d}", "{d}", "Use this: {d}", "A tool. {d}", "{d} For users.")


@dataclass(frozen=True, slots=True)
class VariantTool:
    """A tool requested in the phrasings of ``target``; ``names`` maps the target's arguments to its own."""

    tool: Tool
    target: TargetTool
    names: dict[str, str]

    def request(self, rng: random.Random) -> tuple[str, dict[str, Any]]:
        """Draw a clause that asks for the tool, and the expected arguments in the schema's order."""
        clause, call = draw_request(self.target, "train", rng)
        return clause, {self.names[key]: value for key, value in call.arguments.items()}


def draw_variant(rng: random.Random, target: TargetTool | None = None) -> VariantTool:
    """Draw a variant of a target tool, by default of a random one."""
    tools = load_target_tools()
    target = rng.choice(tools.all) if target is None else target
    while True:
        draw = rng.random()
        hint = rng.choice(target.description.rstrip(".").lower().split())
        name = (
            f"{rng.choice(VERBS)}_{hint}"
            if draw < 0.45
            else f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
            if draw < 0.7
            else f"{hint}_{make_word(rng)}"
            if draw < 0.85
            else make_word(rng, 2, 3)
        )
        if name.isidentifier() and name not in tools.names:
            break
    names: dict[str, str] = {}
    for slot in target.slots:
        while slot not in names:
            own = make_word(rng) if rng.random() < 0.3 else rng.choice(_PROPERTY_WORDS)
            if own not in names.values() and own not in tools.properties:
                names[slot] = own
    function = {
        "name": name,
        "description": rng.choice(_DESCRIPTIONS).format(d=target.description),
        "parameters": {
            "type": "object",
            "properties": {names[key]: slot.schema() for key, slot in target.slots.items()},
            "required": [names[key] for key, slot in target.slots.items() if not slot.optional],
        },
    }
    return VariantTool(Tool(function), target, names)
