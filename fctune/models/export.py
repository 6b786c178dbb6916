"""Export a trained model: merged, as a Hugging Face directory, or its adapter, as a PEFT directory.

Tensors are merged one at a time into copies; the live weights do not change, so training can continue.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from fctune.base.errors import DiskError
from fctune.base.files import staged_directory
from fctune.calls.response_template import ChosenResponse, choose_response_template, write_response_template
from fctune.calls.server_parsers import write_server_parsers
from fctune.config.sections.adapter import AdapterConfig
from fctune.data.chat_template import ChatTemplate
from fctune.data.chosen_template import ChosenTemplate
from fctune.data.template_args import ADDITIONAL_TEMPLATES, merge_template_args, read_template_args, write_template_args
from fctune.models.adapter_base import name_base
from fctune.models.architecture import Architecture
from fctune.models.base_weights import plan_base
from fctune.models.causal_lm import CausalLM
from fctune.models.frozen_experts import iter_frozen_experts
from fctune.models.frozen_linear import FrozenLinear, is_scale
from fctune.models.hub import COMPANION_FILES
from fctune.models.lora import LoRALinear, is_adapter, iter_adapted, merge
from fctune.models.tensor_files import write_shards
from fctune.models.token_rows import TokenRows, trained_token_ids

_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

_MAX_FILE_BYTES = 4 * 1024**3


@dataclass(frozen=True, slots=True)
class Prompting:
    """Prompt settings of a trained model, as its directory records them.

    Attributes:
        chat_template: Template in place of the base's; None keeps the base's.
        template_args: Switches of the template.
        has_reasoning: The model was trained on reasoning; None: unknown.
    """

    chat_template: ChosenTemplate | None = None
    template_args: Mapping[str, Any] | None = None
    has_reasoning: bool | None = None


BASE_PROMPTING = Prompting()


def export_merged(
    model: CausalLM,
    base_dir: Path,
    out: Path,
    is_writer: bool,
    max_file_bytes: int = _MAX_FILE_BYTES,
    prompting: Prompting = BASE_PROMPTING,
) -> None:
    """Write the model, with its adapters merged, as a Hugging Face directory.

    Every rank must call this, because sharded weights are gathered, one at a time; only the writer keeps them.

    Args:
        model: Model to export; not changed.
        base_dir: Directory that the base was loaded from; gives config and tokenizer.
        out: Directory to create; replaced if it exists.
        is_writer: True if this rank writes the files.
        max_file_bytes: Size above which weights are split into several files.
        prompting: Template and switches for the export to carry.

    Raises:
        DiskError: The disk is full, gone or read-only; raised by the writer once all tensors are gathered.
    """
    tensors = iter_merged(model)
    try:
        if is_writer:
            on_host = ((name, tensor.cpu()) for name, tensor in tensors)
            plan, dtype = plan_base(model.architecture, base_dir), model.precision.compute_dtype
            with _new_directory(out) as staging:
                write_shards(staging, chain(plan.split(on_host), plan.read_copied(dtype)), max_file_bytes)
                copy_companions(base_dir, staging, prompting)
                write_model_config(staging, base_dir, dtype, is_dequantized=plan.is_dequantized)
    finally:
        for _ in tensors:  # after a failed write the other ranks still send
            pass


def export_adapter(
    model: CausalLM,
    config: AdapterConfig,
    base: str,
    base_dir: Path,
    out: Path,
    is_writer: bool,
    prompting: Prompting = BASE_PROMPTING,
) -> None:
    """Write the adapters as a PEFT directory. Every rank must call this.

    Args:
        model: Model to export; not changed.
        config: The ``adapter`` section of the run's config.
        base: The base as the user gave it: a directory or ``hf:NAME[@REVISION]``.
        base_dir: Directory that the base was loaded from; gives the tokenizer.
        out: Directory to create; replaced if it exists.
        is_writer: True if this rank writes the files.
        prompting: Template and switches for the export to carry.

    Raises:
        DiskError: The disk is full, gone or read-only.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            full = model.architecture.to_peft_layout(name, _gather(parameter)).contiguous()
            if is_writer:
                tensors[model.architecture.to_peft_name(name, config.modules)] = full.cpu()
    if not is_writer:
        return
    with _new_directory(out) as staging:
        save_file(tensors, staging / "adapter_model.safetensors", metadata={"format": "pt"})
        write_adapter_config(staging, config, base, model.architecture, trained_token_ids(model))
        copy_companions(base_dir, staging, prompting)


@torch.no_grad()
def iter_merged(model: CausalLM) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the merged weights by their names in transformers' model, in its layout, on their device.

    Weights are in the compute dtype, stored buffers in their own.

    Every rank must iterate to the end, because sharded weights are gathered, one at a time. The model does not change.
    """
    frozen = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, FrozenLinear)}
    ends = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, TokenRows)}
    adapted = dict(iter_adapted(model))
    experts = dict(iter_frozen_experts(model))
    names = (name for name, _ in model.named_parameters() if not is_adapter(name) and not is_scale(name))
    # All parts of quantised experts are one weight.
    for name in dict.fromkeys(owner if (owner := name.rpartition(".")[0]) in experts else name for name in names):
        module = experts.get(name) or frozen.get(name)
        full = _gather(model.get_parameter(name) if module is None else module.dequantized_weight())
        if isinstance(module, LoRALinear):
            a, b = _gather(module.lora_a), _gather(module.lora_b)
            magnitude = None if module.magnitude is None else _gather(module.magnitude)
            full = merge(full, a, b, module.scaling, magnitude)
        elif (adapter := adapted.get(name)) is not None:
            full = adapter.merge(full, _gather(adapter.lora_a), _gather(adapter.lora_b))
        full = full.to(model.precision.compute_dtype)  # only training needs float32
        if (end := ends.get(name)) is not None:
            index = torch.tensor(end.ids, device=full.device)
            full = full.index_copy(0, index, _gather(end.token_rows).to(full))
        yield model.architecture.to_hf_name(name), model.architecture.to_hf_layout(name, full).contiguous()
    for name, buffer in model.stored_buffers():
        yield model.architecture.to_hf_name(name), buffer.detach()


def _gather(parameter: Tensor) -> Tensor:
    tensor = parameter.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def write_adapter_config(
    folder: Path, config: AdapterConfig, base: str, architecture: Architecture, token_ids: Sequence[int] = ()
) -> None:
    """Write ``adapter_config.json``, by which PEFT and inference servers load the adapter.

    Args:
        folder: Existing directory.
        config: The ``adapter`` section of the run's config.
        base: The base: a directory or ``hf:NAME[@REVISION]``.
        architecture: Shape of the model.
        token_ids: Tokens with trained rows, in the order of the rows.
    """
    from peft import LoraConfig, TaskType  # slow to import

    tokens: list[int] | dict[str, list[int]] | None = list(token_ids) or None
    if token_ids and not architecture.is_tied:  # PEFT trains the rows of a tied head with those of the embedding
        tokens = {name.rpartition(".")[2]: list(token_ids) for name in (architecture.embedding, architecture.head)}
    modules = architecture.resolve_adapter_modules(config.modules)
    parameters = [name for name in modules if name in architecture.expert_names]
    parameters += [f"{name}.weight" for name in modules if name in architecture.router_names]
    base_name, revision = name_base(base)
    LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0 if parameters else config.dropout,  # PEFT refuses any where it adds to parameters
        target_modules=architecture.peft_targets(modules),
        target_parameters=parameters or None,
        use_rslora=config.scaling == "rslora",
        use_dora=config.dora,
        trainable_token_indices=tokens,
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=base_name,
        revision=revision,
        inference_mode=True,
    ).save_pretrained(str(folder))


def write_model_config(folder: Path, base_dir: Path, dtype: torch.dtype, *, is_dequantized: bool = False) -> None:
    """Copy the base's ``config.json``, with ``dtype`` set to that of the exported weights."""
    config = json.loads((base_dir / "config.json").read_text(encoding="utf-8"))
    if is_dequantized:
        config.pop("quantization_config", None)
    sections = [config, *([text] if isinstance(text := config.get("text_config"), dict) else [])]
    for section in sections:  # a vision-language model's text may name its dtype again
        key = "torch_dtype" if "torch_dtype" in section else "dtype"
        if section is config or key in section:
            section[key] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def copy_companions(base_dir: Path, out: Path, prompting: Prompting = BASE_PROMPTING) -> None:
    """Copy the tokenizer, chat template with its switches, generation config and licence of the base to ``out``.

    The generation config gets all tokens that end a turn, so that servers stop at each of them; a file next to it names
    the servers' parsers for the model; and the tokenizer's config declares how answers of the template are read.

    Args:
        base_dir: Directory of the base.
        out: Directory to write to.
        prompting: Template to write in place of the base's, and switches to record over those of the base.
    """
    for pattern in COMPANION_FILES:
        for file in base_dir.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, out / file.name)
    if prompting.chat_template is not None:
        _replace_chat_template(out, prompting.chat_template.source)
    elif (base_dir / ADDITIONAL_TEMPLATES).is_dir() and (out / "tokenizer_config.json").is_file():
        # Servers choose by request, but the model knows one template.
        _replace_chat_template(out, _load_template(base_dir, None).source)
    template_args = merge_template_args(read_template_args(out), prompting.template_args)
    write_template_args(out, template_args)
    if (out / "tokenizer_config.json").is_file():
        template = _load_template(base_dir, prompting.chat_template)
        write_generation_config(out, base_dir, template)
        write_response_template(out, choose_response(base_dir, prompting.chat_template))
        write_server_parsers(out, template, template_args, prompting.has_reasoning)


def write_generation_config(folder: Path, base_dir: Path, template: ChatTemplate) -> None:
    """Write the base's ``generation_config.json`` with every token that ends a turn; its other values are kept.

    ``eos_token_id`` becomes the list of the base's own ids and of those with which the chat template ends a turn.

    Args:
        folder: Directory to write to.
        base_dir: Directory of the base.
        template: Chat template of the model in ``folder``.
    """
    path = base_dir / "generation_config.json"
    if path.is_file():
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    else:  # what transformers takes from the model's config then
        config = json.loads((base_dir / "config.json").read_text(encoding="utf-8"))
        config = {**config, **(config.get("text_config") or {})}
        values = {key: config[key] for key in _SPECIAL_TOKENS if config.get(key) is not None}
    known = values.get("eos_token_id")
    known = known if isinstance(known, list) else [] if known is None else [known]
    every = list(dict.fromkeys([*known, *sorted(template.stop_ids)]))
    if len(every) > len(known):
        values["eos_token_id"] = every
    if values.get("pad_token_id") is None:
        pad_id = template.tokenizer.pad_token_id
        values["pad_token_id"] = every[0] if pad_id is None else pad_id
    (folder / "generation_config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


@functools.lru_cache(maxsize=4)
def _load_template(base_dir: Path, chat_template: ChosenTemplate | None) -> ChatTemplate:
    """Return the template of exports; a run writes it with every checkpoint."""
    return ChatTemplate(base_dir, chat_template=chat_template)


@functools.lru_cache(maxsize=4)
def choose_response(base_dir: Path, chat_template: ChosenTemplate | None) -> ChosenResponse:
    """Return the response template of exports of a base, with its own chat template or another."""
    return choose_response_template(_load_template(base_dir, chat_template), is_own=chat_template is None)


def _replace_chat_template(folder: Path, source: str) -> None:
    """Write a chat template where transformers and servers find it first, and remove those of the base."""
    for file in folder.glob("chat_template*"):
        file.unlink()
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.pop("chat_template", None) is not None:
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _new_directory(out: Path) -> Iterator[Path]:
    """Yield a staging directory that replaces ``out`` on success and is deleted on failure.

    Raises:
        DiskError: The disk is full, gone or read-only.
    """
    try:
        with staged_directory(out, replaces=True) as staging:
            yield staging
    except (OSError, SafetensorError) as error:
        raise DiskError(f"{out}: cannot be written ({getattr(error, 'strerror', None) or error}).") from None
