"""llama.cpp's names of pre-tokenizers, by what a tokenizer.json says.

llama.cpp has the regular expressions by which tokenizers split text before merging compiled in, each under a name. Its
converter recognises a tokenizer by a checksum of one text's ids, so a vocabulary of one's own is unknown to it although
it splits text like a known one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"
_CASED = (f"{_START}{_UPPER}*{_LOWER}+", f"{_START}{_UPPER}+{_LOWER}*")
_CASED_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

# By the expression, and by whether a piece that is a token needs no merges.
_BY_EXPRESSION = {
    (rf"{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_REST}", True): "llama-bpe",
    (rf"{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_REST}", False): "smaug-bpe",
    (rf"{_WORDS}|\p{{N}}|{_SYMBOLS}|{_REST}", False): "qwen2",
    (
        rf"{_CONTRACTIONS}|{_START}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_REST}",
        False,
    ): "qwen35",
    (rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_CASED_SYMBOLS}|{_REST}", True): "tekken",
    (
        "|".join(f"{part}{_CONTRACTIONS}?" for part in _CASED) + rf"|\p{{N}}{{1,3}}|{_CASED_SYMBOLS}|{_REST}",
        False,
    ): "gpt-4o",
}
_GPT2 = "gpt-2"
_LINES = "lines"


def find_pre_tokenizer(model_dir: Path) -> str:
    """Return llama.cpp's name of the pre-tokenizer in a directory's tokenizer.json, or ``lines`` if it has none.

    Raises:
        ConfigError: The tokenizer is not a byte-level BPE without a normalizer.
    """
    source = json.loads((model_dir / "tokenizer.json").read_text(encoding="utf-8"))
    steps = _list_steps(source.get("pre_tokenizer"))
    is_byte_level = bool(steps) and steps[-1]["type"] == "ByteLevel" and not steps[-1]["add_prefix_space"]
    if source["model"]["type"] != "BPE" or source.get("normalizer") is not None or not is_byte_level:
        raise ConfigError(
            f"{model_dir}/tokenizer.json: llama.cpp's converter does not know this tokenizer, which is not a "
            "byte-level BPE. Serve the model with vLLM: fctune serve."
        )
    ignores_merges = bool(source["model"].get("ignore_merges"))
    if [step["type"] for step in steps] == ["ByteLevel"] and steps[0]["use_regex"] and not ignores_merges:
        return _GPT2
    if [step["type"] for step in steps] == ["Split", "ByteLevel"] and not steps[1]["use_regex"]:
        return _BY_EXPRESSION.get((steps[0]["pattern"].get("Regex", ""), ignores_merges), _LINES)
    return _LINES


def _list_steps(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    steps: list[dict[str, Any]] = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return steps
