"""Tokens stand where the tokenizer's own offsets say, whichever way their places were found."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from fctune.data.chat_template import ChatTemplate
from fctune.data.synthetic import iter_conversations
from fctune.data.token_offsets import PlacedTokens, PlacingTokenizer

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


@given(rows=st.lists(texts, min_size=2, max_size=6))
@settings(max_examples=150, deadline=None)
def test_parts_that_were_met_before_have_the_tokens_of_the_whole(rows: list[str], byte_level: PlacingTokenizer) -> None:
    for row in rows * 2:
        text = row.encode("utf-8", "ignore").decode()
        assert byte_level.place(text).ids == byte_level.ids(text)


@pytest.mark.parametrize(
    "token",
    [
        tokenizers.AddedToken("<cut>", lstrip=True, special=True),
        tokenizers.AddedToken("<cut>", rstrip=True, special=True),
        tokenizers.AddedToken("cut", single_word=True, special=True),
        tokenizers.AddedToken("<cut>", normalized=True),
    ],
    ids=["left", "right", "word", "normalised"],
)
def test_a_special_token_that_takes_more_than_itself_cuts_as_the_tokenizer_does(token: tokenizers.AddedToken) -> None:
    tokenizer = train(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFC())
    tokenizer.tokenizer.add_tokens([token])
    tokenizer = PlacingTokenizer(tokenizer.tokenizer)
    for text in ("one <cut> two", "one<cut>two", "cut cutter cut.", "e\u0301 <cut> e\u0301"):
        encoding = tokenizer.tokenizer.encode(text, add_special_tokens=False)
        for _ in range(2):
            placed = tokenizer.place(text)
            assert (placed.ids, to_characters(placed, text)) == (encoding.ids, encoding.offsets)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fctune.data.token_offsets._MAX_KEPT_CHARACTERS", 200)
    tokenizer = train(pre_tokenizers.ByteLevel(add_prefix_space=False))
    for number in range(100):
        text = f"row {number}<|eot_id|> and more of it"
        assert tokenizer.place(text).ids == tokenizer.ids(text)
        assert sum(map(len, tokenizer._known)) <= 200 + len(text)


def test_a_vocabulary_of_words_is_placed_by_its_own_offsets() -> None:
    tokenizer = train(pre_tokenizers.Metaspace())
    for text in ("Hello there", "find_probe(é)", ""):
        encoding = tokenizer.tokenizer.encode(text, add_special_tokens=False)
        placed = tokenizer.place(text)
        assert (placed.ids, to_characters(placed, text)) == (encoding.ids, encoding.offsets)
