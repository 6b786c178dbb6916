"""Options for vLLM's server, so that it renders prompts and parses reasoning and calls as the model was trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fctune.calls.formats.registry import FORMATS, detect_format
from fctune.calls.server_parsers import find_server_parsers, read_server_parsers
from fctune.data.chat_template import ChatTemplate
from fctune.errors import ConfigError
from fctune.generation.model_files import find_model


def server_options(model: str, name: str | None = None, template_args: Mapping[str, Any] | None = None) -> list[str]:
    """Return the options of vLLM's server for a run's export or another model directory.

    vLLM reads the model directory's own chat template, from which the formats of calls and reasoning are detected here.
    The API key is not among the options, because every user of a machine can see them: vLLM reads VLLM_API_KEY.

    Args:
        model: as ``fctune.generation.model_files.find_model`` takes it.
        name: the served model's name; None uses the directory's name, for a run the run's.
        template_args: switches of the chat template, over those recorded with the model; a request's own come first.

    Raises:
        ConfigError: the model does not exist, is only an adapter, or uses a call format that vLLM cannot parse.
    """
    files = find_model(model)
    if files.adapter_dir is not None:
        raise ConfigError(f"{model}: contains only an adapter. Serve the run's merged model in export/merged instead.")
    template = ChatTemplate(files.model_dir, template_args=template_args)
    call_format = detect_format(template.source)
    parsers = (read_server_parsers(files.model_dir) or find_server_parsers(template))["vllm"]
    parser, reasoning_parser = parsers["tool_call_parser"], parsers["reasoning_parser"]
    if parser is None:
        known = ", ".join(name for name, other in FORMATS.items() if other.vllm_parser)
        raise ConfigError(f"{files.model_dir}: vLLM has no tool parser for {call_format.name}; it supports {known}.")
    served = name or Path(model).resolve().name
    return [
        *("--model", str(files.model_dir), "--served-model-name", served),
        *("--enable-auto-tool-choice", "--tool-call-parser", parser),
        *(("--reasoning-parser", reasoning_parser) if reasoning_parser is not None else ()),
        *_template_options(template.template_args),
    ]


def _template_options(template_args: Mapping[str, Any]) -> list[str]:
    return ["--default-chat-template-kwargs", json.dumps(dict(template_args))] if template_args else []
