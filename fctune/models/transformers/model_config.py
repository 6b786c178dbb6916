"""config.json of a model that transformers builds: checked, and read by transformers' classes.

Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError, one_line
from fctune.config.parsing import suggest
from fctune.models.architecture import Architecture
from fctune.models.transformers.refused_types import find_refusal

# Quantisation of checkpoints that loading undoes, by quant_method of config.json.
DEQUANTIZED = ("mxfp4", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(Architecture):
    """Sizes and config.json of a decoder, from which transformers builds its modules.

    Attributes:
        config_json: Content of config.json.
        where: Path or name of the config.json, for messages.
    """

    config_json: str
    where: str


def check_config(where: str, raw: dict[str, Any]) -> None:
    """Check, without importing torch, that transformers has the architecture of a config.json.

    Args:
        where: Path or name of the file, for messages.
        raw: Content of the file.

    Raises:
        ConfigError: An encoder-decoder, a model that transformers does not have, such as one of remote code, one that
            is refused by name, or one whose quantisation cannot be undone.
    """
    known = read_model_types()
    text = find_text_config(raw)
    family = text.get("model_type") or raw.get("model_type")
    if raw.get("is_encoder_decoder") or text.get("is_encoder_decoder"):
        raise ConfigError(
            f"{where}: model_type={family!r} is an encoder-decoder, but only decoders are trained here; choose a "
            "causal language model."
        )
    if not isinstance(family, str) or (known and family not in known and raw.get("model_type") not in known):
        version = _find_version()
        if raw.get("auto_map"):
            raise ConfigError(
                f"{where}: model_type={family!r} needs the code in its own repository (auto_map), which is never run; "
                f"choose a model that transformers has, or a version of transformers that has this one (here: "
                f"{version})."
            )
        hint = (suggest(family, known) if isinstance(family, str) else "") or "."
        raise ConfigError(
            f"{where}: model_type={family!r} is not a causal language model of transformers {version}{hint} Install a "
            "version that has it, or choose another model."
        )
    for name in dict.fromkeys((raw.get("model_type"), family)):
        if isinstance(name, str) and (reason := find_refusal(name)) is not None:
            raise ConfigError(f"{where}: model_type={name!r} {reason}; choose another model.")
    _check_quantization(where, raw)


def _check_quantization(where: str, raw: dict[str, Any]) -> None:
    config = find_quantization(raw)
    method = config.get("quant_method") if isinstance(config, dict) else None
    if config and method not in DEQUANTIZED:
        raise ConfigError(
            f"{where}: its weights are quantised (quant_method={method!r}), and only {' and '.join(DEQUANTIZED)} are "
            "dequantised while loading. Use the unquantised model; adapter.base=nf4 quantises it for training."
        )


def find_text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config.json that describes the text model: all of it, or that of a vision-language model."""
    text = raw.get("text_config")
    return text if isinstance(text, dict) else raw


def find_quantization(raw: dict[str, Any]) -> Any:
    """Return what a config.json says of the quantisation of its checkpoint; None or empty if nothing."""
    return raw.get("quantization_config") or find_text_config(raw).get("quantization_config")


@functools.cache
def read_model_types() -> frozenset[str]:
    """Read the model types of transformers' causal language models from its source, which takes no import of torch.

    Empty if its source has another form; models are then checked only when they are built.
    """
    package = importlib.util.find_spec("transformers")
    assert package is not None
    assert package.submodule_search_locations is not None
    file = Path(package.submodule_search_locations[0]) / "models" / "auto" / "modeling_auto.py"
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == _MAPPING:
                assert isinstance(node.value, ast.Call)
                return frozenset(name for name, _ in ast.literal_eval(node.value.args[0]))
    except (OSError, SyntaxError, ValueError, AssertionError, IndexError):
        pass
    return frozenset()


_MAPPING = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


def _find_version() -> str:
    from importlib.metadata import version

    return version("transformers")


def read_text_config(where: str, config_json: str) -> Any:
    """Return transformers' config of a text model, from the content of a config.json. Callers must not change it.

    Raises:
        ConfigError: transformers cannot read it; ``where`` names the file.
    """
    return read_full_config(where, config_json).get_text_config()


@functools.lru_cache(maxsize=8)
def read_full_config(where: str, config_json: str) -> Any:
    """Return transformers' config of a model, with those of its vision tower and the like; see ``read_text_config``."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    raw: dict[str, Any] = json.loads(config_json)
    raw.pop("quantization_config", None)
    try:
        # Infinity is stored as an object, since JSON has none.
        return CONFIG_MAPPING[raw["model_type"]].from_dict(PreTrainedConfig._decode_special_floats(raw))
    except Exception as error:  # the library's validation raises all kinds
        reason = one_line(error, 300)
        raise ConfigError(
            f"{where}: transformers cannot read it ({type(error).__name__}: {reason}). Compare it with the published "
            "one, or download the model again."
        ) from None
