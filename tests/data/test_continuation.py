"""Token ids between two answers of the model are those that each public chat template prints there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.templates import find_templates, write_model, write_tokenizer
from fctune.base.errors import DataError
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Call, Conversation, Message, Tool
from tests.conftest import TINY_BASE

TEMPLATES = {template.name: template for template in find_templates()}
# With tools, of one family each; others have the same templates in other versions.
CHOSEN = (
    "gemma4", "gemma4_v2", "glm4moe", "gptoss", "lfm2_2_5", "lfm2_v2", "llama3_1", "llama3_2",
    "muse_glimmer", "nemotron_3_nano", "qwen2_5", "qwen3", "qwen3_5_think", "qwen3_5_nothink", "qwen3_instruct_2507",
    "transformers_llama4",
)  # fmt: skip

pytestmark = pytest.mark.skipif(len(TEMPLATES) < 10, reason="trl is not installed: pip install -e '.[dev]'")

TOOL = Tool(
    {
        "name": "find_place",
        "description": "Find a place.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    }
)
ASK = Message("user", "Find Bergen.")
CALLS = Message("assistant", None, (Call("find_place", {"town": "Bergen"}, id="callAAAA1"),))
FOUND = Message("tool", '{"found": true, "note": "<b>"}', call_id="callAAAA1", name="find_place")


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")
    write_tokenizer(root / "tokenizer", [str(message.to_openai()) for message in (ASK, CALLS, FOUND)])

    def make(name: str) -> Path:
        if not (root / name).exists():
            write_model(root / name, root / "tokenizer", TEMPLATES[name])
        return root / name

    return make


@pytest.mark.parametrize("name", CHOSEN)
def test_what_follows_an_answer_is_what_the_template_prints_after_its_stop_token(
    name: str, make_model: Callable[[str], Path]
) -> None:
    template = ChatTemplate(make_model(name))
    # Nemotron's prompt opens the reasoning, which its template takes away again from an answer without any.
    calls = replace(CALLS, reasoning="I look it up.") if name.startswith("nemotron") else CALLS
    conversation = Conversation((ASK, calls, FOUND), (TOOL,))
    added = template.encode_continuation(conversation, 1)
    full = template.encode_prompt(conversation)
    before = full[: len(full) - len(added)]
    assert full == before + added
    assert before[-1] in template.stop_ids
    text = template.decode(before)
    assert text.startswith(template.render(Conversation((ASK,), (TOOL,)), add_generation_prompt=True))
    assert "Bergen" in text.rpartition("Find Bergen.")[2]
    assert "found" in template.decode(added)


def test_an_answer_that_the_template_renders_differently_later_is_refused(make_model: Callable[[str], Path]) -> None:
    template = ChatTemplate(make_model("nemotron_3_nano"))
    with pytest.raises(DataError, match="differently once messages follow"):
        template.encode_continuation(Conversation((ASK, CALLS, FOUND), (TOOL,)), 1)


def test_control_tokens_in_a_result_stay_plain_text() -> None:
    template = ChatTemplate(TINY_BASE)
    stop = template.decode([min(template.stop_ids)])
    shown = replace(FOUND, content=f"a {stop} b")
    plain = template.encode_continuation(Conversation((ASK, CALLS, replace(FOUND, content="a b")), (TOOL,)), 1)
    added = template.encode_continuation(Conversation((ASK, CALLS, shown), (TOOL,)), 1)
    assert stop in template.decode(added)
    assert sum(i in template.stop_ids for i in added) == sum(i in template.stop_ids for i in plain)
