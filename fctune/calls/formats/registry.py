"""The table of wire formats: by name, and from a model's chat template."""

from __future__ import annotations

import difflib

from fctune.calls.formats.base import CallFormat, Malformed, Parsed
from fctune.calls.formats.hermes import Hermes
from fctune.calls.formats.json_formats import Glaive, LlamaJson, MarkedList, MistralNamed, Xlam
from fctune.calls.formats.marked_formats import DeepSeek, GptOss
from fctune.calls.formats.python_formats import Lfm, Pythonic
from fctune.calls.formats.xml_formats import Glm, Qwen3Coder
from fctune.errors import ConfigError, DataError

__all__ = ["ALIASES", "FORMATS", "CallFormat", "Malformed", "Parsed", "detect_format", "get_format"]

FORMATS: dict[str, CallFormat] = {
    call_format.name: call_format
    for call_format in (
        Hermes(),
        LlamaJson(),
        Pythonic(),
        MarkedList("mistral_v3", mark="[TOOL_CALLS]", has_id=True),
        MarkedList("mistral_v7", mark="[TOOL_CALLS]", has_id=True),
        MistralNamed("mistral_v11", has_id=True),
        MistralNamed("mistral_v13", has_id=False),
        Xlam(),
        Qwen3Coder(),
        DeepSeek("deepseek_v3", has_fence=True),
        DeepSeek("deepseek_v31", has_fence=False),
        MarkedList("granite3", mark="<|tool_call|>", has_id=False),
        Glm(),
        GptOss(),
        Lfm(),
        Glaive(),
    )
}

# Models that write a format which bears another's name.
ALIASES = {
    "qwen2.5": "hermes",
    "qwen3": "hermes",
    "granite4": "hermes",
    "llama3.1": "llama3_json",
    "llama3.2": "llama3_json",
    "llama4": "pythonic",
    "bfcl": "pythonic",
    "toolace": "pythonic",
    "qwen3.5": "qwen3_coder",
    "nemotron3": "qwen3_coder",
    "deepseek_r1": "deepseek_v3",
}

# What a template must hold to be of a format. The first row that fits decides: the more particular marks stand above
# the more common ones.
_TEMPLATE_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("lfm", ("<|tool_call_start|>",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("gpt_oss", ("<|channel|>", "functions.")),
    ("mistral_v11", ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    ("mistral_v13", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral_v7", ("[TOOL_CALLS]", "[TOOL_CONTENT]")),
    ("mistral_v7", ("[TOOL_CALLS]", "[SYSTEM_PROMPT]")),
    ("mistral_v3", ("[TOOL_CALLS]",)),
    ("hermes", ("<tool_call>", "arguments")),
    ("granite3", ("<|tool_call|>",)),
    ("glaive", ("<functioncall>",)),
    ("xlam", ("in a single JSON array",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters": ')),
    ("llama3_json", ("<|header_start|>", '"parameters": ')),
    ("pythonic", ("<|python_start|>",)),
)


def get_format(name: str) -> CallFormat:
    """The format of that name, or the one that a model family of that name writes.

    Raises:
        ConfigError: No such format; the message lists those there are.
    """
    found = FORMATS.get(ALIASES.get(name, name))
    if found is not None:
        return found
    near = difflib.get_close_matches(name, [*FORMATS, *ALIASES], n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise ConfigError(
        f"format {name!r}: no such call format{hint}\n  Known: {', '.join(FORMATS)}; by model: {', '.join(ALIASES)}."
    )


def detect_format(chat_template: str) -> CallFormat:
    """The format in which a chat template writes calls.

    Raises:
        DataError: The template writes calls in no known format, or none at all.
    """
    for name, marks in _TEMPLATE_MARKS:
        if all(mark in chat_template for mark in marks):
            return FORMATS[name]
    raise DataError(
        f"chat template of {len(chat_template):,} characters: it shows none of the known ways of writing calls.\n"
        f"  Name the format: --format NAME, one of {', '.join(FORMATS)}."
    )
