"""Modelfiles in Go's own text/template, which Ollama uses: the same prompts as in Python, and the mark of calls."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fctune.apps.serve.ollama import make_modelfile
from fctune.data.chat_template import ChatTemplate
from fctune.data.chosen_template import open_chosen_template
from fctune.data.conversation import Call, Conversation, Message, Tool
from tests.apps.serve.go_template import render_go, to_go
from tests.conftest import ROOT

pytestmark = pytest.mark.serving

TOOL = Tool({"name": "find", "description": "Find <a> & b.", "parameters": {"type": "object", "properties": {}}})
CALLS = (Call("find", {"a": 1, "b": ["x <y>", None]}, "call00001"), Call("find", {}, "call00002"))
MESSAGES = (
    Message("system", "Be brief."),
    Message("user", "What is it?"),
    Message("assistant", "I look.", CALLS[:1]),
    Message("tool", "42", call_id="call00001", name="find"),
    Message("assistant", "This."),
    Message("user", "And that?"),
    Message("assistant", None, CALLS),
    Message("tool", "1", call_id="call00001", name="find"),
    Message("tool", "2", call_id="call00002", name="find"),
)


@pytest.fixture(scope="module")
def go() -> str:
    """The go command."""
    found = os.environ.get("FCTUNE_GO") or shutil.which("go")
    if not found:
        pytest.skip("no go command on the PATH, and FCTUNE_GO names none")
    return found


def test_go_renders_what_the_evaluator_in_python_renders_and_finds_the_mark_of_calls(
    go: str, tiny_base: Path, tmp_path: Path
) -> None:
    requests, expected = [], []
    for chosen in (None, "hermes"):
        template = ChatTemplate(tiny_base, chat_template=open_chosen_template(chosen, "") if chosen else None)
        modelfile, reason = make_modelfile(template, "model.gguf")
        assert reason is None
        for messages in (MESSAGES[:2], MESSAGES[1:2], MESSAGES[:5], MESSAGES[1:], MESSAGES):
            for tools in ((), (TOOL,), (TOOL, Tool({**TOOL.function, "name": "other"}))):
                data = to_go(Conversation(messages, tools))
                source = modelfile.split('"""')[1]
                data["Tools"] = [tool.to_openai() for tool in tools]
                requests.append({"source": source, "data": data})
                if "{{ $tool }}" not in source:
                    data = {**data, "Tools": [{"Function": tool.function} for tool in tools]}
                expected.append(render_go(source, data))
    environment = {**os.environ, "GOCACHE": str(tmp_path), "GO111MODULE": "off"}
    program = ROOT / "tests" / "apps" / "launch" / "ollama_template.go"
    done = subprocess.run(
        [go, "run", str(program)], input=json.dumps(requests), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert [answer["text"] for answer in answers] == expected
    assert {answer["mark"] for answer in answers} == {"<tool_call>\n"}
