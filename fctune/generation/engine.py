"""The engine protocol, and generation in this process through transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from fctune.data.conversation import Conversation
from fctune.data.template import ChatTemplate
from fctune.errors import CheckpointError, ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said to one prompt: its text without the end-of-turn token; ``is_cut`` where the limit ended it."""

    index: int
    text: str
    is_cut: bool


class Engine(Protocol):
    """Something that answers conversations."""

    def answer(self, prompts: Sequence[Conversation], max_new_tokens: int) -> Iterator[Answer]:
        """An answer to each prompt, in any order, as they are ready."""


class InProcessEngine:
    """Greedy, batched generation with a KV cache on this machine's GPU or CPU.

    Args:
        model_dir: a Hugging Face model directory, such as a run's ``export/merged``.
        adapter_dir: a PEFT adapter on it, such as a run's ``export/adapter``.
        batch_size: prompts answered at a time.

    Raises:
        ConfigError: a directory that is missing, broken, or has no tokenizer or chat template.
        CheckpointError: weights that cannot be read.
    """

    def __init__(self, model_dir: str | Path, adapter_dir: str | Path | None = None, batch_size: int = 64):
        self.model_dir = Path(model_dir)
        if not (self.model_dir / "config.json").is_file():
            raise ConfigError(f"{model_dir}: not a model directory (no config.json). Pass a Hugging Face directory.")
        self.template = ChatTemplate(self.model_dir)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = _load_model(self.model_dir, adapter_dir).to(self.device)
        self.batch_size = batch_size
        self._stop_ids = _stop_ids(self.model.generation_config.eos_token_id, self.template)

    def answer(self, prompts: Sequence[Conversation], max_new_tokens: int) -> Iterator[Answer]:
        """An answer to each prompt; longest prompts first, so that a batch is of about one length.

        Raises:
            DataError: a prompt that leaves no room for an answer within the model's positions.
        """
        encoded = [self.template.encode_prompt(prompt) for prompt in prompts]
        limit = self.model.config.max_position_embeddings
        for prompt, ids in zip(prompts, encoded, strict=True):
            if len(ids) + max_new_tokens > limit:
                raise DataError(
                    f"{prompt.source}: {len(ids):,} prompt tokens and {max_new_tokens} to answer are over the model's "
                    f"{limit:,} positions. Lower --max-new-tokens or leave the case out."
                )
        order = sorted(range(len(prompts)), key=lambda i: -len(encoded[i]))
        for start in range(0, len(order), self.batch_size):
            indices = order[start : start + self.batch_size]
            yield from self._answer_batch(indices, [encoded[i] for i in indices], max_new_tokens)

    @torch.no_grad()
    def _answer_batch(self, indices: list[int], encoded: list[list[int]], max_new_tokens: int) -> Iterator[Answer]:
        width = max(map(len, encoded))
        pad = self.template.tokenizer.pad_token_id
        pad = next(iter(self._stop_ids)) if pad is None else pad
        tokens = torch.tensor([[pad] * (width - len(ids)) + ids for ids in encoded], device=self.device)
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in encoded], device=self.device)
        generated = self.model.generate(
            input_ids=tokens,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=sorted(self._stop_ids),
            pad_token_id=pad,
        )
        for index, row in zip(indices, generated[:, width:].tolist(), strict=True):
            end = next((i for i, token in enumerate(row) if token in self._stop_ids), None)
            text = self.template.tokenizer.decode(row[:end], skip_special_tokens=False)
            yield Answer(index, text, is_cut=end is None)


def _load_model(model_dir: Path, adapter_dir: str | Path | None) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(model_dir), local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype="auto"
        )
        if adapter_dir is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(adapter_dir)).merge_and_unload()
    except Exception as error:  # whatever a broken file makes the libraries raise
        reason = " ".join(str(error).split())[:300]
        where = f"{model_dir} with {adapter_dir}" if adapter_dir else str(model_dir)
        raise CheckpointError(f"{where}: cannot be loaded ({type(error).__name__}: {reason}).") from None
    return model.eval()


def _stop_ids(eos: int | list[int] | None, template: ChatTemplate) -> set[int]:
    """What ends an answer: the model's own end tokens, and what the template closes an assistant's turn with."""
    ids = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return ids | template.stop_ids
