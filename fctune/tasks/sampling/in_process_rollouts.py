"""Rollout engine that generates in this process, with a model in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fctune.engines.in_process import InProcessEngine
from fctune.tasks.sampling.rollouts import Generation


class InProcessRolloutEngine:
    """Continues token ids in batches with the most recently published model.

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
        encoded = dict(enumerate(map(list, prompts)))
        limits = dict(enumerate(max_new_tokens))
        for i, tokens in self._engine.continue_all(encoded, dict(enumerate(seeds)), limits):
            if isinstance(tokens, str):
                yield Generation(i, version=self._version, error=tokens)
                continue
            ids, logprobs = tokens.ids[: limits[i]], tokens.logprobs[: limits[i]]
            is_cut = not ids or ids[-1] not in self._engine.stop_ids
            yield Generation(i, ids, logprobs, is_cut, self._version)

    def describe(self) -> dict[str, Any]:
        """Return the base model's digest and the sampling settings."""
        return self._engine.describe()

    def close(self) -> None:
        """Free the published model."""
        if self._made is not None:
            self._made.model = None
