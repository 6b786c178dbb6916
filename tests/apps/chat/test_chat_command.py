"""``fctune chat`` shows a model's calls, and runs nothing that the user has not named and confirmed."""

from __future__ import annotations

import io
import json
import shlex
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fctune.apps.chat.chat import run_tool
from fctune.calls.formats.registry import FORMATS
from fctune.calls.reasoning.registry import find_reasoning
from fctune.cli import main
from fctune.data.conversation import Call, Conversation
from fctune.data.sources import Defect, read_source
from fctune.engines import local
from fctune.engines.engine import Answer, Prompt
from tests.conftest import TINY_BASE

TOOLS = [
    {
        "name": "get_time",
        "description": "The time in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "returns": {"type": "object", "properties": {"hour": {"type": "integer"}, "zone": {"enum": ["CET", "EST"]}}},
    }
]
# From Mistral's chat templates.
ALTERNATION = """\
{%- set ns = namespace(index=0) -%}
{%- for message in messages if message.role in ("user", "assistant") and not message.tool_calls -%}
    {%- if (message.role == "user") != (ns.index % 2 == 0) -%}
        {{- raise_exception("conversation roles must alternate user/assistant/user/assistant") -}}
    {%- endif -%}
    {%- set ns.index = ns.index + 1 -%}
{%- endfor -%}
"""
CALL = FORMATS["hermes"].render([Call("get_time", {"city": "Oslo"})])


class ScriptedEngine(local.LocalEngine):
    """The engine with a model that says what it is told to; the template and its call format are real."""

    texts: ClassVar[list[str]] = []
    prompts: ClassVar[list[Conversation]] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        type(self).prompts = []

    def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        (prompt,) = prompts
        self._encode(prompts)
        self.prompts.append(prompt.conversation)
        text = self.texts[len(self.prompts) - 1]
        yield Answer(0, text, reasoning=find_reasoning(text))


class TerminalInput(io.StringIO):
    """Lines typed at a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command on typed lines, with the model's texts; returns what it prints."""
    monkeypatch.setattr(local, "LocalEngine", ScriptedEngine)
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))

    def run(
        typed: str, texts: list[str], *options: str, model: Path = TINY_BASE, stdin: type[io.StringIO] = io.StringIO
    ) -> str:
        monkeypatch.setattr(ScriptedEngine, "texts", texts)
        monkeypatch.setattr(sys, "stdin", stdin(typed))
        assert main(["chat", str(model), "--tools", str(tmp_path / "tools.json"), *options]) == 0
        return capsys.readouterr().out

    return run


def test_a_call_is_shown_and_its_typed_result_reaches_the_model(chat: Callable[..., str], tmp_path: Path) -> None:
    row = tmp_path / "row.jsonl"
    shown = chat(f'What time is it in Oslo?\n{{"hour": 9}}\n/save {row}\n', [CALL, "It is nine."])
    assert 'get_time({"city": "Oslo"})' in shown
    assert "It is nine." in shown
    user, asked, result = ScriptedEngine.prompts[1].messages
    assert user.content == "What time is it in Oslo?"
    assert asked.calls[0].arguments == {"city": "Oslo"}
    assert (result.role, result.content, result.call_id) == ("tool", '{"hour": 9}', asked.calls[0].id)
    (saved,) = read_source(str(row))
    assert isinstance(saved, Conversation)
    assert [message.role for message in saved.messages] == ["user", "assistant", "tool", "assistant"]


def test_a_simulated_result_obeys_the_tools_schema(chat: Callable[..., str]) -> None:
    chat("Time in Oslo?\n", [CALL, "One."], "--simulate")
    assert json.loads(str(ScriptedEngine.prompts[1].messages[-1].content)) == {"hour": 1, "zone": "CET"}


@pytest.mark.parametrize(("reply", "is_run"), [("y", True), (" Yes ", True), ("n", False), ("", False)])
def test_a_command_runs_only_when_confirmed(reply: str, is_run: bool, chat: Callable[..., str], tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    command = f"{sys.executable} -c \"import sys; open('{trace}', 'w').write(sys.stdin.read()); print('ten')\""
    typed = "" if is_run else "typed\n"
    chat(f"Time in Oslo?\n{reply}\n{typed}", [CALL, "Fine."], "--exec", f"get_time={command}")
    assert trace.exists() == is_run
    assert ScriptedEngine.prompts[1].messages[-1].content == ("ten" if is_run else "typed")
    if is_run:
        assert json.loads(trace.read_text()) == {"city": "Oslo"}


@pytest.mark.parametrize(
    ("command", "limit_s", "result"),
    [
        ("sh -c 'echo broken >&2; exit 3'", 30, '{"error": "exit code 3", "stderr": "broken"}'),
        ("no-such-program", 30, '{"error": "cannot be started: No such file or directory"}'),
        ("sleep 60", 0.3, '{"error": "no result within 0.3 s"}'),
        ("sh -c 'exec >&- 2>&-; sleep 60'", 0.3, '{"error": "no result within 0.3 s"}'),
        ("yes", 0.3, '{"error": "no result within 0.3 s"}'),
        ("sh -c 'sleep 60 & echo ten'", 30, "ten"),
        ("sh -c 'setsid sleep 20 & sleep 0.1; echo ten'", 30, "ten"),  # outside the group, and holds the pipe
        ("head -c 100000 /dev/zero", 30, "\0" * 65536 + "\n[cut: only the first 65,536 of 100,000 bytes]"),
        ("true", 30, ""),  # does not read its input
        ("sh -c 'wc -c; exec >&-; sleep 0.2'", 30, "16"),
    ],
)
def test_a_commands_result_is_what_it_wrote_until_its_end_or_its_time_limit(
    command: str, limit_s: float, result: str
) -> None:
    started = time.monotonic()
    assert run_tool(shlex.split(command), {"city": "Oslo"}, limit_s) == result
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(("rest", "limit_s"), [("", 30.0), ("; sleep 60", 0.5)], ids=["ended", "out-of-time"])
def test_nothing_that_a_command_started_outlives_it(rest: str, limit_s: float, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    run_tool(["sh", "-c", f"sleep 60 & echo $! > {pid}{rest}"], {}, limit_s)
    state = Path(f"/proc/{pid.read_text().strip()}/stat")
    for _ in range(100):  # until process 1 has collected it
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.02)
    pytest.fail("the child of the command is still running")


def test_a_commands_output_is_bounded_in_memory() -> None:
    run_tool(["true"], {}, 5.0)
    tracemalloc.start()
    result = run_tool(["head", "-c", "50000000", "/dev/zero"], {}, 30.0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result.endswith("[cut: only the first 65,536 of 50,000,000 bytes]")
    assert peak < 2_000_000


def test_a_failing_command_is_a_result_that_the_model_gets(chat: Callable[..., str]) -> None:
    chat("Time in Oslo?\ny\n", [CALL, "Sorry."], "--exec", "get_time=sh -c 'echo broken >&2; exit 3'")
    assert "broken" in str(ScriptedEngine.prompts[1].messages[-1].content)


@pytest.mark.parametrize("options", [[], ["--exec", "get_time=date -u"]])
def test_input_that_ends_before_a_result_is_no_alarm(chat: Callable[..., str], options: list[str]) -> None:
    shown = chat("What time is it in Oslo?\n", [CALL], *options)
    assert 'get_time({"city": "Oslo"})' in shown
    last = "end of the input, which has no line with the result of get_time (--simulate makes results up)"
    assert shown.splitlines()[-1] == last
    assert "dropped" not in shown
    assert "taken back" not in shown


def test_the_question_before_a_command_shows_the_call(chat: Callable[..., str]) -> None:
    calls = FORMATS["hermes"].render([Call("get_time", {"city": city}) for city in ("Oslo", "Rome")])
    shown = chat("Times?\nn\nnine\nn\nten\n", [calls, "Fine."], "--exec", "get_time=date -u")
    for city in ("Oslo", "Rome"):
        assert f'run date -u for get_time({{"city": "{city}"}})? [y/N]' in shown


def test_a_name_from_the_model_does_not_control_the_terminal_that_asks_for_its_result(
    chat: Callable[..., str],
) -> None:
    call = FORMATS["hermes"].render([Call("get\x1b[2J", {})])
    shown = chat("Time?\nnine\n", [call, "Fine."], stdin=TerminalInput)
    assert r"result of get\x1b[2J (JSON or text; /cancel): " in shown
    assert "\x1b" not in shown


def test_a_commands_output_need_not_be_utf_8(chat: Callable[..., str]) -> None:
    code = r"import sys; sys.stdout.buffer.write(b'caf\\xe9')"
    chat("Time in Oslo?\ny\n", [CALL, "Fine."], "--exec", f'get_time={sys.executable} -c "{code}"')
    assert ScriptedEngine.prompts[1].messages[-1].content == "caf\N{REPLACEMENT CHARACTER}"


def test_half_a_surrogate_pair_is_shown_and_saved(chat: Callable[..., str], tmp_path: Path) -> None:
    row = tmp_path / "row.jsonl"
    answer = "<think>\ud801</think>\ud802" + CALL.replace("Oslo", r"\ud803")
    chat(f"Time?\nnine\n/reasoning\n/save {row}\n", [answer, "It is {\ud804"])
    (saved,) = read_source(str(row))
    assert isinstance(saved, Conversation)
    _, called, _, answered = saved.messages
    assert (called.reasoning, called.content, called.calls[0].arguments) == ("?", "?", {"city": "?"})
    assert answered.content == "It is {?"


def test_a_saved_answer_with_a_broken_call_is_a_defect(chat: Callable[..., str], tmp_path: Path) -> None:
    row = tmp_path / "row.jsonl"
    chat(f"Time?\nnine\n/save {row}\n", [CALL, "<tool_call>{"])
    (defect,) = read_source(str(row))
    assert isinstance(defect, Defect)
    assert defect.pointer.startswith("messages[3].content")


def test_after_a_cancelled_call_a_template_that_requires_alternation_accepts_a_message(
    chat: Callable[..., str], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in TINY_BASE.iterdir():
        (model / file.name).symlink_to(file)
    config = json.loads((TINY_BASE / "tokenizer_config.json").read_text())
    config["chat_template"] = ALTERNATION + config["chat_template"]
    (model / "tokenizer_config.json").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    shown = chat("Hi\nTime?\n/cancel\nAgain.\n", ["Hello.", CALL, "Fine."], model=model)
    assert "Fine." in shown
    assert [message.content for message in ScriptedEngine.prompts[2].messages] == ["Hi", "Hello.", "Again."]


def test_a_malformed_call_is_shown_with_its_reason(chat: Callable[..., str]) -> None:
    assert "malformed call: not closed" in chat("Time?\n", ["<tool_call>{"])


def test_reasoning_is_folded(chat: Callable[..., str]) -> None:
    shown = chat("Hi\n/reasoning\n", ["<think>They greet me.</think>Hello."])
    assert shown.index("[reasoning, 3 words") < shown.index("Hello.") < shown.index("They greet me.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tools", "nowhere.json"], "nowhere.json: cannot be read"),
        (["--exec", "get_time=date"], "no tool get_time in --tools"),
        (["--exec", "get_time"], "expected TOOL=COMMAND"),
        (["--max-new-tokens", "0"], "expected 1 or more"),
        (["--exec-timeout", "nan"], "--exec-timeout nan: expected seconds"),
    ],
)
def test_wrong_options_are_refused_before_the_model_is_loaded(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", str(TINY_BASE), *options]) == 2
    assert message in capsys.readouterr().err
