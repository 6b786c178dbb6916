"""Ollama's Modelfile for a model: its chat template in the form of Go's text/template, which is what declares tools.

Ollama does not run the Jinja template in a GGUF file. It reads from the Modelfile's TEMPLATE whether a model takes
tools (``.Tools``) and how its calls look (``.ToolCalls``), and reads calls that are JSON objects with a name and
arguments. The template is taken apart here by rendering conversations of known words.

https://docs.ollama.com/modelfile and https://docs.ollama.com/template, 2026.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from fctune.base.errors import ConfigError, DataError
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Call, Conversation, Message, Tool

_SYSTEM, _ASKED, _SAID, _RESULT = "Systemtext", "Askedtext", "Saidtext", "Resulttext"
_NAME, _ARGUMENTS = "calledtool", {"argumentname": "argumenttext"}
_TOOLS = tuple(
    Tool({"name": name, "description": f"Does {name}.", "parameters": {"type": "object", "properties": {}}})
    for name in (_NAME, "othertool")
)
_BARE = "{{ $tool.Function }}"
_ENDS = '"\r\n'  # characters that end a value without quotes, or begin one with them
_USER = Message("user", _ASKED)
_ANSWER = Message("assistant", _SAID)
_CALL = Call(_NAME, _ARGUMENTS, "call00001")


def make_modelfile(template: ChatTemplate, file_name: str) -> tuple[str, str | None]:
    """Return the Modelfile for a GGUF file, and why it declares no tools; None if it does.

    Raises:
        ConfigError: A stop token, or the file's name, would end its value in the Modelfile.
    """
    lines = [f"FROM {_quote(f'./{file_name}') if set(file_name) & set(_ENDS) else f'./{file_name}'}"]
    reason = None
    try:
        lines.append(f'TEMPLATE """{_refuse_quotes(_Parts(template).write())}"""')
    except DataError as error:
        reason = str(error)
    lines += [f"PARAMETER stop {_quote(template.decode([token]))}" for token in sorted(template.stop_ids)]
    lines.append("PARAMETER temperature 0")
    return "\n".join(lines) + "\n", reason


class _Parts:
    """The texts of which a chat template puts a prompt together.

    Raises (at construction):
        DataError: Its prompts cannot be taken apart.
    """

    def __init__(self, template: ChatTemplate):
        self._template = template
        said = self._render([_USER, _ANSWER])
        self.user = _cut(self._render([_USER, _ANSWER, _USER]), said)
        self.assistant = self._split(_cut(said, self._render([_USER])), _SAID)
        self.prompt = _cut(self._render([_USER], is_prompt=True), self._render([_USER]))
        asked = self._render([_USER], _TOOLS)
        calling = Message("assistant", None, (_CALL,))
        called = self._render([_USER, calling], _TOOLS)
        self.call = self._unwrap(_cut(called, asked))
        both = Message("assistant", None, (_CALL, Call(_NAME, _ARGUMENTS, "call00002")))
        twice = self._unwrap(_cut(self._render([_USER, both], _TOOLS), asked))
        if not (twice.startswith(self.call) and twice.endswith(self.call)):
            raise DataError("its chat template does not write calls one after another")
        self.between = twice[len(self.call) : -len(self.call)]
        combined = self._unwrap(
            _cut(self._render([_USER, Message("assistant", _SAID, (_CALL,))], _TOOLS), asked), is_complete=False
        )
        # A template that drops the text next to calls has nothing between them.
        is_kept = combined.startswith(_SAID) and combined.endswith(self.call)
        self.after_text = combined[len(_SAID) : -len(self.call)] if is_kept else ""
        result = Message("tool", _RESULT, call_id="call00001", name=_NAME)
        self.result = self._split(_cut(self._render([_USER, calling, result], _TOOLS), called), _RESULT)

    def write(self) -> str:
        """Return the template in Go's form."""
        heads = {(s, t): self._find_head(s, t) for s in (True, False) for t in (True, False)}
        name, arguments = "{{ .Function.Name }}", "{{ .Function.Arguments }}"
        call = _escape(self.call).replace(_NAME, name, 1).replace(json.dumps(_ARGUMENTS), arguments, 1)
        if name not in call or arguments not in call:
            raise DataError("it does not write a call's name and its arguments as JSON, which Ollama reads")
        # Ollama takes for a call's mark the text that comes first behind .ToolCalls, up to a brace, unless an action or
        # a condition without text precedes it, as the separators do. So the mark stands in a branch of its own.
        mark = _escape(self.call.partition("{")[0])
        marked = f"{{{{ if false }}}}{mark}{{{{ end }}}}" if mark.strip() else ""
        between = self._write_separators()
        return "".join(
            (
                f"{{{{ if .System }}}}{{{{ if .Tools }}}}{heads[True, True]}{{{{ else }}}}{heads[True, False]}",
                f"{{{{ end }}}}{{{{ else if .Tools }}}}{heads[False, True]}",
                f"{{{{ else }}}}{heads[False, False]}{{{{ end }}}}",
                "{{ range $index, $message := .Messages }}",
                '{{ if eq .Role "user" }}',
                _escape(self.user).replace(_ASKED, "{{ .Content }}"),
                '{{ else if eq .Role "assistant" }}',
                f"{_escape(self.assistant[0])}{{{{ .Content }}}}",
                f"{{{{ if .ToolCalls }}}}{marked}{{{{ range $number, $call := .ToolCalls }}}}{between}{call}",
                f"{{{{ end }}}}{{{{ end }}}}{_escape(self.assistant[1])}",
                '{{ else if eq .Role "tool" }}',
                f"{_escape(self.result[0])}{{{{ .Content }}}}{_escape(self.result[1])}",
                f"{{{{ end }}}}{{{{ end }}}}{_escape(self.prompt)}",
            )
        )

    def _write_separators(self) -> str:
        """Return what comes before a call."""
        between, after_text = _escape(self.between), _escape(self.after_text)
        if between == after_text:
            return f"{{{{ if or $number $message.Content }}}}{between}{{{{ end }}}}" if between else ""
        return f"{{{{ if $number }}}}{between}{{{{ else if $message.Content }}}}{after_text}{{{{ end }}}}"

    def _find_head(self, has_system: bool, has_tools: bool) -> str:
        """Return what comes before the first user's turn, in Go's form."""
        messages = [*([Message("system", _SYSTEM)] if has_system else []), _USER]
        head = _cut_end(self._render(messages, _TOOLS if has_tools else ()), self.user)
        bos = self._template.tokenizer.bos_token
        if bos and head.startswith(bos):  # llama.cpp adds it
            head = head[len(bos) :]
        if has_system and head.count(_SYSTEM) != 1:
            raise DataError("its chat template does not write the system message once, before the first question")
        if not has_tools:
            return _escape(head).replace(_SYSTEM, "{{ .System }}")
        forms = (([tool.to_openai() for tool in _TOOLS], "{{ $tool }}"), ([tool.function for tool in _TOOLS], _BARE))
        for objects, written in forms:
            for indent in (None, 2, 4):
                first, second = (json.dumps(value, indent=indent) for value in objects)
                if head.count(first) == 1 and head.count(second) == 1:
                    before, _, rest = head.partition(first)
                    between, _, after = rest.partition(second)
                    # A mark in front of each tool stands in front of the first one, too.
                    listed = f"{{{{ if $position }}}}{_escape(between)}{{{{ end }}}}{written}"
                    tools = f"{{{{ range $position, $tool := .Tools }}}}{listed}{{{{ end }}}}"
                    return f"{_escape(before)}{tools}{_escape(after)}".replace(_SYSTEM, "{{ .System }}")
        raise DataError(
            "its chat template does not write tools as JSON, which is the only form in which Ollama passes them"
        )

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), is_prompt: bool = False) -> str:
        return self._template.render(Conversation(tuple(messages), tuple(tools)), add_generation_prompt=is_prompt)

    def _split(self, text: str, word: str) -> tuple[str, str]:
        before, found, after = text.partition(word)
        if not found:
            raise DataError("its chat template changes the text of messages")
        return before, after

    def _unwrap(self, turn: str, is_complete: bool = True) -> str:
        """Return an assistant's turn without what stands around every turn."""
        before, after = self.assistant
        if not (turn.startswith(before) and turn.endswith(after)):
            if is_complete:
                raise DataError("its chat template ends turns with calls differently from other turns")
            return ""
        return turn[len(before) : len(turn) - len(after)]


def _cut(text: str, start: str) -> str:
    if not text.startswith(start):
        raise DataError("its chat template rewrites earlier turns")
    return text[len(start) :]


def _cut_end(text: str, end: str) -> str:
    if not text.endswith(end):
        raise DataError("its chat template writes the first question differently from later ones")
    return text[: len(text) - len(end)]


def _quote(text: str) -> str:
    """Return a text in quotes as a Modelfile's parser removes them, which knows no escapes.

    Raises:
        ConfigError: It would end the value, so that the rest of it were instructions.
    """
    if '"""' in text:
        raise ConfigError(
            f"{text!r} contains three quotation marks, which end a value in Ollama's Modelfile: what follows would be "
            "read as instructions. A stop token like this is no accident; export from a tokenizer without it."
        )
    quotes = '"""' if '"' in text else '"'
    return f"{quotes}{text}{quotes}"


def _refuse_quotes(text: str) -> str:
    if '"""' in text:
        raise DataError('its chat template writes """, which ends a Modelfile\'s TEMPLATE')
    return text


def _escape(text: str) -> str:
    """Return a text as Go's templates hold it."""
    return text.replace("{{", '{{ "{{" }}')
