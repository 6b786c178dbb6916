"""The tokens with which an assistant turn ends, found from a chat template and a model's generation config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from fctune.base.errors import ConfigError, DataError
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.tracing import TracedTemplate
from fctune.data.turns import TurnEnd

_TOOL = Tool({"name": "probe", "description": "A probe.", "parameters": {"type": "object", "properties": {}}})
_ASK = Message("user", "Hi")


def read_eos_ids(model_dir: Path, has_fallback: bool = False) -> set[int]:
    """Return the ids of a model directory's generation_config.json that end generation; empty without the file.

    Args:
        model_dir: The directory.
        has_fallback: Without the file, take the ids of config.json, as transformers and vLLM do.

    Raises:
        ConfigError: The file is not JSON, or its eos_token_id is neither an id nor a list of ids.
    """
    path = model_dir / "generation_config.json"
    if has_fallback and not path.is_file():
        path = model_dir / "config.json"
    if not path.is_file():
        return set()
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        eos = {**values, **(values.get("text_config") or {})}.get("eos_token_id")
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path}: not a JSON object ({error}). Download the model directory again.") from None
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token) is int for token in ids):
        raise ConfigError(f"{path}: eos_token_id is {eos!r}; expected a token id or a list of them.")
    return set(ids)


def find_turn_ends(
    template: TracedTemplate, special: Mapping[str, int], eos_ids: set[int], eos_id: int | None
) -> tuple[TurnEnd, TurnEnd]:
    """Return how the template ends an answer, and how it ends a turn with calls.

    A turn ends with the special token that the template prints after it. If there is none, the model stops with the
    token that opens the next message, provided that it is one of ``eos_ids`` or these are unknown; otherwise with
    ``eos_id``, which the template prints nowhere.

    Args:
        template: Traced chat template.
        special: Ids of the tokenizer's special tokens by spelling.
        eos_ids: Ids that end generation.
        eos_id: The tokenizer's end-of-sequence token.

    Raises:
        DataError: The template ends turns without a token, so that generation could not stop.
    """
    finder = _TurnEndFinder(template, special, eos_ids, eos_id)
    call, other = Call("probe", {"a": "b"}, id="call00001"), Call("probe", {"a": "c"}, id="call00002")
    single, several = Message("assistant", None, (call,)), Message("assistant", None, (call, other))
    result = Message("tool", "1", call_id="call00001", name="probe")
    answer_end = finder.find([Message("assistant", "Yes.")], Message("user", "And?"), set())
    closers = _find_closers(template, single, several, special)
    call_end = finder.find([single, Message("assistant", "Look.", (call,))], result, closers)
    following = dict.fromkeys((*answer_end.following, *call_end.following))
    return tuple(  # type: ignore[return-value]
        TurnEnd((), tuple(following), end.appended) if not end.printed else end for end in (answer_end, call_end)
    )


class _TurnEndFinder:
    """Finds the end of assistant turns in renderings; see ``find_turn_ends``."""

    def __init__(self, template: TracedTemplate, special: Mapping[str, int], eos_ids: set[int], eos_id: int | None):
        self._template, self._special, self._eos_ids, self._eos_id = template, special, eos_ids, eos_id
        self._by_length = sorted(special, key=len, reverse=True)

    def find(self, answers: list[Message], following: Message, excluded: set[str]) -> TurnEnd:
        """Return the end of these turns; of several ends, where the template looks at more, all are stop tokens.

        Args:
            answers: Turns of one kind, each tried after a question.
            following: Message that may follow them.
            excluded: Special tokens that end no turn.
        """
        printed: dict[str, None] = {}
        opening: dict[str, None] = {}
        for answer in answers:
            text = self._render(_ASK, answer)
            if text is None:
                continue
            token = self._find_last_token(text)
            if token is not None and token not in excluded:
                printed[token] = None
            elif (longer := self._render(_ASK, answer, following)) is not None and longer.startswith(text):
                opening.update(dict.fromkeys(t for t in self._by_length if longer.startswith(t, len(text))))
        if printed:
            return TurnEnd(tuple(printed))
        stops = [token for token in opening if not self._eos_ids or self._special[token] in self._eos_ids]
        if stops:
            return TurnEnd((), tuple(stops), self._special[stops[0]])
        if self._eos_id is None:
            raise DataError(
                "its chat template ends an assistant turn without a special token, and the tokenizer has no "
                "end-of-sequence token, so generation could not stop. Add an eos_token to tokenizer_config.json, or "
                "use a template that ends turns with a special token."
            )
        return TurnEnd((), (), self._eos_id)

    def _render(self, *messages: Message) -> str | None:
        """Return the text of a conversation with a tool; None if the template rejects it."""
        try:
            return self._template.render(Conversation(messages, (_TOOL,)))[0]
        except DataError:
            return None

    def _find_last_token(self, text: str) -> str | None:
        """Return the special token that a text ends with, white space aside."""
        text = text.rstrip()
        return next((token for token in self._by_length if text.endswith(token)), None)


def _find_closers(template: TracedTemplate, single: Message, several: Message, special: Mapping[str, int]) -> set[str]:
    """Return the special tokens that the template prints once for each call, which therefore end no turn."""
    try:
        one, two = (template.render(Conversation((_ASK, turn), (_TOOL,)))[0] for turn in (single, several))
    except DataError:
        return set()
    return {token for token in special if two.count(token) > one.count(token)}
