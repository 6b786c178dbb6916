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
        encoded = template.encode(conversation)
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
    split = ChatTemplate(model, SupervisionConfig(parallel_calls="split")).encode(parallel)
    text = ChatTemplate(model).tokenizer.decode(split.tokens)
    assert text.index("Bergen") < text.index("Oslo")
    assert json.dumps({"town": "Oslo"}) in text


def test_most_public_templates_are_supported() -> None:
    assert len(TEMPLATES) >= 60
