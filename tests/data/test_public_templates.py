"""Every public chat template that renders tools and calls has transformers' ids and exact masks, or is rejected.

The templates are those of the ``trl`` wheel, each with a byte-level tokenizer that has its special tokens.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.supervision import SupervisionConfig
from fctune.errors import DataError

_spec = importlib.util.find_spec("trl")
FOLDER = Path(_spec.origin).parent / "chat_templates" if _spec and _spec.origin else None
TEMPLATES = sorted(FOLDER.glob("*.jinja")) if FOLDER else []

SPECIAL = re.compile(
    r"<[|｜][^<>\s]*?[|｜]>|</?s>|\[/?[A-Z_]{3,}\]|<eos>|<bos>|<end_of_turn>|<start_of_turn>|</?tool_call>|<\|[a-z_]+>|<[a-z_]+\|>"
)

TOOL = Tool(
    {
        "name": "find_place",
        "description": "Find a place.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["town"],
        },
    }
)


def call(identity: str, **arguments: Any) -> Call:
    return Call("find_place", arguments, id=identity)


def result(identity: str, content: str) -> Message:
    return Message("tool", content, call_id=identity, name="find_place")


ASK = Message("user", "Find Bergen for 3 days.")
CALLS = Message("assistant", None, (call("callAAAA1", town="Bergen", days=3),))
FOUND = result("callAAAA1", '{"found": true}')
CONVERSATIONS = {
    "no call": Conversation((Message("user", "Hi"), Message("assistant", "Hello there.")), (TOOL,)),
    "single": Conversation((Message("system", "Be brief."), ASK, CALLS), (TOOL,)),
    "result and answer": Conversation((ASK, CALLS, FOUND, Message("assistant", "It is there.")), (TOOL,)),
    "several turns": Conversation(
        (
            *(Message("user", "Hi"), Message("assistant", "Hello."), ASK, CALLS, FOUND, Message("assistant", "Yes.")),
            *(Message("user", "And Oslo?"), Message("assistant", None, (call("callBBBB2", town="Oslo"),))),
        ),
        (TOOL,),
    ),
    "unicode": Conversation((ASK, Message("assistant", None, (call("callAAAA1", town="Ærø 北京 🎉"),))), (TOOL,)),
    "empty arguments": Conversation((ASK, Message("assistant", None, (call("callAAAA1"),))), (TOOL,)),
    "content with a call": Conversation((ASK, Message("assistant", "Let me look.", CALLS.calls)), (TOOL,)),
    "parallel": Conversation(
        (
            *(ASK, Message("assistant", None, (call("callAAAA1", town="Bergen"), call("callBBBB2", town="Oslo")))),
            *(result("callAAAA1", "1"), result("callBBBB2", "2"), Message("assistant", "Both.")),
        ),
        (TOOL,),
    ),
}

# Conversations of which a template silently drops a part.
DROPPED = {
    "gptoss": ("parallel",),
    "llama3_1": ("content with a call",),
    "llama3_2": ("content with a call",),
    "muse_glimmer": ("content with a call",),
}

# Templates that render tools and calls but end no turn with a token, so a model would never learn to stop.
WITHOUT_END = {"glm4moe"}


def write_model(source: str, path: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(["find a place"], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_special_tokens(sorted({"<bos_>", "<eos_>", *SPECIAL.findall(source)}))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos_>", eos_token="<eos_>", chat_template=source
    )
    fast.save_pretrained(path)
    return path


def reference(model: Path, conversation: Conversation, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model).apply_chat_template(
        [m.to_openai() for m in conversation.messages],
        tools=[t.to_openai() for t in conversation.tools] or None,
        **options,
    )


def renders_calls(model: Path) -> bool:
    """Return True if transformers renders tools, and calls before a result, with the template."""
    try:
        question = reference(model, Conversation((ASK,), (TOOL,)), tokenize=False)
        answered = reference(model, CONVERSATIONS["result and answer"], tokenize=False)
        bare = reference(model, Conversation((ASK, Message("assistant", "x")), ()), tokenize=False)
    except Exception:
        return False
    return "days" in question and answered.count("Bergen") > bare.count("Bergen")


pytestmark = pytest.mark.skipif(not TEMPLATES, reason="trl is not installed: pip install -e '.[dev]'")


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_ids_equal_transformers_and_only_answers_are_supervised(path: Path, tmp_path: Path) -> None:
    model = write_model(path.read_text(), tmp_path / "model")
    if not renders_calls(model) or path.stem in WITHOUT_END:
        with pytest.raises(DataError):
            ChatTemplate(model)
        return
    template = ChatTemplate(model)
    num_encoded = 0
    for name, conversation in CONVERSATIONS.items():
        try:
            expected = reference(model, conversation, tokenize=True, return_dict=True)["input_ids"]
        except Exception:
            with pytest.raises(DataError, match="the chat template"):
                template.encode(conversation)
            assert name in ("parallel", "content with a call"), name
            continue
        if name in DROPPED.get(path.stem.removesuffix("_training"), ()):
            with pytest.raises(DataError, match="does not print"):
                template.encode(conversation)
            continue
        (encoded,) = template.encode(conversation)
        assert encoded.tokens == expected, name
        check_mask(template, conversation, encoded.tokens, encoded.weights)
        num_encoded += 1
    assert num_encoded >= 6


def check_mask(template: ChatTemplate, conversation: Conversation, tokens: list[int], weights: list[float]) -> None:
    supervised = template.tokenizer.decode([t for t, w in zip(tokens, weights, strict=True) if w > 0])
    context = template.tokenizer.decode([t for t, w in zip(tokens, weights, strict=True) if w == 0])
    for message in conversation.messages:
        if message.role != "assistant":
            assert (message.content or "").strip('{}"') not in supervised or message.content in ("1", "2", "Hi")
        elif message.content and not message.calls:
            assert message.content in supervised
            assert message.content not in context.replace("Hi", "")
    assert "<think>" not in supervised
    ends = [i for i, w in enumerate(weights) if w > 0 and (i + 1 == len(weights) or weights[i + 1] == 0)]
    num_answers = sum(m.role == "assistant" for m in conversation.messages)
    assert len(ends) <= num_answers or "gptoss" in str(template.model_dir)
    assert all(tokens[end] in template.encoder.special_ids for end in ends)


@pytest.mark.parametrize("name", ["llama3_1", "qwen2_5"])
def test_a_template_with_one_call_per_turn_rejects_or_splits_parallel_calls(name: str, tmp_path: Path) -> None:
    assert FOLDER is not None
    model = write_model((FOLDER / f"{name}.jinja").read_text(), tmp_path / "model")
    parallel = CONVERSATIONS["parallel"]
    if name == "llama3_1":
        with pytest.raises(DataError, match="single tool-calls"):
            ChatTemplate(model).encode(parallel)
    (split,) = ChatTemplate(model, SupervisionConfig(parallel_calls="split")).encode(parallel)
    text = ChatTemplate(model).tokenizer.decode(split.tokens)
    assert text.index("Bergen") < text.index("Oslo")
    assert json.dumps({"town": "Oslo"}) in text


def load(name: str, path: Path, supervision: SupervisionConfig | None = None) -> ChatTemplate:
    assert FOLDER is not None
    source = (FOLDER / f"{name}.jinja").read_text()
    return ChatTemplate(path if path.exists() else write_model(source, path), supervision)


def test_a_call_that_the_template_drops_is_named_with_the_remedy(tmp_path: Path) -> None:
    parallel = CONVERSATIONS["parallel"]
    with pytest.raises(DataError, match=r"call 2 of 2 of messages\[1\] \(find_place\); set data.parallel_calls=split"):
        load("gptoss", tmp_path / "model").encode(parallel)
    template = load("gptoss", tmp_path / "model", SupervisionConfig(parallel_calls="split"))
    text = template.decode(template.encode(parallel)[0].tokens)
    assert "Bergen" in text
    assert "Oslo" in text


@pytest.mark.parametrize("name", ["gptoss", "llama3_1", "llama3_2", "muse_glimmer"])
def test_text_that_the_template_drops_next_to_a_call_is_named_or_dropped_on_request(name: str, tmp_path: Path) -> None:
    answer = Message("assistant", "It is there.")  # after which gpt-oss drops the text before a call
    conversation = Conversation((ASK, Message("assistant", "Let me look.", CALLS.calls), FOUND, answer), (TOOL,))
    with pytest.raises(DataError, match=r"the text next to a call in messages\[1\]; set data.content_with_calls=drop"):
        load(name, tmp_path / "model").encode(conversation)
    template = load(name, tmp_path / "model", SupervisionConfig(content_with_calls="drop"))
    without = Conversation((ASK, CALLS, FOUND, answer), (TOOL,))
    assert template.encode(conversation) == template.encode(without)


def test_content_is_kept_on_request_to_drop_it_where_the_template_prints_it(tmp_path: Path) -> None:
    conversation = CONVERSATIONS["content with a call"]
    template = load("qwen3", tmp_path / "model", SupervisionConfig(content_with_calls="drop"))
    assert "Let me look." in template.decode(template.encode(conversation)[0].tokens)


def test_a_call_whose_quotes_are_not_escaped_is_named(tmp_path: Path) -> None:
    template = load("lfm2_2_5", tmp_path / "model")
    for town in ("Land's End", "C:\\new", "a\nb"):
        conversation = Conversation((ASK, Message("assistant", None, (call("callAAAA1", town=town),))), (TOOL,))
        with pytest.raises(DataError, match=r"find_place\.town of messages\[1\] in quotes .* cannot be parsed back"):
            template.encode(conversation)
    fine = Conversation((ASK, Message("assistant", None, (call("callAAAA1", town='say "hi"'),))), (TOOL,))
    assert template.encode(fine)[0].num_supervised


VALUES: dict[str, Any] = {
    "quotes": 'She said "it\'s here" \\ there',
    "newline": " two\n lines ",
    "number": -1.5e-7,
    "large": 12345678901234567890,
    "truth": True,
    "nothing": None,
    "empty": "",
    "list": ["Ærø", 1, False, {"deep": ["北京", "it's"]}],
    "dict": {"a b": {"c": []}},
}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_no_template_that_prints_every_value_is_rejected(path: Path, tmp_path: Path) -> None:
    try:
        template = ChatTemplate(write_model(path.read_text(), tmp_path / "model"))
    except DataError:
        return
    values = {k: v for k, v in VALUES.items() if k not in ("quotes", "newline")} if "lfm2_2_5" in path.stem else VALUES
    conversation = Conversation(
        (
            *(Message("system", " Be\n brief. "), ASK, Message("assistant", None, (call("callAAAA1", **values),))),
            *(result("callAAAA1", '{"a": "b \\"c\\""}'), Message("assistant", "Look:\n\n- one  \n- two")),
        ),
        (TOOL,),
    )
    assert template.encode(conversation)[0].num_supervised


def test_most_public_templates_are_supported() -> None:
    assert len(TEMPLATES) >= 60
