"""DeepSeek V3.2, V4 and V4.1: calls in the model's own markup, whose values say whether they are strings."""

from __future__ import annotations

from typing import Any

from fctune.base.json_reader import ParseError, decode_json
from fctune.calls.formats.base import TemplateSignature
from fctune.calls.formats.invoke_calls import Block, InvokeFormat
from fctune.calls.formats.json_calls import dump_json
from fctune.data.conversation import Call

_DSML = "｜DSML｜"


def _make_tags(block: str, space: str = "") -> Block:
    opening, closing = f"<{_DSML}{space}", f"</{_DSML}{space}"
    return Block(
        f"{opening}{block}>",
        f"{closing}{block}>",
        f"{opening}invoke",
        f"{closing}invoke>",
        f"{opening}parameter",
        f"{closing}parameter>",
    )


class DeepSeekV32(InvokeFormat):
    """``<｜DSML｜invoke name="f">`` with ``<｜DSML｜parameter name="k" string="true">`` a value, in ``function_calls``.

    The encoding of DeepSeek-V3.2, which has no chat template. Values with ``string="false"`` are JSON.
    """

    name = "deepseek_v32"
    # A template may put the tags together from the mark and their names.
    template_signatures = (TemplateSignature((_DSML, "function_calls"), priority=2),)
    vllm_parser = "deepseek_v32"
    sglang_parser = "deepseekv32"
    _tags = _make_tags("function_calls")

    def _after_no_arguments(self, call: Call) -> tuple[str, ...]:
        return () if call.arguments else ("",)

    def _write_value(self, value: Any, schema: Any, is_typed: bool) -> tuple[str, str]:
        if isinstance(value, str) and not self._has_mark(value):
            return ' string="true"', value
        return ' string="false"', dump_json(value, "an argument").replace("<", "\\u003c")

    def _read_value(self, text: str, attributes: str, schema: Any) -> Any:
        if 'string="true"' in attributes:
            return text
        try:
            return decode_json(text)
        except ParseError:
            return text


class DeepSeekV4(DeepSeekV32):
    """V3.2's calls in a block named ``tool_calls``."""

    name = "deepseek_v4"
    template_signatures = (TemplateSignature((_DSML,), priority=1),)
    vllm_parser = "deepseek_v4"
    sglang_parser = "deepseekv4"
    _tags = _make_tags("tool_calls")
    _other_openings = (f"<{_DSML}toolcalls>", f"<{_DSML}tool>")


class DeepSeekV41(DeepSeekV32):
    """V3.2's calls with a space in each tag, in a block named ``calls``."""

    name = "deepseek_v41"
    template_signatures = (TemplateSignature((f"<{_DSML} calls>",), priority=3),)
    vllm_parser = "deepseek_v41"
    sglang_parser = "deepseekv41"
    _tags = _make_tags("calls", " ")
