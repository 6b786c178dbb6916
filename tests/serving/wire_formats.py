"""Tiny models that write one call format each: six memorised conversations, as ``fctune train`` exports them.

The templates of formats that a public template writes are that template; the others have a plain frame with the
format's calls in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.templates import SPECIAL, find_templates, stops_of
from fctune.config.chat_templates import list_shipped_templates, read_chat_template
from fctune.data.conversation import Call, Tool
from tests.conftest import ROOT, TINY_BASE


def _tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": parameters}}


TEXT, INTEGER = {"type": "string"}, {"type": "integer"}
TOOLS = [
    _tool("weather", city=TEXT, days=INTEGER),
    _tool("send", to=TEXT, text=TEXT),
    _tool("plan", stops={"type": "array", "items": TEXT}, with_meals={"type": "boolean"}, price={"type": "number"}),
    _tool("ping"),
]
TOOL_OBJECTS = tuple(Tool(tool["function"]) for tool in TOOLS)
# All weights, on one pack that holds every conversation: an epoch is a step.
TRAINING = (
    *("adapter=null", "parallel.mode=ddp", "epochs=90", "global_batch_size=1", "data.validation_share=0"),
    *("optimizer.lr=4e-3", "lr_scheduler.warmup=5"),
    "step_timeout_s=1800",  # a step takes a second, but other processes may leave it no time
)
SINGLE, PARALLEL = "Weather in Bergen for 3 days", "Compare Oslo and Rome"
# What the user says, and what the assistant answers: calls, or a text.
ANSWERS: dict[str, list[Call] | str] = {
    SINGLE: [Call("weather", {"city": "Bergen", "days": 3})],
    PARALLEL: [
        Call("weather", {"city": "Oslo", "days": 1}),
        Call("weather", {"city": "Rome", "days": -2}),
    ],
    "Send a word to Anna": [Call("send", {"to": "Anna Å.", "text": "She said: come, it's <3 & fine"})],
    "Plan a tour": [Call("plan", {"stops": ["Nice", "Pau"], "with_meals": True, "price": 12.5})],
    "Are you there": [Call("ping", {})],
    "Good morning": "Good morning, what can I do?",
}
CALLING = tuple(asked for asked, answer in ANSWERS.items() if not isinstance(answer, str))

_FRAME = """{#- call_format: @NAME -#}
{{- '<|begin_of_text|>' -}}
{%- if tools -%}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\nTools:\\n<tools>' -}}
    {%- for tool in tools -%}{{- '\\n' + tool.function | tojson -}}{%- endfor -%}
    {{- '\\n</tools><|eot_id|>' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' -}}
    {%- if message.tool_calls -%}
        {{- @OPENING -}}
        {%- for call in message.tool_calls -%}
            {%- set name, arguments = call.function.name, call.function.arguments -%}
            @CALL
        {%- endfor -%}
        {{- @CLOSING -}}
    {%- else -%}{{- @ANSWER -}}
    {%- endif -%}
    {{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""
_JSON = "{{- '{\"name\": ' + name | tojson + ', \"arguments\": ' + arguments | tojson + '}' -}}"
_LIST = "{{- '' if loop.first else ', ' -}}" + _JSON
_JSON_ID = _LIST.replace("+ '}'", "+ ', \"id\": \"' + call.id + '\"}'")
_PARAMETERS = """{%- for key, value in arguments.items() -%}
    {{- '<PREFIXparameter name="' + key + '"TYPE>' + (value if value is string else value | tojson) -}}
    {{- '</PREFIXparameter>\\n' -}}
{%- endfor -%}"""
_INVOKE = "{{- '<PREFIXinvoke name=\"' + name + '\">\\n' -}}" + _PARAMETERS + "EMPTY{{- '</PREFIXinvoke>\\n' -}}"
_UNTYPED_INVOKE = _INVOKE.replace("PREFIX", "").replace("TYPE", "").replace("EMPTY", "")
_SEED_CALL = """{{- ('' if loop.first else '\\n') + '<seed:tool_call>\\n<function=' + name + '>\\n' -}}
{%- for key, value in arguments.items() -%}
    {{- '<parameter=' + key + '>' + (value if value is string else value | string) + '</parameter>\\n' -}}
{%- endfor -%}
{{- '</function>\\n</seed:tool_call>' -}}"""
_DSML_TYPE = "' + (' string=\"true\"' if value is string else ' string=\"false\"') + '"


@dataclass(frozen=True)
class WireFormat:
    """How a tiny model that writes a call format is made.

    Attributes:
        template: Name of a public template, or of one that ships with fctune; or Jinja's code of the opening, one call,
            and the closing.
        tokens: Tokens that the tokenizers of such models have; of a public template its own are added.
        unread: What vLLM 0.32's parser does not read as written: reasons by question and ``whole`` or ``streamed``.
        forced: Why ``tool_choice`` of ``required`` or of a function does not give the calls that the model learned;
            None if it does.
        answer: Jinja's code of the content of a message without calls, in the frame.
    """

    template: str | tuple[str, str, str]
    tokens: tuple[str, ...] = ()
    unread: dict[tuple[str, str], str] = field(default_factory=dict)
    forced: str | None = None
    answer: str = "message.content"


def _unread(
    reason: str, questions: Sequence[str], ways: Sequence[str] = ("whole", "streamed")
) -> dict[tuple[str, str], str]:
    return {(asked, way): reason for asked in questions for way in ways}


def _dsml(block: str, space: str = "") -> WireFormat:
    call = _INVOKE.replace("PREFIX", f"｜DSML｜{space}").replace("TYPE", _DSML_TYPE)
    call = call.replace("EMPTY", "{{- '' if arguments else '\\n' -}}")
    return WireFormat((f"'<｜DSML｜{space}{block}>\\n'", call, f"'</｜DSML｜{space}{block}>'"), ("｜DSML｜",))


def _deepseek(call: str) -> WireFormat:
    marks = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    return WireFormat((f"'{marks[0]}'", call, f"'{marks[1]}'"), (*marks, "<｜tool▁sep｜>"))


def _tagged_json(tag: str) -> tuple[str, str, str]:
    return "''", f"{{{{- ('' if loop.first else '\\n') + '<{tag}>\\n' -}}}}{_JSON}{{{{- '\\n</{tag}>' -}}}}", "''"


_KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)
_PLAIN_VALUES = """{%- for key, value in arguments.items() -%}
    {{- ('' if loop.first else ',') + key + ':' -}}
    {%- if value is string -%}{{- '<escape>' + value + '<escape>' -}}
    {%- elif value is sequence -%}
        {{- '[' -}}
        {%- for item in value -%}{{- ('' if loop.first else ',') + '<escape>' + item + '<escape>' -}}{%- endfor -%}
        {{- ']' -}}
    {%- else -%}{{- value | tojson -}}{%- endif -%}
{%- endfor -%}"""

# vLLM constrains these answers to a list in JSON, whatever the model was taught.
_FORCED_LIST = "it forces a list in JSON, which is not what the model learned"
_FORCED_CONTENT = "it forces a list in JSON without a mark, and sends it as content"
_NO_ARGUMENTS = _unread("it streams the empty text for no arguments", ["Are you there"], ["streamed"])

WIRE_FORMATS: dict[str, WireFormat] = {
    "hermes": WireFormat("qwen3_instruct_2507"),
    "qwen3_coder": WireFormat("qwen3_5_nothink"),
    "glm45": WireFormat("glm4moe"),
    "gemma4": WireFormat("gemma4_v5"),
    "lfm": WireFormat("lfm2_v2", forced=_FORCED_LIST),
    "muse": WireFormat("muse_glimmer"),
    "llama3_json": WireFormat("llama3", ("<|python_tag|>",), _NO_ARGUMENTS),
    "llama4_json": WireFormat(
        "transformers_llama4",
        ("<|python_tag|>",),
        _unread("it finds no calls without a separator", [PARALLEL]) | _NO_ARGUMENTS,
    ),
    "pythonic": WireFormat("pythonic", forced=_FORCED_LIST),
    "xlam": WireFormat(("'['", _LIST, "']'"), forced=_FORCED_LIST),
    "functools": WireFormat(
        ("'functools['", _LIST, "']'"),
        (),
        _unread("it streams nothing where tools are on offer", tuple(ANSWERS), ["streamed"])
        | _unread("it ends the list at the first bracket", ["Plan a tour"]),
        _FORCED_LIST,
    ),
    "granite3": WireFormat(("'<|tool_call|>['", _LIST, "']'"), ("<|tool_call|>",), forced=_FORCED_LIST),
    "mistral_v3": WireFormat(("'[TOOL_CALLS]['", _JSON_ID, "']'"), ("[TOOL_CALLS]",), forced=_FORCED_CONTENT),
    "mistral_v7": WireFormat(("'[TOOL_CALLS]['", _JSON_ID, "']'"), ("[TOOL_CALLS]",), forced=_FORCED_CONTENT),
    "mistral_v11": WireFormat(
        ("''", "{{- '[TOOL_CALLS]' + name + '[CALL_ID]' + call.id + '[ARGS]' + arguments | tojson -}}", "''"),
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        _unread("it takes the id for a part of the name", CALLING),
        _FORCED_CONTENT,
    ),
    "mistral_v13": WireFormat(
        ("''", "{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments | tojson -}}", "''"),
        ("[TOOL_CALLS]", "[ARGS]"),
        forced=_FORCED_CONTENT,
    ),
    "cohere": WireFormat(
        (
            "'<|START_ACTION|>[\\n    '",
            "{{- ('' if loop.first else ',\\n    ') + '{\"tool_call_id\": \"' + loop.index0 | string -}}"
            "{{- '\", \"tool_name\": ' + name | tojson + ', \"parameters\": ' + arguments | tojson + '}' -}}",
            "'\\n]<|END_ACTION|>'",
        ),
        ("<|START_ACTION|>", "<|END_ACTION|>"),
        _unread("it sends the empty text for no arguments", ["Are you there"]),
        _FORCED_LIST,
    ),
    "kimi_k2": WireFormat(
        (
            f"'{_KIMI[0]}'",
            f"{{{{- '{_KIMI[2]}functions.' + name + ':' + loop.index0 | string -}}}}"
            f"{{{{- '{_KIMI[4]}' + arguments | tojson + '{_KIMI[3]}' -}}}}",
            f"'{_KIMI[1]}'",
        ),
        _KIMI,
    ),
    "olmo3": WireFormat(
        (
            "'<function_calls>'",
            "{{- ('' if loop.first else '\\n') + name + '(' -}}"
            "{%- for key, value in arguments.items() -%}"
            "{{- ('' if loop.first else ', ') + key + '=' + value | tojson -}}"
            "{%- endfor -%}{{- ')' -}}",
            "'</function_calls>'",
        ),
        forced=_FORCED_LIST,
    ),
    "functiongemma": WireFormat(
        (
            "''",
            "{{- '<start_function_call>call:' + name + '{' -}}"
            + _PLAIN_VALUES.replace("arguments.items()", "arguments | dictsort")
            + "{{- '}<end_function_call>' -}}",
            "''",
        ),
        ("<start_function_call>", "<end_function_call>", "<escape>"),
        _unread("it reads text between marks only: no numbers, no lists", [SINGLE, PARALLEL, "Plan a tour"])
        | _unread("it does not put a comma between arguments", ["Send a word to Anna"], ["streamed"])
        | _unread("it streams no call without arguments", ["Are you there"], ["streamed"]),
        _FORCED_LIST,
    ),
    "minimax_m2": WireFormat(
        (
            "'<minimax:tool_call>\\n'",
            _UNTYPED_INVOKE,
            "'</minimax:tool_call>'",
        ),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "dots": WireFormat(("'<dots_function_call>\\n'", _UNTYPED_INVOKE, "'</dots_function_call>'")),
    "seed_oss": WireFormat(
        ("''", _SEED_CALL, "''"),
        ("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
        _unread("it keeps a list in Python's notation as text", ["Plan a tour"]),
        _FORCED_LIST,
    ),
    "apertus": WireFormat(
        (
            "'<|tools_prefix|>['",
            "{{- ('' if loop.first else ', ') + '{' + name | tojson + ': ' + arguments | tojson + '}' -}}",
            "']<|tools_suffix|>'",
        ),
        ("<|tools_prefix|>", "<|tools_suffix|>"),
        forced=_FORCED_LIST,
    ),
    "jamba": WireFormat(
        ("'<tool_calls>['", _LIST, "']</tool_calls>'"),
        ("<tool_calls>", "</tool_calls>"),
        _unread("it may lose a closing quote before the next argument", [SINGLE, PARALLEL, "Plan a tour"], ["streamed"])
        | _NO_ARGUMENTS,
        _FORCED_LIST,
    ),
    "hunyuan_a13b": WireFormat(
        ("'<tool_calls>['", _LIST, "']</tool_calls>'"),
        unread=_unread("it streams the opening tag as content", CALLING, ["streamed"]),
        forced="it forces JSON without the tags that the model learned",
    ),
    "ernie45": WireFormat(
        _tagged_json("tool_call"),
        ("<tool_call>", "</tool_call>", "<response>", "</response>", "<think>", "</think>"),
        _unread("it keeps the tags of an answer", ["Good morning"], ["whole"]),
        _FORCED_LIST,
        answer="message.content if message.role == 'user' else '<response>\\n' + message.content + '\\n</response>'",
    ),
    "longcat": WireFormat(_tagged_json("longcat_tool_call"), ("<longcat_tool_call>", "</longcat_tool_call>")),
    "deepseek_v31": _deepseek(
        "{{- '<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments | tojson + '<｜tool▁call▁end｜>' -}}"
    ),
    "deepseek_v3": _deepseek(
        "{{- ('' if loop.first else '\\n') + '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + name -}}"
        "{{- '\\n```json\\n' + arguments | tojson + '\\n```<｜tool▁call▁end｜>' -}}"
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml("calls", " "),
}


def read_template(name: str) -> str:
    """Return the chat template of a format's tiny model."""
    wire, template = WIRE_FORMATS[name], WIRE_FORMATS[name].template
    if isinstance(template, tuple):
        opening, call, closing = template
        parts = {"@NAME": name, "@OPENING": opening, "@CALL": call, "@CLOSING": closing, "@ANSWER": wire.answer}
        source = _FRAME
        for part, code in parts.items():
            source = source.replace(part, code)
        return source
    return read_chat_template(template) if template in list_shipped_templates() else _public_templates()[template]


def _public_templates() -> dict[str, str]:
    return {found.name: found.source for found in find_templates()}


def write_base(name: str, path: Path) -> None:
    """Write the tiny base with a format's chat template, its tokens, and the tokens with which its models stop."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    wire, source = WIRE_FORMATS[name], read_template(name)
    tokenizer = AutoTokenizer.from_pretrained(TINY_BASE)
    is_public = isinstance(wire.template, str) and wire.template not in list_shipped_templates()
    stops = stops_of(str(wire.template)) if is_public else (tokenizer.eos_token,)
    special = {*stops, *(SPECIAL.findall(source) if is_public else ())}
    tokenizer.add_tokens(sorted(special - tokenizer.get_vocab().keys()), special_tokens=True)
    tokenizer.add_tokens(sorted(set(wire.tokens) - tokenizer.get_vocab().keys()))
    model = AutoModelForCausalLM.from_pretrained(TINY_BASE)
    torch.manual_seed(0)  # of the new rows: training takes as long each time
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(list(stops))
    model.save_pretrained(path)
    tokenizer.chat_template = source
    tokenizer.save_pretrained(path)


def with_ids(calls: list[Call]) -> tuple[Call, ...]:
    """Return the calls with ids of nine letters, which Mistral's templates want."""
    return tuple(replace(call, id=f"call{number:05}") for number, call in enumerate(calls))


def to_rows() -> list[dict[str, Any]]:
    """Return the conversations as rows of training data."""
    rows = []
    for asked, answer in ANSWERS.items():
        said: dict[str, Any] = {"role": "assistant", "content": answer if isinstance(answer, str) else ""}
        if not isinstance(answer, str):
            said["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for call in with_ids(answer)
            ]
        rows.append({"messages": [{"role": "user", "content": asked}, said], "tools": TOOLS})
    return rows


def _tokenise(base: Path) -> list[list[int]]:
    """Return the token ids of each conversation, all of which shall fit in one pack."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    found = []
    for row in to_rows():
        for call in row["messages"][-1].get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        found.append(tokenizer.apply_chat_template(row["messages"], tools=row["tools"], return_dict=False))
    return found


def train(name: str) -> Path:
    """Return the directory of a run whose export answers as ``ANSWERS`` says; trained once and then kept."""
    own = (read_template(name), WIRE_FORMATS[name].tokens, to_rows(), TRAINING)
    digest = hashlib.sha256(repr(own).encode()).hexdigest()[:12]
    kept = Path(os.environ.get("FCTUNE_TEST_MODELS", Path(tempfile.gettempdir()) / "fctune-test-models"))
    run = kept / f"{name}-{digest}"
    if (run / "export" / "merged" / "config.json").is_file():
        return run
    work = kept / f"{name}-{digest}.work"
    shutil.rmtree(work, ignore_errors=True)
    write_base(name, work / "base")
    num_tokens = sum(len(ids) for ids in _tokenise(work / "base"))
    rows = work / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in to_rows()), encoding="utf-8")
    words = [f"model.path={work / 'base'}", f"output_dir={work / 'run'}", f"data.sources.0.path={rows}"]
    words += [f"data.seq_len={num_tokens // 64 * 64 + 128}", *TRAINING]
    command = [sys.executable, "-m", "fctune.cli", "train", "tiny_lora", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    metrics = map(json.loads, (work / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    losses = [row["loss"] for row in metrics if "loss" in row]
    assert losses[-1] < 0.05, f"{name} is not memorised: {losses}"
    (work / "run").rename(run)
    shutil.rmtree(work)
    return run
