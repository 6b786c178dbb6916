"""What exports of every call format write, read by the vLLM parsers that ``fctune serve`` names, without a server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fctune.calls.server_parsers import find_server_parsers
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Conversation, Message
from tests.serving.wire_formats import ANSWERS, TOOL_OBJECTS, TOOLS, WIRE_FORMATS, with_ids, write_base

pytestmark = pytest.mark.serving


@pytest.fixture(scope="module")
def read(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vLLM's parsers made of each format's answers."""
    given = []
    for name in WIRE_FORMATS:
        folder = tmp_path_factory.mktemp(name)
        write_base(name, folder)
        template = ChatTemplate(folder)
        parsers = find_server_parsers(template, has_reasoning=False)["vllm"]
        names = [parsers["tool_call_parser"], parsers["reasoning_parser"]]
        requests = [to_request(template, asked) for asked in ANSWERS]
        given.append({"folder": str(folder), "parsers": names, "requests": requests})
    script = str(Path(__file__).with_name("vllm_parse.py"))
    done = subprocess.run(
        [vllm_python, script], input=json.dumps(given), capture_output=True, text=True, timeout=1700, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return dict(zip(WIRE_FORMATS, map(json.loads, lines), strict=True))


def to_request(template: ChatTemplate, asked: str) -> dict[str, Any]:
    answer = ANSWERS[asked]
    said = Message("assistant", answer) if isinstance(answer, str) else Message("assistant", None, with_ids(answer))
    (sample,) = template.encode(Conversation((Message("user", asked), said), TOOL_OBJECTS))
    first = next(number for number, weight in enumerate(sample.weights) if weight > 0)
    last = max(number for number, weight in enumerate(sample.weights) if weight > 0)
    tokens = list(sample.tokens)
    messages = [{"role": "user", "content": asked}]
    return {"messages": messages, "tools": TOOLS, "prompt": tokens[:first], "answer": tokens[first : last + 1]}


@pytest.mark.parametrize("name", WIRE_FORMATS)
def test_the_parser_reads_what_the_export_writes(name: str, read: dict[str, Any]) -> None:
    if "cohere_melody" in read[name].get("error", ""):
        pytest.skip("vLLM's parser for cohere needs pip install cohere_melody")
    assert "error" not in read[name], read[name]
    wrong = {}
    for (asked, answer), both in zip(ANSWERS.items(), read[name]["read"], strict=True):
        calls = [] if isinstance(answer, str) else [(call.name, call.arguments) for call in answer]
        content = answer if isinstance(answer, str) else ""
        for way, found in zip(("whole", "streamed"), both, strict=True):
            got = [(called, decode(text)) for called, text in found["calls"]]
            if (got, (found["content"] or "").strip()) != (calls, content):
                wrong[asked, way] = found
    assert wrong.keys() == WIRE_FORMATS[name].unread.keys(), wrong


def decode(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
