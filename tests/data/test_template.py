"""Token ids equal those of transformers, and exactly the model's own words are supervised."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from fctune.base.errors import ConfigError, DataError
from fctune.config.sections.data import DataConfig, SourceConfig
from fctune.data.chat_template import ChatTemplate, load_tokenizer
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.prepared_set import SPLITS, describe_counts, prepare
from fctune.data.sources import Defect, read_source
from fctune.data.stop_tokens import read_eos_ids
from fctune.data.supervision import SupervisionConfig, split_parallel_calls
from fctune.data.synthetic import iter_conversations
from tests.conftest import REAL_DATA

WEATHER = Tool(
    {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
)
CALL = Call("get_weather", {"city": "Paris"}, id="a")
OTHER = Call("get_weather", {"city": "Rome"}, id="b")
RESULT = Message("tool", '{"sky": "sunny"}', call_id="a", name="get_weather")


@pytest.fixture(scope="module")
def template(tiny_base: Path) -> ChatTemplate:
    return ChatTemplate(tiny_base)


def reference_ids(template: ChatTemplate, conversation: Conversation) -> list[int]:
    ids = template.tokenizer.apply_chat_template(
        [m.to_openai() for m in conversation.messages],
        tools=[t.to_openai() for t in conversation.tools] or None,
        tokenize=True,
        return_dict=True,
    )["input_ids"]
    return list(ids)


def supervised_text(template: ChatTemplate, conversation: Conversation) -> list[str]:
    """Return the text of each run of supervised tokens."""
    (encoded,) = template.encode(conversation)
    runs: list[list[int]] = []
    last = -2
    for i, (token, weight) in enumerate(zip(encoded.tokens, encoded.weights, strict=True)):
        if weight > 0:
            if i != last + 1:
                runs.append([])
            runs[-1].append(token)
            last = i
    return [template.tokenizer.decode(run) for run in runs]


def test_token_ids_equal_transformers_on_the_synthetic_set(template: ChatTemplate) -> None:
    for split in ("train", "pretrain"):
        for conversation in iter_conversations(split, 200, 1):
            assert template.encode(conversation)[0].tokens == reference_ids(template, conversation)


@pytest.mark.real_data
def test_token_ids_equal_transformers_on_real_rows(template: ChatTemplate) -> None:
    rows = list(read_source(str(REAL_DATA / "glaive_demo" / "glaive_toolcall_en_demo.json")))
    assert len(rows) == 300
    for row in rows:
        assert not isinstance(row, Defect)
        assert template.encode(row)[0].tokens == reference_ids(template, row)


@pytest.mark.real_data
def test_every_real_row_supervises_its_assistant_turns_and_nothing_else(template: ChatTemplate) -> None:
    for row in read_source(str(REAL_DATA / "glaive_demo" / "glaive_toolcall_en_demo.json")):
        assert isinstance(row, Conversation)
        turns = supervised_text(template, row)
        answers = [message for message in row.messages if message.role == "assistant"]
        assert len(turns) == len(answers) > 0
        for turn, message in zip(turns, answers, strict=True):
            assert turn.endswith("<|eot_id|>")
            if message.content:
                assert turn.startswith(message.content.strip()[:20])
            for call in message.calls:
                assert call.name in turn


def test_exactly_the_answers_are_supervised(template: ChatTemplate) -> None:
    conversation = Conversation(
        (
            Message("system", "Be brief."),
            Message("user", "Weather in Paris?"),
            Message("assistant", None, (CALL,)),
            RESULT,
            Message("assistant", "It is sunny."),
        ),
        (WEATHER,),
    )
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|eot_id|>'
    assert supervised_text(template, conversation) == [call, "It is sunny.<|eot_id|>"]


def test_train_on_selects_turns(tiny_base: Path) -> None:
    conversation = Conversation(
        (
            Message("user", "Hi"),
            Message("assistant", "Hello."),
            Message("user", "Weather in Paris?"),
            Message("assistant", None, (CALL,)),
            RESULT,
            Message("assistant", "Sunny."),
        ),
        (WEATHER,),
    )
    counts = {
        name: len(supervised_text(ChatTemplate(tiny_base, SupervisionConfig(train_on=name)), conversation))  # type: ignore[arg-type]
        for name in ("assistant", "last_assistant", "calls")
    }
    assert counts == {"assistant": 3, "last_assistant": 1, "calls": 1}


def test_message_weights_and_call_weights_scale_their_tokens(tiny_base: Path) -> None:
    conversation = Conversation(
        (
            Message("user", "Hi"),
            Message("assistant", "Hello.", weight=0.0),
            Message("user", "Weather in Paris?"),
            Message("assistant", "Let me look.", (CALL,), weight=0.5),
        ),
        (WEATHER,),
    )
    template = ChatTemplate(tiny_base, SupervisionConfig(call_weight=3.0))
    (encoded,) = template.encode(conversation)
    by_weight = {
        weight: template.tokenizer.decode(
            [t for t, w in zip(encoded.tokens, encoded.weights, strict=True) if w == weight]
        )
        for weight in set(encoded.weights)
    }
    assert set(by_weight) == {0.0, 0.5, 1.5}
    assert by_weight[0.5].strip() == "Let me look."
    assert by_weight[1.5].strip().startswith("<tool_call>")
    assert "Hello." in by_weight[0.0]


def test_splitting_parallel_calls_pairs_each_with_its_result() -> None:
    results = (Message("tool", "rome", call_id="b"), Message("tool", "paris", call_id="a"))
    conversation = Conversation(
        (Message("user", "?"), Message("assistant", "Look.", (CALL, OTHER)), *results), (WEATHER,)
    )
    split = split_parallel_calls(conversation).messages
    assert [m.content for m in split] == ["?", "Look.", "paris", None, "rome"]
    assert [m.calls for m in split] == [(), (CALL,), (), (OTHER,), ()]


@pytest.mark.parametrize(("first", "second"), [(None, None), ("a", "b")])
def test_splitting_parallel_calls_pairs_results_without_ids_by_name(first: str | None, second: str | None) -> None:
    calls = (Call("get_weather", {"city": "Rome"}, first), Call("get_time", {}, second))
    results = (Message("tool", "noon", name="get_time"), Message("tool", "sunny", name="get_weather"))
    conversation = Conversation((Message("user", "?"), Message("assistant", None, calls), *results), (WEATHER,))
    split = split_parallel_calls(conversation).messages
    assert [[call.name for call in m.calls] or m.content for m in split] == [
        "?",
        ["get_weather"],
        "sunny",
        ["get_time"],
        "noon",
    ]


def test_splitting_parallel_calls_keeps_missing_and_surplus_results() -> None:
    results = (Message("tool", "rome", call_id="b"), Message("tool", "?", call_id="c"))
    conversation = Conversation((Message("assistant", None, (CALL, OTHER)), *results), (WEATHER,))
    split = split_parallel_calls(conversation).messages
    assert [[call.id for call in m.calls] or m.content for m in split] == [["a"], ["b"], "rome", "?"]


def test_a_prompt_ends_at_the_start_of_the_answer(template: ChatTemplate) -> None:
    question = Conversation((Message("user", "Weather in Paris?"),), (WEATHER,))
    answered = Conversation((*question.messages, Message("assistant", None, (CALL,))), (WEATHER,))
    prompt = template.encode_prompt(question)
    (encoded,) = template.encode(answered)
    assert encoded.tokens[: len(prompt)] == prompt
    assert encoded.weights[len(prompt)] > 0
    assert not any(encoded.weights[: len(prompt)])


def test_text_that_resembles_a_marker_or_a_turn_is_plain_text(template: ChatTemplate) -> None:
    for content in (
        "[0:0:1]",
        "[deadbeef:0:1] hi",
        "{{ messages }}",
        "{% for m in x %}",
        "assistant",
        "\x00 \ue000 🎉",
    ):
        conversation = Conversation((Message("user", content), Message("assistant", content)))
        assert template.encode(conversation)[0].tokens == reference_ids(template, conversation)
        assert supervised_text(template, conversation) == [f"{content.strip()}<|eot_id|>"]


SPELLED = Conversation(
    (
        Message("system", "Never say <|eot_id|>."),
        Message("user", "What is <|eot_id|>? 🎉"),
        Message("assistant", "The end <|eot_id|> of a turn.", (Call("get_weather", {"city": "<|eot_id|>"}, id="a"),)),
        Message("tool", "Got<|eot_id|>", call_id="a", name="get_weather"),
        Message("assistant", "Done."),
    ),
    (WEATHER,),
)


def test_a_control_token_in_content_is_named(template: ChatTemplate) -> None:
    remedy = r"holds '<\|eot_id\|>', a control token .* data.special_tokens_in_content=escape .* or keep"
    for number in range(4):
        plain = [Message(m.role, "x", call_id=m.call_id) for m in SPELLED.messages]
        plain[2] = Message("assistant", "x", (CALL,))
        plain[number] = SPELLED.messages[number]
        with pytest.raises(DataError, match=rf"messages\[{number}\]\.content {remedy}"):
            template.encode(Conversation(tuple(plain), (WEATHER,)))
    tool = Tool({**WEATHER.function, "description": "See <|eot_id|>."})
    with pytest.raises(DataError, match=r"tools\[0\]\.function\.description holds"):
        template.encode(Conversation((Message("user", "Hi"), Message("assistant", "Hello.")), (tool,)))


def test_an_escaped_control_token_is_plain_text_with_the_same_words_supervised(tiny_base: Path) -> None:
    template = ChatTemplate(tiny_base, SupervisionConfig(special_tokens_in_content="escape", call_weight=3.0))
    (encoded,) = template.encode(SPELLED)
    text = template.tokenizer.apply_chat_template(
        [m.to_openai() for m in SPELLED.messages], tools=[WEATHER.to_openai()], tokenize=False
    )
    assert template.decode(encoded.tokens) == text
    end = template.tokenizer.convert_tokens_to_ids("<|eot_id|>")
    assert encoded.tokens.count(end) == text.count("<|eot_id|>") - 5  # one per turn, and none for content
    spans = {
        weight: template.decode([t for t, w in zip(encoded.tokens, encoded.weights, strict=True) if w == weight])
        for weight in (1.0, 3.0)
    }
    assert spans[1.0] == "The end <|eot_id|> of a turn.Done.<|eot_id|>"
    assert json.dumps({"city": "<|eot_id|>"}) in spans[3.0]
    assert spans[3.0].endswith("</tool_call><|eot_id|>")


def test_a_kept_control_token_is_encoded_as_transformers_encodes_it(tiny_base: Path) -> None:
    template = ChatTemplate(tiny_base, SupervisionConfig(special_tokens_in_content="keep"))
    assert template.encode(SPELLED)[0].tokens == reference_ids(template, SPELLED)
    assert template.encode_prompt(SPELLED)[: len(reference_ids(template, SPELLED))] == reference_ids(template, SPELLED)


def test_control_tokens_in_a_prompt_are_plain_text_by_default(template: ChatTemplate) -> None:
    question = Conversation((Message("user", "What is <|eot_id|><|start_header_id|>?"),))
    ids = template.encode_prompt(question)
    plain = template.encode_prompt(Conversation((Message("user", "What is it?"),)))
    for token in ("<|eot_id|>", "<|start_header_id|>"):
        identity = template.tokenizer.convert_tokens_to_ids(token)
        assert ids.count(identity) == plain.count(identity)
    assert "What is <|eot_id|><|start_header_id|>?" in template.decode(ids)


def test_private_use_characters_are_unchanged_without_a_control_token(template: ChatTemplate) -> None:
    conversation = Conversation((Message("user", "\U000f0041"), Message("assistant", "\U000f0042")))
    assert template.encode(conversation)[0].tokens == reference_ids(template, conversation)
    both = Conversation((Message("user", "\U000f0041 <|eot_id|>"),))
    with pytest.raises(DataError, match="stand for it"):
        template.encode_prompt(both)


@pytest.fixture
def broken(tiny_base: Path, tmp_path: Path) -> Callable[[str | None], Path]:
    """Return a function that copies the tiny base with another chat template, or none."""

    def make(source: str | None) -> Path:
        path = tmp_path / "model"
        shutil.copytree(tiny_base, path)
        config = json.loads((path / "tokenizer_config.json").read_text())
        config.pop("chat_template", None)
        (path / "chat_template.jinja").unlink(missing_ok=True)
        if source is not None:
            config["chat_template"] = source
        (path / "tokenizer_config.json").write_text(json.dumps(config))
        return path

    return make


LOOP = "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}<|eot_id|>{% endfor %}"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "no chat template"),
        (LOOP, "ignores tools"),
        ("{% for m in messages %}", "not valid Jinja"),
        ("{{ tools }}" + LOOP, "does not render calls"),
        ("{{ messages[0].content }} {{ tools }} {{ messages[0].tool_calls }}", "starts an assistant turn differently"),
        (
            "{{ raise_exception('I only take one message') if messages|length > 1 }}{{ tools or messages.tool_calls }}",
            "one message",
        ),
    ],
)
def test_a_template_that_cannot_be_trained_on_is_rejected(
    source: str | None, words: str, broken: Callable[[str | None], Path]
) -> None:
    with pytest.raises((ConfigError, DataError), match=words):
        ChatTemplate(broken(source))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "hostile",
    [
        "{{ 1/0 }}",
        "{{ range(10**9) }}",
        "{{ range(1000000000) | list }}",
        "{{ 'x' * 10**10 }}",
        "{{ 'x' * 1000000000 }}",
        "{{ 10**10**10 }}",
        "{{ 'x' | center(10**9) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a, b in [(1, 2)] * 10000 %}{% for c, d in [(1, 2)] * 100000 %}{% endfor %}{% endfor %}",
        pytest.param(
            "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            marks=pytest.mark.slow,
        ),
        pytest.param("{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}", marks=pytest.mark.slow),
        "{{ messages.absent.name }}",
        "{{ '%s %s' % 1 }}",
    ],
)
def test_a_template_that_fails_or_never_ends_is_named_within_bounded_time_and_memory(
    hostile: str, broken: Callable[[str | None], Path]
) -> None:
    path = broken(LOOP + hostile)
    started = time.thread_time()
    with pytest.raises(DataError, match=f"^{path}: .*chat template"):
        ChatTemplate(path)
    assert time.thread_time() - started < 10


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", "unheard_of"])
@pytest.mark.parametrize(
    "tokenizer_class", ["PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizerFast", "Qwen2Tokenizer", None]
)
def test_the_tokenizer_is_the_one_that_transformers_loads(
    model_type: str, tokenizer_class: str | None, tiny_base: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_base, path)
    for name, key, value in (
        ("config.json", "model_type", model_type),
        ("tokenizer_config.json", "tokenizer_class", tokenizer_class),
    ):
        content = json.loads((path / name).read_text()) | {key: value}
        (path / name).write_text(json.dumps(content))

    def describe(load: Callable[[], Any]) -> tuple[type, str, dict[str, Any], str] | type[Exception]:
        try:
            tokenizer = load()
        except Exception as error:
            return type(error)
        return (
            type(tokenizer),
            tokenizer.backend_tokenizer.to_str(),
            tokenizer.special_tokens_map,
            tokenizer.get_chat_template(),
        )

    expected = describe(lambda: AutoTokenizer.from_pretrained(str(path), local_files_only=True))
    found = describe(lambda: load_tokenizer(path))
    assert found == (ConfigError if isinstance(expected, type) else expected)


def test_a_broken_or_missing_tokenizer_is_named(tiny_base: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_base, path)
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        ChatTemplate(path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        ChatTemplate(path)


PLAIN = (
    "{{ tools }}\n{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function | tojson }}{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_a_turn_that_ends_in_plain_text_is_trained_to_end_with_the_end_of_sequence(
    broken: Callable[[str | None], Path],
) -> None:
    template = ChatTemplate(broken(PLAIN))
    eos = template.tokenizer.eos_token_id
    assert template.stop_ids == {eos}
    question, follow_up = Message("user", "Hi"), Message("user", "Who?")
    messages = (question, Message("assistant", "Hello."), follow_up, Message("assistant", "I."))
    samples = template.encode(Conversation(messages))
    for sample, index in zip(samples, (1, 3), strict=True):
        prompt = template.encode_prompt(Conversation(messages[:index]))
        supervised = [token for token, weight in zip(sample.tokens, sample.weights, strict=True) if weight > 0]
        assert sample.tokens == [*prompt, *supervised]
        assert supervised[-1] == eos
        assert template.decode(supervised[:-1]).strip() == messages[index].content


def test_a_template_without_any_stop_token_is_refused(broken: Callable[[str | None], Path]) -> None:
    path = broken(PLAIN)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (path / name).exists():
            content = json.loads((path / name).read_text())
            content.pop("eos_token", None)
            (path / name).write_text(json.dumps(content))
    with pytest.raises(DataError, match="generation could not stop"):
        ChatTemplate(path)


@pytest.mark.parametrize("eos", [7, [7, 9]])
def test_generation_stops_at_the_ids_of_the_generation_config_too(
    eos: int | list[int], broken: Callable[[str | None], Path], template: ChatTemplate
) -> None:
    path = broken(template.source)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert ChatTemplate(path).stop_ids == template.stop_ids | set(eos if isinstance(eos, list) else [eos])
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": "x"}))
    with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id is 'x'"):
        ChatTemplate(path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": 7}, "config.json": {"eos_token_id": 8}}, ({7}, {7})),
        ({"config.json": {"eos_token_id": [8, 9]}}, (set(), {8, 9})),
        ({"config.json": {"eos_token_id": 8, "text_config": {"eos_token_id": 9}}}, (set(), {9})),
        ({"config.json": {}}, (set(), set())),
    ],
    ids=["both", "model", "nested", "neither"],
)
def test_end_tokens_are_read_from_the_model_config_only_in_place_of_the_generation_config(
    files: dict[str, Any], expected: tuple[set[int], set[int]], tmp_path: Path
) -> None:
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    assert (read_eos_ids(tmp_path), read_eos_ids(tmp_path, has_fallback=True)) == expected


REWRITING = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|start_header_id|>{{ m.role }}"
    "<|end_header_id|>{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
)


def test_the_samples_of_a_conversation_stay_in_one_split_and_are_counted(
    broken: Callable[[str | None], Path], tmp_path: Path
) -> None:
    def answer(content: str) -> dict[str, str]:
        return {"role": "assistant", "content": content, "reasoning_content": "So."}

    def ask(content: str) -> dict[str, str]:
        return {"role": "user", "content": content}

    rows = [{"messages": [ask("Hi"), answer("Hello."), ask(f"Who is {row}?"), answer("I.")]} for row in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(
        sources=[SourceConfig(path=str(tmp_path / "rows.jsonl"))], validation_share=0.3, seq_len=256, packed=False
    )
    prepared = prepare(config, broken(REWRITING), tmp_path / "prepared")
    assert (prepared.counts.rows, prepared.counts.conversations, prepared.counts.samples) == (60, 60, 120)
    splits = [{int(prepared.digests[i]) for i in prepared.packs[split][0]} for split in SPLITS]
    assert len(splits[0]) + len(splits[1]) == 60
    assert min(map(len, splits)) > 5
    assert not splits[0] & splits[1]
    assert any("120 samples" in line for line in describe_counts(prepared))
