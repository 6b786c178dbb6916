"""Generation in this process, through transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Conversation
from fctune.errors import CheckpointError, ConfigError, DataError
from fctune.generation.engine import Answer, Sampling
from fctune.models.hub import digest_model

_NUM_SHOWN = 3


class InProcessEngine:
    """Batched generation with a KV cache on this machine's GPU or CPU.

    Greedy unless sampled, under the model's own generation config, as servers do: a repetition penalty that stands
    there counts.

    Args:
        model_dir: a Hugging Face model directory, such as a run's ``export/merged``.
        adapter_dir: a PEFT adapter on it, such as a run's ``export/adapter``.
        batch_size: prompts answered at a time; halved for good where memory does not suffice.
        sampling: how tokens are chosen.
        device: where to; None: the GPU if there is one.
        model: a transformers model that is there already, of the directory's tokenizer; None loads the directory's.

    Raises:
        ConfigError: a directory that is missing, broken, or has no tokenizer or chat template.
        CheckpointError: weights that cannot be read.
    """

    def __init__(
        self,
        model_dir: str | Path,
        adapter_dir: str | Path | None = None,
        batch_size: int = 64,
        sampling: Sampling | None = None,
        device: torch.device | None = None,
        model: Any = None,
    ):
        self.model_dir = Path(model_dir)
        self.adapter_dir = Path(adapter_dir) if adapter_dir is not None else None
        if not (self.model_dir / "config.json").is_file():
            raise ConfigError(f"{model_dir}: not a model directory (no config.json). Pass a Hugging Face directory.")
        self.template = ChatTemplate(self.model_dir)
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = (_load_model(self.model_dir, self.adapter_dir) if model is None else model).to(self.device)
        self.batch_size = batch_size
        self.sampling = sampling or Sampling()
        self._stop_ids = _stop_ids(self.model.generation_config.eos_token_id, self.template)

    def describe(self) -> dict[str, Any]:
        """Path and content of the model and of its adapter, and how tokens are chosen."""
        sampling = self.sampling if self.sampling.temperature > 0 else Sampling()
        described = {"model": str(self.model_dir), "model_digest": digest_model(self.model_dir)}
        if self.adapter_dir is not None:
            described |= {"adapter": str(self.adapter_dir), "adapter_digest": digest_model(self.adapter_dir)}
        return {**described, "temperature": sampling.temperature, "seed": sampling.seed}

    def answer(self, prompts: Sequence[Conversation], max_new_tokens: int) -> Iterator[Answer]:
        """An answer to each prompt; longest prompts first, so that a batch is of about one length.

        Raises:
            DataError: no prompt at all can be answered: the template refuses them, or they leave no room for an answer
                within the model's positions. Where that is so for some, these alone are errors.
        """
        encoded, refused = self._encode(prompts, max_new_tokens)
        if refused and not encoded:
            shown = "\n".join(f"  {prompts[i].source}: {reason}" for i, reason in list(refused.items())[:_NUM_SHOWN])
            raise DataError(f"{self.model_dir}: none of {len(refused):,} prompts can be answered\n{shown}")
        for index, reason in refused.items():
            yield Answer(index, error=reason)
        waiting = sorted(encoded, key=lambda i: -len(encoded[i]))
        while waiting:
            batch = waiting[: self.batch_size]
            seeds = [self._seed(prompts[i]) for i in batch]
            try:
                answers = self._answer_batch(batch, [encoded[i] for i in batch], seeds, max_new_tokens)
            except torch.OutOfMemoryError as error:
                if len(batch) > 1:
                    self.batch_size = max(1, len(batch) // 2)
                    continue
                answers = [Answer(batch[0], error=f"out of memory ({' '.join(str(error).split())[:160]})")]
            yield from answers
            waiting = waiting[len(batch) :]

    def generate(self, encoded: list[list[int]], max_new_tokens: int, **options: Any) -> Tensor:
        """Token ids ``[b, s]`` that the model adds to prompts of token ids, padded where it stopped."""
        width = max(map(len, encoded))
        pad = self.template.tokenizer.pad_token_id
        pad = min(self._stop_ids) if pad is None else pad
        tokens = torch.tensor([[pad] * (width - len(ids)) + ids for ids in encoded], device=self.device)
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in encoded], device=self.device)
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        with torch.no_grad():
            generated: Tensor = self.model.generate(
                input_ids=tokens,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                eos_token_id=sorted(self._stop_ids),
                pad_token_id=pad,
                **greedy,
                **options,
            )
        return generated[:, width:]

    def _encode(
        self, prompts: Sequence[Conversation], max_new_tokens: int
    ) -> tuple[dict[int, list[int]], dict[int, str]]:
        """Token ids of the prompts by place, and of those that cannot be answered, why."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        encoded: dict[int, list[int]] = {}
        refused: dict[int, str] = {}
        for place, prompt in enumerate(prompts):
            try:
                ids = self.template.encode_prompt(prompt)
            except DataError as error:
                refused[place] = str(error)
                continue
            if limit is not None and len(ids) + max_new_tokens > limit:
                refused[place] = (
                    f"{len(ids):,} prompt tokens and {max_new_tokens:,} to answer are over the model's {limit:,} "
                    "positions; lower --max-new-tokens"
                )
            else:
                encoded[place] = ids
        return encoded, refused

    def _answer_batch(
        self, indices: list[int], encoded: list[list[int]], seeds: list[int], max_new_tokens: int
    ) -> list[Answer]:
        options: dict[str, Any] = {}
        if self.sampling.temperature > 0:
            from transformers import LogitsProcessorList

            options["logits_processor"] = LogitsProcessorList([_GumbelNoise(self.sampling.temperature, seeds)])
        answers = []
        for index, row in zip(indices, self.generate(encoded, max_new_tokens, **options).tolist(), strict=True):
            end = next((i for i, token in enumerate(row) if token in self._stop_ids), None)
            text = self.template.tokenizer.decode(row[:end], skip_special_tokens=False)
            answers.append(Answer(index, text, is_cut=end is None))
        return answers

    def _seed(self, prompt: Conversation) -> int:
        text = f"{self.sampling.seed} {prompt.digest()}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


class _GumbelNoise:
    """Turns greedy search into sampling: the likeliest token after Gumbel noise is one drawn from the softmax.

    C. J. Maddison, D. Tarlow, T. Minka, A* Sampling, NeurIPS 2014, section 2. Each row has its own generator, where
    ``torch.multinomial`` would share one over the batch.
    """

    def __init__(self, temperature: float, seeds: list[int]):
        self._temperature = temperature
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, tokens: Tensor, logits: Tensor) -> Tensor:
        draws = [torch.rand(logits.shape[-1], generator=g, dtype=torch.float64) for g in self._generators]
        uniform = torch.stack(draws).clamp_min(torch.finfo(torch.float64).tiny)
        noise = -torch.log(-torch.log(uniform))
        return logits.double() / self._temperature + noise.to(logits.device)


def _load_model(model_dir: Path, adapter_dir: Path | None) -> Any:
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
