"""Rollout engine that generates in this process, with a model in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fctune.generation.in_process import InProcessEngine
from fctune.sampling.rollouts import Generation


class InProcessRolloutEngine:
    """Continues token ids in batches with the model that was published last.

    Args:
        make_engine: Makes the engine of the first published model; it must keep tokens.
    """

    def __init__(self, make_engine: Callable[[Any], InProcessEngine]):
        self._make_engine = make_engine
        self._made: InProcessEngine | None = None
        self._version = 0

    @property
    def _engine(self) -> InProcessEngine:
        assert self._made is not None, "nothing was published"
        return self._made

    @property
    def version(self) -> int:
        """Version of the published model."""
        return self._version

    def publish(self, policy: Any, version: int) -> None:
        """Generate with this transformers model from now on."""
        if self._made is None:
            self._made = self._make_engine(policy)
        self._made.model, self._version = policy, version

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], max_new_tokens: Sequence[int]
    ) -> Iterator[Generation]:
        """Yield the continuation of each prompt, longest prompts first."""
        waiting = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        while waiting:
            batch = waiting[: self._engine.batch_size]
            limit = max(max_new_tokens[i] for i in batch)
            try:
                encoded = [list(prompts[i]) for i in batch]
                continued = self._engine.continue_tokens(encoded, [seeds[i] for i in batch], limit)
            except torch.OutOfMemoryError as error:
                if len(batch) == 1:
                    reason = f"out of memory ({' '.join(str(error).split())[:160]})"
                    yield Generation(batch[0], version=self._version, error=reason)
                    waiting = waiting[1:]
                self._engine.batch_size = max(1, len(batch) // 2)
                continue
            for i, tokens in zip(batch, continued, strict=True):
                ids, logprobs = tokens.ids[: max_new_tokens[i]], tokens.logprobs[: max_new_tokens[i]]
                is_cut = not ids or ids[-1] not in self._engine.stop_ids
                yield Generation(i, ids, logprobs, is_cut, self._version)
            waiting = waiting[len(batch) :]

    def describe(self) -> dict[str, Any]:
        """Return the base model's digest and the sampling settings."""
        return self._engine.describe()

    def close(self) -> None:
        """Free the published model."""
        if self._made is not None:
            self._made.model = None
