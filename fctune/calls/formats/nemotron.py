"""Nemotron Nano 2 and Llama Nemotron: calls as a JSON list between tags. Nemotron 3 writes Qwen3-Coder's format."""

from __future__ import annotations

from fctune.calls.formats.base import TemplateSignature
from fctune.calls.formats.json_calls import MarkedListFormat


class NemotronList(MarkedListFormat):
    """``<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>``.

    The chat template of NVIDIA-Nemotron-Nano-9B-v2. vLLM reads it only by a plugin that comes with the model.
    """

    name = "nemotron_list"
    aliases = ("nemotron2", "nemotron-nano-v2", "llama-nemotron")
    template_signatures = (TemplateSignature(("<TOOLCALL>",)),)
    _mark, _closing = "<TOOLCALL>", "</TOOLCALL>"
