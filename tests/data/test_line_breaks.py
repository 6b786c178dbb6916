"""A list of tools that is tokenised line by line has the tokens of the complete text, whatever the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from fctune.data.line_breaks import split_between_objects, splits_between_objects
from fctune.data.synthetic import iter_conversations
from fctune.data.token_offsets import OffsetTokenizer

SPECIAL = "<|eot_id|>"
BEFORE = r"[^\r\n\p{L}\p{N}]?"
SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# The patterns of public models.
PATTERNS = {
    "Llama 3": rf"{SUFFIXES}|{BEFORE}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}",
    "Qwen 2": rf"{SUFFIXES}|{BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}",
    "Qwen 3.5": rf"{SUFFIXES}|{BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}",
    "gpt-oss": rf"{BEFORE}{UPPER}*{LOWER}+{SUFFIXES}?|{BEFORE}{UPPER}+{LOWER}*{SUFFIXES}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}",
}


def train(pre: Any, normalizer: Any = None) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    rows = [json.dumps([tool.function for tool in c.tools]) for c in iter_conversations("train", 50, 1)]
    texts = [*rows, *(row.replace("}, {", "}\n{") for row in rows)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


def by_pattern(*patterns: str, behavior: str = "isolated", **options: Any) -> Any:
    steps = [pre_tokenizers.Split(Regex(pattern), behavior) for pattern in patterns]
    options = {"add_prefix_space": False, "use_regex": False, **options}
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(**options)])


PUBLIC = {name: by_pattern(pattern) for name, pattern in PATTERNS.items()}
PUBLIC |= {
    "GPT-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "DeepSeek V3": by_pattern(
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ),
}
OTHERS = {
    "words": pre_tokenizers.Metaspace(),
    "spaces": by_pattern(r"\s?\S+"),
    "no letters": by_pattern("[^a-z]+|[a-z]+"),
    "a look back": by_pattern(r"(?<=\n)\{|\{|[^{]+"),
    "a look ahead": by_pattern(r"\}(?=\n\{)|\}\n|[^}]+"),
    "anchors": by_pattern(r"^\{|\s+|[^\s]+"),
    "dots of any character": by_pattern("(?m:.{1,9})"),
    "space before": by_pattern(PATTERNS["Llama 3"], add_prefix_space=True),
    "merged": by_pattern(r"\n", behavior="merged_with_next"),
}
TOKENIZERS = {name: train(pre) for name, pre in PUBLIC.items() if name != "Qwen 2"}
TOKENIZERS["Qwen 2"] = train(PUBLIC["Qwen 2"], normalizers.NFC())
UNSAFE = {name: train(pre) for name, pre in OTHERS.items()}
UNSAFE["compatibility forms"] = train(PUBLIC["Llama 3"], normalizers.NFKC())

lines = st.one_of(
    st.text(max_size=12),
    st.sampled_from(['{"type": "object", "required": ["city"]}', '{"a": 1}', "{}", "}", '{"', SPECIAL, "\u0301", "'s"]),
)
texts = st.lists(lines, min_size=1, max_size=6).flatmap(
    lambda parts: st.lists(st.sampled_from(['}\n{"', "\n", "", " ", "}\n\n{"]), min_size=6, max_size=6).map(
        lambda breaks: "".join(f"{part}{gap}" for part, gap in zip(parts, breaks, strict=False))
    )
)


def has_equal_tokens(tokenizer: tokenizers.Tokenizer, text: str) -> bool:
    expected: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    split = OffsetTokenizer(tokenizer)
    return all(split.encode(text).ids.tolist() == expected for _ in range(2))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=texts)
@settings(max_examples=60, deadline=None)
def test_lines_have_the_tokens_of_the_complete_text(name: str, text: str) -> None:
    assert has_equal_tokens(TOKENIZERS[name], text.encode("utf-8", "ignore").decode())


@pytest.mark.parametrize("name", UNSAFE)
@given(text=texts)
@settings(max_examples=15, deadline=None)
def test_a_tokenizer_that_joins_lines_keeps_its_tokens(name: str, text: str) -> None:
    assert has_equal_tokens(UNSAFE[name], text.encode("utf-8", "ignore").decode())


@pytest.mark.parametrize("name", TOKENIZERS)
def test_public_tokenizers_split_between_objects(name: str) -> None:
    assert splits_between_objects(TOKENIZERS[name])


def test_the_tiny_base_splits_between_objects(tiny_base: Path) -> None:
    assert splits_between_objects(tokenizers.Tokenizer.from_file(str(tiny_base / "tokenizer.json")))


@pytest.mark.parametrize("name", UNSAFE)
def test_tokenizers_that_may_not_split_between_objects_are_left_alone(name: str) -> None:
    assert not splits_between_objects(UNSAFE[name])


def test_only_line_breaks_between_objects_split() -> None:
    assert split_between_objects('[{"a": {}}\n{"b": 1}\n{}\n\n{"c": 2} {"d": 3}\n{"e": 4}]') == [
        '[{"a": {}}\n',
        '{"b": 1}\n{}\n\n{"c": 2} {"d": 3}\n',
        '{"e": 4}]',
    ]


def test_tools_are_tokenised_once_each(tiny_base: Path) -> None:
    tokenizer = OffsetTokenizer(tokenizers.Tokenizer.from_file(str(tiny_base / "tokenizer.json")))
    tools = [f'{{"name": "tool_{letter}"}}' for letter in "abcdef"]
    tokenizer.encode("\n".join(tools) + "\n")
    before = set(tokenizer._cache)
    tokenizer.encode("\n".join([tools[0], tools[3], tools[1], tools[2]]) + "\n")
    assert set(tokenizer._cache) == before
