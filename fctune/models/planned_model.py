"""Model of a run on the meta device, from its config.json alone: no weights are read or downloaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fctune.base.errors import ConfigError
from fctune.config.cache import prepared_root
from fctune.config.schema import RunConfig
from fctune.config.sections.model import ModelSource
from fctune.data.data_size import find_prepared
from fctune.models.added_tokens import count_vocabulary, find_extended_path
from fctune.models.architecture import Architecture
from fctune.models.attention import AttentionKernel
from fctune.models.causal_lm import CausalLM
from fctune.models.hub import describe_failure, parse_name
from fctune.models.lora import apply_lora_
from fctune.models.precision import PrecisionPolicy, choose_precision
from fctune.models.sources import build_model, build_shapes, find_public_config, parse_architecture, read_architecture
from fctune.models.token_choice import TokenChoice, choose_tokens, find_candidates
from fctune.models.token_rows import train_tokens_
from fctune.models.untrained_tokens import Candidates


def find_architecture(
    path: str, model_dir: str | None = None, model_source: ModelSource = "auto"
) -> tuple[Architecture, Path | None, str]:
    """Find the architecture of a model, its directory if it is on this machine, and a description of the source.

    Args:
        path: ``model.path`` of the config.
        model_dir: Directory with a config.json to use instead.
        model_source: ``model.source`` of the config.

    Raises:
        ConfigError: The model is neither on this machine nor a known public one, and its config.json cannot be
            downloaded; or the config.json is invalid.
    """
    named = parse_name(path)
    if model_dir is not None and not Path(model_dir).is_dir():
        raise ConfigError(f"--model {model_dir}: no such directory; pass the one with the model's config.json.")
    if model_dir is not None or named is None:
        folder = Path(model_dir or path)
        return read_architecture(folder, model_source), folder, str(folder / "config.json")
    from huggingface_hub import try_to_load_from_cache

    name, revision = named
    cached = try_to_load_from_cache(name, "config.json", revision=revision)
    if isinstance(cached, str):
        return read_architecture(Path(cached).parent, model_source), Path(cached).parent, cached
    known = find_public_config(name)
    if known is not None:
        return parse_architecture(name, known, model_source), None, f"{name}, built into this version of fctune"
    content = _download_config(path, name, revision)
    try:
        raw = json.loads(content)
    except ValueError as error:
        raise ConfigError(f"hf:{name}/config.json: cannot be read as JSON ({error}). Pass --model DIR.") from None
    return parse_architecture(f"hf:{name}/config.json", raw, model_source), None, f"{name} on the hub"


def _download_config(path: str, name: str, revision: str | None) -> bytes:
    """Download a config.json with a single attempt: the hub's own client retries for half a minute."""
    import httpx
    from huggingface_hub import constants, get_token, hf_hub_url

    token = get_token()
    try:
        if constants.HF_HUB_OFFLINE:
            raise ConnectionError("HF_HUB_OFFLINE is set")
        url = hf_hub_url(name, "config.json", revision=revision)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # The hub redirects renamed repositories; httpx drops the token when the host changes.
        answer = httpx.get(url, headers=headers, timeout=5, follow_redirects=True)
        answer.raise_for_status()
    except Exception as error:  # from httpx, or from the hub's client for an invalid name
        raise ConfigError(
            f"model.path={path}: config.json cannot be downloaded ({describe_failure(error, 200)}). "
            "Pass --model DIR with one; no weights are needed."
        ) from None
    return answer.content


def shape_model(
    config: RunConfig,
    architecture: Architecture,
    attention_kernel: AttentionKernel | None = None,
    token_ids: Sequence[int] = (),
    device_type: str = "cuda",
) -> CausalLM:
    """Build the model of a run on a type of device, adapters and trained token rows included, on the meta device.

    Without an attention kernel, the model is to be counted only, and may be one that cannot run.
    """
    precision = choose_precision(config.precision, config.adapter is not None, device_type)
    if attention_kernel is None:
        model = build_shapes(architecture, config.data.row_tokens, precision)
    else:
        model = build_model(architecture, config.data.row_tokens, precision, attention_kernel)
    if config.adapter is not None:
        apply_lora_(model, config.adapter)
        train_tokens_(model, token_ids)
    return model


def shape_teacher(
    config: RunConfig, device_type: str = "cuda", kernel: AttentionKernel | None = None
) -> CausalLM | None:
    """Build the frozen teacher of a distillation on the meta device; None without one in the run's processes.

    Without an attention kernel, it is to be counted only.

    Raises:
        ConfigError: It is no model that is known.
    """
    if config.distill is None or config.distill.teacher is None:
        return None
    dtype = choose_precision(config.precision, config.adapter is not None, device_type).compute_dtype
    try:
        architecture, _, _ = find_architecture(config.distill.teacher)
        precision, seq_len = PrecisionPolicy.uniform(dtype), config.data.row_tokens
        if kernel is None:
            return build_shapes(architecture, seq_len, precision)
        return build_model(architecture, seq_len, precision, kernel)
    except ConfigError as error:
        raise ConfigError(f"distill.teacher={config.distill.teacher}: {error}") from None


def extend_architecture(
    config: RunConfig, architecture: Architecture, model_dir: Path | None
) -> tuple[Architecture, Path | None]:
    """Return the architecture with ``model.add_tokens``, and the base's directory, the extended one if it exists.

    Raises:
        ConfigError: A token that the tokenizer has already.
    """
    added = config.model.add_tokens
    if not added:
        return architecture, model_dir
    if model_dir is not None:
        extended = find_extended_path(model_dir, added, prepared_root(config))
        if (extended / "config.json").is_file():
            return read_architecture(extended, config.model.source), extended
    return replace(architecture, vocab_size=count_vocabulary(architecture, model_dir, added)), None


def find_planned_tokens(config: RunConfig, architecture: Architecture, model_dir: Path | None) -> TokenChoice:
    """Find the tokens whose rows a run would train, as far as the files on this machine show.

    Without the model's tokenizer, a list counts as so many tokens; ``auto`` finds none without the model's weights and
    the prepared set.

    Raises:
        ConfigError: A token that the tokenizer does not have, or rows of a head with an adapter.
        CheckpointError, DataError: The model's weights or the prepared set are damaged.
    """
    adapter, added = config.adapter, config.model.add_tokens
    if adapter is None:
        return TokenChoice(())
    if model_dir is None or not (model_dir / "tokenizer.json").is_file():
        listed = adapter.train_tokens if isinstance(adapter.train_tokens, list) else []
        return TokenChoice(tuple(range(len({*listed, *added}))))
    prepared = None if isinstance(adapter.train_tokens, list) else find_prepared(config, model_dir)
    candidates = Candidates() if prepared is None else find_candidates(prepared[0], model_dir)
    return choose_tokens(adapter, model_dir, architecture, candidates, added)
