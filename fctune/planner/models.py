"""The shape of the model that a config names, from its config.json alone: no weights are read or downloaded."""

from __future__ import annotations

import json
from pathlib import Path

from fctune.config.schema import RunConfig
from fctune.errors import ConfigError
from fctune.gpus import GPUS, Gpu
from fctune.models.architecture import Architecture
from fctune.models.attention import AttentionKernel
from fctune.models.causal_lm import CausalLM
from fctune.models.hub import describe_failure, parse_name
from fctune.models.lora import apply_lora_
from fctune.models.precision import choose_precision
from fctune.models.sources import find_public_config, parse_architecture, read_architecture
from fctune.parallel.layout import check_layout


def find_architecture(path: str, by_hand: str | None = None) -> tuple[Architecture, Path | None, str]:
    """The architecture of ``model.path``, its directory where it is here, and where the shape was found.

    Args:
        path: as in the config.
        by_hand: a directory with a config.json, in place of it.

    Raises:
        ConfigError: a model that is not here, is not known, and whose config.json cannot be downloaded.
    """
    named = parse_name(path)
    if by_hand is not None and not Path(by_hand).is_dir():
        raise ConfigError(f"--model {by_hand}: no such directory; name the one that holds the model's config.json.")
    if by_hand is not None or named is None:
        folder = Path(by_hand or path)
        return read_architecture(folder), folder, str(folder / "config.json")
    from huggingface_hub import try_to_load_from_cache

    name, revision = named
    cached = try_to_load_from_cache(name, "config.json", revision=revision)
    if isinstance(cached, str):
        return read_architecture(Path(cached).parent), Path(cached).parent, cached
    known = find_public_config(name)
    if known is not None:
        return parse_architecture(name, known), None, f"{name}, as this version of the planner knows it"
    content = _download_config(path, name, revision)
    try:
        raw = json.loads(content)
    except ValueError as error:
        raise ConfigError(f"hf:{name}/config.json: cannot be read as JSON ({error}).") from None
    return parse_architecture(f"hf:{name}/config.json", raw), None, f"{name} on the hub"


def _download_config(path: str, name: str, revision: str | None) -> bytes:
    """One try of a few seconds: the hub's own client tries for half a minute."""
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
    except Exception as error:  # httpx's own, and the hub's for an invalid name
        raise ConfigError(
            f"model.path={path}: config.json cannot be downloaded ({describe_failure(error, 200)}). "
            "Pass --model DIR with one; no weights are needed."
        ) from None
    return answer.content


def shape_model(
    config: RunConfig, architecture: Architecture, attention_kernel: AttentionKernel = "per_document"
) -> CausalLM:
    """Build the model of a run on CUDA, adapters included, on the meta device."""
    precision = choose_precision(config.precision, config.adapter is not None, "cuda")
    model = architecture.build_model(config.data.seq_len, precision, attention_kernel)
    if config.adapter is not None:
        apply_lora_(model, config.adapter)
    return model


def check_run(config: RunConfig, gpu: Gpu) -> None:
    """Stop where the run would stop on this kind of GPU; one that is described by hand is taken at its word.

    Raises:
        ConfigError: products in float8 on a GPU that has none.
    """
    precision = choose_precision(config.precision, config.adapter is not None, "cuda")
    is_base = config.adapter is not None and config.adapter.base == "float8"
    known = GPUS.get(gpu.name)
    if known is not None and known.fp8_tflops is None and (precision.has_float8_matmuls or is_base):
        key = "adapter.base=float8" if is_base else f"precision={config.precision}"
        raise ConfigError(
            f"{key}: --gpu {gpu.name} has no products in float8, so the run would not start on it. Use bf16, or a GPU "
            f"that has them: {', '.join(name for name, one in GPUS.items() if one.fp8_tflops is not None)}."
        )


def is_valid_layout(config: RunConfig, model: CausalLM, mode: str, num_shards: int) -> bool:
    """Whether a run can start so."""
    try:
        check_layout(config, model, mode, num_shards)
    except ConfigError:
        return False
    return True
