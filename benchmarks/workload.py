"""Workload of the training benchmarks: a random model of a given shape, and the same rows for every tool.

A tokenizer is trained on the synthetic texts with Llama 3's pre-tokenizer, and written twice: as ``tokenizer.json``
with the demo model's chat template, and as the rank file that torchtune reads. If the texts have too few words, the
model's vocabulary is larger than the tokenizer's, because the width of the logits determines the cost.

torchtune 0.6.1 cannot read tool calls, so every row is also written as plain messages with the same text. It rejects
consecutive user turns and has no role for tool results, so these are merged into one user turn. Rows that it would
still reject, and rows over ``seq_len``, are left out for every tool.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.deep_models import save_public_config
from benchmarks.model_zoo import shrink
from fctune.apps.demo.tokenizer import train_tokenizer
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Conversation
from fctune.data.synthetic import iter_conversations
from fctune.models.sources import find_public_config

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "fctune" / "assets" / "tiny_base_template.jinja"

# The pattern of torchtune (tiktoken's cl100k) and of Llama 3's tokenizer.json.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL = (
    "begin_of_text end_of_text reserved_special_token_0 reserved_special_token_1 finetune_right_pad_id step_id "
    "start_header_id end_header_id eom_id eot_id python_tag image"
)
SPECIAL = [f"<|{name}|>" for name in _SPECIAL.split()]

_TURN = re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n(.*?)<\|eot_id\|>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder: of Llama 3.1 with untied embeddings, unless ``config`` names another family."""

    vocab: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    config: tuple[tuple[str, Any], ...] = ()  # entries of config.json that replace Llama's

    @property
    def num_parameters(self) -> int:
        """Number of parameters without adapters."""
        return sum(rows * columns for rows, columns in self.tensors().values())

    def tensors(self) -> dict[str, tuple[int, int]]:
        """Return tensor shapes by Hugging Face name; the second size of a norm is 1."""
        kv = self.width // self.heads * self.kv_heads
        of_block = {
            "self_attn.q_proj": (self.width, self.width),
            "self_attn.k_proj": (kv, self.width),
            "self_attn.v_proj": (kv, self.width),
            "self_attn.o_proj": (self.width, self.width),
            "mlp.gate_proj": (self.hidden, self.width),
            "mlp.up_proj": (self.hidden, self.width),
            "mlp.down_proj": (self.width, self.hidden),
            "input_layernorm": (self.width, 1),
            "post_attention_layernorm": (self.width, 1),
        }
        named = {"model.embed_tokens": (self.vocab, self.width), "model.norm": (self.width, 1)}
        named["lm_head"] = (self.vocab, self.width)
        for layer in range(self.layers):
            named |= {f"model.layers.{layer}.{name}": sizes for name, sizes in of_block.items()}
        return {f"{name}.weight": sizes for name, sizes in named.items()}


SHAPES = {
    "toy": Shape(2_048, 2, 128, 4, 4, 256),  # the smallest linears that NF4 supports
    "50m": Shape(32_000, 6, 512, 8, 4, 1_408),
    "3b": Shape(128_256, 28, 3_072, 24, 8, 8_192),  # Llama-3.2-3B with an untied head
    "8b": Shape(128_256, 32, 4_096, 32, 8, 14_336),  # Llama-3.1-8B
    "qwen2_0_5b": Shape(  # Qwen2.5-0.5B
        *(151_936, 24, 896, 14, 2, 4_864),
        config=(("model_type", "qwen2"), ("tie_word_embeddings", True), ("rms_norm_eps", 1e-6)),
    ),
    "gemma3_270m": Shape(  # Gemma 3 270M
        *(262_144, 18, 640, 4, 1, 2_048),
        config=(
            *(("model_type", "gemma3_text"), ("tie_word_embeddings", True), ("head_dim", 256)),
            *(("sliding_window", 512), ("query_pre_attn_scalar", 256), ("rms_norm_eps", 1e-6)),
            ("layer_types", [f"{kind}_attention" for kind in (["sliding"] * 5 + ["full"]) * 3]),
        ),
    ),
}

# Public models by the names of their directories; their shapes are in ``fctune/models/public_configs.json``.
PUBLIC = {
    "qwen3_8b": "Qwen/Qwen3-8B",
    "qwen3_30b_a3b": "Qwen/Qwen3-30B-A3B-Instruct-2507",
    "gpt_oss_20b": "openai/gpt-oss-20b",
    "qwen3_5_9b": "Qwen/Qwen3.5-9B",
}


def write_model(folder: Path, shape: Shape, *, has_weights: bool, num_texts: int = 4_000) -> None:
    """Write a model directory: config, tokenizer in both forms and, if ``has_weights``, float32 weights from a seed."""
    folder.mkdir(parents=True, exist_ok=True)
    num_tokens = _write_tokenizer(folder, shape.vocab, num_texts)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.width,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.width // shape.heads,
        "intermediate_size": shape.hidden,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
        **_find_ids(num_tokens),
        "rope_parameters": {
            "rope_theta": 500_000.0,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8_192,
        },
    }
    if shape.config:
        del config["rope_parameters"], config["architectures"]
        _write_other_family(folder, config | dict(shape.config), has_weights)
        return
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if has_weights:
        from safetensors.torch import save_file

        generator = torch.Generator().manual_seed(0)
        weights = {
            name: torch.ones(rows) if columns == 1 else torch.randn(rows, columns, generator=generator) * 0.02
            for name, (rows, columns) in shape.tensors().items()
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_public_model(folder: Path, name: str, *, is_small: bool, num_texts: int = 4_000) -> None:
    """Write a model directory with a public model's config and no weights.

    Args:
        folder: Directory to write.
        name: Name on the hub, of a model in ``public_configs.json``.
        is_small: Write few layers of each kind, in sizes of a tiny model.
        num_texts: Synthetic texts that the tokenizer is trained on.

    Raises:
        KeyError: The model is not in ``public_configs.json``.
    """
    raw = find_public_config(name)
    if raw is None:
        raise KeyError(f"{name} is not in fctune/models/public_configs.json")
    folder.mkdir(parents=True, exist_ok=True)
    text = raw.get("text_config", raw)
    vocab = SHAPES["toy"].vocab if is_small else text["vocab_size"]
    tokens = {"vocab_size": vocab, **_find_ids(_write_tokenizer(folder, vocab, num_texts))}
    save_public_config(folder, raw, shrink(text, tokens) if is_small else {**text, **tokens})


def _find_ids(num_tokens: int) -> dict[str, int]:
    """Return the entries of config.json that name special tokens, which are the last of the tokenizer's."""
    first = num_tokens - len(SPECIAL)
    return {"bos_token_id": first, "eos_token_id": first + SPECIAL.index("<|eot_id|>")}


def _write_other_family(folder: Path, config: dict[str, Any], has_weights: bool) -> None:
    """Write the config of a family other than Llama and, if ``has_weights``, bfloat16 weights from a seed."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    made = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    if has_weights:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).save_pretrained(folder)
    else:
        made.save_pretrained(folder)


def _write_tokenizer(folder: Path, vocab: int, num_texts: int) -> int:
    """Write the tokenizer in both forms; return its number of tokens."""
    texts = (
        json.dumps(conversation.to_openai(), ensure_ascii=False) + "\n\n"
        for kind in ("pretrain", "train")
        for conversation in iter_conversations(kind, num_texts // 2, 0)
    )
    tokenizer = train_tokenizer(texts, _SPLIT, vocab - len(SPECIAL), ignore_merges=True)
    ranks = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    to_byte = _bytes_by_letter()
    lines = [f"{base64.b64encode(bytes(to_byte[c] for c in token)).decode()} {rank}" for token, rank in ranks]
    (folder / "tokenizer.model").write_text("\n".join(lines) + "\n")
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|finetune_right_pad_id|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE.read_text(), **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(ranks) + len(SPECIAL)


def _bytes_by_letter() -> dict[str, int]:
    """Return the byte that each letter of byte-level BPE stands for (https://github.com/openai/gpt-2, encoder.py)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Counts of the written rows; tokens are counted with fctune's template."""

    rows: int
    left_out: int
    tokens: int
    supervised: int
    longest: int


def write_rows(folder: Path, model_dir: Path, conversations: Iterable[Conversation], seq_len: int) -> RowCounts:
    """Write ``rows.jsonl`` for fctune, ``turns.jsonl`` (turns as text) for TRL, and ``plain.jsonl`` for torchtune."""
    folder.mkdir(parents=True, exist_ok=True)
    template = ChatTemplate(model_dir)
    lengths: list[int] = []
    supervised = left_out = 0
    with (
        open(folder / "rows.jsonl", "w", encoding="utf-8") as rows,
        open(folder / "turns.jsonl", "w", encoding="utf-8") as turns,
        open(folder / "plain.jsonl", "w", encoding="utf-8") as plain,
    ):
        for conversation in conversations:
            messages = [{"role": role, "content": text} for role, text in _TURN.findall(template.render(conversation))]
            merged = _merge_turns(messages)
            (encoded,) = template.encode(conversation)
            # torchtune appends one token to each row.
            if len(encoded.tokens) >= seq_len or not _is_alternating(merged):
                left_out += 1
                continue
            rows.write(json.dumps(conversation.to_openai()) + "\n")
            turns.write(json.dumps({"messages": messages}) + "\n")
            plain.write(json.dumps({"messages": merged}) + "\n")
            lengths.append(len(encoded.tokens))
            supervised += encoded.num_supervised
    counts = RowCounts(len(lengths), left_out, sum(lengths), supervised, max(lengths))
    (folder / "counts.json").write_text(json.dumps(asdict(counts)))
    return counts


def _merge_turns(turns: list[dict[str, str]]) -> list[dict[str, Any]]:
    merged: list[dict[str, Any]] = []
    for turn in turns:
        role = "user" if turn["role"] == "tool" else turn["role"]
        if merged and role == "user" and merged[-1]["role"] == "user":
            merged[-1]["content"] += "\n" + turn["content"]
        else:
            merged.append({"role": role, "content": turn["content"]})
    return merged


def _is_alternating(turns: list[dict[str, Any]]) -> bool:
    """Return True if user and assistant alternate and no turn is empty, as torchtune requires."""
    spoken = [turn["role"] for turn in turns if turn["role"] != "system"]
    expected = ["user", "assistant"] * (len(spoken) // 2)
    return bool(spoken) and spoken == expected and all(turn["content"].strip() for turn in turns)
