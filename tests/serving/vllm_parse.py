"""Read token ids with vLLM's parsers, as its chat completions do, complete and token by token.

Run with a Python that has vLLM. Reads from standard input a list of ``{"folder", "parsers", "requests"}``, with the
names of both parsers, and requests of ``{"messages", "tools", "prompt", "answer"}`` in token ids. Prints one line of
JSON for each folder.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager


def main() -> int:
    """Read everything from standard input, and print one line for each folder."""
    given = json.load(sys.stdin)
    print()
    for one in given:
        tokenizer = AutoTokenizer.from_pretrained(one["folder"])
        names = {"tool_parser_name": one["parsers"][0], "reasoning_parser_name": one["parsers"][1]}
        try:
            parser_class: Any = ParserManager.get_parser(**names, enable_auto_tools=True, tokenizer=tokenizer)
            ways = (read_whole, read_stream)
            read = [[way(parser_class, tokenizer, request) for way in ways] for request in one["requests"]]
            print("RESULT", json.dumps({"read": read}), flush=True)
        except Exception as error:  # to be reported by the test, for each folder
            print("RESULT", json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
    return 0


def open_parser(parser_class: Any, tokenizer: Any, given: Any) -> tuple[Any, Any]:
    """Return a parser, which is made for each answer, and the request as it changes it."""
    request = ChatCompletionRequest(model="model", messages=given["messages"], tools=given["tools"])
    parser = parser_class(tokenizer, request.tools, chat_template_kwargs={}, model_config=None)
    return parser, parser.adjust_request(request)


def read_whole(parser_class: Any, tokenizer: Any, given: Any) -> dict[str, Any]:
    """Return reasoning, content and calls of a complete answer."""
    parser, request = open_parser(parser_class, tokenizer, given)
    text = tokenizer.decode(given["answer"][:-1], skip_special_tokens=request.skip_special_tokens)
    reasoning, content, calls = parser.parse(
        text, request, enable_auto_tools=True, model_output_token_ids=given["answer"]
    )
    return {"reasoning": reasoning, "content": content, "calls": [[call.name, call.arguments] for call in calls or []]}


def read_stream(parser_class: Any, tokenizer: Any, given: Any) -> dict[str, Any]:
    """Return what the deltas of single tokens add up to."""
    parser, request = open_parser(parser_class, tokenizer, given)
    answer, sent = given["answer"], ""
    found: dict[str, Any] = {"reasoning": "", "content": ""}
    calls: dict[int, list[str]] = {}
    for number, token in enumerate(answer):
        is_last = number == len(answer) - 1
        text = tokenizer.decode(answer[: number + (not is_last)], skip_special_tokens=request.skip_special_tokens)
        delta = "" if text.endswith("\ufffd") else text[len(sent) :]
        sent += delta
        message = parser.parse_delta(delta, [token], request, given["prompt"], finished=is_last)
        if message is None:
            continue
        found["reasoning"] += message.reasoning or ""
        found["content"] += message.content or ""
        for piece in message.tool_calls or []:
            call = calls.setdefault(piece.index, ["", ""])
            call[0] += (piece.function and piece.function.name) or ""
            call[1] += (piece.function and piece.function.arguments) or ""
    return {**found, "calls": list(calls.values())}


if __name__ == "__main__":
    sys.exit(main())
