"""Config keys by the names that other trainers give them, for the remedies of misspelt keys and options."""

from __future__ import annotations

import functools

from fctune.config.fields import iter_fields
from fctune.config.schema import RunConfig

DATA_REMEDY = "--data FILE, or data.sources=[{path: FILE}]"

# Names of transformers, TRL, PEFT, torchtune, Axolotl and LLaMA-Factory.
_OTHER_NAMES = {
    "adapter.alpha": ("lora_alpha",),
    "adapter.dropout": ("lora_dropout",),
    "adapter.modules": ("target_modules", "lora_target", "lora_target_modules", "lora_attn_modules"),
    "adapter.rank": ("r", "lora_r", "lora_rank"),
    "activation_checkpointing.fraction": ("gradient_checkpointing",),
    "checkpoint.every": ("save_steps", "save_interval"),
    "checkpoint.keep_last": ("save_total_limit",),
    "clip_grad_norm": ("max_grad_norm", "grad_clip"),
    "compile": ("torch_compile",),
    "data.packed": ("packing", "sample_packing"),
    "data.seq_len": ("max_length", "max_seq_len", "max_seq_length", "sequence_len", "cutoff_len", "model_max_length"),
    "epochs": ("epoch", "num_epochs", "num_train_epochs"),
    "global_batch_size": ("batch_size", "train_batch_size", "effective_batch_size", "gradient_accumulation_steps"),
    "log_every_n_steps": ("logging_steps",),
    "lr_scheduler.name": ("lr_scheduler_type", "scheduler"),
    "lr_scheduler.warmup": ("warmup_ratio", "warmup_steps", "num_warmup_steps", "warmup"),
    "micro_batch_size": ("per_device_train_batch_size", "micro_batch"),
    "model.path": ("base_model", "model", "model_id", "model_name", "model_name_or_path", "checkpoint_dir"),
    "optimizer.lr": ("lr", "learning_rate"),
    "optimizer.weight_decay": ("weight_decay",),
    "output_dir": ("output", "out", "output_path", "save_dir"),
    "precision": ("bf16", "fp16", "dtype", "torch_dtype"),
    "resume": ("resume_from_checkpoint",),
    "validation.every": ("eval_steps", "eval_interval"),
    DATA_REMEDY: (
        *("data", "data_file", "data_files", "data_path", "dataset", "datasets", "dataset_name", "train_data"),
        *("train_file", "train_files", "data.path", "data.file", "data.files", "data.dataset", "data.train"),
    ),
}


def find_key(name: str) -> str | None:
    """Return the config key that an unknown key or option is probably meant for.

    Args:
        name: Key as it was written, with its section if it had one, or an option without its dashes.

    Returns:
        The key; ``DATA_REMEDY`` for rows, which are given by several keys; None if no key or several fit.
    """
    name = name.replace("-", "_").lower()
    by_name = {other: key for key, others in _OTHER_NAMES.items() for other in others}
    if (key := by_name.get(name) or by_name.get(name.rpartition(".")[2])) is not None and key != name:
        return key
    known = list_keys()
    if name in known:
        return name
    found = [key for key in known if key.rpartition(".")[2] == name.rpartition(".")[2]]
    return found[0] if len(found) == 1 else None


@functools.cache
def list_keys() -> tuple[str, ...]:
    """Return every key of a run's config, sections included, but not those of list items."""
    return tuple(key for key, _ in iter_fields(RunConfig))
