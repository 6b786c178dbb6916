"""Plans of the weights of transformers' models, by transformers' own rules for converting checkpoints.

The rules rename stored tensors and fuse them, as the tensors of each expert into one parameter. They run here on
tensors that are not read yet: see ``lazy_tensors``. Rules are those of the class that the checkpoint was saved from; of
a vision-language model, the text weights are taken, and exports copy the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import Mxfp4Dequantize, convert_moe_packed_tensors
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.quantizers import AutoHfQuantizer

from fctune.base.errors import CheckpointError, ConfigError
from fctune.models.tensor_files import TensorHeader
from fctune.models.transformers.lazy_tensors import LazyTensor
from fctune.models.transformers.model_config import DecoderConfig, find_quantization, read_full_config
from fctune.models.transformers.modules import build_decoder, build_empty
from fctune.models.weight_plan import WeightPlan
from fctune.models.weight_sources import Dequantized, Leaf, Source, Stored

_QUANTIZED = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class TextModel:
    """The text model within the model that a checkpoint was saved from.

    Attributes:
        original: The model of the checkpoint, on the meta device.
        names: Names in the original of the text model's parameters and stored buffers.
        tied: Names in the text model of the weights that share another's, with the name of that one.
    """

    original: Any
    names: Mapping[str, str]
    tied: Mapping[str, str]


@dataclass(slots=True)
class _Conversion:
    """Result of the rules for the stored tensors; names are the original model's."""

    sources: dict[str, Source] = field(default_factory=dict)
    ignored: list[Leaf] = field(default_factory=list)  # without a place in the model, and known to be
    unknown: list[str] = field(default_factory=list)
    incomplete: dict[str, list[str]] = field(default_factory=dict)


def plan_weights(architecture: DecoderConfig, model_dir: Path, headers: Mapping[str, TensorHeader]) -> WeightPlan:
    """Plan how a model's parameters and stored buffers consist of the tensors of a checkpoint.

    Raises:
        CheckpointError: Tensors do not fit together.
        ConfigError: transformers cannot build the model.
    """
    text = find_text_model(architecture)
    converted = _convert(text.original, _make_quantizer(architecture, headers), model_dir, headers)
    sources: dict[str, list[Source]] = {}
    for name in text.names:
        if name not in text.tied:
            # Where a checkpoint has the tied weight under several names, or under that of the other one alone.
            aliases = [name, *(other for other, source in text.tied.items() if source == name)]
            stored = [converted.sources.pop(text.names[alias], None) for alias in aliases if alias in text.names]
            if found := [source for source in stored if source is not None]:
                sources[name] = found
    leaves = [leaf for source in converted.sources.values() for leaf in source.leaves()]
    taken = [leaf for found in sources.values() for source in found for leaf in source.leaves()]
    if not any(isinstance(leaf, Dequantized) for leaf in taken):
        # An export of a quantised base is not quantised, and only the model's own tensors can be dequantised.
        leaves += converted.ignored
    ours = {original: name for name, original in text.names.items()}
    incomplete = {ours.get(name, name): gaps for name, gaps in converted.incomplete.items()}
    return WeightPlan(model_dir, sources, leaves, converted.unknown, incomplete)


def to_loaded_name(architecture: DecoderConfig, path: str) -> str:
    """Return the path that a module of the text model has in the model that AutoModelForCausalLM loads.

    PEFT and servers find the modules of an adapter by it.
    """
    for prefix, longer in _find_loaded_prefixes(architecture):
        if path.startswith(prefix):
            return longer + path.removeprefix(prefix)
    return path


@lru_cache(maxsize=4)
def _find_loaded_prefixes(architecture: DecoderConfig) -> tuple[tuple[str, str], ...]:
    decoder = build_decoder(architecture, torch.bfloat16)
    config = read_full_config(architecture.where, architecture.config_json)
    loaded = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) or _find_class(architecture)
    if loaded is None or loaded is type(decoder):
        return ()
    return tuple(_find_prefixes(decoder, build_empty(loaded, config, architecture.where)))


@lru_cache(maxsize=4)
def find_text_model(architecture: DecoderConfig) -> TextModel:
    """Build the model that a checkpoint was saved from, and find the text model within it.

    Raises:
        ConfigError: transformers cannot build it, or it holds no such text model.
    """
    decoder = build_decoder(architecture, torch.bfloat16)
    text_names = list(decoder.state_dict())
    tied = dict(decoder.all_tied_weights_keys)
    saved = _find_class(architecture)
    if saved is None or saved is type(decoder):
        return TextModel(decoder, {name: name for name in text_names}, tied)
    original = build_empty(saved, read_full_config(architecture.where, architecture.config_json), architecture.where)
    prefixes = _find_prefixes(decoder, original)
    names = {name: _replace_prefix(name, prefixes) for name in text_names}
    stored = original.state_dict()
    if absent := [name for name in names.values() if name not in stored]:
        raise ConfigError(
            f"{architecture.where}: the text model of {saved.__name__} cannot be found in it (it has no {absent[0]}); "
            "use the text-only version of this model."
        )
    return TextModel(original, names, tied)


def _find_class(architecture: DecoderConfig) -> Any:
    """Return the class that a checkpoint was saved from; None if config.json does not name one that is known."""
    names = json.loads(architecture.config_json).get("architectures") or [None]
    found = getattr(transformers, str(names[0]), None)
    return found if hasattr(found, "config_class") and hasattr(found, "_from_config") else None


def _find_prefixes(decoder: Any, original: Any) -> list[tuple[str, str]]:
    """Return prefixes of names in the text model, with those that replace them in the original; most specific first."""
    base = decoder.base_model_prefix
    for part, prefix in ((decoder, ""), (getattr(decoder, base), f"{base}.")):
        for path, module in original.named_modules():
            if type(module) is type(part):
                return [(prefix, f"{path}." if path else "")]
    return []


def _replace_prefix(name: str, prefixes: Sequence[tuple[str, str]]) -> str:
    for prefix, longer in prefixes:
        if name.startswith(prefix):
            return longer + name.removeprefix(prefix)
    return name


def _make_quantizer(architecture: DecoderConfig, headers: Mapping[str, TensorHeader]) -> Any:
    """Return transformers' quantiser that undoes a checkpoint's quantisation; None if nothing stored is quantised.

    An export of a quantised base is not quantised, though the run's config.json is that of the base.
    """
    config = find_quantization(json.loads(architecture.config_json))
    if not config or not any(header.dtype in _QUANTIZED for header in headers.values()):
        return None
    return AutoHfQuantizer.from_config({**config, "dequantize": True}, pre_quantized=True)


def _convert(original: Any, quantizer: Any, model_dir: Path, headers: Mapping[str, TensorHeader]) -> _Conversion:
    """Apply transformers' rules to stored tensors, as its own loading does."""
    rules = get_model_conversion_mapping(original, hf_quantizer=quantizer)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    defer_dequantization_(converters)
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    known = original.state_dict()
    ignored = _find_ignored(original)
    result = _Conversion()
    fused: dict[str, tuple[WeightConverter, dict[str, list[str]]]] = {}
    for name in sorted(headers, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, original.base_model_prefix, known)
        if renamed not in known and name in known:
            renamed, pattern = rename_source_key(name, [], [], original.base_model_prefix, known)
        if renamed not in known:
            if ignored is not None and ignored.search(renamed):
                result.ignored.append(Stored(headers[name]))
            else:
                result.unknown.append(name)
        elif pattern is None:
            result.sources[renamed] = Stored(headers[name])
        else:
            _, names = fused.setdefault(renamed, (by_pattern[pattern], {}))
            names.setdefault(pattern, []).append(name)
    for target, (rule, names) in fused.items():
        if gaps := _find_gaps(rule, names, len(known[target]) if known[target].ndim else 0):
            result.incomplete[target] = gaps
            continue
        try:
            result.sources |= _fuse(rule, target, names, original, headers)
        except (ValueError, RuntimeError, KeyError, IndexError) as error:
            stored = next(iter(names.values()))[0]
            raise CheckpointError(
                f"{model_dir}: {stored} and the other tensors of {target} do not fit together ({error}). Download the "
                "model again."
            ) from None
    return result


def _fuse(
    rule: Any, target: str, names: Mapping[str, Sequence[str]], original: Any, headers: Mapping[str, TensorHeader]
) -> dict[str, Source]:
    """Apply one rule's operations to the tensors that its patterns match; returns the sources of its targets."""
    patterns = (rule._original_source_patterns, rule._original_target_patterns)
    fresh = type(rule)(*patterns, operations=rule.operations)  # rule.copy is missing in transformers 5.17
    fresh.scope_prefix, fresh.base_model_prefix = rule.scope_prefix, rule.base_model_prefix
    for pattern, matched in names.items():
        for name in matched:
            fresh.add_tensor(target, name, pattern, LazyTensor(Stored(headers[name])))
    made = fresh.convert(target, model=original, config=original.config)
    tensors = {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
    return {name: tensor.source for name, tensor in tensors.items()}


def _find_gaps(rule: Any, names: Mapping[str, Sequence[str]], num_experts: int) -> list[str]:
    """Return the names of the tensors that are missing of a stack over experts."""
    if not any(isinstance(operation, MergeModulelist) and operation.dim == 0 for operation in rule.operations):
        return []
    gaps: list[str] = []
    for pattern, matched in names.items():
        number = re.compile(pattern.replace("*", r"(\d+)"))
        found = {int(match[1]): match for name in matched if (match := number.search(name))}
        if "*" in pattern and len(found) == len(matched):
            example = next(iter(found.values()))
            gaps += [
                f"{example.string[: example.start(1)]}{i}{example.string[example.end(1) :]}"
                for i in range(num_experts)
                if i not in found
            ]
    return gaps


def _find_ignored(original: Any) -> re.Pattern[str] | None:
    """Return the pattern of stored tensors that transformers leaves out: prediction heads, computed tables."""
    patterns = {r"rotary_emb\.inv_freq", *(original._keys_to_ignore_on_load_unexpected or ())}
    if any(name.endswith("position_ids") for name, _ in original.named_buffers()):
        patterns.add(r"(^|\.)position_ids$")
    return re.compile("|".join(f"({pattern})" for pattern in sorted(patterns)))


def defer_dequantization_(converters: Iterable[WeightConverter]) -> None:
    """Replace the dequantisations among converters' operations by ones on tensors that are not read yet, in place."""
    for converter in converters:
        converter.operations = [_defer(operation) for operation in converter.operations]


def _defer(operation: ConversionOps) -> ConversionOps:
    if isinstance(operation, Fp8Dequantize):
        return _DeferredFp8(operation)
    return _DeferredMxfp4() if isinstance(operation, Mxfp4Dequantize) else operation


class _DeferredMxfp4(ConversionOps):  # type: ignore[misc]
    """Experts in blocks of 32 four-bit numbers, ``[e, out, groups, 16]``, with a scale each; made ``[e, in, out]``."""

    def convert(self, input_dict: dict[str, Any], full_layer_name: str, **_: Any) -> dict[str, Any]:
        """Return the fused weight of all experts, under its full name."""
        headers = {name.rpartition("_")[2]: _header(value) for name, value in input_dict.items()}
        if set(headers) != {"blocks", "scales"}:
            raise ValueError("blocks or scales are missing")
        blocks, scales = headers["blocks"], headers["scales"]
        if blocks.shape[:-1] != scales.shape:
            raise ValueError(f"blocks are {list(blocks.shape)}, scales {list(scales.shape)}")
        num_experts, rows, groups, size = blocks.shape
        name = blocks.name.removesuffix("_blocks")
        shape = (num_experts, groups * size * 2, rows)
        stored = Dequantized(name, shape, (blocks, scales), _unpack_mxfp4, num_experts, packing="mxfp4")
        return {full_layer_name: LazyTensor(stored)}


def _unpack_mxfp4(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    blocks, scales = tensors
    unpacked: Tensor = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    return unpacked


class _DeferredFp8(ConversionOps):  # type: ignore[misc]
    """Weights in float8 (or packed in four bits) with a scale per block, or one for all."""

    def __init__(self, operation: Any):
        self.operation = operation

    def convert(self, input_dict: dict[str, Any], full_layer_name: str, **_: Any) -> dict[str, Any]:
        """Return the weights by pattern, without their scales; a single weight under its full name."""
        result: dict[str, Any] = {}
        for pattern, values in input_dict.items():
            if "activation_scale" in pattern or "weight_scale_inv" in pattern:
                continue
            scales = input_dict.get(f"{pattern}_scale_inv")
            if scales is not None and len(scales) != len(values):
                raise ValueError(f"{len(values)} weights have {len(scales)} scales")
            result[pattern] = (
                values if scales is None else [self._pair(w, s) for w, s in zip(values, scales, strict=True)]
            )
        return {full_layer_name: result["weight"]} if "weight" in result else result

    def _pair(self, weight: Any, scale: Any) -> LazyTensor:
        stored, scales = _header([weight]), _header([scale])
        columns = stored.shape[-1] * (2 if stored.dtype is torch.int8 else 1)
        # Without dims, one scale serves any part of the weight.
        num_groups = scales.shape[0] if scales.shape else stored.shape[0]
        if stored.shape[0] % num_groups:
            raise ValueError(f"{stored.name} is {list(stored.shape)}, its scales are {list(scales.shape)}")
        shape = (*stored.shape[:-1], columns)
        return LazyTensor(Dequantized(stored.name, shape, (stored, scales), self._dequantize, num_groups))

    def _dequantize(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        weight, scale = tensors
        dequantized: Tensor = self.operation._dequantize_one(weight, scale, output_dtype=dtype)
        return dequantized


def _header(value: Any) -> TensorHeader:
    source = (value[0] if isinstance(value, list) else value).source
    if not isinstance(source, Stored):
        raise ValueError("a quantised tensor was fused before it was dequantised")
    return source.header
