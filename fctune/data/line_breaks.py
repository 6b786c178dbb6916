"""Line breaks between JSON objects at which a tokenizer splits a text whatever is before and after.

Templates print each tool on a line of its own. If the tokenizer never joins the end of such a line and the start of the
next, the lines can be tokenised one by one, and their tokens kept.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import tokenizers

BETWEEN_OBJECTS = '}\n{"'
_BREAK = re.compile(r'(?<=\}\n)(?=\{")')

# A pattern without lookarounds decides by the text of the piece alone. These two also look at the character after it,
# and for a quote before it, which makes no difference at a break: the end and the start of a text are alike.
_KNOWN_LOOKAROUNDS = (r"(?!\S)", '(?<=")')
_CONTEXT = re.compile(r"\(\?(?!:|i:)|\\[bBAzZGKRX1-9k]|(?<!\\)[$^]")
_CLASS = re.compile(r"\[\^?(?:\\.|[^\]\\])+\]", re.DOTALL)
# Characters that patterns tell apart, alone and in pairs.
_CHARACTERS = "aZ1é中_ \t\n\r\u00a0\u0301🙂{}[]\"',:;.-/\\<|>=(`"
_KINDS = "aZ1é中 \n\r}]\"',/"


def split_between_objects(text: str) -> list[str]:
    """Return the text split at each line break between JSON objects."""
    return _BREAK.split(text) if BETWEEN_OBJECTS in text else [text]


def splits_between_objects(tokenizer: tokenizers.Tokenizer) -> bool:
    """Return True if a tokenizer splits at each line break between JSON objects, so that it can encode them separately.

    Known are byte-level tokenizers that split by patterns whose only lookarounds are those of public models. What such
    a pattern does at a break is tried with all kinds of characters before and after.
    """
    steps = _list_steps(tokenizer.pre_tokenizer)
    if not steps or not all(map(_is_known, steps)) or not _keeps_breaks(tokenizer.normalizer):
        return False
    return all(_splits(tokenizer.pre_tokenizer, left, right) for left, right in _iter_probes())


def _list_steps(pre_tokenizer: Any) -> list[dict[str, Any]]:
    """Return the settings of a pre-tokenizer's steps; empty without one, or with one written in Python."""
    try:
        settings = json.loads(pre_tokenizer.__getstate__())
    except Exception:  # of several types, by the kind of pre-tokenizer
        return []
    return list(settings["pretokenizers"]) if settings.get("type") == "Sequence" else [settings]


def _is_known(step: dict[str, Any]) -> bool:
    if step.get("type") == "ByteLevel":
        return not step.get("add_prefix_space")
    if step.get("type") == "Digits":
        return True
    if step.get("type") != "Split" or step.get("behavior") != "Isolated" or step.get("invert"):
        return False
    pattern = step.get("pattern", {}).get("Regex")
    if not isinstance(pattern, str):
        return False
    for known in _KNOWN_LOOKAROUNDS:
        pattern = pattern.replace(known, "")
    return _CONTEXT.search(_CLASS.sub("", pattern)) is None


def _keeps_breaks(normalizer: Any) -> bool:
    return normalizer is None or type(normalizer) is tokenizers.normalizers.NFC


def _iter_probes() -> Iterator[tuple[str, str]]:
    """Yield texts before and after a break."""
    pairs = ["".join(pair) for pair in itertools.product(_KINDS, repeat=2)]
    for near in ("", *_CHARACTERS, *pairs):
        for far in ("", "a", ' "type": "object"'):
            yield f"{near}}}\n", f'{{"{far}'
            yield f"{far}}}\n", f'{{"{near}'


def _splits(pre_tokenizer: Any, left: str, right: str) -> bool:
    """Return True if two texts have the same pieces together as alone."""
    together = [piece for piece, _ in pre_tokenizer.pre_tokenize_str(left + right)]
    alone = [piece for text in (left, right) for piece, _ in pre_tokenizer.pre_tokenize_str(text)]
    return together == alone
