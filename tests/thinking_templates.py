"""Model directories whose chat template prints reasoning, made from that of the tiny base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

# What the template prints before an assistant's content: reasoning under the message's KEY, if it has any.
READS = "{%- if message.KEY %}{{- '<think>\\n' + message.KEY + '\\n</think>\\n\\n' }}{%- endif %}"
# Always a think block, as hybrid models have it: their generation prompt without thinking is an empty one.
HYBRID = "{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}"

_OFF = (
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)
_TURN = "{%- else %}\n            {%- if message.content %}"
_PROMPT = "'<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"


def write_thinking_model(tiny_base: Path, path: Path, block: str) -> Path:
    """Copy the tiny base to ``path`` with a template that prints ``block`` in each of the assistant's turns."""
    shutil.copytree(tiny_base, path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    source = config.pop("chat_template")
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    assert source.count(_TURN) == source.count(_PROMPT) == 1
    turn = _TURN.replace("{%- if", "{%- if message.role == 'assistant' %}" + block + "{%- endif %}{%- if")
    source = source.replace(_TURN, turn)
    if block == HYBRID:
        source = source.replace(_PROMPT, _PROMPT + _OFF)
    (path / "chat_template.jinja").write_text(source)
    return path
