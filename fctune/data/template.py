"""A conversation as the model's own chat template writes it: token ids, and which of them are learnt.

Which text the template prints for which message, the template itself tells (``fctune.data.tracing``). Of an assistant's
text, what precedes the model's own words (the generation prompt) and what follows its end-of-turn token is context; the
rest is learnt.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.tracing import Span, TracedTemplate
from fctune.errors import ConfigError, DataError

TrainOn = Literal["assistant", "last_assistant", "calls"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a conversation and the loss weight of each as a target; 0.0 where nothing is learnt."""

    tokens: list[int]
    weights: list[float]

    @property
    def num_supervised(self) -> int:
        """How many tokens carry a loss."""
        return sum(weight > 0 for weight in self.weights)


@dataclass(frozen=True, slots=True)
class Policy:
    """What of a conversation is learnt, and what is done where a template cannot say it."""

    train_on: TrainOn = "assistant"
    call_weight: float = 1.0
    parallel_calls: Literal["error", "split"] = "error"


class ChatTemplate:
    """The chat template and tokenizer of a model directory.

    Raises (at construction):
        ConfigError: no tokenizer, or one without a chat template.
        DataError: a template that ignores tools, or whose assistant turns cannot be told apart from the rest.
    """

    def __init__(self, model_dir: str | Path, policy: Policy | None = None):
        self.model_dir = Path(model_dir)
        self.policy = Policy()
        self.tokenizer = load_tokenizer(self.model_dir)
        self._backend = self.tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.source: str = self.tokenizer.get_chat_template(None, [{}])
        try:
            self._traced = TracedTemplate(self.source, self.tokenizer.special_tokens_map)
        except DataError as error:
            raise DataError(f"{self.model_dir}: {error}") from None
        self._special_ids = set(self.tokenizer.all_special_ids)
        self._special_ids |= {i for i, t in self.tokenizer.added_tokens_decoder.items() if t.special}
        self._prompts = self._find_generation_prompts()
        self._history_header = self._find_history_header()
        self.stop_ids: set[int] = set()  # what the template ends an assistant's turn with
        self._verify()  # of the template, under the plain policy
        self.policy = policy or Policy()

    def render(self, conversation: Conversation, add_generation_prompt: bool = False) -> str:
        """The text that the template makes of a conversation.

        Raises:
            DataError: when the template refuses it, with the template's own words.
        """
        return self._traced.render(conversation, add_generation_prompt=add_generation_prompt)[0]

    def encode(self, conversation: Conversation) -> Encoded:
        """Token ids, equal to transformers' ``apply_chat_template``, and their loss weights.

        Raises:
            DataError: when the template refuses the conversation, or a token straddles the edge of what is learnt.
        """
        if self.policy.parallel_calls == "split":
            conversation = split_parallel_calls(conversation)
        text, spans = self._traced.render(conversation)
        printed = {span.message for span in spans}
        encoding = self._backend.encode(text, add_special_tokens=False)
        tokens: list[int] = encoding.ids
        offsets: list[tuple[int, int]] = encoding.offsets
        weights = [0.0] * len(tokens)
        for span in spans:
            weight = self._message_weight(conversation, span.message)
            if weight > 0:
                start = self._answer_start(conversation, span, text)
                stop = self._answer_stop(conversation, span, text, printed)
                message = conversation.messages[span.message]
                self._weigh_span(message, weight, start, stop, text, tokens, offsets, weights)
        return Encoded(tokens, weights)

    def encode_prompt(self, conversation: Conversation) -> list[int]:
        """Token ids of a conversation up to where the model is to answer."""
        text = self.render(conversation, add_generation_prompt=True)
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _message_weight(self, conversation: Conversation, place: int) -> float:
        message = conversation.messages[place]
        if message.role != "assistant":
            return 0.0
        if self.policy.train_on == "calls" and not message.calls:
            return 0.0
        if self.policy.train_on == "last_assistant":
            last = max(i for i, m in enumerate(conversation.messages) if m.role == "assistant")
            if place != last:
                return 0.0
        return message.weight

    def _answer_start(self, conversation: Conversation, span: Span, text: str) -> int:
        """Where in ``text`` the model's own words of an assistant's turn begin: after what it is prompted with."""
        turn = text[span.start : span.stop]
        for prompt in self._prompts:  # longest first
            if turn.startswith(prompt):
                return span.start + len(prompt)
        # A template may prompt otherwise in other places, such as after a result.
        before = Conversation(conversation.messages[: span.message], conversation.tools)
        prompted = self._traced.render(before, add_generation_prompt=True)[0]
        if span.start <= len(prompted) <= span.stop and text.startswith(prompted):
            return len(prompted)
        # A turn that is history may lack what the prompt opens, such as a think block: its plain header is left.
        if self._history_header and turn.startswith(self._history_header):
            return span.start + len(self._history_header)
        raise DataError("the chat template opens an assistant turn otherwise than its generation prompt does")

    def _answer_stop(self, conversation: Conversation, span: Span, text: str, printed: set[int]) -> int:
        """Where an assistant's turn ends: where its text does, or before a result that is printed within it."""
        following = span.message + 1
        if following in printed or following == len(conversation.messages):
            return span.stop
        alone = self._traced.render(Conversation(conversation.messages[:following], conversation.tools))[0]
        if span.start < len(alone) <= span.stop and text.startswith(alone):
            return len(alone)
        raise DataError("the chat template prints another message within an assistant's turn")

    def _weigh_span(
        self,
        message: Message,
        weight: float,
        start: int,
        stop: int,
        text: str,
        tokens: list[int],
        offsets: list[tuple[int, int]],
        weights: list[float],
    ) -> None:
        # Offsets never fall, so a span's tokens are found by bisection.
        first = bisect_right(offsets, start, key=lambda offset: offset[1])
        inside = range(first, bisect_left(offsets, stop, lo=first, key=lambda offset: offset[0]))
        if inside and offsets[first][0] < start:
            piece = text[slice(*offsets[first])]
            raise DataError(f"the tokenizer joins the template's text to the answer's in one token ({piece!r})")
        end_of_turn = next((n for n in reversed(inside) if tokens[n] in self._special_ids), None)
        if end_of_turn is None or text[offsets[end_of_turn][1] : stop].strip():
            raise DataError("the chat template does not close an assistant turn with a special token")
        prose_stop = start
        if message.calls:
            content = (message.content or "").strip()
            prose = text.find(content, start, stop) if content else -1
            prose_stop = prose + len(content) if prose >= 0 else start
        for i in inside:
            if i <= end_of_turn:
                is_call = bool(message.calls) and offsets[i][1] > prose_stop
                weights[i] = weight * (self.policy.call_weight if is_call else 1.0)

    def _find_generation_prompts(self) -> list[str]:
        """What the template puts before an answer: its generation prompt, with and without an empty think block."""
        question = Conversation((Message("user", "Hello"),))
        prompts: set[str] = set()
        for variables in ({}, {"enable_thinking": False}):
            closed = self._traced.render(question, **variables)[0]
            opened = self._traced.render(question, add_generation_prompt=True, **variables)[0]
            if not opened.startswith(closed):
                raise DataError(
                    f"{self.model_dir}: its chat template's generation prompt does not follow the messages."
                )
            prompts.add(opened[len(closed) :])
        return sorted(prompts, key=len, reverse=True)

    def _find_history_header(self) -> str:
        """What the template puts before the words of an answer that is not the last; empty where it cannot be told."""
        words = "Hello there."
        answered = Conversation((Message("user", "Hi"), Message("assistant", words), Message("user", "Thanks")))
        try:
            text, spans = self._traced.render(answered)
        except DataError:
            return ""
        turns = [text[span.start : span.stop] for span in spans if span.message == 1]
        return turns[0].partition(words)[0] if len(turns) == 1 and words in turns[0] else ""

    def _verify(self) -> None:
        """Stop at a template that drops tools or calls, or whose text cannot be told message from message."""
        texts = {name: self._verify_text(name, conversation) for name, conversation in _PROBES.items()}
        if not all(word in texts["a tool and a call"] for word in _PROBE_WORDS):
            raise DataError(
                f"{self.model_dir}: its chat template ignores tools, so a model cannot learn to call them. "
                "Use a model whose template renders `tools`, or add one that does as chat_template.jinja."
            )
        for conversation in _PROBES.values():
            try:
                encoded = self.encode(conversation)
            except DataError as error:
                raise DataError(
                    f"{self.model_dir}: {error}: which tokens are the answer's cannot be derived."
                ) from None
            learnt = [token for token, weight in zip(encoded.tokens, encoded.weights, strict=True) if weight > 0]
            if not learnt:
                raise DataError(
                    f"{self.model_dir}: no loop of its chat template prints the messages; cannot derive masks."
                )
            answer = self.tokenizer.decode(learnt)
            if any(message.calls for message in conversation.messages) and not all(w in answer for w in _CALL_WORDS):
                raise DataError(
                    f"{self.model_dir}: its chat template does not write calls, so a model cannot learn to make them. "
                    "Use a model whose template renders `tool_calls`, or add one that does as chat_template.jinja."
                )
            self.stop_ids.add(learnt[-1])

    def _verify_text(self, name: str, conversation: Conversation) -> str:
        try:
            text = self.render(conversation)
        except DataError as error:
            raise DataError(f"{self.model_dir}: {error} (a conversation with {name}).") from None
        expected = self.tokenizer.apply_chat_template(
            [m.to_openai() for m in conversation.messages],
            tools=[t.to_openai() for t in conversation.tools] or None,
            tokenize=False,
        )
        if text != expected:
            raise DataError(
                f"{self.model_dir}: its chat template renders differently when traced; cannot derive masks."
            )
        return text


def load_tokenizer(model_dir: Path) -> Any:
    """The tokenizer of a model directory, through transformers, without network.

    Raises:
        ConfigError: when it is missing, broken, slow-only, or has no chat template.
    """
    from transformers import AutoTokenizer

    files = ("tokenizer.json", "tokenizer_config.json")
    missing = [name for name in files if not (model_dir / name).is_file()]
    if missing:
        raise ConfigError(f"{model_dir}: holds no {' or '.join(missing)}; download the whole model directory.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a broken file makes the library raise
        raise ConfigError(f"{model_dir}: its tokenizer cannot be loaded ({type(error).__name__}: {error}).") from None
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{model_dir}: its tokenizer has no fast form (tokenizer.json), which masks are derived with."
        )
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{model_dir}: its tokenizer has no chat template, so it is a base model. Use the instruct model, or put a "
            "template that renders tools in chat_template.jinja."
        )
    return tokenizer


def split_parallel_calls(conversation: Conversation) -> Conversation:
    """The same conversation with one call a turn: each call of a turn is followed by its own result.

    Results are told apart by ``call_id`` where the row has them, else by order.
    """
    messages: list[Message] = []
    pending = list(conversation.messages)
    while pending:
        message = pending.pop(0)
        if len(message.calls) < 2:
            messages.append(message)
            continue
        results: list[Message] = []
        while pending and pending[0].role == "tool":
            results.append(pending.pop(0))
        for number, call in enumerate(message.calls):
            content = message.content if number == 0 else None
            messages.append(Message("assistant", content, (call,), weight=message.weight))
            own = next((r for r in results if call.id is not None and r.call_id == call.id), None)
            if own is None and results and all(r.call_id is None or call.id is None for r in results):
                own = results[0]
            if own is not None:
                results.remove(own)
                messages.append(own)
        messages += results
    return Conversation(tuple(messages), conversation.tools, conversation.source)


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
