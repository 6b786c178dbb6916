"""The same models in transformers, loaded, counted and trained without this project's code."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from fctune.config.schema import RunConfig
from fctune.data.loader import Batch, GlobalLoader
from fctune.models.sources import read_config


def load_reference(folder: Path) -> Any:
    """Load a directory with transformers, with its own attention and experts, without dropout or noise."""
    import transformers

    options = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    config = transformers.AutoConfig.from_pretrained(folder)
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    kind = getattr(transformers, str(read_config(folder)["architectures"][0]))
    return kind.from_pretrained(folder, **options).eval()


def count_parameters(folder: Path) -> int:
    """Count the parameters of the text model of a config.json in transformers' model on the meta device."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    text = config.get_text_config()
    text.tie_word_embeddings = config.tie_word_embeddings
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(text)
    return sum(parameter.numel() for parameter in model.parameters())


def train_reference(model: Any, config: RunConfig, loader: GlobalLoader, num_steps: int) -> list[float]:
    """Train transformers' model on the run's conversations, one by one; returns the loss of each step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=float(config.optimizer["lr"]))
    losses = []
    for number in range(1, num_steps + 1):
        step = loader.step_at(number)
        optimizer.zero_grad()
        total = 0.0
        for batch in loader.micro_batches(step, 0, 1, 1):
            for row, start, stop in iter_conversations(batch):
                tokens, labels = (t[row, start:stop] for t in (batch.tokens, batch.labels))
                logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
                each = cross_entropy(logits, labels, reduction="none", ignore_index=-100)
                loss = (each * batch.loss_weights[row, start:stop]).sum() / loader.totals(step).weight_sum
                loss.backward()
                total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained, config.clip_grad_norm or math.inf)
        optimizer.step()
        losses.append(total)
    return losses


def iter_conversations(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """Iterate over the conversations of a batch without padding: row, first token, and the one after the last label."""
    for row, labels in enumerate(batch.labels):
        lengths = [len(labels)] if batch.lengths is None else batch.lengths[row]
        start = 0
        for length in lengths:
            supervised = (labels[start : start + length] != -100).nonzero()
            if len(supervised):
                yield row, start, start + int(supervised.max()) + 1
            start += length
