"""A conversation as the model's own chat template writes it: token ids, and which of them are learnt.

What the template emits for each message is taken from the template itself. Its Jinja tree is given a marker at the head
of every loop over messages, so one rendering tells which text belongs to which message; nothing is guessed from the
strings a family of models happens to use. Of an assistant's text, what precedes the model's own words (the generation
prompt) and what follows its end-of-turn token is context; the rest is learnt.
"""

from __future__ import annotations

import itertools
import re
import secrets
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jinja2
from jinja2 import nodes

from fctune.data.conversation import Call, Conversation, Message, Tool
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


@dataclass(frozen=True, slots=True)
class Span:
    """Text ``[start, stop)`` of a rendering that belongs to one message."""

    message: int
    start: int
    stop: int


class _Tagged(dict[str, Any]):
    """A message that knows its place; an attribute, so that a template which dumps the mapping does not see it."""

    def __init__(self, message: dict[str, Any], place: int):
        super().__init__(message)
        self.place = place


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
        self._nonce = secrets.token_hex(8)
        self._marker = re.compile(rf"\[{self._nonce}:(\d+):(\d*)\]")
        self._template = self._instrument()
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
        return self._render(conversation, add_generation_prompt=add_generation_prompt)[0]

    def encode(self, conversation: Conversation) -> Encoded:
        """Token ids, equal to transformers' ``apply_chat_template``, and their loss weights.

        Raises:
            DataError: when the template refuses the conversation, or a token straddles the edge of what is learnt.
        """
        if self.policy.parallel_calls == "split":
            conversation = split_parallel_calls(conversation)
        text, spans = self._render(conversation)
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

    # --- rendering ---

    def _instrument(self) -> jinja2.Template:
        """The template with a marker wherever a loop turns to a message, and one where that loop ends."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            environment: jinja2.Environment = _compile_jinja_template(self.source).environment
            tree = environment.parse(self.source)
        except jinja2.TemplateError as error:
            raise DataError(f"{self.model_dir}: its chat template is not valid Jinja ({error}).") from None
        bodies = [body for node in (tree, *tree.find_all(nodes.Node)) for body in _bodies(node)]
        loops = [
            (body, n) for body in bodies for n in body if isinstance(n, nodes.For) and isinstance(n.target, nodes.Name)
        ]
        for number, (body, loop) in enumerate(loops):
            # A flag per loop: loops over anything but messages must print nothing, as macros trim and compare text.
            name, flag = loop.target.name, f"fctune_loop_{number}"  # type: ignore[attr-defined]
            before = f"{{% set {flag} = namespace(opened=false) %}}"
            head = (
                f"{{% if {name}.place is defined %}}{{% set {flag}.opened = true %}}"
                f"{{{{ '[{self._nonce}:{number}:' ~ {name}.place ~ ']' }}}}{{% endif %}}"
            )
            after = f"{{% if {flag}.opened %}}[{self._nonce}:{number}:]{{% endif %}}"
            loop.body[:0] = environment.parse(head).body
            place = next(i for i, statement in enumerate(body) if statement is loop)
            body[place : place + 1] = [*environment.parse(before).body, loop, *environment.parse(after).body]
        return environment.from_string(tree)

    def _render(
        self, conversation: Conversation, add_generation_prompt: bool = False, **variables: Any
    ) -> tuple[str, list[Span]]:
        # Keys without a value are left out, as transformers leaves them out.
        messages = [
            _Tagged({k: v for k, v in message.to_openai().items() if v is not None}, place)
            for place, message in enumerate(conversation.messages)
        ]
        tools = [tool.to_openai() for tool in conversation.tools] or None
        try:
            marked = self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self.tokenizer.special_tokens_map, **variables},
            )
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template refuses it: {error}") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"the chat template fails on it: {type(error).__name__}: {error}") from None
        return self._take_markers(marked)

    def _take_markers(self, marked: str) -> tuple[str, list[Span]]:
        parts = self._marker.split(marked)
        plain = "".join(parts[::3])
        spans: list[Span] = []
        length = 0
        # Loops over messages that we are in, outermost first: their number, the message they are at, where it began.
        stack: list[tuple[str, int, int]] = []

        def close(message: int, start: int) -> None:
            if not plain[start:length].isspace() and length > start:
                spans.append(Span(message, start, length))

        for text, number, place in itertools.zip_longest(parts[::3], parts[1::3], parts[2::3]):
            length += len(text)
            if number is None:
                break
            if stack and stack[-1][0] == number:
                close(*stack.pop()[1:])
            if place:
                stack.append((number, int(place), length))
        return plain, sorted(spans, key=lambda span: (span.start, -span.stop))

    # --- what is learnt ---

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
        prompted = self._render(before, add_generation_prompt=True)[0]
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
        alone = self._render(Conversation(conversation.messages[:following], conversation.tools))[0]
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
            closed = self._render(question, **variables)[0]
            opened = self._render(question, add_generation_prompt=True, **variables)[0]
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
            text, spans = self._render(answered)
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


def _bodies(node: nodes.Node) -> list[list[nodes.Node]]:
    """Every list of statements of a node of the Jinja tree."""
    return [body for field in ("body", "else_") if isinstance(body := getattr(node, field, None), list)]


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
