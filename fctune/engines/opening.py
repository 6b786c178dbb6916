"""Open the model or server that a user names: ``fctune eval``, ``chat`` and ``gate``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fctune.base.errors import ConfigError
from fctune.calls.formats.base import CallFormat
from fctune.calls.response_template import find_call_format
from fctune.config.loading import read_environment
from fctune.data.chosen_template import ChosenTemplate, open_chosen_template
from fctune.engines.engine import Engine, Sampling
from fctune.engines.http_client import RetryPolicy
from fctune.engines.model_files import ModelFiles, check_model_paths, find_model, is_server
from fctune.engines.server import ServerEngine

if TYPE_CHECKING:
    import torch


def find_files(model: str, adapter: str | None = None) -> ModelFiles | None:
    """Return the files of a model, with an adapter if one is named; None for a server.

    Raises:
        ConfigError: There is no such model or adapter, or the adapter is for a server.
    """
    if is_server(model):
        check_model_paths(model, adapter)
        return None
    return find_model(model, adapter)


def open_engine(
    model: str,
    files: ModelFiles | None,
    named: CallFormat | None = None,
    *,
    sampling: Sampling | None = None,
    template_args: dict[str, Any] | None = None,
    chat_template: str | ChosenTemplate | None = None,
    batch_size: int = 64,
    device: torch.device | None = None,
    served_model: str | None = None,
    concurrency: int = 16,
    request: Mapping[str, Any] | None = None,
    retry_policy: RetryPolicy | None = None,
    keeps_tokens: bool = False,
    is_streamed: bool = False,
) -> tuple[Engine, CallFormat | None]:
    """Open a model or server; returns it with the call format of its text, None if the server parses the calls.

    Args:
        model: As on the command line.
        files: The model's files from ``find_files``; None for a server, whose key is in FCTUNE_API_KEY.
        named: Call format of the text; None: that of the model's chat template, or parsed by the server.
        sampling: Temperature and seed; None: greedy.
        template_args: Switches of the chat template.
        chat_template: Template in place of the model's own, read already, or by name or file.
        batch_size: Prompts at a time, in process.
        device: Device of a model in process; None: the first GPU, or the CPU.
        served_model: Name to request from a server; None: the one that it serves.
        concurrency: Requests in flight.
        request: Fields that are merged into each request.
        retry_policy: When to repeat a request; None: the default.
        keeps_tokens: Return token ids and log-probabilities with the answers.
        is_streamed: Have a server stream its answers.

    Raises:
        ConfigError: The server cannot be used like this, or the chat template's call format is unknown.
    """
    if files is None:
        if chat_template is not None:
            raise ConfigError("--chat-template: a server renders its own. Start it with the template, and omit this.")
        key = read_environment().get("FCTUNE_API_KEY") or None
        engine = ServerEngine(
            model,
            served_model,
            key,
            concurrency,
            sampling,
            request,
            retry_policy,
            template_args,
            keeps_tokens,
            is_streamed,
        )
        return engine, named
    from fctune.engines.local import LocalEngine

    if isinstance(chat_template, str):
        chat_template = open_chosen_template(chat_template, "--chat-template ")
    in_process = LocalEngine(
        *files,
        batch_size=batch_size,
        sampling=sampling,
        device=device,
        template_args=template_args,
        chat_template=chat_template,
        keeps_tokens=keeps_tokens,
    )
    return in_process, named or find_call_format(in_process.template)
