"""What a server must be told so that it reads and renders calls as the model was trained to write them."""

from __future__ import annotations

from pathlib import Path

from fctune.calls.formats.registry import detect_format
from fctune.data.chat_template import ChatTemplate
from fctune.errors import ConfigError
from fctune.evaluation.serving import PARSERS
from fctune.generation.model_files import find_model


def server_options(model: str, name: str | None = None) -> list[str]:
    """Options of vLLM's server for a run's export or another model directory.

    The chat template is the model directory's own, which vLLM takes by itself; it is what the calls' format is found
    from. The key that callers must show is read by vLLM from VLLM_API_KEY: options are seen by all of a machine.

    Args:
        model: as ``fctune.generation.model_files.find_model`` takes it.
        name: that callers ask for; None: the directory's, the run's for a run.

    Raises:
        ConfigError: no such model, an adapter alone, or a format that vLLM has no parser for.
    """
    files = find_model(model)
    if files.adapter_dir is not None:
        raise ConfigError(f"{model}: an adapter alone. Serve the run's export/merged, which has it merged.")
    found = detect_format(ChatTemplate(files.model_dir).source)
    parser = PARSERS["vllm"].get(found.name)
    if parser is None:
        known = ", ".join(sorted(PARSERS["vllm"]))
        raise ConfigError(f"{files.model_dir}: vLLM has no tool parser for {found.name}; it has those of {known}.")
    served = name or Path(model).resolve().name
    return [
        *("--model", str(files.model_dir), "--served-model-name", served),
        *("--enable-auto-tool-choice", "--tool-call-parser", parser),
    ]
