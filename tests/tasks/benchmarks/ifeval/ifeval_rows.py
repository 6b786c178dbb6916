"""Prompts of IFEval's shape, written by hand, with answers and the instructions that these follow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Asked(NamedTuple):
    """A prompt with its instructions, and for some answers which of them are followed strictly and loosely."""

    prompt: str
    instructions: dict[str, dict[str, Any]]
    answers: dict[str, tuple[str, str]]

    def to_row(self, key: int) -> dict[str, Any]:
        """Return the row of the prompt."""
        names, arguments = list(self.instructions), list(self.instructions.values())
        return {"key": key, "prompt": self.prompt, "instruction_id_list": names, "kwargs": arguments}


ASKED = (
    Asked(
        "Describe a lake without commas.",
        {"punctuation:no_comma": {}},
        {"A lake is wet.": ("+", "+"), "Wet, and deep.": ("-", "-"), "": ("-", "-"), "Sure, here:\nWet.": ("-", "+")},
    ),
    Asked(
        "Say 'boat' twice, in at most five words, all in lower case.",
        {
            "keywords:frequency": {"keyword": "boat", "frequency": 2, "relation": "at least"},
            "length_constraints:number_words": {"relation": "less than", "num_words": 6},
            "change_case:english_lowercase": {},
        },
        {
            "the boat and another boat": ("+++", "+++"),
            "the boat, and *another* boat too": ("+-+", "+-+"),
            "A boat": ("-+-", "-+-"),
        },
    ),
    Asked(
        "Answer in JSON.",
        {"detectable_format:json_format": {}},
        {'{"a": 1}': ("+", "+"), "a: 1": ("-", "-"), '**\n{"a": 1}\n**': ("-", "+")},
    ),
    Asked(
        "Repeat this first: Tell me.",
        {"combination:repeat_prompt": {"prompt_to_repeat": "Tell me."}},
        {"Tell me. It rains.": ("+", "+"), "It rains.": ("-", "-")},
    ),
)
NEEDS_DATA = (
    Asked(
        "In at least two sentences, and none in capitals.",
        {"length_constraints:number_sentences": {"relation": "at least", "num_sentences": 2}},
        {"One. Two.": ("+", "+"), "One": ("-", "-")},
    ),
    Asked(
        "Use one word in capitals.",
        {"change_case:capital_word_frequency": {"capital_frequency": 1, "capital_relation": "at least"}},
        {"A BIG boat": ("+", "+"), "a small one": ("-", "-")},
    ),
)


def write_rows(path: Path, asked: Sequence[Asked] = ASKED) -> Path:
    """Write prompts as JSONL, with keys from 100."""
    rows = [one.to_row(number) for number, one in enumerate(asked, start=100)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def add_sentence_data(folder: Path) -> Path:
    """Write NLTK's data for English sentences, without any abbreviations or collocations."""
    english = folder / "tokenizers" / "punkt_tab" / "english"
    english.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (english / name).write_text("")
    return folder
