"""Template switches are recorded with a model, and every later use renders with them unless told otherwise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from fctune.base.errors import ConfigError
from fctune.cli.parser import Parser, add_template_args_argument
from fctune.config.fields import SectionProblems
from fctune.config.sections.data import DataConfig, SourceConfig
from fctune.config.sections.model import ModelConfig
from fctune.data.chat_template import ChatTemplate
from fctune.data.chosen_template import ChosenTemplate
from fctune.data.conversation import Conversation, Message
from fctune.data.fingerprint import fingerprint_inputs
from fctune.data.template_args import TEMPLATE_ARGS_FILE, read_template_args
from fctune.engines.vllm_options import server_options
from fctune.models.added_tokens import extend_base
from fctune.models.export import Prompting, copy_companions
from tests.thinking_templates import HYBRID, write_thinking_model

QUESTION = Conversation((Message("user", "Hi"),))
CLOSED = "<think>\n\n</think>\n\n"


@pytest.fixture
def base(tiny_base: Path, tmp_path: Path) -> Path:
    return write_thinking_model(tiny_base, tmp_path / "base", HYBRID)


def prompt_of(template: ChatTemplate) -> str:
    return template.render(QUESTION, add_generation_prompt=True)


def test_an_export_renders_as_its_run_unless_told_otherwise(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert not prompt_of(ChatTemplate(base)).endswith(CLOSED)
    copy_companions(base, out, Prompting(template_args={"enable_thinking": False}))
    assert prompt_of(ChatTemplate(out)).endswith(CLOSED)
    assert prompt_of(ChatTemplate(out)) == prompt_of(ChatTemplate(base, template_args={"enable_thinking": False}))
    for given in ({"enable_thinking": True}, {"enable_thinking": None}):
        assert not prompt_of(ChatTemplate(out, template_args=given)).endswith(CLOSED)


def test_a_model_trained_from_an_export_keeps_its_switches_and_may_change_them(base: Path, tmp_path: Path) -> None:
    recorded: list[dict[str, Any]] = []
    before = base
    switches: list[dict[str, Any]] = [{"enable_thinking": False}, {}, {"enable_thinking": None}]
    for number, given in enumerate(switches):
        out = tmp_path / f"out{number}"
        out.mkdir()
        copy_companions(before, out, Prompting(template_args=given))
        recorded.append(read_template_args(out))
        before = out
    assert recorded == [{"enable_thinking": False}, {"enable_thinking": False}, {}]
    assert not (before / TEMPLATE_ARGS_FILE).exists()


def test_switches_of_a_template_that_is_replaced_do_not_apply(base: Path, tiny_base: Path, tmp_path: Path) -> None:
    (base / TEMPLATE_ARGS_FILE).write_text('{"enable_thinking": false}')
    plain = ChosenTemplate("plain", ChatTemplate(tiny_base).source)
    assert ChatTemplate(base, chat_template=plain).template_args == {}
    out = tmp_path / "out"
    out.mkdir()
    copy_companions(base, out, Prompting(chat_template=plain))
    assert read_template_args(out) == {}


def test_an_export_of_a_model_with_several_templates_has_the_one_that_it_was_trained_with(
    tiny_base: Path, tmp_path: Path
) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    shutil.copytree(tiny_base, base)
    out.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(str(base))
    for_tools = tokenizer.chat_template
    tokenizer.chat_template = {"default": "{% for m in messages %}{{ m.content }}{% endfor %}", "tool_use": for_tools}
    tokenizer.save_pretrained(str(base))
    assert (base / "additional_chat_templates" / "tool_use.jinja").is_file()
    for model_dir in (base, extend_base(base, ["<call>"], tmp_path)):
        assert ChatTemplate(model_dir).source == for_tools
        copy_companions(model_dir, out)
        assert AutoTokenizer.from_pretrained(str(out)).chat_template == for_tools
        assert ChatTemplate(out).source == for_tools


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "not JSON"),
        (b"[1]", "expected an object"),
        (b'{"tools": 1}', "set from each row"),
        (b"\xff", "cannot be read"),
    ],
)
def test_a_damaged_record_is_named(base: Path, text: bytes, words: str) -> None:
    path = base / TEMPLATE_ARGS_FILE
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=f"{TEMPLATE_ARGS_FILE}.*{words}"):
        ChatTemplate(base)


def test_recorded_switches_change_the_prepared_set(base: Path) -> None:
    config = DataConfig(sources=[SourceConfig(path="synthetic:train:9:0")])
    name, _ = fingerprint_inputs(config, base)
    (base / TEMPLATE_ARGS_FILE).write_text('{"enable_thinking": false}')
    assert fingerprint_inputs(config, base)[0] != name


def test_a_server_is_started_with_the_recorded_switches(base: Path) -> None:
    assert "--default-chat-template-kwargs" not in server_options(str(base))
    (base / TEMPLATE_ARGS_FILE).write_text('{"enable_thinking": false}')
    for given, expected in ((None, {"enable_thinking": False}), ({"enable_thinking": True}, {"enable_thinking": True})):
        options = server_options(str(base), template_args=given)
        assert json.loads(options[options.index("--default-chat-template-kwargs") + 1]) == expected


def test_switches_in_a_config_are_checked() -> None:
    def problems(**switches: Any) -> list[str]:
        found = SectionProblems()
        ModelConfig(path="hf:some/model", template_args=switches).check("model", found)
        return found.lines

    assert problems(enable_thinking=True, reasoning_effort="low", level=[1, {"a": None}]) == []
    assert problems(messages=[]) == [
        "model.template_args.messages: is set from each row, not by a switch; leave it out"
    ]
    assert "cannot be the name" in problems(**{"enable-thinking": True})[0]
    assert "expected a value that JSON can hold" in problems(day=float("nan"))[0]


def test_switches_on_a_command_line_are_pairs_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser()
    add_template_args_argument(parser)

    def parse(text: str) -> Any:
        return parser.parse_args(["--template-args", text]).template_args

    assert parser.parse_args([]).template_args is None
    assert parse("enable_thinking=false, reasoning_effort=low") == {"enable_thinking": False, "reasoning_effort": "low"}
    assert parse('{"enable_thinking": true, "level": 2}') == {"enable_thinking": True, "level": 2}
    for text, words in (("enable_thinking", "not an override"), ("tools=1", "set from each row"), ("{", "not JSON")):
        with pytest.raises(SystemExit):
            parse(text)
        assert words in capsys.readouterr().err
