"""An engine that continues token ids by a function of the text so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fctune.data.chat_template import ChatTemplate
from fctune.engines.decoding import AnswerDecoder
from fctune.engines.engine import Answer, AnswerTokens, Prompt


class ScriptedEngine:
    """Answers with ``answer(text of the prompt)``, an exception of which is the answer's error."""

    def __init__(self, template: ChatTemplate, answer: Callable[[str], str]):
        self._template = template
        self._decoder = AnswerDecoder(template)
        self._answer = answer
        self._stop = min(template.stop_ids)
        self.prompts: list[tuple[int, ...]] = []
        self.version = 7

    def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        for index, prompt in reversed(list(enumerate(prompts))):
            assert prompt.ids is not None
            self.prompts.append(prompt.ids)
            try:
                text = self._answer(self._template.decode(list(prompt.ids)))
            except RuntimeError as error:
                yield Answer(index, error=str(error), version=self.version)
                continue
            ids = (*self._template.tokenizer.encode(text, add_special_tokens=False), self._stop)
            is_cut = len(ids) > prompt.max_new_tokens
            ids = ids[: prompt.max_new_tokens]
            logprobs = tuple(-0.5 - 0.001 * position for position in range(len(ids)))
            tokens = AnswerTokens(prompt.ids, ids, logprobs)
            yield self._decoder.decode(Answer(index, is_cut=is_cut, tokens=tokens, version=self.version))

    def publish(self, policy: Any, version: int) -> None:
        self.version = version

    def describe(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...
