"""Engine that generates in this process, through transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fctune.base.errors import CheckpointError, ConfigError, DataError, one_line
from fctune.config.intervals import format_count
from fctune.data.chat_template import ChatTemplate
from fctune.data.chosen_template import ChosenTemplate
from fctune.engines.choices import find_span, to_answer, with_choice
from fctune.engines.decoding import AnswerDecoder, find_stop_ids
from fctune.engines.engine import Answer, AnswerTokens, ChoiceScore, Prompt, Sampling
from fctune.engines.model_files import ModelFiles
from fctune.models.hub import digest_model
from fctune.models.precision import is_emulated
from fctune.runs.device import total_memory

if TYPE_CHECKING:
    from transformers import DynamicCache

    from fctune.models.transformers.prefix_cache import PrefixCache

_NUM_SHOWN = 3


class LocalEngine:
    """Generates in batches, with a KV cache, on this machine's GPU or CPU; a ``PolicyEngine``.

    The model's own generation config applies, as it does on servers: a repetition penalty there has its effect.

    Args:
        model_dir: A Hugging Face model directory, such as a run's ``export/merged``.
        adapter_dir: A PEFT adapter to merge into the model, such as a run's ``export/adapter``.
        batch_size: Prompts in a batch; halved for good when memory runs out.
        sampling: Choice of tokens; None is greedy.
        device: Where to generate; None takes the GPU if there is one.
        model: A transformers model in memory to use with the directory's tokenizer; None loads the directory's.
        loads_model: Load the directory's weights; without, and without a model, one must be published first.
        template_args: Switches of the chat template for every prompt, over those recorded with the model.
        chat_template: Template in place of the one in the adapter's directory, or in the model's, if any.
        keeps_tokens: Answers have their ``tokens``.
        reuses_prefixes: Keep what was read of conversations for their next prompts, in a quarter of the memory.

    Raises:
        ConfigError: The directory is missing or broken, or has no tokenizer or chat template.
        CheckpointError: The weights cannot be read.
    """

    def __init__(
        self,
        model_dir: str | Path,
        adapter_dir: str | Path | None = None,
        batch_size: int = 64,
        sampling: Sampling | None = None,
        device: torch.device | None = None,
        model: Any = None,
        loads_model: bool = True,
        template_args: dict[str, Any] | None = None,
        chat_template: ChosenTemplate | None = None,
        keeps_tokens: bool = False,
        reuses_prefixes: bool = True,
    ):
        self.model_dir = Path(model_dir)
        self.adapter_dir = Path(adapter_dir) if adapter_dir is not None else None
        if not (self.model_dir / "config.json").is_file():
            raise ConfigError(f"{model_dir}: not a model directory (no config.json). Pass a Hugging Face directory.")
        tokenizer_dir = ModelFiles(self.model_dir, self.adapter_dir).tokenizer_dir
        self._chosen = chat_template
        self.template = ChatTemplate(tokenizer_dir, template_args=template_args, chat_template=chat_template)
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.batch_size = batch_size
        self.sampling = sampling or Sampling()
        self._keeps_tokens = keeps_tokens
        self._reuses_prefixes = reuses_prefixes
        self._prefixes: PrefixCache | None = None
        self.decoder = AnswerDecoder(self.template)
        self.model: Any = None
        self.version = 0
        self.stop_ids: frozenset[int] = frozenset()
        if model is not None or loads_model:
            self.publish(_load_model(self.model_dir, self.adapter_dir, self.device) if model is None else model, 0)

    def publish(self, policy: Any, version: int) -> None:
        """Generate with this transformers model from now on."""
        from fctune.models.transformers.prefix_cache import PrefixCache

        self.model, self.version = policy.to(self.device), version
        self._prefixes = PrefixCache(self.model, total_memory(self.device, 1) // 4)
        self.stop_ids = find_stop_ids(policy.generation_config.eos_token_id, self.template)

    def close(self) -> None:
        """Release the model, so that its memory can be freed."""
        self.model = self._prefixes = None

    def describe(self) -> dict[str, Any]:
        """Return paths and digests of the model, its adapter and its chosen template, and the sampling settings."""
        sampling = self.sampling if self.sampling.temperature > 0 else Sampling()
        described: dict[str, Any] = {"model": str(self.model_dir), "model_digest": digest_model(self.model_dir)}
        if self.adapter_dir is not None:
            described |= {"adapter": str(self.adapter_dir), "adapter_digest": digest_model(self.adapter_dir)}
        if self._chosen is not None:
            digest = hashlib.blake2b(self._chosen.source.encode(), digest_size=8).hexdigest()
            described |= {"chat_template": self._chosen.name, "chat_template_digest": digest}
        if self.template.template_args:
            described["template_args"] = self.template.template_args
        return {**described, "temperature": sampling.temperature, "seed": sampling.seed}

    def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        """Yield one answer per prompt, longest prompts first, so that a batch holds prompts of similar length.

        Raises:
            DataError: No prompt can be answered: the template refuses them, or they leave no room for an answer within
                the model's positions. If that holds for some prompts only, their answers are errors.
        """
        prefixes = self._prefixes
        assert prefixes is not None, "nothing was published"
        encoded, choices, refused = self._encode(prompts)
        if refused and not encoded and not choices:
            shown = "\n".join(
                f"  {prompts[i].conversation.source}: {reason}" for i, reason in list(refused.items())[:_NUM_SHOWN]
            )
            raise DataError(
                f"{self.model_dir}: none of {format_count(len(refused), 'prompt')} can be answered\n{shown}"
            )
        for index, reason in refused.items():
            yield Answer(index, error=reason, version=self.version)
        for index, sequences in choices.items():
            yield self._choose(index, prompts[index], sequences)
        seeds = {i: self._seed(prompts[i]) for i in encoded}
        can_keep = self._reuses_prefixes and prefixes.can_continue
        kept = {i for i in encoded if can_keep and prompts[i].is_continued and len(encoded[i]) > 1}
        prefixes.retain([encoded[i] for i in kept])
        waiting = sorted(encoded, key=lambda i: (i in kept, -len(encoded[i])))
        while waiting:
            batch = [i for i in waiting[: self.batch_size] if (i in kept) == (waiting[0] in kept)]
            try:
                limit = max(prompts[i].max_new_tokens for i in batch)
                asked = [encoded[i] for i in batch], [seeds[i] for i in batch]
                for row, tokens in self.continue_tokens(*asked, limit, keeps_prefixes=batch[0] in kept):
                    waiting.remove(batch[row])
                    yield self._decode(batch[row], tokens, prompts[batch[row]].max_new_tokens)
            except torch.OutOfMemoryError as error:
                if prefixes:
                    prefixes.retain(())
                elif len(batch) > 1:
                    self.batch_size = max(1, len(batch) // 2)
                else:
                    reason = f"out of memory ({' '.join(str(error).split())[:160]})"
                    waiting.remove(batch[0])
                    yield Answer(batch[0], error=reason, version=self.version)

    def generate(self, encoded: list[list[int]], max_new_tokens: int, **options: Any) -> Tensor:
        """Return the token ids ``[b, s]`` that the model generates after each prompt, padded after its last."""
        tokens, mask = self._pad(encoded)
        generated: Tensor = self._extend(tokens, mask, max_new_tokens, **options).sequences
        return generated[:, tokens.shape[1] :]

    def _pad(self, encoded: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Return token ids ``[b, s]``, padded before each prompt, and the mask of what is not padding."""
        width, pad = max(map(len, encoded)), self._pad_id
        tokens = torch.tensor([[pad] * (width - len(ids)) + ids for ids in encoded], device=self.device)
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in encoded], device=self.device)
        return tokens, mask

    @property
    def _pad_id(self) -> int:
        pad: int | None = self.template.tokenizer.pad_token_id
        return min(self.stop_ids) if pad is None else pad

    def _extend(self, tokens: Tensor, mask: Tensor, max_new_tokens: int, **options: Any) -> Any:
        """Return transformers' result for tokens and mask ``[b, s]``, padded after the end of each row.

        A long prompt is read in several passes, unless the model carries a state along it.
        """
        from fctune.models.transformers.prefix_cache import choose_chunk

        assert self._prefixes is not None, "nothing was published"
        if self._prefixes.can_continue:
            # Some generation configs ask for no cache, or one of a fixed size; reading in parts needs one that grows.
            options |= {"use_cache": True, "cache_implementation": None}
            if "past_key_values" not in options and (chunk := choose_chunk(*tokens.shape)) < tokens.shape[1]:
                options["prefill_chunk_size"] = chunk
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        with torch.no_grad():
            return self.model.generate(
                input_ids=tokens,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                eos_token_id=sorted(self.stop_ids),
                pad_token_id=self._pad_id,
                return_dict_in_generate=True,
                **greedy,
                **options,
            )

    def _generate_shrinking(
        self, encoded: list[list[int]], max_new_tokens: int, processors: Sequence[RowProcessor]
    ) -> Iterator[dict[int, list[int]]]:
        """Generate after each prompt, without the answers that have ended once they are half of the batch.

        They would be computed until the longest answer ends.

        Yields:
            Token ids by the index of the prompt, of the answers that have ended since the last time.
        """
        from transformers import LogitsProcessorList, StoppingCriteriaList

        tokens, mask = self._pad(encoded)
        width, rows = tokens.shape[1], list(range(len(encoded)))
        options: dict[str, Any] = {"logits_processor": LogitsProcessorList(processors)}
        stop_ids = torch.tensor(sorted(self.stop_ids), device=self.device)
        options["stopping_criteria"] = StoppingCriteriaList([HalfEnded(width, stop_ids)])
        while rows:
            result = self._extend(tokens, mask, max_new_tokens - tokens.shape[1] + width, **options)
            generated = result.sequences[:, width:]
            is_going = ~find_ended(generated, stop_ids) & (generated.shape[1] < max_new_tokens)
            going = is_going.nonzero().squeeze(1)
            for processor in processors:
                processor.end_pass(generated, going)
            ends = zip(rows, generated.tolist(), is_going.tolist(), strict=True)
            yield {row: ids for row, ids, goes_on in ends if not goes_on}
            num_new = result.sequences.shape[1] - tokens.shape[1]
            tokens = result.sequences[going]
            mask = torch.cat([mask, mask.new_ones(len(mask), num_new)], dim=1)[going]
            result.past_key_values.batch_select_indices(going)
            options["past_key_values"] = result.past_key_values
            rows = [rows[index] for index in going.tolist()]

    def _generate_together(
        self,
        encoded: list[list[int]],
        max_new_tokens: int,
        processors: Sequence[RowProcessor],
        cache: DynamicCache | None,
    ) -> Iterator[dict[int, list[int]]]:
        """Generate after each prompt until all answers have ended; yields once, as ``_generate_shrinking`` does."""
        from transformers import LogitsProcessorList

        options: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
        generated = self.generate(encoded, max_new_tokens, logits_processor=LogitsProcessorList(processors), **options)
        for processor in processors:
            processor.end_pass(generated, generated.new_empty(0))
        yield dict(enumerate(generated.tolist()))

    def _decode(self, index: int, tokens: AnswerTokens, limit: int) -> Answer:
        """Return the answer that continued tokens are, up to its own limit, which its batch may exceed."""
        ids = tokens.ids[:limit]
        tokens = AnswerTokens(tokens.prompt_ids, ids, tokens.logprobs[:limit])
        is_cut = not ids or ids[-1] not in self.stop_ids
        answer = Answer(index, is_cut=is_cut, tokens=tokens, version=self.version)
        return self.decoder.decode(answer, has_tokens=self._keeps_tokens)

    def _choose(self, index: int, prompt: Prompt, sequences: list[list[int]]) -> Answer:
        """Return the most likely choice of a prompt, given the token ids of the prompt with each choice."""
        from fctune.models.transformers.likelihood import score_continuations

        try:
            start, num_after = find_span(sequences)
            own = [ids[start : len(ids) - num_after] for ids in sequences]
            logprobs = score_continuations(self.model, sequences[0][:start], own)
        except DataError as error:
            return Answer(index, error=str(error), version=self.version)
        except torch.OutOfMemoryError as error:
            reason = f"out of memory ({' '.join(str(error).split())[:160]})"
            return Answer(index, error=reason, version=self.version)
        scores = [
            ChoiceScore(float(values.double().sum()), len(ids), len(self.template.decode(ids)))
            for ids, values in zip(own, logprobs, strict=True)
        ]
        return replace(to_answer(index, prompt.choices, scores), version=self.version)

    def _encode(
        self, prompts: Sequence[Prompt]
    ) -> tuple[dict[int, list[int]], dict[int, list[list[int]]], dict[int, str]]:
        """Return the token ids of prompts by index, those with each choice, and why the others cannot be answered."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        encoded: dict[int, list[int]] = {}
        choices: dict[int, list[list[int]]] = {}
        refused: dict[int, str] = {}
        for index, prompt in enumerate(prompts):
            if prompt.ids is not None:
                encoded[index] = list(prompt.ids)
                continue
            try:
                if prompt.choices:
                    choices[index] = [
                        self.template.encode_prompt(with_choice(prompt.conversation, choice), False)
                        for choice in prompt.choices
                    ]
                    if limit is not None and (longest := max(map(len, choices[index]))) > limit:
                        del choices[index]
                        refused[index] = (
                            f"{longest:,} tokens with its longest choice exceed the model's {limit:,} positions"
                        )
                    continue
                ids = self.template.encode_prompt(prompt.conversation)
            except DataError as error:
                refused[index] = str(error)
                continue
            if limit is not None and len(ids) + prompt.max_new_tokens > limit:
                refused[index] = (
                    f"{len(ids):,} prompt tokens and {prompt.max_new_tokens:,} for the answer exceed the model's "
                    f"{limit:,} positions; lower --max-new-tokens"
                )
            else:
                encoded[index] = ids
        return encoded, choices, refused

    def continue_tokens(
        self, encoded: list[list[int]], seeds: list[int], max_new_tokens: int, keeps_prefixes: bool = False
    ) -> Iterator[tuple[int, AnswerTokens]]:
        """Continue a batch of prompts; without its stop token, a continuation was cut off.

        Args:
            encoded: Token ids of each prompt.
            seeds: Seed of each continuation, for temperatures above 0.
            max_new_tokens: Limit of tokens.
            keeps_prefixes: Keep what is read and generated for the next prompts of these conversations.

        Yields:
            The index of a prompt and its ids with their log-probabilities, without these unless the engine keeps
            tokens; short ones first, as soon as they have left the batch.
        """
        record = ChosenLogprobs(len(encoded), self.device) if self._keeps_tokens else None
        processors: list[RowProcessor] = [record] if record is not None else []
        if self.sampling.temperature > 0:
            processors.append(GumbelNoise(self.sampling.temperature, seeds))
        prefixes = self._prefixes
        assert prefixes is not None, "nothing was published"
        cache = prefixes.read(encoded) if keeps_prefixes else None
        if cache is None and prefixes.can_continue and not counts_from_prompt(self.model.generation_config):
            passes = self._generate_shrinking(encoded, max_new_tokens, processors)
        else:
            passes = self._generate_together(encoded, max_new_tokens, processors, cache)
        for ended in passes:
            logprobs = None if record is None else record.logprobs.tolist()
            cut = {row: self._cut(ids) for row, ids in ended.items()}
            if cache is not None:
                prefixes.keep(cache, encoded, [cut[row] for row in range(len(encoded))])
            for row, ids in cut.items():
                of_row = () if logprobs is None else tuple(logprobs[row][: len(ids)])
                yield row, AnswerTokens(tuple(encoded[row]), ids, of_row)

    def _cut(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return generated token ids up to the one that ends the answer."""
        end = next((i + 1 for i, token in enumerate(ids) if token in self.stop_ids), len(ids))
        return tuple(ids[:end])

    def _seed(self, prompt: Prompt) -> int:
        if prompt.seed is not None:
            return prompt.seed
        text = f"{self.sampling.seed} {prompt.conversation.digest()}" + (f" {prompt.sample}" if prompt.sample else "")
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


class RowProcessor(Protocol):
    """Logits processor with a state for each row of a batch."""

    def __call__(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Return the logits ``[b, vocabulary]`` to choose from after ``tokens`` ``[b, s]``."""
        ...

    def end_pass(self, generated: Tensor, going: Tensor) -> None:
        """Take note of the tokens ``[b, s]`` that were generated by now, and go on with the rows ``going`` alone."""
        ...


class HalfEnded:
    """Stopping criterion that ends all rows once half of them have ended.

    Args:
        width: Tokens of a row before those that are generated.
        stop_ids: Tokens that end an answer, on the device of the rows.
    """

    def __init__(self, width: int, stop_ids: Tensor):
        self._width, self._stop_ids = width, stop_ids

    def __call__(self, tokens: Tensor, scores: Any, **options: Any) -> Tensor:
        """Return for each row ``[b]`` whether it ends."""
        ended = find_ended(tokens[:, self._width :], self._stop_ids)
        return (2 * ended.sum() >= len(ended)).expand(len(ended))


def find_ended(generated: Tensor, stop_ids: Tensor) -> Tensor:
    """Return for each row of ``generated`` ``[b, s]`` whether it has a token that ends an answer, ``[b]``."""
    return torch.isin(generated, stop_ids).any(dim=1)


# Settings that depend on where the prompt ends, or on more than the tokens: generation cannot be interrupted with them.
_FROM_PROMPT = (
    *("begin_suppress_tokens", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id"),
    *("guidance_scale", "max_time", "min_length", "min_new_tokens", "penalty_alpha", "prompt_lookup_num_tokens"),
)


def counts_from_prompt(generation_config: Any) -> bool:
    """Return True if a model's generation config has settings that depend on where the prompt ends."""
    return (generation_config.num_beams or 1) > 1 or any(getattr(generation_config, key, None) for key in _FROM_PROMPT)


class GumbelNoise:
    """Logits processor that turns greedy search into sampling by the Gumbel-max trick.

    The most likely token after Gumbel noise is a sample from the softmax (C. J. Maddison, D. Tarlow, T. Minka, A*
    Sampling, NeurIPS 2014, section 2). Each row has its own generator; ``torch.multinomial`` would share one across the
    batch.
    """

    def __init__(self, temperature: float, seeds: list[int]):
        self._temperature = temperature
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Return the scaled logits ``[b, vocabulary]`` with noise; ``tokens`` are not used."""
        draws = [torch.rand(logits.shape[-1], generator=g, dtype=torch.float64) for g in self._generators]
        uniform = torch.stack(draws).clamp_min(torch.finfo(torch.float64).tiny)
        noise = -torch.log(-torch.log(uniform))
        return logits.double() / self._temperature + noise.to(logits.device)

    def end_pass(self, generated: Tensor, going: Tensor) -> None:
        """Go on with the generators of these rows alone."""
        self._generators = [self._generators[index] for index in going.tolist()]


class ChosenLogprobs:
    """Logits processor that records the log-probabilities of the tokens that are chosen, before any noise.

    A step's token is known at the next step only, so one step's logits are kept and not those of all.

    Args:
        num_rows: Rows of the batch.
        device: Where the logits are.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._logits: Tensor | None = None
        self._chosen: list[Tensor] = []
        self._num_rows = num_rows
        self._rows = torch.arange(num_rows, device=device)

    def __call__(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Return the logits ``[b, vocabulary]`` unchanged; ``tokens`` ``[b, s]`` end with the previous choice."""
        if self._logits is not None:
            self._take(tokens[:, -1])
        self._logits = logits
        return logits

    def end_pass(self, generated: Tensor, going: Tensor) -> None:
        """Record the last token, and go on with these rows alone."""
        self._take(generated[:, -1])
        self._logits, self._rows = None, self._rows[going]

    @property
    def logprobs(self) -> Tensor:
        """Log-probabilities ``[b, s]`` of the tokens of all rows, 0 after those that were left out had ended."""
        return torch.stack(self._chosen, dim=1)

    def _take(self, chosen: Tensor) -> None:
        assert self._logits is not None
        logprobs = self._logits.float().log_softmax(-1)
        of_all = logprobs.new_zeros(self._num_rows)
        of_all[self._rows] = logprobs.gather(1, chosen[:, None]).squeeze(1)
        self._chosen.append(of_all)


def _load_model(model_dir: Path, adapter_dir: Path | None, device: torch.device) -> Any:
    """Load a model in the dtype it is stored in, or in float32 where the processor only emulates that one."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(model_dir), local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype="auto"
        )
        if adapter_dir is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(adapter_dir)).merge_and_unload()
    except Exception as error:  # broken files make the libraries raise all kinds
        reason = one_line(error, 300)
        where = f"{model_dir} with {adapter_dir}" if adapter_dir else str(model_dir)
        raise CheckpointError(
            f"{where}: cannot be loaded ({type(error).__name__}: {reason}). Download or export it again."
        ) from None
    if device.type == "cpu" and is_emulated(model.dtype):
        num_bytes = 4 * sum(weight.numel() for weight in model.parameters())
        if num_bytes < total_memory(device, 1) / 2:  # a larger one answers slowly rather than not at all
            model = model.float()
    return model.eval()
