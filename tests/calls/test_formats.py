"""Every call format: rendered calls are read back, other text is not a call, and nothing is lost or evaluated."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fctune.base.errors import ConfigError, DataError
from fctune.calls.formats.base import SERVERS, TURN_ENDS, CallFormat, Parsed, Server
from fctune.calls.formats.registry import FORMATS, detect_format, get_format
from fctune.calls.matching import is_equal
from fctune.data.conversation import Call, Tool
from fctune.data.sources.defects import RowError
from fctune.data.sources.row_json import MAX_VALUE_DEPTH, check_depth
from tests.conftest import ROOT
from tests.tasks.benchmarks.bfcl.bfcl_wheel import SOURCE_CATEGORIES, gold_calls, load_cases, needs_wheel, python_cases

GOLDEN = Path(__file__).parents[2].parent / "shared" / "data" / "rendered_formats"
WEATHER = Tool(
    {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    }
)
PARIS = Call("get_weather", {"city": "Paris", "days": 3})
ROME = Call("get_weather", {"city": "Rome"})
each_format = pytest.mark.parametrize("call_format", list(FORMATS.values()), ids=list(FORMATS))
each_reading = pytest.mark.parametrize("lenient", [False, True], ids=["strict", "lenient"])


def assert_reads_back(call_format: CallFormat, calls: list[Call], tools: tuple[Tool, ...], lenient: bool) -> None:
    text = call_format.render(calls, tools)
    parsed = call_format.parse(text, tools, lenient=lenient)
    assert (list(parsed.calls), parsed.malformed, parsed.prose) == (calls, (), ""), text
    for call, given_call in zip(calls, parsed.calls, strict=True):
        assert is_equal(call.arguments, given_call.arguments, is_same_number_type=True), text


@pytest.mark.sample(16)
@needs_wheel
@pytest.mark.parametrize("lenient", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["strict", "lenient"])
@each_format
def test_every_gold_call_is_read_back_unchanged(call_format: CallFormat, lenient: bool) -> None:
    cases = list(python_cases())
    assert len(cases) == 2351
    for case in [*cases, *(case for category in SOURCE_CATEGORIES for case in load_cases(category))]:
        assert_reads_back(call_format, gold_calls(case), case.tools, lenient)


values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    | st.sampled_from(
        [
            "</tool_call>",
            "</parameter>",
            "a\n</think>\n",
            "<json>1</json>",
            "null",
            "5",
            " 5 ",
            "\n",
            "'",
            '"',
            "\\",
            "]",
        ]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
schemas = st.sampled_from(
    [None, {}, {"type": "string"}, {"type": "integer"}, {"type": "float"}, {"type": "boolean"}, {"type": "array"},
     {"type": "dict"}, {"type": "any"}, {"type": ["string", "null"]}, {"type": "string", "default": None}]
)  # fmt: skip
names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.\-]{0,9}", fullmatch=True)


@st.composite
def calls_with_tools(draw: st.DrawFn) -> tuple[list[Call], tuple[Tool, ...]]:
    calls = draw(st.lists(st.builds(Call, names, st.dictionaries(names, values, max_size=3)), min_size=1, max_size=3))
    tools = []
    for name in dict.fromkeys(call.name for call in calls):
        given = {key: draw(schemas) for call in calls for key in call.arguments}
        properties = {key: schema for key, schema in given.items() if schema is not None}
        tools.append(Tool({"name": name, "parameters": {"type": "object", "properties": properties}}))
    return calls, tuple(tools)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(drawn=calls_with_tools())
def test_any_call_is_read_back_unchanged_in_every_format(drawn: tuple[list[Call], tuple[Tool, ...]]) -> None:
    calls, tools = drawn
    for call_format in FORMATS.values():  # drawing takes longer than reading
        assert_reads_back(call_format, calls, tools, lenient=False)


@pytest.mark.real_data
@pytest.mark.skipif(not GOLDEN.is_dir(), reason="../shared/data is not here")
@pytest.mark.parametrize(
    ("file", "name", "is_single", "is_parallel"),
    [
        ("qwen2_5.txt", "hermes", True, True),
        ("qwen3.txt", "hermes", True, True),
        ("qwen3_instruct_2507.txt", "hermes", True, True),
        ("llama3_1.txt", "llama3_json", True, False),
        ("llama3_2.txt", "llama3_json", True, False),
        ("mistral_common.txt", "mistral_v3", False, True),
        ("mistral_common.txt", "mistral_v7", False, True),
        ("mistral_common.txt", "mistral_v11", False, True),
        ("mistral_common.txt", "mistral_v13", False, True),
        ("qwen3_5_nothink.txt", "qwen3_coder", True, True),
        ("nemotron_3_nano.txt", "qwen3_coder", True, True),
        ("deepseekv3.txt", "deepseek_v3", True, True),
        ("glm4moe.txt", "glm45", True, True),
        ("gptoss.txt", "gpt_oss", True, False),
        ("lfm2_2_5.txt", "lfm", True, True),
    ],
)
def test_calls_are_rendered_as_by_the_official_templates(
    file: str, name: str, is_single: bool, is_parallel: bool
) -> None:
    text = (GOLDEN / file).read_text(encoding="utf-8")
    call_format = get_format(name)
    has_ids = name in ("mistral_v3", "mistral_v7", "mistral_v11")
    ids = ("abcdef123", "abcdef124") if has_ids else (None, None)
    pair = [Call("get_weather", {"city": city}, call_id) for city, call_id in zip(("Paris", "Rome"), ids, strict=True)]
    for calls, is_there in (([PARIS], is_single), (pair, is_parallel)):
        if is_there:
            assert call_format.render(calls) in text
            assert call_format.render(calls, [WEATHER]) in text
            assert call_format.parse(call_format.render(calls), [WEATHER]).calls == tuple(calls)


def test_cohere_calls_are_rendered_as_by_coheres_own_renderer() -> None:
    melody = pytest.importorskip("cohere_melody")
    calls = [PARIS, Call("note", {"text": 'Größe\n"x" </a>', "more": [None, True, {"k": 1.5}]}), Call("ping", {})]
    written = [{"id": call.name, "name": call.name, "parameters": json.dumps(call.arguments)} for call in calls]
    user = {"role": "user", "content": [{"type": "text", "text": "Hi."}]}
    for render in (melody.render_cmd3, melody.render_cmd4):
        text = render({"messages": [user, {"role": "chatbot", "content": [], "tool_calls": written}]})
        assert get_format("cohere").render(calls) in text


needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="trl is not installed: pip install --no-deps trl"
)


@needs_trl
def test_the_format_of_official_templates_is_detected() -> None:
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations
    templates = Path(spec.submodule_search_locations[0]) / "chat_templates"
    expected = {
        "qwen2_5": "hermes", "qwen3": "hermes", "qwen3_instruct_2507": "hermes", "llama3_1": "llama3_json",
        "llama3_2": "llama3_json", "qwen3_5_nothink": "qwen3_coder", "nemotron_3_nano": "qwen3_coder",
        "deepseekv3": "deepseek_v3", "glm4moe": "glm45", "gptoss": "gpt_oss", "lfm2_2_5": "lfm", "gemma4": "gemma4",
        "gemma4_v2": "gemma4", "gemma4_v3": "gemma4", "gemma4_v4": "gemma4", "gemma4_v5": "gemma4",
        "diffusion_gemma": "gemma4", "muse_glimmer": "muse", "qwen3_5_think": "qwen3_coder", "qwen3_6": "qwen3_coder",
        "qwen3_8": "qwen3_coder", "qwen3_vl": "hermes", "nemotron_3_super": "qwen3_coder", "lfm2_v2": "lfm",
    }  # fmt: skip
    for file, name in expected.items():
        assert detect_format((templates / f"{file}.jinja").read_text(encoding="utf-8")).name == name
    for file in ("llama3", "gemma3", "phi3"):
        with pytest.raises(DataError, match="--format"):
            detect_format((templates / f"{file}.jinja").read_text(encoding="utf-8"))


ODD = Call(
    "note", {"text": 'Größe\n"x" {a: [1]}, b', "ratio": 1e21, "on": True, "more": [1, -2.5, {"k": "v", "B": [False]}]}
)


@needs_trl
@pytest.mark.parametrize(
    ("file", "name", "has_null"),
    [
        ("gemma4", "gemma4", False),
        ("gemma4_v3", "gemma4", False),
        ("gemma4_v5", "gemma4", True),
        ("diffusion_gemma", "gemma4", False),
        ("muse_glimmer", "muse", True),
        ("qwen3_6", "qwen3_coder", True),
        ("qwen3_8", "qwen3_coder", True),
    ],
)
def test_parallel_calls_are_rendered_as_by_a_template_and_read_from_its_rendering(
    file: str, name: str, has_null: bool
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0]) / "chat_templates" / f"{file}.jinja"
    calls = [PARIS, ODD, Call("ping", {}), *([Call("note", {"text": None})] if has_null else [])]
    message = {"role": "assistant", "content": "", "tool_calls": [call.to_openai() for call in calls]}
    rendered, _ = render_jinja_template(
        conversations=[[{"role": "user", "content": "Hi."}, message]],
        chat_template=source.read_text(encoding="utf-8"),
        bos_token="<bos>",
    )
    call_format = get_format(name)
    assert call_format.render(calls) in rendered[0]
    assert list(call_format.parse(rendered[0]).calls) == calls


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("""{{ '<tool_call>\\n{"name": "' + c.name + '", "arguments": ' + c.arguments|tojson }}""", "hermes"),
        ("""{{ '<tool_call>\\n<function=' + c.name + '>\\n<parameter=' + key + '>' }}""", "qwen3_coder"),
        ("{{ '<tool_call>' + c.name }}<arg_key>{{ k }}</arg_key>", "glm45"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral_v3"),
        ("{{ '[TOOL_CALLS] [' }}{{ '[TOOL_RESULTS]' + id + '[TOOL_CONTENT]' }}", "mistral_v7"),
        ("{{ '[TOOL_CALLS]' + c.name + '[CALL_ID]' + c.id + '[ARGS]' }}", "mistral_v11"),
        ("{{ '[TOOL_CALLS]' + c.name + '[ARGS]' }}", "mistral_v13"),
        ("respond with <|tool_call|> followed by a JSON list of tools used", "granite3"),
        ("<|start_header_id|>{{ '{\"name\": \"' + c.name + '\", ' }}{{ '\"parameters\": ' }}", "llama3_json"),
        ("<|header_start|>{{ '{\"name\": \"' + c.name + '\", ' }}{{ '\"parameters\": ' }}", "llama4_json"),
        ("<|start_header_id|> you MUST put it in the format of [func_name1(a=b), func_name2()]", "pythonic"),
        ("<|start_header_id|> make calls in a single JSON array: [{\"name\": ...", "xlam"),
        ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + c.name + '<｜tool▁sep｜>' }}", "deepseek_v31"),
        ("{{ '<functioncall> ' }}", "glaive"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>", "kimi_k2"),
        ("<|tool|>{{ tools }}<|/tool|>{{ '<|tool_call|>' + (c|tojson) + '<|/tool_call|>' }}", "phi4_mini"),
        ("<|tool|>{{ message['tools'] }}<|/tool|>", "phi4_mini"),
        ('formatted as functools[{"name": [function name], "arguments": ...}]', "functools"),
        ("{{ '<function_calls>' }}{{ c.name }}({{ k ~ '=' ~ (v|tojson) }}){{ '</function_calls>' }}", "olmo3"),
        ("<tool_call>\\n{arguments}</tool_call>, Python code between '<code>' and '</code>' tags", "hermes"),
        ("Python code between '<code>' and '</code>' tags", "smollm3_code"),
        ("{{ '<TOOLCALL>[' }}", "nemotron_list"),
        ("<|START_ACTION|>[{{ '{\"tool_call_id\": \"0\", \"tool_name\": ' }}", "cohere"),
        ("{{ '<|tool_call>call:' + c.name + '{' }}", "gemma4"),
        ("{{ '<start_function_call>call:' + c.name + '{' }}", "functiongemma"),
        ("{% set begin = '<minimax:tool_call>' %}{{ '<invoke name=\"' + c.name }}", "minimax_m2"),
        ("{% for c in tool_calls %}{{ '<｜DSML｜function_calls>' }}", "deepseek_v32"),
        ("{% set dsml = '｜DSML｜' %}{{ '<' + dsml + 'tool_calls>' }}", "deepseek_v4"),
        ("{% for c in tool_calls %}{{ '<｜DSML｜ calls>' }}", "deepseek_v41"),
        ("{{ '<atem:function_calls>\\n<atem:invoke name=\"' + c.name }}", "muse"),
        ("[SYSTEM_PROMPT]{{ '[TOOL_CALLS]' + c.name + '[ARGS]' + arguments }}", "mistral_v13"),
        ("{{ '<seed:tool_call>\\n<function=' + c.name + '>\\n<parameter=' + key + '>' }}", "seed_oss"),
        ("{{ '<response>' }}{{ '<tool_call>\\n{\"name\": ' }}{{ c.arguments }}", "ernie45"),
        ("{{ '<longcat_tool_call>\\n' + {'arguments': a}|tojson }}", "longcat"),
        ("{{ '<|bom|><tool_calls>[' }}", "jamba"),
        ("{{ '<|extra_0|><tool_calls>' }}", "hunyuan_a13b"),
        ("{{ '<dots_function_call>\\n<invoke name=\"' + c.name }}", "dots"),
        ("{{ '<|tools_prefix|>[' }}", "apertus"),
    ],
)  # fmt: skip
def test_the_format_is_detected_from_the_marks_in_a_template(template: str, name: str) -> None:
    assert detect_format(template).name == name


def test_an_unknown_format_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean hermes") as error:
        get_format("hermez")
    assert all(name in str(error.value) for name in FORMATS)


def test_every_model_family_names_one_format() -> None:
    aliases = [alias for call_format in FORMATS.values() for alias in call_format.aliases]
    assert len(aliases) == len(set(aliases))
    assert not set(aliases) & FORMATS.keys()
    for call_format in FORMATS.values():
        assert [get_format(name) for name in (call_format.name, *call_format.aliases)] == [call_format] * (
            1 + len(call_format.aliases)
        )


@pytest.mark.parametrize("server", SERVERS)
def test_a_server_reads_most_formats_by_a_parser_of_its_own(server: Server) -> None:
    parsers = {name: call_format.get_server_parser(server) for name, call_format in FORMATS.items()}
    assert parsers["hermes"] == "hermes"
    assert parsers["glaive"] is None
    assert sum(parser is not None for parser in parsers.values()) >= 12


NEW_FORMAT = """
import json
from fctune.calls.formats.base import CallFormat, TemplateSignature
from fctune.data.conversation import Call

class Shout(CallFormat):
    name = "shout"
    aliases = ("shouter",)
    template_signatures = (TemplateSignature(("CALL!",)),)
    vllm_parser = "loud"

    def render(self, calls, tools=()):
        return "".join(f"CALL!{json.dumps([call.name, call.arguments])}" for call in calls)

    def _read(self, state, tools, lenient):
        for piece in state.text[:state.end].split("CALL!")[1:]:
            end = state.find(piece, state.position) + len(piece)
            state.add_calls([Call(*json.loads(piece))], end - len(piece) - 5, end)
"""
USE_NEW_FORMAT = """
from fctune.calls.formats import registry
from fctune.data.conversation import Call
shout = registry.get_format("shouter")
assert shout is registry.FORMATS["shout"] is registry.detect_format("{{ 'CALL!' }}")
assert shout.get_server_parser("vllm") == "loud" and shout.get_server_parser("sglang") is None
assert shout.parse(shout.render([Call("f", {"a": 1})])).calls == (Call("f", {"a": 1}),)
"""


def test_a_format_is_added_by_one_file(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "fctune", tmp_path / "fctune", ignore=shutil.ignore_patterns("__pycache__", "assets"))
    (tmp_path / "fctune" / "calls" / "formats" / "shout.py").write_text(NEW_FORMAT)
    done = subprocess.run([sys.executable, "-c", USE_NEW_FORMAT], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def nest(levels: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(levels - 1):
        value = [value]
    return {"a": value}


@each_format
def test_a_call_of_the_greatest_depth_in_a_row_is_read_back(call_format: CallFormat) -> None:
    arguments = nest(MAX_VALUE_DEPTH)
    check_depth(arguments, "arguments")
    for lenient in (False, True):
        assert_reads_back(call_format, [Call("f", arguments)], (), lenient)
    with pytest.raises(RowError, match="nested deeper than 126 levels"):
        check_depth(nest(MAX_VALUE_DEPTH + 1), "arguments")


LLAMA4 = '<|python_start|><|python_end|>{"name": "f", "parameters": {"a": 1}}'
HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
F1 = (Call("f", {"a": 1}),)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'
)
COHERE = '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}\n]<|END_ACTION|>'


DSML = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
MINIMAX = '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n</minimax:tool_call>'
ATEM = (
    '<atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>\n'
    "</atem:function_calls>"
)


# The result of the strict and of the lenient reading: the calls, or the beginning of the reason.
@pytest.mark.parametrize(
    ("name", "text", "strict", "lenient"),
    [
        ("hermes", HERMES, F1, F1),
        ("hermes", "Sure.\n" + HERMES + "<|im_end|>\n", F1, F1),
        ("hermes", HERMES[:-12], "not closed", F1),
        ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "unknown key", F1),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "arguments: expected", F1),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "missing 'arguments'", (Call("f", {}),)),
        ("hermes", "<tool_call>{'name': 'f', 'arguments': {'a': 1}}</tool_call>", "expected a key in", F1),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 2, "a": 1}}</tool_call>', "duplicate key 'a'", F1),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is not", "NaN is not"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "the number", "the number"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "arguments: e", "arguments: e"),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', "missing name", "missing name"),
        ("hermes", "<tool_call></tool_call>", "unexpected end", "unexpected end"),
        ("hermes", '{"name": "f", "arguments": {"a": 1}}', (), F1),
        ("gemma4", "<|tool_call>call:f{a:1}<tool_call|><turn|>", F1, F1),
        ("gemma4", '<|tool_call>call:f{a:<|"|>}<tool_call|><|"|>}<tool_call|>', (Call("f", {"a": "}<tool_call|>"}),),
         (Call("f", {"a": "}<tool_call|>"}),)),
        ("gemma4", "<|tool_call>call:f{a:1}", "not closed by", F1),
        ("gemma4", '<|tool_call>call:f{a:<|"|>x', 'not closed by <|"|>', (Call("f", {"a": "x"}),)),
        ("gemma4", "<|tool_call>:f{a:1}<tool_call|>", "expected call:", F1),
        ("gemma4", "<|tool_call>call:f{a:x}<tool_call|>", "expected a value", (Call("f", {"a": "x"}),)),
        ("gemma4", '<|tool_call>call:f{<|"|>a<|"|>:1}<tool_call|>', F1, F1),
        ("gemma4", "<|tool_call>call:f{a:2,a:1}<tool_call|>", "duplicate key 'a'", F1),
        ("gemma4", "<|tool_call>f(a=1)<tool_call|>", "expected call:", "expected call:"),
        ("gemma4", "call:f{a:1}", (), ()),
        ("functiongemma", "<start_function_call>call:f{a:1}<end_function_call><start_function_response>", F1, F1),
        ("functiongemma", "<start_function_call>call:f{a:<escape>1}<end_function_call>", "not closed by <escape>",
         (Call("f", {"a": "1}"}),)),
        ("deepseek_v4", "So.\n\n" + DSML + "<｜end▁of▁sentence｜>", F1, F1),
        ("deepseek_v4", DSML.replace("tool_calls", "toolcalls"), "not opened by", F1),
        ("deepseek_v4", DSML.replace(' string="false"', ""), F1, F1),
        ("deepseek_v4", DSML.replace("false", "true"), (Call("f", {"a": "1"}),), (Call("f", {"a": "1"}),)),
        ("deepseek_v4", DSML[: DSML.index("</｜DSML｜invoke>")], "not closed by </｜DSML｜invoke>", F1),
        ("deepseek_v32", DSML, "not opened by <｜DSML｜function_calls>", F1),
        ("deepseek_v32", '<｜DSML｜invoke name="f">{"a": 1}</｜DSML｜invoke>', "not closed by", F1),
        ("deepseek_v41", DSML.replace("｜DSML｜", "｜DSML｜ ").replace("tool_calls", "calls"), F1, F1),
        ("deepseek_v41", DSML, (), ()),
        ("minimax_m2", MINIMAX + "[e~[", F1, F1),
        ("minimax_m2", MINIMAX[20:], "not opened by", F1),
        ("minimax_m2", MINIMAX.replace("</invoke>\n", ""), "not closed by </invoke>", F1),
        ("minimax_m2", MINIMAX.replace('"a"', "a"), "expected <parameter", "expected <parameter"),
        ("muse", " to=f<|message|>" + ATEM + "<|eot|>", F1, F1),
        ("muse", " to=user<|message|>Yes.<|eom|><|start|>assistant to=f<|message|>" + ATEM, F1, F1),
        ("muse", " to=self<|message|>" + ATEM + "<|eom|><|start|>assistant to=user<|message|>" + ATEM, (), ()),
        ("muse", ATEM, (), F1),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', F1, F1),
        ("llama3_json", '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}<|eom_id|>', F1, F1),
        ("llama3_json", '[{"name": "f", "parameters": {"a": 1}}]', (), F1),
        ("llama3_json", 'I call {"name": "f", "parameters": {"a": 1}}', (), F1),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}} there', "text after", F1),
        ("llama3_json", '{"answer": 42}', (), ()),
        ("llama3_json", "<|python_tag|>print(1)", "expected a JSON", "no call after"),
        ("llama4_json", LLAMA4, F1, F1),
        ("llama4_json", LLAMA4.replace("><", ">Look.<") + "<|eot|>", F1, F1),
        ("llama4_json", LLAMA4[18:], (), F1),
        ("llama4_json", LLAMA4.replace("<|python_end|>", ""), "not closed by", F1),
        ("llama4_json", LLAMA4.replace('"parameters"', '"arguments"'), "unknown key 'arguments'", F1),
        ("llama4_json", "<|python_start|>Look.<|python_end|>", "no call after", ()),
        ("pythonic", "[f(a=1)]", F1, F1),
        ("pythonic", "<|python_start|>[f(a=1)]<|python_end|><|eot|>", F1, F1),
        ("pythonic", "<|python_tag|>[f(a=1)]", F1, F1),
        ("pythonic", "f(a=1)", (), F1),
        ("pythonic", "```python\n[f(a=1)]\n```", (), F1),
        ("pythonic", "[f(a=1)] Done.", "text after", F1),
        ("pythonic", "[f(1)]", "expected an argument", ()),
        ("pythonic", "[f(a=x)]", "expected a value, got the name 'x'", (Call("f", {"a": "x"}),)),
        ("pythonic", "[f(a=true)]", "expected a value, got the name 'true'", (Call("f", {"a": True}),)),
        ("pythonic", "[f(a=g(b=1))]", "expected a value, got the name 'g'", (Call("f", {"a": "g(b=1)"}),)),
        ("pythonic", "[f(a=3 - 2 * 2 ** 0)]", F1, F1),
        ("pythonic", "[f(a='x' 'y', b=-1.5e3, c=[True, None], d={'k': (1,)})]",
         (Call("f", {"a": "xy", "b": -1500.0, "c": [True, None], "d": {"k": [1]}}),),
         (Call("f", {"a": "xy", "b": -1500.0, "c": [True, None], "d": {"k": [1]}}),)),
        ("pythonic", "[1, 2]", (), ()),
        ("pythonic", "[f(a='<|python_tag|>')]", (Call("f", {"a": "<|python_tag|>"}),),
         (Call("f", {"a": "<|python_tag|>"}),)),
        ("pythonic", "f(a='<|python_tag|>')", (), (Call("f", {"a": "<|python_tag|>"}),)),
        ("mistral_v3", '[{"name": "f", "arguments": {"a": "[TOOL_CALLS]"}}]', (), (Call("f", {"a": "[TOOL_CALLS]"}),)),
        ("mistral_v3", 'So {"name": "g", "arguments": {}} [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', F1, F1),
        ("mistral_v3", 'Hm.[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]</s>', F1, F1),
        ("mistral_v3", '[{"name": "f", "arguments": {"a": 1}}]', (), F1),
        ("mistral_v3", "[TOOL_CALLS] nothing", "expected a JSON", "no call after"),
        ("mistral_v11", '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}', (Call("f", {"a": 1}, "abc"),),
         (Call("f", {"a": 1}, "abc"),)),
        ("mistral_v13", '[TOOL_CALLS]f{"a": 1}', "no [ARGS]", "no [ARGS]"),
        ("mistral_v13", '[TOOL_CALLS]f [x][ARGS]{"a": 1}', "no name after", (Call("f [x]", {"a": 1}),)),
        ("xlam", '[{"name": "f", "arguments": {"a": 1}}]', F1, F1),
        ("xlam", "[]", (), ()),
        ("xlam", "[1, 2]", (), ()),
        ("xlam", '```json\n[{"name": "f", "arguments": {"a": 1}}]\n```', (), F1),
        ("xlam", '[{"name": 1}]', "missing 'arguments'", "missing name"),
        ("granite3", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|end_of_text|>', F1, F1),
        ("granite3", '<tool_call>[{"name": "f", "arguments": {"a": 1}}]', (), F1),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", F1, F1),
        ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", (), F1),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>", "not closed", F1),
        ("qwen3_coder", "<tool_call>\n<function=f and g>\n</function>\n</tool_call>", "no name in", "no name in"),
        ("qwen3_coder", "<tool_call>\n{}\n</tool_call>", "expected <function=", "expected <function="),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", F1, F1),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>", "not closed", F1),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": 1}\n```"
         "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>", F1, F1),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>"
         "<｜tool▁calls▁end｜>", "expected a function name", F1),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>"
         "<｜tool▁calls▁end｜>", F1, F1),
        ("gpt_oss", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
         '<|constrain|>json<|message|>{"a": 1}<|call|>', F1, F1),
        ("gpt_oss", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', F1, F1),
        ("gpt_oss", " to=functions.f<|channel|>commentary json", "no <|message|>", "no <|message|>"),
        ("gpt_oss", "<|channel|>final<|message|>Write to=functions.f there.<|return|>", (), ()),
        ("lfm", "<|tool_call_start|>[f(a=1)]<|tool_call_end|>Checking.", F1, F1),
        ("lfm", "<|tool_call_start|>[f(a=1)]", "not closed", F1),
        ("lfm", '<|tool_call_start|>[f(a={"b": null})]<|tool_call_end|>', (Call("f", {"a": {"b": None}}),),
         (Call("f", {"a": {"b": None}}),)),
        ("glaive", '<functioncall> {"name": "f", "arguments": \'{"a": 1}\'} <|endoftext|>', F1, F1),
        ("glaive", '<functioncall> {"name": "f", "arguments": {"a": 1}}', "no arguments in", F1),
        ("glaive", '<functioncall> {"name": "f", "arguments": \'{"a": "it\'s"}\'}', (Call("f", {"a": "it's"}),),
         (Call("f", {"a": "it's"}),)),
        ("kimi_k2", KIMI, F1, F1),
        ("kimi_k2", f"So: {KIMI}<|im_end|>", F1, F1),
        ("kimi_k2", KIMI.replace("<|tool_call_end|>", ""), "not closed by <|tool_call_e", F1),
        ("kimi_k2", KIMI.removeprefix("<|tool_calls_section_begin|>"), "not opened by", "not opened by"),
        ("kimi_k2", KIMI.replace("functions.", ""), "expected functions.NAME", F1),
        ("kimi_k2", KIMI.replace("f:0", "f"), "expected functions.NAME", "expected functions.NAME"),
        ("kimi_k2", KIMI.replace('{"a": 1}', ""), "expected a JSON", (Call("f", {}),)),
        ("kimi_k2", KIMI.replace('{"a": 1}', "[1]"), "the arguments are not", "the arguments are not"),
        ("phi4_mini", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|><|end|>', F1, F1),
        ("phi4_mini", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', "not closed by", F1),
        ("phi4_mini", '<|tool_call|>{"name": "f", "arguments": {"a": 1}}<|/tool_call|>', "expected a list", F1),
        ("functools", 'functools[{"name": "f", "arguments": {"a": 1}}]', F1, F1),
        ("functools", "Use functools.reduce([1]).", (), ()),
        ("functools", 'functools[{"name": "f", "parameters": {"a": 1}}]', "unknown key", F1),
        ("olmo3", "<function_calls>f(a=1)</function_calls><|im_end|>", F1, F1),
        ("olmo3", "<function_calls>\nf(a=1)\n</function_calls>", F1, F1),
        ("olmo3", "<function_calls>f(a=1), f(a=1)</function_calls>", "text after a call", "text after a call"),
        ("olmo3", "<function_calls>f(a=1)", "expected a function", F1),
        ("olmo3", "<function_calls>f(1)</function_calls>", "expected an arg", "expected an arg"),
        ("olmo3", "<function_calls>\n</function_calls>", "no call after", "no call after"),
        ("olmo3", "f(a=1)", (), F1),
        ("olmo3", '<function_calls>f(a="</function_calls>")</function_calls>',
         (Call("f", {"a": "</function_calls>"}),), (Call("f", {"a": "</function_calls>"}),)),
        ("smollm3_code", "<code>\nf(a=1)\n</code>", F1, F1),
        ("smollm3_code", "<code>\nx = f(a=1)\nprint(x)\n</code>", "expected '('", F1),
        ("smollm3_code", "<code>\nprint(f(a=1), datetime.now())\n</code>", "expected an arg", F1),
        ("smollm3_code", "<code>\nx = 1\n</code>", "expected '('", "expected '('"),
        ("smollm3_code", "<code>\nx = f(a=1", "expected '('", "expected ','"),
        ("nemotron_list", '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>\n<SPECIAL_12>', F1, F1),
        ("nemotron_list", '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]', "not closed by", F1),
        ("nemotron_list", '<TOOLCALL>[{"name": "f", "arguments": "{}"}]</TOOLCALL>', "arguments: ex", (Call("f", {}),)),
        ("cohere", COHERE, F1, F1),
        ("cohere", f"Plan. {COHERE}<|END_OF_TURN_TOKEN|>", F1, F1),
        ("cohere", COHERE.removesuffix("<|END_ACTION|>"), "not closed by", F1),
        ("cohere", COHERE.replace("tool_name", "name"), "unknown key 'name'", F1),
        ("cohere", COHERE.replace("parameters", "arguments"), "unknown key 'arguments'", F1),
        ("cohere", "<|START_ACTION|>[]<|END_ACTION|>", (), "no call after"),
        ("apertus", 'Yes. <|tools_prefix|>[{"f": {"a": 1}}]<|tools_suffix|>', F1, F1),
        ("apertus", '<|tools_prefix|>[{"f": {"a": 1}}]', "not closed by", F1),
        ("apertus", '<|tools_prefix|>[{"f": {"a": 1}, "g": {}}]<|tools_suffix|>', "expected an object", "expected an"),
        ("apertus", '<|tools_prefix|>[{"f": [1]}]<|tools_suffix|>', "f: expected an object", "no call after"),
        ("jamba", '<tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>', F1, F1),
        ("hunyuan_a13b", '<tool_calls>[{"name": "f", "arguments": {"a": 1}}]', "not closed by", F1),
        ("ernie45", f"<response>\nSure.\n</response>\n{HERMES}\n", F1, F1),
        ("longcat", HERMES.replace("tool_call>", "longcat_tool_call>"), F1, F1),
        ("longcat", HERMES, (), F1),
        ("seed_oss", "<seed:tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</seed:tool_call>",
         F1, F1),
        ("seed_oss", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", (), F1),
        ("dots", MINIMAX.replace("minimax:tool_call", "dots_function_call"), F1, F1),
        ("dots", MINIMAX, "not opened by", F1),
    ],
)  # fmt: skip
def test_the_strict_and_the_lenient_result(name: str, text: str, strict: Any, lenient: Any) -> None:
    tools = [Tool({"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}})]
    for is_lenient, expected in ((False, strict), (True, lenient)):
        parsed = get_format(name).parse(text, tools, lenient=is_lenient)
        if isinstance(expected, str):
            assert not parsed.calls, (is_lenient, parsed)
            assert [span.reason[: len(expected)] for span in parsed.malformed] == [expected], (is_lenient, parsed)
        else:
            assert (parsed.calls, parsed.malformed if expected else ()) == (expected, ()), (is_lenient, parsed)


@each_format
@pytest.mark.parametrize(
    "text",
    [
        '```json\n{"name": "f", "arguments": {"a": 1}}\n```',
        '```\n{"name": "f", "arguments": {"a": 1}}\n```<|im_end|>',
        'I call it.\n```json\n{\n  "name": "f",\n  "arguments": {"a": 1}\n}\n```',
        '{"name": "f", "arguments": {"a": 1}}',
        '[{"name": "f", "parameters": {"a": 1}}]',
        '{"type": "function", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}',
        "<tools>\n{'name': 'f', 'arguments': {'a': 1}}\n</tools>",
    ],
)
def test_bare_and_fenced_calls_of_offered_tools_are_found_leniently(call_format: CallFormat, text: str) -> None:
    tools = [Tool({"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}})]
    strict, lenient = call_format.parse_both(text, tools)
    assert (lenient.calls, lenient.malformed) == (F1, ())
    if call_format.name not in ("llama3_json", "xlam"):
        assert (strict.calls, strict.malformed) == ((), ())


def test_a_section_of_calls_that_is_not_closed_is_malformed_beside_its_calls() -> None:
    strict, lenient = get_format("kimi_k2").parse_both(KIMI.removesuffix("<|tool_calls_section_end|>"))
    assert (strict.calls, lenient.calls, lenient.malformed) == (F1, F1, ())
    assert [span.reason for span in strict.malformed] == ["not closed by <|tool_calls_section_end|>"]


def test_several_fenced_calls_are_found_in_order() -> None:
    text = '```json\n{"name": "f", "arguments": {"a": 1}}\n```\nand\n```json\n[{"name": "g", "arguments": {}}]\n```'
    parsed = get_format("hermes").parse(text, [Tool({"name": "f"}), Tool({"name": "g"})], lenient=True)
    assert (parsed.calls, parsed.prose) == ((*F1, Call("g", {})), "and")


@pytest.mark.parametrize(
    "text",
    [
        '```json\n{"name": "g", "arguments": {"a": 1}}\n```',
        '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]',
        '{"name": "f", "description": "A tool.", "parameters": {"type": "object"}}',
        '{"type": "function", "function": {"name": "f", "description": "A tool.", "parameters": {}}}',
        '{"name": "f"}',
        'One could write {"name": "f", "arguments": {}} here.',
        '{"name": "f", "arguments": {}} is an example.',
    ],
)
def test_other_objects_are_no_bare_calls(text: str) -> None:
    for tools in ([Tool({"name": "f"})], []):
        parsed = get_format("hermes").parse(text, tools, lenient=True)
        assert (parsed.calls, parsed.malformed, parsed.prose) == ((), (), text)


def test_calls_prose_and_malformed_spans_have_their_positions() -> None:
    text = f"First.\n{HERMES}\nThen.\n<tool_call>oops</tool_call>\nLast.\n{HERMES}<|im_end|>"
    parsed = get_format("hermes").parse(text)
    assert [text[start:end] for start, end in parsed.spans] == [HERMES, HERMES]
    (span,) = parsed.malformed
    assert text[span.start : span.end] == "<tool_call>oops</tool_call>"
    assert parsed.prose.split() == ["First.", "Then.", "Last."]


def test_a_call_inside_a_string_is_part_of_the_string() -> None:
    call = Call("say", {"text": HERMES, "more": '[TOOL_CALLS][{"name": "g", "arguments": {}}] [g(x=1)] </s>'})
    for call_format in FORMATS.values():
        assert_reads_back(call_format, [call], (), lenient=False)


@pytest.mark.parametrize(
    "code",
    ["__import__('os').system('true')", "(lambda: 1)()", "[x for x in (1,)]", "open('/x','w')", "f'{1}'", "b'x'",
     "1 if 1 else 2", "9**9**9", "1e308*10", "'a'*10", "x.y", "not 1", "1 < 2", "*[1]", "1/0"],
)  # fmt: skip
def test_code_in_an_argument_is_never_evaluated(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("something was evaluated")

    with monkeypatch.context() as patch:
        for name in ("eval", "exec", "compile"):
            patch.setattr(f"builtins.{name}", forbidden)
        strict = get_format("pythonic").parse(f"[f(a={code})]")
        lenient = get_format("pythonic").parse(f"[f(a={code})]", lenient=True)
    assert not strict.calls
    assert strict.malformed
    assert all(isinstance(value, str) for call in lenient.calls for value in call.arguments.values())


@each_reading
@each_format
def test_no_text_is_lost_and_no_text_raises(call_format: CallFormat, lenient: bool) -> None:
    rng = random.Random(call_format.name)
    pieces = [*HOSTILE_PIECES, call_format.render([PARIS], [WEATHER]), call_format.render([PARIS, ROME], [WEATHER])]
    for _ in range(400):
        text = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 12)))
        parsed = call_format.parse(text, [WEATHER], lenient=lenient)
        covered = sorted({*parsed.spans, *((span.start, span.end) for span in parsed.malformed)})
        assert all(0 <= start < end <= len(text) for start, end in covered), text
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(covered)), (text, parsed)
        rest, position = [], 0
        for start, end in [*covered, (len(text), len(text))]:
            rest.append(text[position:start])
            position = end
        # Prose is the rest, letter by letter, without the marks of the format itself.
        assert _without_marks(parsed.prose) == _without_marks("".join(rest)), (text, parsed)
        assert len(parsed.calls) == len(parsed.spans)


def _without_marks(text: str) -> str:
    return _MARKS.sub("", text)


# Ends of a turn, marks before calls, headers of messages, an empty list of calls, separators of calls.
_MARKS = re.compile(
    "|".join([
        *map(re.escape, TURN_ENDS), r"<\|start\|>\s*assistant", "to=(?:functions.f|get_weather)",
        r"<\|python_(?:tag|start|end)\|>", r"\[TOOL_CALLS\]", r"<\|tool_call\|>", "<｜tool▁calls▁(?:begin|end)｜>",
        r"<\|tool_call_(?:start|end)\|>", r"<\|start\|>[\w.\-]*\s*<\|message\|>", r"<\|(?:message|start|end|call)\|>",
        r"<\|/tool_call\|>", r"<\|tool_calls_section_(?:begin|end)\|>", "functools(?:\\[)?", "</?TOOLCALL>",
        r"<\|(?:START|END)_ACTION\|>", "</?code>", r"\[\]", ";", r"\s",
        "</?｜DSML｜ ?(?:function_|tool_)?calls>", "</?(?:minimax:tool_call|atem:function_calls)>",
        r"<\|eo[mt]\|>", "</?(?:tool_calls|dots_function_call|response)>", r"<\|tools_(?:prefix|suffix)\|>",
    ])
)  # fmt: skip


@pytest.mark.sample(12)
@each_format
def test_parse_both_equals_two_calls_of_parse(call_format: CallFormat) -> None:
    """The lenient reading is skipped only where its result would be the same."""
    rng = random.Random(call_format.name)
    complete = [call_format.render(calls, [WEATHER]) for calls in ([PARIS], [PARIS, ROME], [Call("g", {})])]
    num_skipped = 0
    for _ in range(1500):
        text = "".join(rng.choice([*complete, " ", "\n", "; ", ", "]) for _ in range(rng.randint(1, 3)))
        for _ in range(rng.randint(0, 2)):
            cut = rng.randrange(len(text) + 1)
            text = text[:cut] + rng.choice(HOSTILE_PIECES) + text[cut + rng.randint(0, 2) :]
        strict, lenient = call_format.parse_both(text, [WEATHER])
        assert strict == call_format.parse(text, [WEATHER]), text
        expected = call_format.parse(text, [WEATHER], lenient=True)
        assert (lenient.calls, lenient.malformed) == (expected.calls, expected.malformed), text
        num_skipped += lenient is strict
    assert num_skipped > 50


HOSTILE_PIECES = [
    "<tool_call>", "</tool_call>", '{"name": "', '{"name": "f", "arguments": {"a": ', "[f(a=", "f(a=", "'", '"', "\\",
    "'''", "[", "]", "{", "}", "(", ")", ",", ":", " ", "\n", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|tool_call|>",
    "<function=f>", "<parameter=a>", "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>", "<|start|>", "<|message|>", "<|call|>", " to=functions.f", "<|tool_call_start|>",
    "<|tool_call_end|>", "<functioncall>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    "<|tool_call_begin|>functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|/tool_call|>",
    "functools[", "<function_calls>", "</function_calls>", "<code>", "</code>", "<TOOLCALL>", "</TOOLCALL>",
    "<|START_ACTION|>", "<|END_ACTION|>", "<think>", "</think>", "\n</think>", "1", "-", "**", "a", "<|python_tag|>",
    "<|tool_call>", "<tool_call|>", '<|"|>', "call:f{", "<escape>", "<start_function_call>", "<minimax:tool_call>",
    "<invoke name=", '<parameter name="a">', "</invoke>", "<｜DSML｜tool_calls>", '<｜DSML｜invoke name="f">',
    '<｜DSML｜parameter name="a" string="true">', "</｜DSML｜parameter>", "</｜DSML｜invoke>", "<atem:function_calls>",
    '<atem:invoke name="f">', '<atem:parameter name="a">', "</atem:parameter>", "</atem:invoke>",
    " to=functions.f<|message|>", "<|eom|>", "=", "#", "0x", "1e999",
    "<|im_end|>", "</s>", "<json>", "NaN", "```", "word ", "é", "\x00", "\ud800",
]  # fmt: skip


# Openings of calls that are never completed, and what follows the last. Most of these once made every opening read the
# same stretch again.
OPENINGS = [
    ("<tool_call>[#", ""), ('<tool_call>[""" "', ""), ("<tool_call><function=", ">"),
    ("<tool_call><function=f><parameter=a>", ""), ("<tool_call>f<arg_key>", "</arg_key>"),
    ("{'name': [#", ""), ('{"name": "f", "parameters": {"a": ', ""), ("[TOOL_CALLS]f[ARGS]{", ""),
    ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{", ""), (" to=functions.f<|message|>", ""), ("<|tool_call_start|>#", ""),
    ("<|tool_call_start|>[f(a=#", "\n[" + "1," * 2000), ('<|tool_call_start|>[f(a=""" "', ""), ("f(a=#", ""),
    ("<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{", ""),
    ("<function_calls>f(a=#", ""), ("<function_calls>f(a=1)\n", ""), ("<code>f(a=#", ""), ("<code>x = f(a=", ""),
    ('<|START_ACTION|>[{"tool_name": "f", "parameters": {', ""), ('<TOOLCALL>[{"name": "f", "arguments": {', ""),
    ('<functioncall> {"name": "f", "arguments": {', ""), ('<|tool_call>call:f{a:[<|"|>', ""),
    ('<|tool_call>call:f{a:[<|"|>,<|"|>y<|"|>,<|"|>', ""), ("<|tool_call>call:f{a:[1,", ""),
    ("<|tool_call>call:f{", "}"),
    ("<start_function_call>call:f{a:<escape>", ""), ('<minimax:tool_call><invoke name="f"><parameter name="a">', ""),
    ('<invoke name="f"><parameter name="a">', "</parameter>"), ("<minimax:tool_call>", '<invoke name="f">'),
    ('<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">', "</｜DSML｜parameter>"),
    ('<｜DSML｜invoke name="f">{"a": ', ""), (' to=f<|message|><atem:invoke name="f"><atem:parameter name="a">', ""),
    (' to=f<|message|><atem:invoke name="f">', "</atem:invoke>"), ("<|message|>", ' to=f<|message|>'), (" to=f", ""),
]  # fmt: skip


def cpu_time(call_format: CallFormat, text: str, lenient: bool) -> float:
    begun = time.process_time()
    call_format.parse(text, [WEATHER], lenient=lenient)
    return time.process_time() - begun


@pytest.mark.sample(8)
@pytest.mark.parametrize("lenient", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["strict", "lenient"])
@each_format
def test_four_times_the_text_takes_four_times_as_long(call_format: CallFormat, lenient: bool) -> None:
    """Twice as much is allowed for; quadratic time would be sixteen times as long."""
    for opening, end in OPENINGS:
        short, long = (opening * (size // len(opening)) + end for size in (8_000, 32_000))
        if cpu_time(call_format, long, lenient) > 0.005:
            ratios = [cpu_time(call_format, long, lenient) / cpu_time(call_format, short, lenient) for _ in range(3)]
            assert min(ratios) < 8, (opening, end[:5])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "text",
    [
        "[" * 10_000,
        '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 10_000 + "</tool_call>",
        "[f(a=" + "[" * 10_000,
        "[f(a=" + "-" * 10_000,
        "[f(a=" + "f(a=" * 10_000,
        "[f(a=1" + "+1" * 20_000,
    ],
    ids=lambda text: text[:60],
)
def test_deeply_nested_text_is_no_call_and_no_error(text: str) -> None:
    for call_format in FORMATS.values():
        for lenient in (False, True):
            assert not call_format.parse(text, [WEATHER], lenient=lenient).calls


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lfm", "<|tool_call_start|>[f(a='x)] <|tool_call_start|>[f(a=1)]<|tool_call_end|>"),
        ("lfm", "<|tool_call_start|>[# oops <|tool_call_start|>[f(a=1)]<|tool_call_end|>"),
        ("hermes", "<tool_call>[# oops\n" + HERMES),
    ],
)
def test_a_call_after_a_string_or_comment_that_is_never_closed_is_found(name: str, text: str) -> None:
    parsed = get_format(name).parse(text, [WEATHER], lenient=True)
    assert (parsed.calls, len(parsed.malformed)) == (F1, 1)


@each_format
def test_a_call_with_anything_inserted_is_parsed_in_time(call_format: CallFormat) -> None:
    """One piece inserted ten thousand times at each mark of a call."""
    text = call_format.render([Call("f", {"a": "x y", "b": [1, {"k": None}], "c": 2.5})], [WEATHER])
    for cut in sorted({0, len(text), *(match.end() for match in re.finditer(r"\W+|\w+", text))}):
        for piece in (" ", "\n", "a", "{", "[", '"', "\\", "<", ",", "1", "a: "):
            hostile = text[:cut] + piece * 10_000 + text[cut:]
            begun = time.process_time()
            call_format.parse_both(hostile, [WEATHER])
            assert time.process_time() - begun < 1, (cut, piece)


@pytest.mark.sample(6)
@each_format
def test_5_mb_of_noise_are_parsed_in_time(call_format: CallFormat) -> None:
    rng = random.Random(5)
    pieces = [piece for piece in HOSTILE_PIECES if "think" not in piece]
    page = "[" + "".join(rng.choice(pieces) for _ in range(10_000))
    text = page * (5_000_000 // len(page) + 1)
    for lenient in (False, True):
        begun = time.process_time()
        parsed = call_format.parse(text, [WEATHER], lenient=lenient)
        assert isinstance(parsed, Parsed)
        assert time.process_time() - begun < 20


# Formats that write a name as a JSON string, which holds anything.
JSON_NAMES = (
    "hermes", "llama3_json", "mistral_v3", "mistral_v7", "xlam", "granite3", "glaive", "phi4_mini", "functools",
    "nemotron_list", "cohere", "llama4_json", "ernie45", "longcat", "apertus", "jamba", "hunyuan_a13b",
)  # fmt: skip


def test_a_call_that_a_format_cannot_express_is_refused() -> None:
    for call_format in FORMATS.values():
        with pytest.raises(DataError):
            call_format.render([Call("f", {"a": float("nan")})])
    odd = Call("no <name> [ARGS]{", {"a": 1})
    for name, call_format in FORMATS.items():
        if name in JSON_NAMES:
            assert call_format.parse(call_format.render([odd])).calls == (odd,), name
        else:
            with pytest.raises(DataError, match="name"):
                call_format.render([odd])


def test_no_calls_are_rendered_as_empty_text() -> None:
    assert {call_format.render([]) for call_format in FORMATS.values()} == {""}


def test_values_without_a_type_take_it_from_the_schema() -> None:
    call_format = get_format("qwen3_coder")
    text = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    for written, schema, expected in [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5", {"type": "float"}, 5),
        ("5.0", {"type": "number"}, 5.0),
        ("five", {"type": "integer"}, "five"),
        ("True", {"type": "boolean"}, True),
        ("true", {"type": "boolean"}, True),
        ("True", {"type": "string"}, "True"),
        ("None", {"type": "string", "default": None}, None),
        ("null", {"type": ["integer", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("{'k': 1}", {"type": "dict"}, {"k": 1}),
        ("5", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "5"),
        ("5", {}, 5),
        ("", {"type": "string"}, ""),
        (" two\nlines ", {"type": "string"}, " two\nlines "),
    ]:
        tools = [Tool({"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}})]
        (call,) = call_format.parse(text.replace("{}", written), tools).calls
        assert call.arguments == {"a": expected}
        assert type(call.arguments["a"]) is type(expected)


def test_json_in_arguments_keeps_letters_and_order() -> None:
    call = Call("f", {"z": "Größe 東京", "a": {"y": 1, "b": 2}})
    assert json.dumps(call.arguments, ensure_ascii=False) in get_format("hermes").render([call])
    (read,) = get_format("hermes").parse(get_format("hermes").render([call])).calls
    assert list(read.arguments) == ["z", "a"]
    assert list(read.arguments["a"]) == ["y", "b"]
