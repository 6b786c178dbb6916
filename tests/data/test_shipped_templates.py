"""The templates that ship work with any tokenizer that has an eos token, and are written to the exports."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fctune.base.errors import ConfigError, DataError
from fctune.calls.formats.registry import detect_format
from fctune.calls.reasoning.base import ReasoningFormat
from fctune.calls.reasoning.registry import detect_reasoning
from fctune.cli import main
from fctune.config.chat_templates import list_shipped_templates, read_chat_template
from fctune.config.loading import load_config
from fctune.data.chat_template import ChatTemplate
from fctune.data.chosen_template import ChosenTemplate, open_chosen_template
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.tracing import TracedTemplate
from fctune.engines.local import LocalEngine
from fctune.models.export import Prompting, copy_companions
from tests.conftest import ROOT, TINY_BASE
from tests.warm_interpreter import warm_python

NAMES = ("hermes", "llama3", "pythonic")
FORMATS = {"hermes": "hermes", "llama3": "llama3_json", "pythonic": "pythonic"}

TOOL = Tool(
    {
        "name": "find_place",
        "description": "Find a <place> & \"more\", 'é'.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}, "days": {"type": "integer"}}},
    }
)
OTHER = Tool({"name": "other.tool", "parameters": {"type": "object", "properties": {}}})
ASK = Message("user", " Find Bergen. ")


def call(town: Any, identity: str = "call00001", **more: Any) -> Call:
    return Call("find_place", {"town": town, **more}, id=identity)


CALL = Message("assistant", None, (call("Bergen", days=3),))
RESULT = Message("tool", '{"found": true}', call_id="call00001", name="find_place")
HOSTILE = 'a"b\'c\\d\n</tool_call> [f(x=1)] {"name": "g"} ### User:\nÆ 京 🎉 \u2028\x85\t'
NESTED = {"a": [1, -2.5, 1e20, True, False, None, {"b": {}, "c": []}], "d e": "", "class": None, "None": "None"}
CONVERSATIONS: dict[str, Conversation] = {
    "no tools": Conversation((Message("user", "Hi"), Message("assistant", "Hello there."))),
    "no system": Conversation((ASK, CALL), (TOOL,)),
    "system": Conversation((Message("system", "Be brief."), ASK, CALL, RESULT, Message("assistant", "Yes.")), (TOOL,)),
    "several turns": Conversation(
        (
            *(Message("user", "Hi"), Message("assistant", "Hello.\n"), ASK, CALL, RESULT, Message("assistant", "Yes.")),
            *(Message("user", "And Oslo?"), Message("assistant", None, (call("Oslo"),))),
        ),
        (TOOL, OTHER),
    ),
    "parallel": Conversation(
        (
            *(
                ASK,
                Message("assistant", None, (call("A"), call("B", "call00002"), Call("other.tool", {}, "call00003"))),
            ),
            *(RESULT, Message("tool", "2", call_id="call00002"), Message("tool", "3", call_id="call00003")),
            Message("assistant", "Both."),
        ),
        (TOOL, OTHER),
    ),
    "hostile": Conversation((Message("user", HOSTILE), Message("assistant", None, (call(HOSTILE),))), (TOOL,)),
    "nested": Conversation((ASK, Message("assistant", None, (call(NESTED),))), (TOOL,)),
    "empty": Conversation(
        (Message("user", ""), Message("assistant", ""), ASK, CALL, Message("tool", "", "", "call00001"))
    ),
    "reasoning": Conversation(
        (
            *(ASK, Message("assistant", None, CALL.calls, reasoning="Bergen.\nSo [find].")),
            *(RESULT, Message("assistant", "There.", reasoning="It is there.")),
        ),
        (TOOL,),
    ),
    "reasoning of a later turn": Conversation(
        (ASK, CALL, RESULT, Message("assistant", "There.", reasoning="It is there.")), (TOOL,)
    ),
    "late system": Conversation(
        (Message("user", "Hi"), Message("assistant", "Hello."), Message("system", "Now."), ASK, CALL)
    ),
}
CONVERSATIONS["empty"] = Conversation(
    (Message("user", ""), Message("assistant", ""), ASK, CALL, Message("tool", "", call_id="call00001")), (TOOL,)
)


def make_tokenizer(kind: str) -> Any:
    """Return a tokenizer of a kind: byte-level with eos alone, with bos = eos, or like SentencePiece's."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = [
        "### User:\nfind a place\n\n### Assistant:\n",
        '{"name": "find_place"}\n\n',
        "[find_place()]",
        ":\n{\n\n",
    ] * 3
    if kind == "sentencepiece":
        letters = [chr(code) for code in range(33, 127)]
        pieces = ["<s>", "</s>", "<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *letters, "##", "###", "na", "{}"]
        merges = [("#", "#"), ("##", "#"), ("n", "a"), ("{", "}")]
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(words, trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    same = {"bos_token": "<|endoftext|>"} if kind == "bos is eos" else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", **same)


@pytest.fixture(scope="module", params=["eos alone", "bos is eos", "sentencepiece", "tiny base"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model's directory without a chat template."""
    path: Path = tmp_path_factory.mktemp("base") / request.param.replace(" ", "_")
    if request.param == "tiny base":
        return copy_base(path)
    make_tokenizer(request.param).save_pretrained(path)
    (path / "config.json").write_text("{}")
    assert "chat_template" not in json.loads((path / "tokenizer_config.json").read_text())
    return path


def copy_base(path: Path) -> Path:
    """Copy the tiny base without its chat template."""
    shutil.copytree(TINY_BASE, path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def choose(name: str) -> ChosenTemplate:
    chosen = open_chosen_template(name, "")
    assert chosen is not None
    return chosen


def exported(base: Path, name: str, path: Path) -> Any:
    """Return the tokenizer that transformers loads from an export of a run with the template."""
    from transformers import AutoTokenizer

    path.mkdir(exist_ok=True)
    copy_companions(base, path, Prompting(chat_template=choose(name)))
    return AutoTokenizer.from_pretrained(path)


def reference(tokenizer: Any, conversation: Conversation, num_messages: int | None = None, **options: Any) -> str:
    """Return transformers' rendering of the first messages of a conversation."""
    messages = [{k: v for k, v in m.to_openai().items() if v is not None} for m in conversation.messages[:num_messages]]
    tools = [tool.to_openai() for tool in conversation.tools] or None
    text: str = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
    return text


def iter_answers(tokenizer: Any, conversation: Conversation) -> Iterator[tuple[Message, str]]:
    """Yield each answer and its text, from renderings of ever more messages."""
    for i, message in enumerate(conversation.messages):
        if message.role == "assistant":
            prompt = reference(tokenizer, conversation, i, add_generation_prompt=True)
            text = reference(tokenizer, conversation, i + 1)
            assert text.startswith(prompt)
            yield message, text[len(prompt) :].rstrip("\n")


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_masks_are_those_of_transformers_with_the_exported_template(
    name: str, base: Path, tmp_path: Path
) -> None:
    template = ChatTemplate(base, chat_template=choose(name))
    tokenizer = exported(base, name, tmp_path / "export")
    assert template.stop_ids == {tokenizer.eos_token_id}
    for what, conversation in CONVERSATIONS.items():
        (sample,) = template.encode(conversation)
        text = reference(tokenizer, conversation)
        assert sample.tokens == tokenizer(text, add_special_tokens=False)["input_ids"], what
        supervised = [t for t, weight in zip(sample.tokens, sample.weights, strict=True) if weight > 0]
        answers = [answer for _, answer in iter_answers(tokenizer, conversation)]
        assert all(answer.endswith(tokenizer.eos_token) for answer in answers)
        assert supervised == [t for a in answers for t in tokenizer(a, add_special_tokens=False)["input_ids"]], what
        assert supervised.count(tokenizer.eos_token_id) == len(answers)


@pytest.mark.parametrize("name", NAMES)
def test_a_rendering_begins_with_that_of_fewer_messages(name: str, base: Path, tmp_path: Path) -> None:
    tokenizer = exported(base, name, tmp_path / "export")
    for conversation in CONVERSATIONS.values():
        texts = [reference(tokenizer, conversation, n) for n in range(1, len(conversation.messages) + 1)]
        for shorter, longer in itertools.pairwise(texts):
            assert longer.startswith(shorter)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def find_reasoning_format(source: str) -> ReasoningFormat:
    found = detect_reasoning(source)
    assert found is not None
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=30)
@given(
    calls=st.lists(
        st.builds(
            Call,
            st.sampled_from(["find_place", "other.tool", "a-b", "ns/f"]),
            st.dictionaries(
                st.text(max_size=8) | st.sampled_from(["town", "class", "None", "a-b"]), VALUES, max_size=4
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    reasoning=st.none() | st.sampled_from(["Hm.", "So\n\n[f(x=1)]", 'call {"name": "g", "parameters": {}}']),
)
def test_calls_are_read_back_from_the_rendering(name: str, calls: list[Call], reasoning: str | None) -> None:
    traced = TracedTemplate(read_chat_template(name), {"eos_token": "</s>"})
    asked = Conversation((ASK,), (TOOL,))
    answered = Conversation((ASK, Message("assistant", None, tuple(calls), reasoning=reasoning)), (TOOL,))
    prompt, text = traced.render(asked, add_generation_prompt=True)[0], traced.render(answered)[0]
    answer, source = text.removeprefix(prompt).rstrip("\n"), read_chat_template(name)
    split = find_reasoning_format(source).split(answer)
    parsed = detect_format(source).parse(split.blank(answer) if split else answer)
    assert parsed.calls == tuple(calls)
    assert not parsed.malformed
    assert (split.text.strip() if split else None) == reasoning


@pytest.mark.parametrize("name", NAMES)
def test_the_call_format_is_recognised_and_has_server_parsers(name: str) -> None:
    found = detect_format(read_chat_template(name))
    assert found.name == FORMATS[name]
    assert found.vllm_parser
    assert found.sglang_parser


def test_the_names_are_those_in_the_documentation() -> None:
    assert tuple(list_shipped_templates()) == NAMES
    assert all(f"`{name}`" in (ROOT / "docs" / "reference" / "config.md").read_text() for name in NAMES)
    assert '"data/templates/*.jinja"' in (ROOT / "pyproject.toml").read_text()


def test_a_comment_names_the_call_format_of_any_template() -> None:
    assert detect_format("{#- call_format: glm45 -#}{{ messages }}<tool_call>arguments").name == "glm45"
    with pytest.raises(DataError, match="did you mean hermes"):
        detect_format("{# call_format: hermse #}")


@pytest.mark.parametrize("name", NAMES)
def test_thinking_is_switched_off_in_prompts_and_turns_alike(name: str, tmp_path: Path) -> None:
    base = copy_base(tmp_path / "base")
    tokenizer = exported(base, name, tmp_path / "export")
    template = ChatTemplate(base, None, {"enable_thinking": False}, choose(name))
    plain = CONVERSATIONS["several turns"]
    (sample,) = template.encode(plain)
    text = reference(tokenizer, plain, enable_thinking=False)
    assert sample.tokens == tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt = reference(tokenizer, plain, 1, add_generation_prompt=True, enable_thinking=False)
    assert prompt.endswith("<think>\n\n</think>\n\n")
    assert text.startswith(prompt)
    supervised = template.decode([t for t, w in zip(sample.tokens, sample.weights, strict=True) if w > 0])
    assert "think" not in supervised, "what the prompt gives is trained"


@pytest.mark.parametrize("name", NAMES)
def test_text_beside_calls_is_kept_or_refused_by_name(name: str, tmp_path: Path) -> None:
    template = ChatTemplate(copy_base(tmp_path / "base"), chat_template=choose(name))
    conversation = Conversation((ASK, Message("assistant", "Let me look.", CALL.calls)), (TOOL,))
    if name == "hermes":
        assert "Let me look.\n<tool_call>" in template.render(conversation)
        template.encode(conversation)
    else:
        with pytest.raises(DataError, match=r"the text next to a call in messages\[1\]; set data.content_with_calls"):
            template.encode(conversation)


def test_pythonic_refuses_a_name_that_python_cannot_call(tmp_path: Path) -> None:
    template = ChatTemplate(copy_base(tmp_path / "base"), chat_template=choose("pythonic"))
    with pytest.raises(DataError, match='the name "two words" cannot be called'):
        template.encode(Conversation((ASK, Message("assistant", None, (Call("two words", {}),))), (TOOL,)))


@pytest.mark.parametrize("name", NAMES)
def test_servers_may_send_arguments_as_text_and_content_in_parts(name: str, tmp_path: Path) -> None:
    tokenizer = exported(copy_base(tmp_path / "base"), name, tmp_path / "export")
    sent = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [sent]}]
    if name == "pythonic":
        with pytest.raises(Exception, match="needs an object"):
            tokenizer.apply_chat_template(messages, tokenize=False)
    else:
        assert '{"a": 1}' in tokenizer.apply_chat_template(messages, tokenize=False)


def test_an_export_has_the_chosen_template_and_none_of_the_bases(tmp_path: Path) -> None:
    tokenizer = exported(TINY_BASE, "hermes", tmp_path)
    assert tokenizer.chat_template == read_chat_template("hermes")
    assert (tmp_path / "chat_template.jinja").read_text() == read_chat_template("hermes")
    assert "chat_template" not in json.loads((tmp_path / "tokenizer_config.json").read_text())


def test_a_base_without_a_template_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no chat template, .*set model.chat_template .* hermes, llama3, pythonic"):
        ChatTemplate(copy_base(tmp_path / "base"))


@pytest.mark.parametrize(
    ("source", "error", "reason"),
    [
        ("{{ messages }}", DataError, "ignores tools|no loop"),
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", DataError, "ignores tools"),
        ("{% for m in messages", DataError, "not valid Jinja"),
        (
            "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ tools ~ m ~ '<|im_end|>' }}{% endfor %}"
            "{{ '<|im_start|>' if add_generation_prompt }}",
            ConfigError,
            r"lacks the template's tokens <\|im_start\|>, <\|im_end\|>, which would become plain text",
        ),
    ],
)
def test_a_file_that_is_no_template_of_the_model_is_refused_by_name(
    source: str, error: type[Exception], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "my.jinja").write_text(source)
    with pytest.raises(error, match=reason) as caught:
        ChatTemplate(copy_base(tmp_path / "base"), chat_template=choose(str(tmp_path / "my.jinja")))
    assert "my.jinja" in str(caught.value)


def test_a_tokenizer_without_eos_is_refused(tmp_path: Path) -> None:
    base = copy_base(tmp_path / "base")
    config = json.loads((base / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="no eos_token, with which the chat template hermes ends"):
        ChatTemplate(base, chat_template=choose("hermes"))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("hermse", r"no such file, and no template of that name; did you mean hermes\?"),
        ("no/such.jinja", "no such file"),
        (".", "a directory"),
        ("EMPTY", "an empty file"),
        ("BINARY", "cannot be read as text"),
    ],
)
def test_a_config_reports_a_template_that_cannot_be_read(value: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "EMPTY").write_text("\n")
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe\x00")
    value = str(tmp_path / value) if value.isupper() else value
    with pytest.raises(ConfigError, match=reason) as caught:
        load_config(ROOT / "configs" / "tiny_lora.yaml", [f"model.chat_template={value}"])
    assert f"model.chat_template={value}" in str(caught.value)


def test_commands_take_the_template_and_need_a_tokenizer_for_it(
    tmp_path: Path, write_rows: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows([CONVERSATIONS["system"].to_openai()])
    base = copy_base(tmp_path / "base")

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        return main(["data", *map(str, arguments)]), *capsys.readouterr()

    code, shown, _ = run("show", rows, "--tokenizer", base, "--chat-template", "llama3")
    assert code == 0
    assert '{"name": "find_place", "parameters": {"town": "Bergen", "days": 3}}<|eot_id|>' in shown
    code, checked, _ = run("check", rows, "--tokenizer", base, "--chat-template", "hermes")
    assert code == 0
    assert "of them supervised" in checked
    for wrong, words in (
        (("check", rows, "--chat-template", "hermes"), "--chat-template: needs --tokenizer"),
        (("show", rows, "--tokenizer", base, "--chat-template", "lama3"), "did you mean llama3?"),
        (("check", rows, "--tokenizer", base), "set model.chat_template (--chat-template)"),
    ):
        code, _, told = run(*wrong)
        assert code == 2
        assert words in told


def test_an_adapter_answers_with_the_template_beside_it(make_model: Callable[..., Path], tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(make_model("llama"), base)
    (base / "tokenizer_config.json").write_text((copy_base(tmp_path / "b") / "tokenizer_config.json").read_text())
    adapter.mkdir()
    copy_companions(base, adapter, Prompting(chat_template=choose("pythonic")))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    engine = LocalEngine(base, adapter, model=model)
    assert detect_format(engine.template.source).name == "pythonic"
    chosen = LocalEngine(base, adapter, model=model, chat_template=choose("hermes"))
    assert detect_format(chosen.template.source).name == "hermes"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_base_without_a_template_trains_and_its_export_is_evaluated(tmp_path: Path) -> None:
    base, run = copy_base(tmp_path / "base"), tmp_path / "run"

    def fctune(*arguments: str) -> str:
        command = [warm_python(), "-m", "fctune.cli", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    model = [
        f"model.path={base}",
        "model.chat_template=hermes",
        f"output_dir={run}",
        "data.sources.0.path=synthetic:train:3000:5",
    ]
    fctune("data", "synthetic", "cases", "--rows", "40", "--seed", "5", "--out", str(tmp_path / "cases.jsonl"))
    evaluated = ["eval.every=100", f"eval.cases={tmp_path / 'cases.jsonl'}", "eval.max_share_of_time=1"]
    fctune(
        "train",
        "--config",
        "configs/tiny_lora.yaml",
        "--nproc",
        "2",
        *model,
        *evaluated,
        "validation.every=100",
    )
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [step["validation_loss"] for step in steps if "validation_loss" in step]
    assert losses[-1] < losses[0]
    for name in ("merged", "adapter"):
        assert (run / "export" / name / "chat_template.jinja").read_text() == read_chat_template("hermes")
    for model_name in ("merged", "adapter"):
        out = tmp_path / f"{model_name}.jsonl"
        fctune(
            "eval",
            "--model",
            str(run / "export" / model_name),
            "--cases",
            str(tmp_path / "cases.jsonl"),
            "--out",
            str(out),
        )
        summary = json.loads(out.with_suffix(".summary.json").read_text())
        assert summary["scores"]["all"]["n"] == 40
        assert summary["scores"]["all"]["rates"]["accuracy"]["rate"] > 0.3
    fctune("validate", str(run), "--no-calls")  # compares the template with the adapter's, as the base has none
