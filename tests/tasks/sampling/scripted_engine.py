"""A rollout engine that answers by a function of the text so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fctune.data.chat_template import ChatTemplate
from fctune.tasks.sampling.rollouts import Generation


class ScriptedEngine:
    """Answers with ``answer(text of the prompt)``, an exception of which is the generation's error."""

    def __init__(self, template: ChatTemplate, answer: Callable[[str], str]):
        self._template = template
        self._answer = answer
        self._stop = min(template.stop_ids)
        self.prompts: list[tuple[int, ...]] = []
        self.version = 7

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], max_new_tokens: Sequence[int]
    ) -> Iterator[Generation]:
        for index, prompt in reversed(list(enumerate(prompts))):
            self.prompts.append(tuple(prompt))
            try:
                text = self._answer(self._template.decode(list(prompt)))
            except RuntimeError as error:
                yield Generation(index, error=str(error))
                continue
            ids = [*self._template.tokenizer.encode(text, add_special_tokens=False), self._stop]
            is_cut = len(ids) > max_new_tokens[index]
            ids = ids[: max_new_tokens[index]]
            logprobs = tuple(-0.5 - 0.001 * position for position in range(len(ids)))
            yield Generation(index, tuple(ids), logprobs, is_cut, self.version)

    def publish(self, policy: Any, version: int) -> None:
        self.version = version

    def describe(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...
