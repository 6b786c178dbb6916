"""The shape of the model that a config names, from its config.json alone: no weights are read or downloaded."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from fctune.config.schema import RunConfig
from fctune.errors import ConfigError
from fctune.gpus import GPUS, Gpu
from fctune.models.hub import describe_failure, parse_name
from fctune.models.lora import apply_lora_
from fctune.models.precision import choose_precision
from fctune.models.torchtune.architecture import Architecture, read_architecture
from fctune.models.torchtune.build import CausalLM, build_model
from fctune.parallel.sharding import check_layout

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_LLAMA_3_2 = _LLAMA | {"rope_scaling": _LLAMA["rope_scaling"] | {"factor": 32.0}, "tie_word_embeddings": True}
_QWEN: dict[str, Any] = {
    "model_type": "qwen2",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}


def _sizes(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


# config.json of public models, as on the hub: what is planned often is not downloaded yet, and may be gated.
KNOWN: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.2-1B": _LLAMA_3_2 | _sizes(16, 2048, 8192, 32, 8, 128256),
    "meta-llama/Llama-3.2-3B": _LLAMA_3_2 | _sizes(28, 3072, 8192, 24, 8, 128256),
    "meta-llama/Llama-3.1-8B": _LLAMA | _sizes(32, 4096, 14336, 32, 8, 128256),
    "meta-llama/Llama-3.1-70B": _LLAMA | _sizes(80, 8192, 28672, 64, 8, 128256),
    "meta-llama/Llama-3.3-70B": _LLAMA | _sizes(80, 8192, 28672, 64, 8, 128256),
    "Qwen/Qwen2-7B": _QWEN | _sizes(28, 3584, 18944, 28, 4, 152064),
    "Qwen/Qwen2.5-7B": _QWEN | _sizes(28, 3584, 18944, 28, 4, 152064),
    "Qwen/Qwen2.5-72B": _QWEN | _sizes(80, 8192, 29568, 64, 8, 152064),
}


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
    known = KNOWN.get(name.removesuffix("-Instruct"))
    if known is not None:
        content, source = json.dumps(known).encode(), f"{name}, as this version of the planner knows it"
    else:
        content, source = _download_config(path, name, revision), f"{name} on the hub"
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "config.json").write_bytes(content)
        try:
            return read_architecture(made), None, source
        except ConfigError as error:  # of a file that is gone by the time that it is read of
            raise ConfigError(str(error).replace(made, f"hf:{name}")) from None


def _download_config(path: str, name: str, revision: str | None) -> bytes:
    """One try of a few seconds: the hub's own client tries for half a minute."""
    import requests
    from huggingface_hub import constants, get_token, hf_hub_url

    token = get_token()
    try:
        if constants.HF_HUB_OFFLINE:
            raise ConnectionError("HF_HUB_OFFLINE is set")
        url = hf_hub_url(name, "config.json", revision=revision)
        answer = requests.get(url, headers={"Authorization": f"Bearer {token}"} if token else {}, timeout=5)
        answer.raise_for_status()
    except Exception as error:  # of requests' family, and of the hub's for a name that cannot be one
        raise ConfigError(
            f"model.path={path}: config.json cannot be downloaded ({describe_failure(error, 200)}). "
            "Pass --model DIR with one; no weights are needed."
        ) from None
    return bytes(answer.content)


def shape_model(config: RunConfig, architecture: Architecture) -> CausalLM:
    """The model as a recipe shapes it for CUDA, on the meta device."""
    precision = choose_precision(config.precision, config.adapter is not None, "cuda")
    model = build_model(architecture, config.data.seq_len, precision.weight_dtype)
    model.precision = precision
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
