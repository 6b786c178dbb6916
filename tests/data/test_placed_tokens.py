"""Tokens stand where the tokenizer's own offsets say, whichever way their places were found."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from fctune.data.placed_tokens import PlacedTokens, PlacingTokenizer
from fctune.data.synthetic import iter_conversations
from fctune.data.template import ChatTemplate

SPECIAL = ["<|eot_id|>", "<|start_header_id|>"]


@pytest.fixture(scope="module")
def byte_level(tiny_base: Path) -> PlacingTokenizer:
    return ChatTemplate(tiny_base).encoder.tokenizer


def train(pre: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None) -> PlacingTokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    text = [str(c.to_openai()) for c in iter_conversations("train", 50, 1)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet))
    tokenizer.add_special_tokens(SPECIAL)
    return PlacingTokenizer(tokenizer)


def to_characters(placed: PlacedTokens[bytes] | PlacedTokens[str], text: str) -> list[tuple[int, int]]:
    """Places in characters: a token within a character stands at all of it."""
    if isinstance(placed.text, str):
        return list(zip(placed.starts, placed.ends, strict=True))
    index = [i for i, character in enumerate(text) for _ in character.encode()]
    return [(index[a], index[b - 1] + 1) for a, b in zip(placed.starts, placed.ends, strict=True)]


texts = st.lists(
    st.one_of(st.text(max_size=20), st.sampled_from([*SPECIAL, "\n\n", "é", "e\u0301", "日本語", "🙂", " hello"])),
    max_size=12,
).map("".join)


@given(text=texts)
@settings(max_examples=300, deadline=None)
def test_places_are_those_of_the_tokenizer(text: str, byte_level: PlacingTokenizer) -> None:
    text = text.encode("utf-8", "ignore").decode()
    encoding = byte_level.tokenizer.encode(text, add_special_tokens=False)
    placed = byte_level.place(text)
    assert isinstance(placed.text, bytes)
    assert placed.ids == encoding.ids == byte_level.ids(text)
    assert to_characters(placed, text) == encoding.offsets


@given(text=texts)
@settings(max_examples=150, deadline=None)
def test_a_text_that_the_tokenizer_changes_is_placed_by_its_own_offsets(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    tokenizer = _normalising()
    encoding = tokenizer.tokenizer.encode(text, add_special_tokens=False)
    placed = tokenizer.place(text)
    assert placed.ids == encoding.ids
    assert to_characters(placed, text) == encoding.offsets
    changed = tokenizer.tokenizer.normalizer.normalize_str(text) != text
    assert isinstance(placed.text, str) or not changed


_made: list[PlacingTokenizer] = []


def _normalising() -> PlacingTokenizer:
    if not _made:
        _made.append(train(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFC()))
    return _made[0]


def test_a_vocabulary_of_words_is_placed_by_its_own_offsets() -> None:
    tokenizer = train(pre_tokenizers.Metaspace())
    for text in ("Hello there", "find_probe(é)", ""):
        encoding = tokenizer.tokenizer.encode(text, add_special_tokens=False)
        placed = tokenizer.place(text)
        assert (placed.ids, to_characters(placed, text)) == (encoding.ids, encoding.offsets)
