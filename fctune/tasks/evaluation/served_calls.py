"""Parse texts with vLLM's or SGLang's own parser; run by ``serving`` in the Python that has them.

    PYTHON served_calls.py vllm|sglang PARSER MODEL_DIR [REASONING_PARSER] < requests.jsonl > replies.jsonl

A request is ``{"id", "text", "tools"}``, with ``template_args`` if the prompt was rendered with any, and ``is_open`` if
the prompt opened the reasoning. A reply is ``{"id", "calls": [{"name", "arguments"}]}`` with arguments as the string
that a client gets, or ``{"id", "error"}``; with a reasoning parser it also has ``reasoning`` and ``content``, the text
in which calls were looked for. The first reply is ``{"version"}``. Exit code 3: not installed.

Imports nothing of fctune, so that the servers' own pins of torch and transformers hold here.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

# Some parsers use regular expressions that take exponential time and would block a server.
MAX_PARSE_S = 2.0

Parse = Callable[[str, list[dict[str, Any]]], list[dict[str, str]]]
Split = Callable[[dict[str, Any]], tuple[str | None, str | None]]


def main(server: str, parser: str, model_dir: str, reasoning_parser: str = "") -> int:
    """Answer every request on stdin; returns 0, or 3 if the server is not installed or has no such parser."""
    # The servers log to stdout.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        version, parse = (open_vllm if server == "vllm" else open_sglang)(parser, model_dir)
        split_reasoning = split_vllm if server == "vllm" else split_sglang
        split = split_reasoning(reasoning_parser, model_dir) if reasoning_parser else None
    except Exception as error:  # such imports can raise anything
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 3
    replies.write(json.dumps({"version": version}) + "\n")
    signal.signal(signal.SIGALRM, _raise_timeout)
    for line in sys.stdin:
        request = json.loads(line)
        reply: dict[str, Any] = {"id": request["id"]}
        try:
            signal.setitimer(signal.ITIMER_REAL, MAX_PARSE_S)
            text = request["text"]
            if split is not None:
                reply["reasoning"], reply["content"] = split(request)
                text = reply["content"] or ""
            # A server only looks for calls if the request has tools.
            reply["calls"] = parse(text, request["tools"]) if request["tools"] else []
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Exception as error:  # a server would answer with status 500
            signal.setitimer(signal.ITIMER_REAL, 0)
            reply["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        replies.write(json.dumps(reply) + "\n")
    replies.close()
    return 0


def _raise_timeout(*_: Any) -> None:
    raise TimeoutError(f"the parser took over {MAX_PARSE_S:g} s")


def open_vllm(name: str, model_dir: str) -> tuple[str, Parse]:
    """Return vLLM's version and its parser of that name, used as in its chat completions."""
    vllm = import_module("vllm")
    try:
        protocol = import_module("vllm.entrypoints.openai.chat_completion.protocol")
        parsers = import_module("vllm.tool_parsers")
    except ImportError:  # before 0.12
        protocol = import_module("vllm.entrypoints.openai.protocol")
        parsers = import_module("vllm.entrypoints.openai.tool_parsers")
    tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(model_dir)
    parser_class, is_whole = _get_vllm_parser(parsers, name)
    encode = _get_harmony_encoder() if parser_class.__module__ == "vllm.parser.harmony" else None
    takes_tools = is_whole or "tools" in inspect.signature(parser_class.__init__).parameters

    def parse(text: str, tools: list[dict[str, Any]]) -> list[dict[str, str]]:
        messages = [{"role": "user", "content": ""}]
        request = protocol.ChatCompletionRequest(model="model", messages=messages, tools=tools)
        # A new parser for each answer, as in the server: parsers have state.
        parser = parser_class(tokenizer, request.tools) if takes_tools else parser_class(tokenizer)
        request = parser.adjust_request(request)
        if is_whole:
            read_from = {"model_output_token_ids": encode(text)} if encode is not None else {}
            calls = parser.parse(text, request, enable_auto_tools=True, **read_from)[2] or []
            return [{"name": call.name, "arguments": call.arguments} for call in calls]
        found = parser.extract_tool_calls(text, request)
        return [{"name": call.function.name, "arguments": call.function.arguments} for call in found.tool_calls]

    parse("", [{"type": "function", "function": {"name": "probe", "parameters": {"type": "object"}}}])
    return f"vLLM {vllm.__version__}", parse


def _get_vllm_parser(parsers: Any, name: str) -> tuple[Any, bool]:
    """Return vLLM's class for a parser's name, and True if it parses complete answers, as it does from 0.31 on."""
    if parsers.ToolParserManager.get_tool_parser(name) is None:
        raise KeyError(f"vLLM has no parser {name!r}")
    try:
        manager = import_module("vllm.parser.parser_manager").ParserManager
        harmony = {"is_harmony": True} if name == "openai" else {}
        return manager.get_parser(tool_parser_name=name, enable_auto_tools=True, **harmony), True
    except (ImportError, AttributeError):
        return parsers.ToolParserManager.get_tool_parser(name), False


def _get_harmony_encoder() -> Callable[[str], list[int]]:
    """Return the encoder of gpt-oss, whose answers vLLM parses from token ids; it needs the vocabulary's file."""
    encoding = import_module("vllm.entrypoints.openai.parser.harmony_utils").get_encoding()

    def encode(text: str) -> list[int]:
        # The prompt ends with this header.
        ids: list[int] = encoding.encode(text.removeprefix("<|start|>assistant"), allowed_special="all")
        return ids

    return encode


def split_vllm(name: str, model_dir: str) -> Split:
    """Return vLLM's reasoning parser of that name, which splits a request's text into reasoning and content."""
    protocol = import_module("vllm.entrypoints.openai.chat_completion.protocol")
    parser_class = import_module("vllm.reasoning").ReasoningParserManager.get_reasoning_parser(name)
    tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(model_dir)
    chat = protocol.ChatCompletionRequest(model="model", messages=[{"role": "user", "content": ""}])

    def split(request: dict[str, Any]) -> tuple[str | None, str | None]:
        parser = parser_class(tokenizer, chat_template_kwargs=request.get("template_args") or {})
        found: tuple[str | None, str | None] = parser.extract_reasoning(request["text"], chat)
        return found

    split({"text": ""})
    return split


def split_sglang(name: str, model_dir: str) -> Split:
    """Return SGLang's reasoning parser of that name, used in the same way."""
    parser_class = import_module("sglang.srt.parser.reasoning_parser").ReasoningParser
    if name not in parser_class.DetectorMap:
        raise KeyError(f"SGLang has no reasoning parser {name!r}")

    def split(request: dict[str, Any]) -> tuple[str | None, str | None]:
        # The server passes what it found in the template and the prompt.
        found: tuple[str | None, str | None] = parser_class(
            name, stream_reasoning=False, force_reasoning=request.get("is_open")
        ).parse_non_stream(request["text"])
        return found

    return split


def open_sglang(name: str, model_dir: str) -> tuple[str, Parse]:
    """Return SGLang's version and its parser of that name, used as in its chat completions."""
    sglang = import_module("sglang")
    tool_class = import_module("sglang.srt.entrypoints.openai.protocol").Tool
    parser_class = import_module("sglang.srt.function_call.function_call_parser").FunctionCallParser
    if name not in parser_class.ToolCallParserEnum:
        raise KeyError(f"SGLang has no parser {name!r}")

    def parse(text: str, tools: list[dict[str, Any]]) -> list[dict[str, str]]:
        parser = parser_class([tool_class(**tool) for tool in tools], name)
        if not parser.has_tool_call(text):
            return []
        _, calls = parser.parse_non_stream(text)
        return [{"name": call.name or "", "arguments": call.parameters} for call in calls]

    return f"SGLang {sglang.__version__}", parse


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
