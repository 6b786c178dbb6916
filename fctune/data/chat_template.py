"""The chat template and tokenizer of a model directory, verified to support supervised training on tool calls."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError, DataError
from fctune.config.chat_templates import list_shipped_templates
from fctune.config.parsing import suggest_hub_name
from fctune.data.bounded_process import LimitError, prepare_processes
from fctune.data.chosen_template import ChosenTemplate
from fctune.data.completeness import CompletenessCheck, UnprintedError
from fctune.data.control_tokens import ControlTokens
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.conversation_encoder import ConversationEncoder, Encoded, make_limit_error
from fctune.data.reasoning import ReasoningSupport, find_reasoning_support
from fctune.data.stop_tokens import find_turn_ends, read_eos_ids
from fctune.data.supervision import SupervisionConfig
from fctune.data.template_args import merge_template_args, read_template_args
from fctune.data.token_offsets import OffsetTokenizer
from fctune.data.tracing import IN_CONTENT, IN_LAST_CONTENT, TracedTemplate, read_own_templates
from fctune.data.turns import TurnEnd, TurnPlanner


class MissingTemplateError(ConfigError):
    """A tokenizer without a chat template, as base models have."""


class ChatTemplate:
    """The chat template and tokenizer of a model directory.

    ``encoder`` does the encoding and can be sent to another process, which then needs no tokenizer files. ``stop_ids``
    are the ids of the tokens with which the template ends an assistant turn, and those of generation_config.json.
    ``template_args`` are the switches given to the template for every conversation, such as ``enable_thinking``; a
    conversation's own are merged over them.
    ``reasoning`` is what the template does with reasoning. ``is_chosen`` is False for the model's own template.

    Args:
        model_dir: Directory with the tokenizer.
        supervision: Selects the supervised tokens.
        template_args: Switches of the template, merged over those recorded in the directory; None unsets one.
        chat_template: Template in place of the model's own, if any.

    Raises (at construction):
        ConfigError: There is no tokenizer, or it lacks tokens of the template chosen.
        MissingTemplateError: The tokenizer has no chat template.
        DataError: The template ignores tools, its assistant turns cannot be separated from the rest, or it exceeds the
            limits on rendering.
    """

    def __init__(
        self,
        model_dir: str | Path,
        supervision: SupervisionConfig | None = None,
        template_args: Mapping[str, Any] | None = None,
        chat_template: ChosenTemplate | None = None,
    ):
        self.model_dir = Path(model_dir)
        self.is_chosen = chat_template is not None
        # Those recorded in the directory belong to its own template.
        recorded = read_template_args(self.model_dir) if chat_template is None else {}
        self.template_args = merge_template_args(recorded, template_args)
        if _read_template(self.model_dir, chat_template) not in read_own_templates():
            prepare_processes()  # while the tokenizer is loaded
        self.tokenizer = load_tokenizer(self.model_dir, chat_template)
        # Encoding the text of a control token changes the tokenizer for a moment.
        self._encoding = threading.RLock()
        # How errors name the template.
        self._origin = (
            f"{model_dir}" if chat_template is None else f"{model_dir} with chat template {chat_template.name}"
        )
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        self.source: str = self.tokenizer.get_chat_template(None, [{}])
        try:
            self._prepare(supervision or SupervisionConfig(), is_chosen=chat_template is not None)
        except LimitError as error:
            raise DataError(f"{self._origin}: {make_limit_error(error)}.") from None

    def _prepare(self, supervision: SupervisionConfig, is_chosen: bool) -> None:
        """Find out how the template works, and make the encoder."""
        try:
            self._traced = TracedTemplate(self.source, self.tokenizer.special_tokens_map | self.template_args)
        except DataError as error:
            raise DataError(f"{self._origin}: {error}") from None
        self.reasoning = self._find_reasoning(supervision)
        self._traced.has_names_in_ids = self._prints_ids_for_names()
        if is_chosen:
            self.require_tokens()
        self._require_tools()
        special = {t.content: i for i, t in self.tokenizer.added_tokens_decoder.items() if t.special}
        answer_end, call_end = self._find_turn_ends(special)
        self.encoder = ConversationEncoder(
            self._traced,
            OffsetTokenizer(self.tokenizer.backend_tokenizer),
            ControlTokens(special),
            CompletenessCheck(self._traced),
            TurnPlanner(self._traced, answer_end, call_end, self.reasoning.switch),
            SupervisionConfig(),
            self.reasoning,
        )
        self._verify()  # with the default supervision
        self.encoder = replace(self.encoder, supervision=supervision)

    def render(self, conversation: Conversation, add_generation_prompt: bool = False) -> str:
        """Return the template's text of a conversation.

        Raises:
            DataError: The template rejects the conversation; the error quotes the template's message.
            TemplateLimitError: It takes too much time or memory.
        """
        try:
            return self._traced.render(conversation, add_generation_prompt=add_generation_prompt)[0]
        except LimitError as error:
            raise make_limit_error(error) from None

    def _render(self, conversation: Conversation) -> str:
        return self._traced.render(conversation)[0]

    def encode(self, conversation: Conversation) -> list[Encoded]:
        """Encode a conversation as ``ConversationEncoder.encode`` does."""
        return self.encoder.encode(conversation)

    def encode_prompt(self, conversation: Conversation, add_generation_prompt: bool = True) -> list[int]:
        """Encode a prompt as ``ConversationEncoder.encode_prompt`` does."""
        with self._encoding:
            return self.encoder.encode_prompt(conversation, add_generation_prompt)

    def encode_continuation(self, conversation: Conversation, index: int) -> list[int]:
        """Return the ids between an answer and the next as ``ConversationEncoder.encode_continuation`` does."""
        with self._encoding:
            return self.encoder.encode_continuation(conversation, index)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        with self._encoding:
            text: str = self.tokenizer.decode(tokens)
        return text

    def count_tokens(self, text: str) -> int:
        """Return the number of a text's token ids, without added special tokens."""
        with self._encoding:
            return len(self.tokenizer.encode(text, add_special_tokens=False))

    def require_tokens(self) -> None:
        """Reject a template that writes control tokens of another tokenizer, which this one would spell as text.

        Raises:
            ConfigError: The tokenizer lacks tokens of the template; they are named.
            DataError: The template refuses a conversation.
        """
        texts = []
        for name, conversation in _PROBES.items():
            try:
                texts.append(self._traced.render(conversation, add_generation_prompt=True)[0])
            except DataError as error:
                raise DataError(f"{self._origin}: {error} (a conversation with {name}).") from None
        spelled = dict.fromkeys(_CONTROL_TOKEN.findall("".join(texts)))
        if lacking := [token for token in spelled if self.tokenizer.backend_tokenizer.token_to_id(token) is None]:
            raise ConfigError(
                f"{self._origin}: the tokenizer lacks the template's tokens {', '.join(lacking)}, which would become "
                f"plain text. Use a template of this model's family, or {', '.join(list_shipped_templates())}."
            )

    def resolve_thinking(self, has_reasoning: Callable[[], bool]) -> None:
        """Choose what ``thinking: auto`` means for a run: the rows' own switches only, unless rows have reasoning.

        Args:
            has_reasoning: Returns True if any row of the run has reasoning; called only if the answer matters.
        """
        supervision = self.encoder.supervision
        if supervision.thinking != "auto":
            return
        sets_switch = supervision.reasoning != "drop" and self.reasoning.switch is not None and has_reasoning()
        if not sets_switch:
            self.encoder = replace(self.encoder, supervision=replace(supervision, thinking="rows"))

    def _find_reasoning(self, supervision: SupervisionConfig) -> ReasoningSupport:
        """Return the template's use of reasoning, and check that it reads the switches."""
        found = find_reasoning_support(self._traced)
        try:
            found.check_args(self.template_args)
        except ConfigError as error:
            raise ConfigError(f"{self._origin}: {error}") from None
        if supervision.reasoning == "in_content":
            found = replace(found, key=IN_CONTENT if found.key == IN_CONTENT else IN_LAST_CONTENT)
        if found.key is not None:
            self._traced.reasoning_key = found.key
        return found

    def _prints_ids_for_names(self) -> bool:
        """Return True if the template prints the id of a call and not its name, as Kimi K2's does."""
        call = Call("another_probe", {}, id=_PROBE_CALL.calls[0].id)
        asked = Conversation((Message("user", "Find it."), Message("assistant", None, (call,))), (_PROBE_TOOL,))
        try:
            text = self._render(asked)
        except DataError:
            return False
        return call.name not in text and str(call.id) in text

    def _require_tools(self) -> None:
        """Reject a template that prints no tools or no calls; other errors are left to ``_verify``."""
        if not self._traced.facts.reads_tools:
            raise DataError(self._describe_ignored_tools())
        try:
            question = self._render(Conversation((Message("user", "Find it."),), (_PROBE_TOOL,)))
        except DataError:
            return
        if not all(word in question for word in _PROBE_WORDS):
            raise DataError(self._describe_ignored_tools())
        if "tool_calls" not in self.source:
            try:
                text = self._render(_PROBES["a tool and a call"])
            except DataError:
                text = ""
            if text.count(_CALL_WORDS[-1]) < 2:  # the question holds it too
                raise DataError(self._describe_ignored_calls())

    def _describe_ignored_tools(self) -> str:
        return (
            f"{self._origin}: its chat template ignores tools, so a model cannot learn to call them. "
            f"Use a model whose template renders `tools`, or {_OTHER_TEMPLATE}."
        )

    def _describe_ignored_calls(self) -> str:
        return (
            f"{self._origin}: its chat template does not render calls, so a model cannot learn to make them. "
            f"Use a model whose template renders `tool_calls`, or {_OTHER_TEMPLATE}."
        )

    def _find_turn_ends(self, special: dict[str, int]) -> tuple[TurnEnd, TurnEnd]:
        """Return how the template ends an answer and a turn with calls; set ``stop_ids``."""
        eos_ids = read_eos_ids(self.model_dir)
        eos_id: int | None = self.tokenizer.eos_token_id
        spellings = {i: token.content for i, token in self.tokenizer.added_tokens_decoder.items()}
        candidates = special | {spellings[i]: i for i in (*eos_ids, eos_id) if i is not None and i in spellings}
        try:
            ends = find_turn_ends(self._traced, candidates, eos_ids, eos_id)
        except DataError as error:
            raise DataError(f"{self._origin}: {error}") from None
        self.stop_ids: set[int] = set(eos_ids)
        for end in ends:
            self.stop_ids |= {candidates[token] for token in (*end.printed, *end.following)}
            self.stop_ids |= set() if end.appended is None else {end.appended}
        return ends

    def _verify(self) -> None:
        """Reject a template that drops calls, or whose messages cannot be separated."""
        for name, conversation in _PROBES.items():
            self._verify_text(name, conversation)
            try:
                samples = self.encode(conversation)
            except DataError as error:
                if isinstance(error, UnprintedError) and error.first is not None and error.first.is_call:
                    raise DataError(self._describe_ignored_calls()) from None
                raise DataError(f"{self._origin}: cannot be trained on: {error}.") from None
            supervised = [t for s in samples for t, weight in zip(s.tokens, s.weights, strict=True) if weight > 0]
            answer = self.decode(supervised)
            if any(message.calls for message in conversation.messages) and not all(w in answer for w in _CALL_WORDS):
                raise DataError(self._describe_ignored_calls())

    def _verify_text(self, name: str, conversation: Conversation) -> str:
        try:
            text = self._render(conversation)
        except DataError as error:
            raise DataError(f"{self._origin}: {error} (a conversation with {name}).") from None
        expected = self._traced.render_with_transformers(conversation)
        if text != expected:
            raise DataError(f"{self._origin}: its chat template renders differently when traced; cannot derive masks.")
        return text


def load_tokenizer(model_dir: Path, chat_template: ChosenTemplate | None = None) -> Any:
    """Load the tokenizer of a model directory with transformers, offline, and with the chat template chosen.

    Raises:
        ConfigError: The tokenizer is missing, broken, or not a fast one.
        MissingTemplateError: It has no chat template.
    """
    if not model_dir.is_dir():
        hint = suggest_hub_name(str(model_dir), ".")
        raise ConfigError(f"{model_dir}: no such directory{hint} Expected a Hugging Face model directory.")
    files = ("tokenizer.json", "tokenizer_config.json")
    missing = [name for name in files if not (model_dir / name).is_file()]
    if missing:
        raise ConfigError(f"{model_dir}: no {' or '.join(missing)} there; download the complete model directory.")
    try:
        tokenizer = _load_tokenizer(model_dir)
    except Exception as error:  # broken files make the library raise exceptions of many types
        raise ConfigError(
            f"{model_dir}: its tokenizer cannot be loaded ({type(error).__name__}: {error}). Download the model again."
        ) from None
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{model_dir}: its tokenizer is not a fast one, which deriving masks requires. Add a tokenizer.json."
        )
    if chat_template is not None:
        tokenizer.chat_template = chat_template.source
        if tokenizer.eos_token is None and re.search(r"\beos_token\b", chat_template.source):
            raise ConfigError(
                f"{model_dir}: its tokenizer has no eos_token, with which the chat template {chat_template.name} ends "
                "turns. Name the token that ends a text as eos_token in tokenizer_config.json."
            )
    if not tokenizer.chat_template:
        raise MissingTemplateError(
            f"{model_dir}: its tokenizer has no chat template, so it is a base model. Use the instruct model, or "
            f"{_OTHER_TEMPLATE}."
        )
    return tokenizer


def _read_template(model_dir: Path, chat_template: ChosenTemplate | None) -> str | None:
    """Return the text of the template that will be used, or None if only the tokenizer's class can tell."""
    if chat_template is not None:
        return chat_template.source
    try:
        if (file := model_dir / "chat_template.jinja").is_file():
            return file.read_text(encoding="utf-8")
        declared = json.loads((model_dir / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):  # reported when the tokenizer is loaded
        return None
    return declared if isinstance(declared, str) else None


def _load_tokenizer(model_dir: Path) -> Any:
    """Load a tokenizer as AutoTokenizer does, without importing its model's code.

    AutoTokenizer loads the model's config class, which takes three seconds of imports. If the tokenizer's class is
    declared, it only needs the model type, which a plain config has too.
    """
    from transformers import AutoTokenizer
    from transformers.configuration_utils import PreTrainedConfig

    declared = json.loads((model_dir / "tokenizer_config.json").read_text(encoding="utf-8"))
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if declared.get("tokenizer_class") and "auto_map" not in declared and (model_dir / "config.json").is_file():
        values = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        config = options["config"] = PreTrainedConfig(name_or_path=str(model_dir))
        for key in ("model_type", "model_name", "tokenizer_class"):
            if key in values:
                setattr(config, key, values[key])
    return AutoTokenizer.from_pretrained(str(model_dir), **options)


# How model families spell the tokens that structure a conversation; tags such as <tool_call> may be plain text.
_CONTROL_TOKEN = re.compile(r"<\|[^|<>\s]+\|>|<｜[^｜<>\s]+｜>|<(?:start|end)_of_\w+>|\[/?[A-Z][A-Z_]{2,}\]")
_OTHER_TEMPLATE = f"set model.chat_template (--chat-template) to {', '.join(list_shipped_templates())} or a file"
_PROBE_TOOL = Tool(
    {
        "name": "find_probe",
        "description": "Find a probe.",
        "parameters": {"type": "object", "properties": {"probe_city": {"type": "string"}}, "required": ["probe_city"]},
    }
)
_PROBE_WORDS = ("find_probe", "probe_city")
_CALL_WORDS = (*_PROBE_WORDS, "Oslo")
_PROBE_CALL = Message("assistant", None, (Call("find_probe", {"probe_city": "Oslo"}, id="call00001"),))
_PROBES = {
    "an answer": Conversation((Message("user", "Hi"), Message("assistant", "Hello there."))),
    "a tool and a call": Conversation((Message("user", "Find it in Oslo."), _PROBE_CALL), (_PROBE_TOOL,)),
    "a call, its result and an answer": Conversation(
        (
            Message("user", "Find it in Oslo."),
            _PROBE_CALL,
            Message("tool", '{"found": true}', call_id="call00001", name="find_probe"),
            Message("assistant", "It is there."),
        ),
        (_PROBE_TOOL,),
    ),
}
