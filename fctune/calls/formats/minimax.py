"""MiniMax M2: calls as ``<invoke>`` with untyped values."""

from __future__ import annotations

from typing import Any, ClassVar

from fctune.calls.formats.base import TemplateSignature
from fctune.calls.formats.invoke_calls import Block, InvokeFormat
from fctune.calls.formats.json_calls import dump_json
from fctune.calls.formats.tagged_calls import read_value, write_value


class MiniMaxM2(InvokeFormat):
    """``<minimax:tool_call>`` with ``<invoke name="f">`` a call and ``<parameter name="k">`` a value.

    The chat templates of MiniMax M2 and M2.1. The tool's schema types the values.
    """

    name = "minimax_m2"
    aliases: ClassVar[tuple[str, ...]] = ("minimax_m2.1", "minimax_m2.7")
    template_signatures = (TemplateSignature(("<minimax:tool_call>", "<invoke name="), priority=1),)
    vllm_parser: ClassVar[str | None] = "minimax_m2"
    sglang_parser: ClassVar[str | None] = "minimax-m2"
    _tags = Block("<minimax:tool_call>", "</minimax:tool_call>", "<invoke", "</invoke>", "<parameter", "</parameter>")

    def _write_value(self, value: Any, schema: Any, is_typed: bool) -> tuple[str, str]:
        text = value if isinstance(value, str) else dump_json(value, "an argument")
        return "", write_value(value, text, schema, is_typed, self._tags)

    def _read_value(self, text: str, attributes: str, schema: Any) -> Any:
        return read_value(text, schema)
