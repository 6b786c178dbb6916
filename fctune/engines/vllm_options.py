"""Options for vLLM's server, so that it renders prompts and parses reasoning and calls as the model was trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError, DataError
from fctune.calls.formats.base import TemplateFormat
from fctune.calls.formats.registry import FORMATS
from fctune.calls.reasoning.registry import detect_reasoning
from fctune.calls.response_template import find_call_format
from fctune.calls.server_parsers import find_server_parsers, read_server_parsers
from fctune.data.chat_template import ChatTemplate, MissingTemplateError
from fctune.engines.model_files import ModelFiles, find_model


class NoParserError(ConfigError):
    """A model whose calls vLLM cannot parse.

    Args:
        problem: Why it cannot, in a sentence.
        remedy: What helps a user who needs calls.
    """

    def __init__(self, problem: str, remedy: str = ""):
        super().__init__(f"{problem} {remedy}".rstrip())
        self.problem = problem


def server_options(
    model: str,
    name: str | None = None,
    template_args: Mapping[str, Any] | None = None,
    adapter_rank: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Return the options of vLLM's server for a run's export or another model directory.

    vLLM reads the model directory's own chat template, from which the formats of calls and reasoning are detected here.
    The API key is not among the options, because every user of a machine can see them: vLLM reads VLLM_API_KEY.

    Args:
        model: As ``fctune.engines.model_files.find_model`` takes it.
        name: The served model's name; None uses the directory's name, for a run the run's.
        template_args: Switches of the chat template, over those recorded with the model; a request's own come first.
        adapter_rank: Largest rank of adapters that are loaded while the server runs, as reinforcement does; None: no
            adapters. The server also needs ``RUN_TIME_ADAPTERS`` in its environment. A base whose calls vLLM cannot
            parse is served without parsers, because reinforcement only exchanges token ids.
        say: Called with a sentence if there are no parsers.

    An adapter is served on its base, under ``name``; the base keeps its own.

    Raises:
        ConfigError: The model does not exist, has no weights, lacks tokens of its template, or is an adapter that vLLM
            cannot load.
        NoParserError: It has no chat template, uses a call format that vLLM cannot parse, or lacks tokens of vLLM's
            parsers; not raised with ``adapter_rank``.
    """
    files = find_model(model)
    if not any(next(files.model_dir.glob(f"*.{ending}"), None) for ending in ("safetensors", "bin")):
        raise ConfigError(f"{files.model_dir}: holds no weights. Download the complete model, or export the run again.")
    options = ["--model", str(files.model_dir)]
    served = name or default_name(model)
    for value in (served, str(files.model_dir)):
        if value.startswith("-"):
            raise ConfigError(f"{value}: vLLM would read it as an option; pass a --name, and an absolute PATH.")
    if adapter_rank is None:
        chat_options = _chat_options(files.tokenizer_dir, template_args)
        names = adapter_options(files, served) if files.adapter_dir else ["--served-model-name", served]
        return [*options, *names, *chat_options]
    if files.adapter_dir is not None:
        raise ConfigError(f"{model}: is an adapter; with --adapters, name its base, onto which adapters are loaded.")
    options += ["--served-model-name", served, *_run_time_options(adapter_rank)]
    try:
        return [*options, *_chat_options(files.tokenizer_dir, template_args)]
    except NoParserError as error:
        say(f"The server parses no calls, which reinforcement does not need: {error.problem}")
        return [*options, *template_options(template_args or {})]


def default_name(model: str) -> str:
    """Return the name under which a model is served unless another is given: its directory's."""
    return Path(model).resolve().name


def _chat_options(folder: Path, template_args: Mapping[str, Any] | None) -> list[str]:
    """Return the options with which chats are rendered and their answers parsed as the model was trained."""
    try:
        template = ChatTemplate(folder, template_args=template_args)
        template.require_tokens()
        parsers = (read_server_parsers(folder, template) or find_server_parsers(template))["vllm"]
        call_format = find_call_format(template)
    except MissingTemplateError:
        raise NoParserError(
            f"{folder}: its tokenizer has no chat template, so it is a base model.",
            "Serve a run's export, which has the template that it was trained with; or pass --adapters RANK to serve "
            "a base for reinforcement.",
        ) from None
    except DataError as error:
        raise NoParserError(str(error)) from None
    parser, reasoning_parser = parsers["tool_call_parser"], parsers["reasoning_parser"]
    if parser is None:
        known = ", ".join(name for name, other in FORMATS.items() if other.vllm_parser)
        raise NoParserError(f"{folder}: vLLM has no tool parser for {call_format.name}; it has parsers for {known}.")
    reasoning_format = detect_reasoning(template.source) if reasoning_parser is not None else None
    for found in filter(None, (call_format, reasoning_format)):
        _require_parser_tokens(folder, template, found)
    return [
        *("--enable-auto-tool-choice", "--tool-call-parser", parser),
        *(("--reasoning-parser", reasoning_parser) if reasoning_parser is not None else ()),
        *template_options(template.template_args),
    ]


def _require_parser_tokens(folder: Path, template: ChatTemplate, found: TemplateFormat) -> None:
    """Reject a tokenizer without which vLLM's parser for a format does not start."""
    vocabulary = template.tokenizer.backend_tokenizer
    if lacking := [token for token in found.vllm_tokens if vocabulary.token_to_id(token) is None]:
        raise NoParserError(
            f"{folder}: the tokenizer lacks {', '.join(lacking)}, without which vLLM's parser {found.vllm_parser} does "
            "not start.",
            f"Train with model.add_tokens=[{', '.join(map(repr, lacking))}], or with model.chat_template=hermes, whose "
            "marks are plain text.",
        )


class UnservedAdapterError(ConfigError):
    """An adapter that vLLM cannot load, for a ``reason`` that does not name its directory."""

    def __init__(self, adapter_dir: Path, reason: str):
        super().__init__(f"{adapter_dir}: {reason}. Serve the run's export/merged instead.")
        self.reason = reason


def adapter_options(files: ModelFiles, name: str, address: str | None = None) -> list[str]:
    """Return the options that serve an adapter on its base, with the tokenizer and template of its training.

    Args:
        files: The adapter and its base, which is not read.
        name: The adapter's name in requests.
        address: Name of the adapter on the hub; None: its directory.

    Raises:
        UnservedAdapterError: vLLM cannot load the adapter.
        ConfigError: The adapter is damaged.
    """
    assert files.adapter_dir is not None
    try:
        config = json.loads((files.adapter_dir / "adapter_config.json").read_text(encoding="utf-8"))
        ranks = [int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{files.adapter_dir}/adapter_config.json: damaged ({type(error).__name__}: {error}). Export the "
            "adapter again."
        ) from None
    for key, what in _UNSERVED.items():
        if config.get(key):
            raise UnservedAdapterError(files.adapter_dir, f"vLLM cannot load {what}")
    limit = next((limit for limit in _LORA_RANKS if limit >= max(ranks)), None)
    if limit is None:
        reason = f"vLLM loads adapters up to rank {_LORA_RANKS[-1]}, not {max(ranks)}"
        raise UnservedAdapterError(files.adapter_dir, reason)
    source = address or str(files.adapter_dir)
    module = f"{name}={source}"
    if "," in module or module.count("=") > 1:  # vLLM splits at "=", and reads what has a comma as JSON
        module = json.dumps({"name": name, "path": source})
    options = ["--enable-lora", "--max-lora-rank", str(limit), "--lora-modules", module]
    if files.tokenizer_dir != files.model_dir:
        options += ["--tokenizer", source]
    return options


def _run_time_options(rank: int) -> list[str]:
    """Return the options with which two versions of an adapter can be asked at a time."""
    limit = next((limit for limit in _LORA_RANKS if limit >= rank), None)
    if rank < 1 or limit is None:
        raise ConfigError(f"--adapters {rank}: expected a rank from 1 to {_LORA_RANKS[-1]}.")
    return ["--enable-lora", "--max-lora-rank", str(limit), "--max-loras", "2", "--max-cpu-loras", "4"]


# Environment in which vLLM loads adapters while it runs.
RUN_TIME_ADAPTERS = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
# Parts of adapters that vLLM 0.32 refuses, by their key in adapter_config.json.
_UNSERVED = {
    "use_dora": "DoRA's magnitudes",
    "trainable_token_indices": "an adapter with rows of the embedding",
    "modules_to_save": "an adapter with whole modules",
    "target_parameters": "an adapter on experts",
}
# Values of vLLM's --max-lora-rank.
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def template_options(template_args: Mapping[str, Any]) -> list[str]:
    """Return the options that set switches of the chat template, for vLLM and SGLang."""
    return ["--default-chat-template-kwargs", json.dumps(dict(template_args))] if template_args else []
