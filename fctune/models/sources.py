"""Sources of models: the packages of this folder, each of which builds some families. Imports no torch."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fctune.base.errors import ConfigError
from fctune.config.sections.model import ModelSource
from fctune.models.architecture import Architecture
from fctune.models.torchtune import architecture as torchtune
from fctune.models.transformers import architecture as transformers
from fctune.models.transformers.model_config import check_config

if TYPE_CHECKING:
    from fctune.models.attention import AttentionKernel
    from fctune.models.causal_lm import CausalLM
    from fctune.models.precision import PrecisionPolicy


def read_config(model_dir: str | Path) -> dict[str, Any]:
    """Read ``config.json`` of a Hugging Face model directory.

    Raises:
        ConfigError: The file is missing or broken.
    """
    path = Path(model_dir) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (path.parent / "adapter_config.json").is_file():
            raise ConfigError(
                f"{path.parent}: contains an adapter, not a model. Name its base, base_model_name_or_path in "
                "adapter_config.json, or merge the adapter into the base first."
            ) from None
        raise ConfigError(f"{path}: no such file; a Hugging Face model directory holds one.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error}). Download the model again.") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(raw).__name__}. Download the model again.")
    return raw


def read_architecture(model_dir: str | Path, model_source: ModelSource = "auto") -> Architecture:
    """Read the architecture from ``config.json`` of a Hugging Face model directory.

    Args:
        model_dir: Model directory.
        model_source: ``model.source`` of the run's config.

    Raises:
        ConfigError: The file is missing or broken, or describes a model that the source cannot build.
    """
    return parse_architecture(str(Path(model_dir) / "config.json"), read_config(model_dir), model_source)


def parse_architecture(where: str, raw: dict[str, Any], model_source: ModelSource = "auto") -> Architecture:
    """Read the architecture from the parsed content of a ``config.json``; ``where`` names the file in messages.

    Raises:
        ConfigError: The content is broken, or describes a model that the source cannot build.
    """
    if choose_source(where, raw, model_source) == "torchtune":
        return torchtune.parse_architecture(where, raw)
    return transformers.parse_architecture(where, raw)


def choose_source(where: str, raw: dict[str, Any], model_source: ModelSource = "auto") -> ModelSource:
    """Return the source that builds a model; ``auto`` takes torchtune for those that it builds exactly.

    Raises:
        ConfigError: The source cannot build the model.
    """
    if model_source != "transformers":
        try:
            torchtune.parse_architecture(where, raw)
        except ConfigError:
            if model_source == "torchtune":
                raise
        else:
            return "torchtune"
    check_config(where, raw)
    return "transformers"


def build_model(
    architecture: Architecture,
    max_seq_len: int,
    precision: PrecisionPolicy,
    attention_kernel: AttentionKernel = "per_document",
) -> CausalLM:
    """Build a model on the meta device, without memory for its weights.

    Args:
        architecture: Sizes and family of the model.
        max_seq_len: Longest row, in tokens; sizes the position embedding's tables.
        precision: Dtypes of the weights and of the computation.
        attention_kernel: Implementation of attention within packed rows.

    Raises:
        ConfigError: Rows longer than the positions of the model, or a combination that the source cannot build.
    """
    if isinstance(architecture, torchtune.TorchtuneArchitecture):
        from fctune.models.torchtune import build as torchtune_build  # imports torchtune, which takes seconds

        return torchtune_build.build_model(architecture, max_seq_len, precision, attention_kernel)
    from fctune.models.transformers import build as transformers_build  # imports torch and transformers

    assert isinstance(architecture, transformers.TransformersArchitecture)
    return transformers_build.build_model(architecture, max_seq_len, precision, attention_kernel)


def build_shapes(architecture: Architecture, max_seq_len: int, precision: PrecisionPolicy) -> CausalLM:
    """Build a model on the meta device to count its parameters and buffers, and what its blocks keep for backward.

    Blocks of torchtune's models do not run and are made without torchtune; of transformers' models, one block of each
    kind is inspected.

    Raises:
        ConfigError: Rows longer than the positions of the model, or a combination that the source cannot build.
    """
    if isinstance(architecture, torchtune.TorchtuneArchitecture):
        from fctune.models.torchtune import shapes  # imports torch

        return shapes.build_shapes(architecture, max_seq_len, precision)
    from fctune.models.transformers import build  # imports torch and transformers

    assert isinstance(architecture, transformers.TransformersArchitecture)
    return build.build_shapes(architecture, max_seq_len, precision)


def find_model_problems(
    model_dir: str | Path | None, modules: Sequence[str] | str, model_source: ModelSource
) -> list[str]:
    """Check a model and ``adapter.modules`` without importing torch, and return one line per problem.

    The modules of a model from transformers are checked when it is built. ``model_dir`` is None if it is not at hand.
    """
    if model_dir is None:
        return ["adapter.modules: empty; name some, or use all-linear"] if not modules else []
    where = str(Path(model_dir) / "config.json")
    try:
        raw = read_config(model_dir)
        source = choose_source(where, raw, model_source)
    except ConfigError as error:
        return [f"model.path: {error}"]
    if source == "torchtune":
        return torchtune.parse_architecture(where, raw).find_adapter_problems(modules)
    return []


def find_public_config(name: str) -> dict[str, Any] | None:
    """Return ``config.json`` of a public model by its hub name, instruct variants included; None if it is not known.

    A run is often planned before its model, which may be gated, is downloaded.
    """
    known = _read_public_configs()
    return known.get(name) or known.get(name.removesuffix("-Instruct").removesuffix("-it"))


@functools.cache
def _read_public_configs() -> dict[str, dict[str, Any]]:
    text = (Path(__file__).parent / "public_configs.json").read_text(encoding="utf-8")
    known: dict[str, dict[str, Any]] = json.loads(text)
    return known
