"""The names of the servers' parsers for a model, recorded in its directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError, DataError
from fctune.calls.formats.base import SERVERS
from fctune.calls.reasoning.base import ReasoningFormat
from fctune.calls.reasoning.registry import detect_reasoning
from fctune.calls.response_template import DeclaredFormat, find_call_format
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Conversation, Message

FILE_NAME = "server_parsers.json"
_ANSWER = Conversation((Message("user", "Hi"), Message("assistant", "Hello there.")))

Parsers = dict[str, dict[str, str | None]]


def find_server_parsers(
    template: ChatTemplate, template_args: Mapping[str, Any] | None = None, has_reasoning: bool | None = None
) -> Parsers:
    """Return the parsers by server: ``tool_call_parser`` and ``reasoning_parser``, None where there is none.

    Servers take an answer without any mark of reasoning for reasoning that is not finished. So a model that was trained
    without reasoning, by a template that then writes no empty block either, gets no reasoning parser. Channels are
    marked in every answer, and without their parser the header of a message would be sent as content.

    Args:
        template: The model's chat template.
        template_args: Its switches, by default those of the template.
        has_reasoning: The model was trained on reasoning; None: unknown.

    Raises:
        DataError: The call format of the template is unknown.
    """
    call_format = find_call_format(template)
    reasoning_format = detect_reasoning(template.source)
    if has_reasoning is False and reasoning_format is not None and not reasoning_format.is_in_every_answer:
        switches = template.template_args if template_args is None else template_args
        is_off = template.reasoning.switch is not None and switches.get(template.reasoning.switch) is False
        if not is_off and not _marks_answers(template, reasoning_format):
            reasoning_format = None
    if isinstance(call_format, DeclaredFormat):  # vLLM combines its parser of thinking with no other
        names = (call_format.vllm_parser, call_format.vllm_parser if call_format.has_thinking else None)
        return {"vllm": dict(zip(_KEYS, names, strict=True)), "sglang": dict.fromkeys(_KEYS)}
    return {
        server: {
            "tool_call_parser": call_format.get_server_parser(server),
            "reasoning_parser": reasoning_format.get_server_parser(server) if reasoning_format else None,
        }
        for server in SERVERS
    }


def _marks_answers(template: ChatTemplate, reasoning_format: ReasoningFormat) -> bool:
    """Return True if an answer without reasoning is trained with an empty block of it."""
    for sample in template.encode(_ANSWER):
        supervised = [token for token, weight in zip(sample.tokens, sample.weights, strict=True) if weight > 0]
        if reasoning_format.split(template.decode(supervised)) is not None:
            return True
    return False


def write_server_parsers(
    folder: Path, template: ChatTemplate, template_args: Mapping[str, Any], has_reasoning: bool | None
) -> None:
    """Record the parsers in a model directory; no file for an unknown call format. Arguments as above."""
    try:
        parsers = find_server_parsers(template, template_args, has_reasoning)
    except DataError:
        return
    recorded = {_TEMPLATE: _digest(template), **parsers}
    (folder / FILE_NAME).write_text(json.dumps(recorded, indent=2) + "\n", encoding="utf-8")


def read_server_parsers(folder: Path, template: ChatTemplate | None = None) -> Parsers | None:
    """Return the recorded parsers of a model directory; None if it records none, or those of another template.

    Args:
        folder: The model directory.
        template: Its chat template, which may have been changed since; None: not compared.

    Raises:
        ConfigError: The file is damaged.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
        if template is not None and recorded.get(_TEMPLATE, _digest(template)) != _digest(template):
            return None
        return {server: {key: recorded[server][key] for key in _KEYS} for server in SERVERS}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: damaged ({type(error).__name__}: {error}); without the file, the template selects parsers."
        ) from None


def _digest(template: ChatTemplate) -> str:
    return hashlib.sha256(template.source.encode()).hexdigest()


_KEYS = ("tool_call_parser", "reasoning_parser")
_TEMPLATE = "chat_template_sha256"
