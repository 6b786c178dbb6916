"""Token offsets equal those of the tokenizers library, however they were computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from fctune.data.chat_template import ChatTemplate
from fctune.data.synthetic import iter_conversations
from fctune.data.token_offsets import OffsetTokenizer, TokenOffsets

SPECIAL = ["<|eot_id|>", "<|start_header_id|>"]


@pytest.fixture(scope="module")
def byte_level(tiny_base: Path) -> OffsetTokenizer:
    return ChatTemplate(tiny_base).encoder.tokenizer


def train(pre: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None) -> OffsetTokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    text = [str(c.to_openai()) for c in iter_conversations("train", 50, 1)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet))
    tokenizer.add_special_tokens(SPECIAL)
    return OffsetTokenizer(tokenizer)


@pytest.fixture(scope="module")
def normalising() -> OffsetTokenizer:
    return train(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFC())


def to_characters(encoded: TokenOffsets[bytes] | TokenOffsets[str], text: str) -> list[tuple[int, int]]:
    """Convert offsets to characters; a token within a character has the offsets of that character."""
    if isinstance(encoded.text, str):
        return list(zip(encoded.starts, encoded.ends, strict=True))
    index = [i for i, character in enumerate(text) for _ in character.encode()]
    return [(index[a], index[b - 1] + 1) for a, b in zip(encoded.starts, encoded.ends, strict=True)]


texts = st.lists(
    st.one_of(st.text(max_size=20), st.sampled_from([*SPECIAL, "\n\n", "é", "e\u0301", "日本語", "🙂", " hello"])),
    max_size=12,
).map("".join)


@given(text=texts)
@settings(max_examples=300, deadline=None)
def test_offsets_equal_the_tokenizers(text: str, byte_level: OffsetTokenizer) -> None:
    text = text.encode("utf-8", "ignore").decode()
    encoding = byte_level.tokenizer.encode(text, add_special_tokens=False)
    encoded = byte_level.encode(text)
    assert isinstance(encoded.text, bytes)
    assert encoded.ids.tolist() == encoding.ids == byte_level.ids(text)
    assert to_characters(encoded, text) == encoding.offsets


@given(text=texts)
@settings(max_examples=150, deadline=None)
def test_text_that_the_tokenizer_normalises_has_the_tokenizers_offsets(text: str, normalising: OffsetTokenizer) -> None:
    text = text.encode("utf-8", "ignore").decode()
    tokenizer = normalising
    encoding = tokenizer.tokenizer.encode(text, add_special_tokens=False)
    encoded = tokenizer.encode(text)
    assert encoded.ids.tolist() == encoding.ids
    assert to_characters(encoded, text) == encoding.offsets
    changed = tokenizer.tokenizer.normalizer.normalize_str(text) != text
    assert isinstance(encoded.text, str) or not changed


@given(rows=st.lists(texts, min_size=2, max_size=6))
@settings(max_examples=150, deadline=None)
def test_cached_parts_have_the_same_tokens_as_the_complete_text(rows: list[str], byte_level: OffsetTokenizer) -> None:
    for row in rows * 2:
        text = row.encode("utf-8", "ignore").decode()
        assert byte_level.encode(text).ids.tolist() == byte_level.ids(text)


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
def test_special_tokens_that_match_more_than_their_text_split_as_in_the_tokenizer(token: tokenizers.AddedToken) -> None:
    tokenizer = train(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFC())
    tokenizer.tokenizer.add_tokens([token])
    tokenizer = OffsetTokenizer(tokenizer.tokenizer)
    for text in ("one <cut> two", "one<cut>two", "cut cutter cut.", "e\u0301 <cut> e\u0301"):
        encoding = tokenizer.tokenizer.encode(text, add_special_tokens=False)
        for _ in range(2):
            encoded = tokenizer.encode(text)
            assert (encoded.ids.tolist(), to_characters(encoded, text)) == (encoding.ids, encoding.offsets)


def test_the_cache_is_bounded() -> None:
    trained = train(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer = OffsetTokenizer(trained.tokenizer, max_cached_characters=200)
    for number in range(100):
        text = f"row {number}<|eot_id|> and more of it"
        assert tokenizer.encode(text).ids.tolist() == tokenizer.ids(text)
        assert sum(map(len, tokenizer._cache)) <= 200 + len(text)


def test_a_vocabulary_of_words_has_the_tokenizers_offsets() -> None:
    tokenizer = train(pre_tokenizers.Metaspace())
    for text in ("Hello there", "find_probe(é)", ""):
        encoding = tokenizer.tokenizer.encode(text, add_special_tokens=False)
        encoded = tokenizer.encode(text)
        assert (encoded.ids.tolist(), to_characters(encoded, text)) == (encoding.ids, encoding.offsets)
