"""Build the demo's tiny base model: a Llama 3.1 with one million weights, a tokenizer and a chat template.

    python -m fctune.apps.demo.tiny_base --out DIR [--seed 0] [--rows 64000]

It is trained from random weights on the synthetic conversations by the training loop, in about 35 minutes on two idle
cores.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from fctune.apps.demo.tokenizer import train_tokenizer
from fctune.base import distributed
from fctune.base.errors import ConfigError
from fctune.config.loading import format_problems, parse_config
from fctune.data.conversation import Conversation, Message
from fctune.data.synthetic import iter_conversations
from fctune.models.export import export_merged
from fctune.runs.directory import RunDirectory
from fctune.training.loop import build_loader, count_steps, train
from fctune.training.setup import build_base, open_sinks, prepare_data, shard_and_load_, start_state

VOCAB_SIZE = 1408
SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|finetune_right_pad_id|>",
)
TAG_TOKENS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEMPLATE = Path(__file__).parents[2] / "assets" / "tiny_base_template.jinja"

# Keywords of JSON Schema with their punctuation are one piece each, so a tool takes about 30 tokens. Words exclude the
# spaces around them and digits are separate: a value has the same tokens everywhere, so it can be copied.
# fmt: off
_SCHEMA_WORDS = (
    "type|function|name|description|parameters|object|properties|required|enum|items|"
    "string|integer|number|boolean|array|arguments"
)
# fmt: on
_MARKS = r'[ "{}\[\]:,]'
_PIECES = "|".join(
    (
        r"\n+",
        rf'{_MARKS}*(?<=")(?:{_SCHEMA_WORDS})"(?:{_MARKS}*(?<=")(?:{_SCHEMA_WORDS})")*{_MARKS}*',
        f"{_MARKS}+",
        "[A-Za-z]+",
        r"\d",
        r'[^\sA-Za-z\d"{}\[\]:,]+',
        r"\s+",
    )
)


def iter_texts(conversations: Iterable[Conversation]) -> Iterator[str]:
    """Yield the tokenizer's training texts: tools, roles and messages, without the tags around them."""
    for conversation in conversations:
        yield "Tools:"
        yield from (message.role for message in conversation.messages)
        yield from (json.dumps(tool.function, ensure_ascii=False) for tool in conversation.tools)
        yield from (message.content for message in conversation.messages if message.content)


def write_tokenizer(out: Path, corpus: Iterable[str]) -> None:
    """Train a tokenizer on ``corpus`` and write its files, with the chat template."""
    tokenizer = train_tokenizer(corpus, _PIECES, VOCAB_SIZE - len(SPECIAL_TOKENS) - len(TAG_TOKENS))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAG_TOKENS])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "pad_token": "<|finetune_right_pad_id|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": TEMPLATE.read_text(encoding="utf-8"),
    }
    _write_json(out / "tokenizer_config.json", config)


def model_config(out: Path) -> LlamaConfig:
    """Return the config of the tiny Llama 3.1, with the ids of the special tokens of the tokenizer in ``out``."""
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    bos, eos, pad = (tokenizer.token_to_id(SPECIAL_TOKENS[index]) for index in (0, 3, 4))
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=16384,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=False,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
        dtype="float32",
    )


def write_random_model(out: Path, seed: int) -> None:
    """Write ``config.json`` and ``model.safetensors`` with random float32 weights.

    Their standard deviation is about 1 / sqrt(128), which suits a layer of this width: with the 0.02 of large models,
    attention stays uniform and the model does not learn to copy within an hour.
    """
    config = model_config(out)
    config.initializer_range = 0.08
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(out)


def copy_rows(tokenizer: Tokenizer, num_rows: int, num_words: int | None, seed: int) -> Iterator[Conversation]:
    """Yield conversations whose answer repeats the question, random words of the vocabulary without spaces.

    Args:
        tokenizer: Tokenizer whose words are drawn.
        num_rows: Number of conversations.
        num_words: Number of different words; None is all.
        seed: Seed of the random choices.
    """
    rng = random.Random(seed)
    words = [tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size(with_added_tokens=False))]
    words = [word for word in words if word.isalnum() and word.isascii()][:num_words]
    for _ in range(num_rows):
        text = "".join(rng.choices(words, k=rng.randint(12, 28)))
        yield Conversation((Message("user", text), Message("assistant", text)))


def train_phase(base: Path, out: Path, rows: str, lr: tuple[float, float], batch: int, seed: int) -> None:
    """Train all weights of ``base`` for one epoch of ``rows`` with a linear learning rate schedule.

    Args:
        base: Model directory to start from.
        out: Run directory of the phase; the trained model is in its ``export/merged``.
        rows: Path of a source, as in ``data.sources``.
        lr: Learning rates at the start and at the end.
        batch: Packs of 1,024 tokens per step.
        seed: Seed of the order of rows.
    """
    problems: list[str] = []
    config = parse_config(
        {
            "output_dir": str(out),
            "seed": seed,
            "model": {"path": str(base)},
            "data": {"sources": [{"path": rows}], "seq_len": 1024, "overlong": "drop", "validation_share": 0.0},
            "precision": "fp32",
            "global_batch_size": batch,
            "micro_batch_size": batch,
            "epochs": 1,
            "optimizer": {"lr": lr[0], "betas": [0.9, 0.98], "weight_decay": 0.01, "fused": True},
            "lr_scheduler": {"name": "linear", "warmup": 50, "min_factor": lr[1] / lr[0]},
            "log_every_n_steps": 50,
        },
        problems,
    )
    if config is None or problems:
        raise ConfigError(format_problems("tiny base", problems))
    world = distributed.init_distributed()
    run = RunDirectory(out)
    run.start(config, world.world_size)
    prepared = prepare_data(config, base, None, world)
    model = build_base(config, base, world)
    gradient_sync = shard_and_load_(model, config, base, world)
    loader = build_loader(config, prepared)
    num_steps = count_steps(config, loader, world)
    state = start_state(model, config, num_steps, gradient_sync)
    with open_sinks(config, run, num_steps, world) as sinks:
        train(config, state, loader, num_steps, world, sinks)
    export_merged(model, base, run.export / "merged", is_writer=True)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def build(out: Path, seed: int, num_rows: int) -> None:
    """Build the base model in ``out``: tokenizer, random weights, then three phases of training.

    Calls depend most on copying words that were never copied before, which such a small
    model learns last. It learns it
    within a few hundred steps if the first phase copies few words: 64, then all, then the conversations.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        start = work / "random"
        write_tokenizer(start, iter_texts(iter_conversations("pretrain", 15_000, seed)))
        write_random_model(start, seed)
        tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
        phases: list[tuple[str, tuple[float, float], int]] = []
        for name, num_copies, num_words in (("few", 16_000, 64), ("all", 10_000, None)):
            rows = work / f"{name}.jsonl"
            with open(rows, "w", encoding="utf-8") as file:
                for row in copy_rows(tokenizer, num_copies, num_words, seed):
                    file.write(json.dumps(row.to_openai()) + "\n")
            phases.append((str(rows), (3e-3, 3e-3), 2))
        phases.append((f"synthetic:pretrain:{num_rows}:{seed}", (3e-3, 1e-4), 3))
        for number, (source, lr, batch) in enumerate(phases):
            train_phase(start, work / str(number), source, lr, batch, seed)
            start = work / str(number) / "export" / "merged"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(start, out)


def main() -> int:
    """Run the build from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m fctune.apps.demo.tiny_base", description="Build the demo's tiny base model."
    )
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=64_000, help="conversations of the last phase")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s  %(message)s", datefmt="%H:%M:%S")
    build(arguments.out, arguments.seed, arguments.rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
