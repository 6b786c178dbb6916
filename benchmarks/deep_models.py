"""Model directories of public models at their real depth, with small random weights and a small tokenizer.

Depth, kinds of layers, ties, scales, windows' pattern and positions are those of the model's own config.json, as in
``fctune/models/public_configs.json``; hidden sizes, heads, experts and the vocabulary are small. The chat template
is the model's own where an installed package has it.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.model_zoo import find_entry, quantize_to_mxfp4_, save_weights, shrink
from benchmarks.templates import ADDED, SPECIAL, find_templates
from fctune.apps.demo.tokenizer import train_tokenizer
from fctune.config.chat_templates import list_shipped_templates
from fctune.models.hub import parse_name
from fctune.models.sources import find_public_config


@dataclass(frozen=True, slots=True)
class Family:
    """Chat template and special tokens of a public model, as in its tokenizer_config.json and generation_config.json.

    Attributes:
        template: Name in ``benchmarks.templates``; None if no installed package has it.
        bos: Token that begins a text; None for models without one.
        eos: Token that ends a text.
        pad: Token of padding.
        stops: Tokens that end an answer besides ``eos``.
        sizes: Sizes in place of the smallest.
        config_eos: Token that config.json names as the end, of a model without a generation_config.json; else None.
    """

    template: str | None
    bos: str | None
    eos: str
    pad: str
    stops: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    config_eos: str | None = None


# Keys of JSON with their quotes are pieces: a step takes time for each token, and rows have a third fewer than with a
# public tokenizer's pieces.
_PIECES = (
    r"""[{\[, ]*\\?["']\w+\\?["']: ?\\?["'\[{]*|\\?["'],? ?"""
    r"""| ?[A-Za-z]+(?:_[A-Za-z]+)*|_|\d{1,3}| ?[^\sA-Za-z_\d]+[\r\n]*|\s+"""
)
# Sizes of a text model without sections of its own. Many CPUs multiply bfloat16 ten times slower than float32.
_SMALLEST = {"hidden_size": 32, "intermediate_size": 48}
# Of the deepest, whose time is that of their many blocks.
_THIN = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
# 4-bit weights share scales in groups of 16,384; of MXFP4, 32 inputs share one.
_NF4 = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
_MXFP4 = {"intermediate_size": 64}
# transformers checks that the heads of Mamba divide its width, in a model without layers of Mamba, too.
_MAMBA = {"hidden_size": 64}
_LLAMA = ("<|begin_of_text|>", "<|eot_id|>", "<|finetune_right_pad_id|>", ("<|end_of_text|>", "<|eom_id|>"))
_GPT_OSS = ("<|startoftext|>", "<|return|>", "<|endoftext|>", ("<|endoftext|>", "<|call|>"), _MXFP4)
_QWEN = (None, "<|im_end|>", "<|endoftext|>", ("<|endoftext|>",))
FAMILIES = {
    "meta-llama/Llama-3.1-8B-Instruct": Family("llama3_1", *_LLAMA),
    "meta-llama/Llama-3.2-1B-Instruct": Family("llama3_2", *_LLAMA, _NF4),
    "meta-llama/Llama-3.3-70B-Instruct": Family("llama3_1", *_LLAMA, _THIN),
    "Qwen/Qwen2-7B-Instruct": Family(None, *_QWEN),
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": Family("qwen2_5", *_QWEN),
    "Qwen/Qwen2.5-72B-Instruct": Family("qwen2_5", *_QWEN, _THIN),
    "Qwen/Qwen3-0.6B": Family("qwen3", *_QWEN),
    "Qwen/Qwen3-4B-Instruct-2507": Family("qwen3_instruct_2507", *_QWEN),
    "Qwen/Qwen3-8B": Family("qwen3", *_QWEN),
    "Qwen/Qwen3-32B": Family("qwen3", *_QWEN),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": Family("qwen3_instruct_2507", *_QWEN, _NF4),
    "Qwen/Qwen3.5-0.8B": Family("qwen3_5_nothink", *_QWEN, config_eos="<|endoftext|>"),
    "Qwen/Qwen3.5-2B": Family("qwen3_5_nothink", *_QWEN, config_eos="<|endoftext|>"),
    "Qwen/Qwen3.5-4B": Family("qwen3_5_think", *_QWEN, config_eos="<|endoftext|>"),
    "Qwen/Qwen3.5-9B": Family("qwen3_5_think", *_QWEN, config_eos="<|endoftext|>"),
    "openai/gpt-oss-20b": Family("gptoss", *_GPT_OSS),
    "openai/gpt-oss-120b": Family("gptoss", *_GPT_OSS),
    "google/gemma-3-270m": Family("gemma3", "<bos>", "<eos>", "<pad>"),
    "google/gemma-3-270m-it": Family("gemma3", "<bos>", "<eos>", "<pad>", ("<end_of_turn>",)),
    "google/functiongemma-270m-it": Family(
        None, "<bos>", "<eos>", "<pad>", ("<end_of_turn>", "<start_function_response>")
    ),
    "google/gemma-4-E2B-it": Family("gemma4_v5", "<bos>", "<eos>", "<pad>", ("<turn|>", "<|tool_response>")),
    "google/gemma-4-E4B-it": Family("gemma4_v5", "<bos>", "<eos>", "<pad>", ("<turn|>", "<|tool_response>")),
    "mistralai/Ministral-3-8B-Instruct-2512-BF16": Family(None, "<s>", "</s>", "<pad>"),
    "ibm-granite/granite-4.0-350m": Family(None, "<|end_of_text|>", "<|end_of_text|>", "<|pad|>", sizes=_MAMBA),
    "ibm-granite/granite-4.0-micro": Family(None, "<|end_of_text|>", "<|end_of_text|>", "<|pad|>", sizes=_MAMBA),
    "LiquidAI/LFM2.5-350M": Family("lfm2_2_5", "<|startoftext|>", "<|im_end|>", "<|pad|>"),
    "HuggingFaceTB/SmolLM3-3B": Family(None, None, "<|im_end|>", "<|im_end|>"),
}


def save_tokenizer(folder: Path, family: Family, template: str | None, texts: Sequence[str]) -> dict[str, int]:
    """Write a small tokenizer with a family's special tokens, and return the ids of its added tokens."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    # Rows hold JSON within JSON, which a template prints without its escapes.
    printed = [text.replace('\\"', '"').replace("\\n", "\n") for text in texts]
    # The template's own words are few tokens, as for the real tokenizer, so that rows are short.
    words = template or list_shipped_templates()["hermes"].read_text(encoding="utf-8")
    texts = [*texts, *printed, *[words] * 30, *["a:\n\nb>\n\nc.\n\n"] * 3]
    tokenizer = train_tokenizer(texts, _PIECES, vocab_size=4000)
    roles = {"bos_token": family.bos, "eos_token": family.eos, "pad_token": family.pad}
    special = {token for token in (*roles.values(), *family.stops) if token is not None}
    special |= set(SPECIAL.findall(template or ""))
    tokenizer.add_special_tokens(sorted(special))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED if token in (template or "")])
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)
    saved.save_pretrained(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return {**saved.get_added_vocab(), "": len(tokenizer.get_vocab())}


def save_model(folder: Path, name: str, texts: Iterable[str]) -> None:
    """Write a model directory of a public model: its config.json in small sizes, random weights and a tokenizer.

    Raises:
        KeyError: The model is not in ``FAMILIES`` or ``public_configs.json``.
        FileNotFoundError: The package with its chat template is not installed.
    """
    family, raw = FAMILIES[name], find_public_config(name)
    if raw is None:
        raise KeyError(f"{name} is not in fctune/models/public_configs.json")
    folder.mkdir(parents=True)
    template = next((t.source for t in find_templates() if t.name == family.template), None)
    if family.template is not None and template is None:
        raise FileNotFoundError(f"the chat template {family.template} is not installed: pip install -e '.[dev]'")
    ids = save_tokenizer(folder, family, template, list(texts))
    ends = (family.eos, *family.stops) if family.config_eos is None else (family.config_eos,)
    eos = sorted({ids[token] for token in ends})
    size = math.ceil(ids[""] / 64) * 64
    tokens: dict[str, Any] = {**family.sizes, "vocab_size": size, "pad_token_id": ids[family.pad], "eos_token_id": eos}
    tokens["bos_token_id"] = None if family.bos is None else ids[family.bos]
    if "text_config" in raw:
        text = raw["text_config"]
        if "vocab_size_per_layer_input" in text:
            tokens["vocab_size_per_layer_input"] = size
        small = shrink(text, tokens, keeps_depth=True)
    else:
        small = shrink(raw, {**_SMALLEST, **tokens}, keeps_depth=True)
    quantization = small.pop("quantization_config", None)
    save_public_config(folder, raw, small)
    save_weights(folder, torch.bfloat16)
    if quantization is not None:
        quantize_to_mxfp4_(folder, quantization, exponents=(-6, -4))
    path = folder / "generation_config.json"  # also written with the weights
    if family.config_eos is None:
        path.write_text(json.dumps({"eos_token_id": eos, "pad_token_id": ids[family.pad]}), encoding="utf-8")
    else:
        path.unlink(missing_ok=True)


def save_public_config(folder: Path, raw: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    """Write the config.json of a public model, with values of its text model in place of its own.

    Args:
        folder: Directory of the model.
        raw: Content of the model's own config.json, or of its entry in ``public_configs.json``.
        text: Values of the text model, in sections of their own or not, as in ``raw``.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    if "text_config" in raw:
        values = {**raw, **(find_entry(raw["model_type"]).sections or {}), "text_config": dict(text)}
    else:
        values = dict(text)
    config = CONFIG_MAPPING[raw["model_type"]].from_dict(values)
    config.architectures = raw.get("architectures") or [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)


def place_model(cache_dir: Path, path: str, texts: Iterable[str]) -> Path:
    """Put the model of ``hf:NAME[@REVISION]`` where the hub's client looks for a downloaded one, unless it is there.

    Args:
        cache_dir: Value of HF_HUB_CACHE.
        path: ``model.path`` of a config.
        texts: Texts that the tokenizer is trained on.
    """
    named = parse_name(path)
    assert named is not None
    name, revision = named
    root = cache_dir / f"models--{name.replace('/', '--')}"
    commit = revision or "0" * 40
    folder = root / "snapshots" / commit
    if not folder.exists():
        (root / "refs").mkdir(parents=True, exist_ok=True)
        (root / "refs" / "main").write_text(commit)
        with tempfile.TemporaryDirectory(dir=cache_dir) as making:  # an interrupted one is not taken for a model
            save_model(Path(making) / "model", name, texts)
            folder.parent.mkdir(exist_ok=True)
            (Path(making) / "model").rename(folder)
    return folder


def describe_layers(model_dir: Path) -> str:
    """Return the number and kinds of a model's layers."""
    raw = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    text = raw.get("text_config", raw)
    kinds = list(dict.fromkeys(text.get("layer_types") or []))
    return f"{text['num_hidden_layers']} {raw['model_type']}" + (f" ({', '.join(kinds)})" if len(kinds) > 1 else "")
