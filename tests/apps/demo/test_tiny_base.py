import json
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from fctune.apps.demo.tiny_base import TAG_TOKENS, TEMPLATE, iter_texts, write_random_model, write_tokenizer
from fctune.data.synthetic import iter_conversations
from tests.conftest import TINY_BASE as BASE

CALLS = [
    {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}},
    {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}},
]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Zürich and Oslo?"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "content": '{"sky": "clear"}', "name": "get_weather"},
    {"role": "tool", "content": '{"sky": "grey"}', "name": "get_weather"},
    {"role": "assistant", "content": "Clear, then grey."},
    {"role": "user", "content": "And Oslo again?"},
    {"role": "assistant", "content": "One moment.", "tool_calls": CALLS[1:]},
]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BASE)


def _render(tokenizer: Any, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    return tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, **kwargs)


def test_the_base_is_small_enough_to_ship():
    assert sum(path.stat().st_size for path in BASE.iterdir()) < 5_000_000
    config = json.loads((BASE / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["num_hidden_layers"] == 4
    assert config["head_dim"] % 2 == 0
    assert not config["tie_word_embeddings"]
    model = AutoModelForCausalLM.from_pretrained(BASE)
    assert 0.8e6 < sum(weight.numel() for weight in model.parameters()) < 1.2e6


def test_the_vocabulary_is_small_and_its_ids_agree_with_the_config(tokenizer):
    config = json.loads((BASE / "config.json").read_text())
    assert len(tokenizer) == config["vocab_size"] < 2048
    assert tokenizer.eos_token == "<|eot_id|>"
    ids = (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"])
    assert ids == (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)


def test_the_shipped_chat_template_is_that_of_the_build(tokenizer):
    assert tokenizer.chat_template == TEMPLATE.read_text(encoding="utf-8")


def test_tools_calls_and_results_are_rendered(tokenizer):
    text = _render(tokenizer, MESSAGES)
    assert '<tools>\n{"name": "get_weather", "parameters"' in text
    assert (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call><|eot_id|>'
    ) in text
    assert '<tool_response>\n{"sky": "clear"}\n</tool_response><|eot_id|>' in text
    assert "One moment.\n<tool_call>" in text


def test_arguments_may_be_a_string_of_json(tokenizer):
    as_text = [{**CALLS[1], "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}]
    messages = [*MESSAGES[:-1], {**MESSAGES[-1], "tool_calls": as_text}]
    assert _render(tokenizer, messages) == _render(tokenizer, MESSAGES)


@pytest.mark.parametrize("first", [0, 1])
def test_every_prefix_of_a_conversation_renders_to_a_prefix_of_its_tokens(tokenizer, first):
    messages = MESSAGES[first:]
    for end in range(1, len(messages)):
        longer = tokenizer(_render(tokenizer, messages[: end + 1]), add_special_tokens=False)["input_ids"]
        prompted = messages[end]["role"] == "assistant"
        for text in (
            _render(tokenizer, messages[:end]),
            _render(tokenizer, messages[:end], add_generation_prompt=prompted),
        ):
            shorter = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert longer[: len(shorter)] == shorter


def test_call_tags_are_single_tokens_and_survive_decoding(tokenizer):
    for tag in TAG_TOKENS:
        (token,) = tokenizer(tag, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode([token], skip_special_tokens=True) == tag


@pytest.mark.parametrize(
    "text", ['{"a": "Zürich, 東京", "b": [1.5, -2]}', "Hi,  there \n\n'x' <tool_call>\n{}", "\t🙂"]
)
def test_any_text_survives_encoding_and_decoding(tokenizer, text):
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_a_value_has_the_same_tokens_in_a_sentence_and_in_a_call(tokenizer):
    value = tokenizer("Zorblat", add_special_tokens=False)["input_ids"]
    for text in ("weather in Zorblat please", '{"city": "Zorblat"}'):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert any(ids[start : start + len(value)] == value for start in range(len(ids)))


def test_conversations_are_short(tokenizer):
    rows = list(iter_conversations("train", 200, 0))
    sizes = []
    for row in rows:
        text = tokenizer.apply_chat_template(**_openai(row), tokenize=False)
        sizes.append(len(tokenizer(text, add_special_tokens=False)["input_ids"]))
    assert sum(sizes) / len(sizes) < 260
    assert max(sizes) < 640


def _openai(row: Any) -> dict[str, Any]:
    content = row.to_openai()
    return {"conversation": content["messages"], "tools": content["tools"]}


def test_an_untrained_build_can_be_loaded_and_is_reproducible(tmp_path):
    corpus = list(iter_texts(iter_conversations("pretrain", 300, 0)))
    weights = []
    for name in ("one", "two"):
        write_tokenizer(tmp_path / name, corpus)
        write_random_model(tmp_path / name, 0)
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert (tmp_path / "one/tokenizer.json").read_bytes() == (tmp_path / "two/tokenizer.json").read_bytes()
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "one").config
    assert config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path / "one"))
