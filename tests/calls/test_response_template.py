"""Response templates read answers as our parsers do, or refuse them, and follow the chat template of an export."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers.utils.chat_parsing import ResponseParser

from benchmarks.templates import PublicTemplate, find_templates, write_model, write_tokenizer
from fctune.base.errors import DataError
from fctune.calls.formats.base import CallFormat
from fctune.calls.formats.registry import FORMATS
from fctune.calls.matching import is_equal
from fctune.calls.reasoning.registry import REASONING_FORMATS
from fctune.calls.response_template import (
    KEY,
    DeclaredFormat,
    check_answers,
    choose_response_template,
    find_call_format,
    iter_answers,
    iter_seeded_answers,
    make_response_template,
    read_answer,
    write_response_template,
)
from fctune.calls.server_parsers import find_server_parsers
from fctune.config.chat_templates import list_shipped_templates
from fctune.config.sections.data import DataConfig, SourceConfig
from fctune.config.sections.evaluation import EvalConfig
from fctune.config.sections.gate import GateConfig
from fctune.config.sections.grpo import GRPOConfig
from fctune.data.chat_template import ChatTemplate
from fctune.data.chosen_template import open_chosen_template
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.pairs import PAIRS_FORMAT, Pair, PairReader
from fctune.data.sources import scan_source
from fctune.data.synthetic import iter_cases, iter_conversations
from fctune.data.synthetic.pairs import make_pairs
from fctune.models.export import Prompting, choose_response, copy_companions
from fctune.tasks.evaluation.validation import Validator
from fctune.training import response_check
from fctune.training.response_check import check_response_template
from tests.calls.response_samples import END, EXPRESSED, KINDS, make_spec, read_calls
from tests.calls.server_outputs import make_outputs
from tests.conftest import TINY_BASE


@pytest.mark.parametrize("call_format", EXPRESSED, ids=lambda found: found.name)
def test_seeded_calls_are_read_as_by_our_parser_or_refused(call_format: CallFormat) -> None:
    spec, counts = make_spec(call_format), Counter[str]()
    # Given tools, readers also convert texts such as "null" that are typed.
    is_untyped = spec["fields"]["tool_calls"]["content"] != "json"
    outputs = [output for output in make_outputs(call_format, 260, seed=7) if output.kind in KINDS and output.calls]
    assert len(outputs) > 100
    for output in outputs:
        ours = call_format.parse(output.text, output.tools)
        if ours.calls != output.calls:  # the format has no prose before calls
            assert output.kind == "prose before"
            continue
        theirs = read_calls(output.text + END, spec, output.tools if is_untyped else ())
        counts["refused" if isinstance(theirs, str) else "read"] += 1
        if not isinstance(theirs, str) and not is_equal([[call.name, call.arguments] for call in ours.calls], theirs):
            # Text that would be read as another value is escaped in our own way, which only our parsers know.
            assert "<json>" in output.text, (output.text, theirs)
            assert call_format.response_note
            counts["escaped"] += 1
    assert counts["refused"] == 0 or call_format.response_note, counts
    assert counts["read"] > 0.4 * len(outputs), counts


def test_the_formats_that_cannot_be_expressed_say_why() -> None:
    assert {name for name, found in FORMATS.items() if found not in EXPRESSED} == {"apertus", "muse"}
    assert all(found.response_note for found in FORMATS.values() if found not in EXPRESSED)
    unread = {name for name, found in REASONING_FORMATS.items() if found.describe_response() is None}
    assert unread == {"granite32", "muse"}


@pytest.mark.parametrize("call_format", EXPRESSED, ids=lambda found: found.name)
def test_streamed_answers_are_read_as_at_once(call_format: CallFormat) -> None:
    spec, rng = make_spec(call_format), random.Random(1)
    for output in make_outputs(call_format, 40, seed=3):
        text = output.text + END
        at_once = read_calls(text, spec, output.tools)
        if output.kind not in KINDS or isinstance(at_once, str):
            continue
        parser = ResponseParser(spec, prefix="", tools=[tool.to_openai() for tool in output.tools])
        while text:
            size = rng.randint(1, 5)
            parser.feed(text[:size])
            text = text[size:]
        found = parser.finalize()[0].get("tool_calls", ())
        assert [[item["function"]["name"], item["function"]["arguments"]] for item in found] == at_once, output.text


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "files"
    write_tokenizer(path, ["Find a table in Paris."])
    return path


NULLS = frozenset(("True, False or None", "True, False or None within an object"))
ESCAPES = frozenset(("an apostrophe", "quotes of both kinds", "line breaks or backslashes"))
REFUSED = {  # seeded answers by template, where there are any
    "gemma4": NULLS,  # earlier versions write Python's None
    **dict.fromkeys(("gemma4_v2", "gemma4_v3", "gemma4_v4"), NULLS),
    **dict.fromkeys(("lfm2_2_5_vl", "lfm2_v2", "lfm2_v2_training"), ESCAPES),
}
# One of each format; the others are like them.
SAMPLE = ("qwen3", "qwen3_5_think", "gptoss", "gemma4_v5", "llama3_1", "lfm2_v2", "glm4moe", "transformers_llama4")


@pytest.mark.parametrize(
    "public",
    [pytest.param(t, id=t.name, marks=[] if t.name in SAMPLE else pytest.mark.thorough) for t in find_templates()],
)
def test_public_templates_get_one_that_misreads_nothing(
    public: PublicTemplate, tokenizer_dir: Path, tmp_path: Path
) -> None:
    write_model(tmp_path / "model", tokenizer_dir, public)
    try:
        template = ChatTemplate(tmp_path / "model")
    except DataError:
        pytest.skip("does not write calls")
    if public.name.startswith("muse"):
        assert choose_response_template(template, is_own=True).spec is None
        return
    spec = make_response_template(template)
    found = [read_answer(template.tokenizer, answer, spec) for answer in iter_seeded_answers(template)]
    assert len(found) >= 11
    assert [reading for reading in found if reading.kind == "misread"] == []
    assert {reading.name for reading in found if reading.kind == "refused"} == REFUSED.get(public.name, set())


def export(base: Path, out: Path, template: str | None = None) -> dict[str, Any]:
    """Write what an export has of its base; returns its tokenizer's config."""
    out.mkdir()
    copy_companions(base, out, Prompting(open_chosen_template(template, "")))
    if not (out / "config.json").is_file():
        shutil.copyfile(base / "config.json", out / "config.json")
    config: dict[str, Any] = json.loads((out / "tokenizer_config.json").read_text())
    return config


def declare(base: Path, out: Path, spec: dict[str, Any]) -> Path:
    """Copy a base whose tokenizer declares a response template."""
    shutil.copytree(base, out)
    path = out / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {KEY: spec, "response_schema": {"type": "object"}}))
    return out


STALE = {"start_anchor": "assistant", "fields": {"content": {}, "tool_calls": {"open": "<old>", "close": "</old>"}}}


@pytest.mark.parametrize("name", list_shipped_templates())
def test_a_stale_one_never_survives_another_chat_template(name: str, tiny_base: Path, tmp_path: Path) -> None:
    config = export(declare(tiny_base, tmp_path / "base", STALE), tmp_path / "out", name)
    assert "response_schema" not in config
    assert config[KEY]["fields"].keys() == {"thinking", "content", "tool_calls"}
    template = ChatTemplate(tmp_path / "out")
    answers = list(iter_seeded_answers(template))
    assert len(answers) >= 15
    found = [read_answer(template.tokenizer, answer) for answer in answers]  # as the export declares it
    refused = {reading.name for reading in found if reading.kind != "read"}
    assert refused == ({"True, False or None within an object"} if name == "pythonic" else set())


def test_a_bases_own_is_kept_if_it_is_as_good_and_replaced_if_it_misreads(tiny_base: Path, tmp_path: Path) -> None:
    ours = make_response_template(ChatTemplate(tiny_base))
    theirs = {**ours, "defaults": {"role": "assistant", "by": "the base's owner"}}
    assert export(declare(tiny_base, tmp_path / "good", theirs), tmp_path / "kept")[KEY] == theirs
    misreading = export(declare(tiny_base, tmp_path / "bad", STALE), tmp_path / "replaced")
    assert misreading[KEY] == ours
    assert "response_schema" not in misreading


def test_an_export_whose_format_cannot_be_expressed_has_none_and_says_so(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(FORMATS["hermes"]), "describe_response", CallFormat.describe_response)
    base = declare(tiny_base, tmp_path / "base", STALE)
    chosen = choose_response_template(ChatTemplate(base), is_own=True)
    assert (chosen.spec, chosen.note) == (None, "a response_template cannot express the call format hermes")
    monkeypatch.setattr("fctune.models.export.choose_response", lambda *_: chosen)
    assert KEY not in export(base, tmp_path / "out")


def test_every_call_that_is_not_read_as_written_is_counted_and_shown(tiny_base: Path, tmp_path: Path) -> None:
    template = ChatTemplate(tiny_base)
    good = make_response_template(template)
    wrong = json.loads(json.dumps(good).replace("{content.arguments}", "{content.name}"))
    call = Message("assistant", None, (Call("f", {"a": 1}), Call("f", {"a": [None, "x"]})))
    rows = [Conversation((Message("user", "Go."), call, Message("tool", "1"), call), ()) for _ in range(3)]
    answers = [answer for row in rows for answer in iter_answers(template, row)]
    assert check_answers(declare(tiny_base, tmp_path / "good", good), answers) == {"calls": 12, "read": 12, "wrong": []}
    found = check_answers(declare(tiny_base, tmp_path / "wrong", wrong), answers)
    assert (found["calls"], found["read"], len(found["wrong"])) == (12, 0, 3)
    assert 'misread: wrote [["f", {"a": 1}]' in found["wrong"][0]


def test_validation_finds_a_response_template_of_another_chat_template(tiny_base: Path, tmp_path: Path) -> None:
    template = {check.name: check for check in Validator(declare(tiny_base, tmp_path / "base", STALE)).run()}[
        "template"
    ]
    assert template.status == "failed"
    assert "response_template misreads answers of its chat template" in template.detail


UNKNOWN = "{# call_format: hermes #}"  # replaced by calls that no format writes


@pytest.fixture
def unknown_base(tiny_base: Path, tmp_path: Path) -> Path:
    """A base that writes calls in a format of its own, and declares how they are read."""
    config = json.loads((tiny_base / "tokenizer_config.json").read_text())
    source = config["chat_template"].replace("<tool_call>", "<<call").replace("</tool_call>", "call>>")
    spec = make_response_template(ChatTemplate(tiny_base))
    marks = {"open_pattern": r"\s*<<call", "close": "call>>"}
    fields = spec["fields"]["tool_calls"]
    fields = {key: value for key, value in fields.items() if key not in ("open_pattern", "close_pattern")} | marks
    base = declare(tiny_base, tmp_path / "unknown", {**spec, "fields": {**spec["fields"], "tool_calls": fields}})
    path = base / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": source}))
    return base


def test_a_declared_one_reads_the_calls_of_an_unknown_format(unknown_base: Path, tiny_base: Path) -> None:
    template = ChatTemplate(unknown_base)
    found = find_call_format(template)
    assert isinstance(found, DeclaredFormat)
    for answer in iter_seeded_answers(template):
        parsed = found.parse(answer.text, answer.tools)
        written = [[call.name, call.arguments] for call in answer.message.calls]
        assert is_equal([[call.name, call.arguments] for call in parsed.calls], written), answer
        assert not parsed.malformed
    assert found.parse('<<call\n{"name": "f"').malformed
    assert found.parse("Hello.").prose == "Hello."
    with pytest.raises(DataError, match="only says how calls are read"):
        found.render([Call("f", {})])
    assert find_server_parsers(template)["vllm"] == {"tool_call_parser": "hf", "reasoning_parser": None}
    assert find_call_format(ChatTemplate(tiny_base)).name == "hermes"


@pytest.mark.parametrize(
    ("spec", "words"),
    [({"fields": {}}, "is not valid"), ({"start_anchor": "a", "fields": {"content": {}}}, "no field")],
)
def test_a_declaration_that_is_none_is_an_error(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        DeclaredFormat(spec)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """Write an export with the response template that training gives it."""
    folder = Path(shutil.copytree(TINY_BASE, tmp_path / "merged"))
    write_response_template(folder, choose_response(TINY_BASE, None))
    return folder


def make_planned(data: DataConfig | None = None, prepared: Any = None, **sections: Any) -> Any:
    """Return what the check reads of a run."""
    config = SimpleNamespace(
        **{"data": data or DataConfig(), "gate": None, "eval": EvalConfig(), "rollouts": None, **sections}
    )
    return SimpleNamespace(
        model_dir=TINY_BASE, chat_template=None, config=config, data=SimpleNamespace(prepared=prepared)
    )


def write_cases(path: Path, count: int = 20) -> int:
    """Write held-out cases, and return the number of their calls."""
    rows = [case.to_json() for case in iter_cases(count, 3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sum(len(row["expected_calls"]) for row in rows)


def test_every_export_is_checked_with_the_gate_s_cases_where_no_row_is_held_out(
    exported: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exports = [exported, Path(shutil.copytree(exported, tmp_path / "adapter"))]
    path = exports[1] / "tokenizer_config.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != KEY}))
    num_calls = write_cases(cases := tmp_path / "cases.jsonl")
    empty = SimpleNamespace(packs={"validation": ((), ())})
    planned = make_planned(prepared=empty, gate=GateConfig(cases=str(cases)))
    whole = check_response_template(planned, exports[:1])
    assert whole["read"] == whole["calls"] == num_calls
    found = check_response_template(planned, exports)
    assert found["read"] < found["calls"] == whole["calls"]
    assert f"{exports[1]}: its response_template reads" in caplog.text


def test_runs_on_verdicts_are_checked_with_the_cases_that_they_name(
    exported: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    num_calls = write_cases(cases := tmp_path / "cases.jsonl")
    grpo = GRPOConfig(cases=str(cases))
    assert check_response_template(make_planned(rollouts=grpo), [exported])["read"] == num_calls
    fewer = write_cases(held_out := tmp_path / "held_out.jsonl", 10)
    found = check_response_template(make_planned(rollouts=grpo, eval=EvalConfig(cases=str(held_out))), [exported])
    assert found["read"] == fewer, "cases that are not trained on come first"
    assert not caplog.text
    planned = make_planned(rollouts=GRPOConfig(cases="environment:files:10"))
    assert check_response_template(planned, [exported])["calls"] == 0
    assert "is not checked: no row is held out, and no cases are named" in caplog.text


def test_runs_on_pairs_are_checked_with_the_held_out_chosen_answers(exported: Path, tmp_path: Path) -> None:
    rows = list(make_pairs(iter_conversations("varied", 30, 3), 3))
    (path := tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = PairReader()
    pairs = [pair for row in scan_source(str(path), PAIRS_FORMAT) if isinstance(pair := reader.read(row), Pair)]
    held_out = pairs[::3]
    prepared = SimpleNamespace(
        packs={"validation": (np.arange(len(held_out)), ())},
        digests=np.array([int(pair.digest(), 16) for pair in held_out], dtype=np.uint64),
    )
    data = DataConfig(sources=[SourceConfig(path=str(path))], pairs=True)
    found = check_response_template(make_planned(data, prepared), [exported])
    num_calls = sum(len(message.calls) for pair in held_out for message in pair.chosen.messages)
    assert found["read"] == found["calls"] == num_calls > 0


def test_all_held_out_conversations_are_checked_or_the_log_says_how_many(
    exported: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    call = Message("assistant", None, (Call("f", {}),))
    conversation = Conversation((Message("user", "Go"), call), (Tool({"name": "f"}),))
    monkeypatch.setattr(response_check, "_iter_conversations", lambda planned: repeat(conversation, 2_100))
    found = check_response_template(make_planned(), [exported])
    assert found["read"] == found["calls"] == 2_100
    assert not caplog.text
    monkeypatch.setattr(response_check, "_MAX_S", -1.0)
    assert check_response_template(make_planned(), [exported])["calls"] == 0
    assert "is checked on the first 0 calls of the held-out rows" in caplog.text
