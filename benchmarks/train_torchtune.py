"""Benchmark run of torchtune's stock recipes, as installed."""

from __future__ import annotations

import importlib.util
import json
import types
from pathlib import Path
from typing import Any

import torch

from benchmarks.job import ALPHA, CLIP, LEARNING_RATE, RANK, WEIGHT_DECAY, Job, Recorder


def train(job: Job, recorder: Recorder) -> None:
    """Run a stock recipe; on one rank the single-device recipe, unless ``job.distributed`` is set."""
    from omegaconf import OmegaConf
    from torchtune import training, utils

    is_distributed = job.distributed or job.ranks > 1
    kind = "distributed" if is_distributed else "single_device"
    module = _load_recipe(f"{'lora' if job.adapter else 'full'}_finetune_{kind}")
    if job.device == "cpu":
        # Called on any device, but fail without a GPU.
        training.get_memory_stats = lambda device, reset_stats=True: {}
        training.log_memory_stats = lambda stats: None
        training.cleanup_before_training = lambda: None
    if is_distributed:
        torch.distributed.init_process_group("gloo" if job.device == "cpu" else "cuda:nccl,cpu:gloo")
    config = OmegaConf.create(torchtune_config(job, Path(job.rows_dir) / "out" / "torchtune"))
    name = {"lora": "LoRAFinetuneRecipe", "full": "FullFinetuneRecipe"}["lora" if job.adapter else "full"]
    recipe = getattr(module, name + ("Distributed" if is_distributed else "SingleDevice"))(cfg=config)
    recipe.save_checkpoint = lambda *_, **__: None  # not measured
    recipe.setup(cfg=config)
    eos, start = recipe._tokenizer.eos_id, recipe._tokenizer.special_tokens["<|start_header_id|>"]
    header = 2 + sum(
        len(recipe._tokenizer.encode(text, add_bos=False, add_eos=False)) for text in ("assistant", "\n\n")
    )
    to_device = utils.batch_to_device

    def count(batch: dict[str, Any], device: torch.device) -> None:
        tokens, labels = batch["tokens"], batch["labels"]
        positions = torch.arange(1, tokens.shape[1] + 1)
        # Every row ends in this token, followed only by padding.
        real = int(((tokens == eos) * positions).amax(1).sum())
        trained = int((labels != -100).sum())
        recorder.count(tokens.numel(), real, trained - header * int((labels == start).sum()), trained)
        to_device(batch, device)

    utils.batch_to_device = count
    schedule_step = recipe._lr_scheduler.step

    def end_step() -> None:  # the recipe's last action in a step before logging
        schedule_step()
        recorder.end_step()

    recipe._lr_scheduler.step = end_step
    if not is_distributed or torch.distributed.get_rank() == 0:
        log = recipe._metric_logger.log_dict

        def record(payload: dict[str, Any], step: int) -> None:
            recorder.losses.append(float(payload["loss"]))
            log(payload, step)

        recipe._metric_logger.log_dict = record
    recorder.begin()
    recipe.train()
    if is_distributed:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _load_recipe(name: str) -> types.ModuleType:
    # By file, because `recipes` is this project's package here.
    import torchtune

    file = Path(torchtune.__file__).parents[1] / "recipes" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"stock_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def torchtune_config(job: Job, out: Path) -> dict[str, Any]:
    """Return the config of the stock recipe."""
    sizes = json.loads((Path(job.model_dir) / "config.json").read_text())
    builder = "_component_builders.lora_llama3_1" if job.adapter else "_component_builders.llama3_1"
    model = {
        "_component_": f"torchtune.models.llama3_1.{builder}",
        "vocab_size": sizes["vocab_size"],
        "num_layers": sizes["num_hidden_layers"],
        "num_heads": sizes["num_attention_heads"],
        "num_kv_heads": sizes["num_key_value_heads"],
        "embed_dim": sizes["hidden_size"],
        "intermediate_dim": sizes["intermediate_size"],
        "max_seq_len": job.seq_len,
    }
    if job.adapter:
        attention = ["q_proj", "k_proj", "v_proj", "output_proj"]
        model |= {"lora_attn_modules": attention, "apply_lora_to_mlp": True, "apply_lora_to_output": False}
        model |= {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0}
    checkpointer: dict[str, Any] = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": job.model_dir,
        "checkpoint_files": ["model.safetensors"],
        "output_dir": str(out),
        "model_type": "LLAMA3",
    }
    if not job.has_weights:
        checkpointer = {"_component_": "benchmarks.train_torchtune.DrawnCheckpoint", "model": model, "dtype": job.dtype}
        checkpointer |= {"device": job.device, "model_type": "LLAMA3"}
    return {
        "output_dir": str(out),
        "seed": 42,
        "device": job.device,
        "dtype": job.dtype,
        "model": model,
        "checkpointer": checkpointer,
        "resume_from_checkpoint": False,
        "save_adapter_weights_only": False,
        "tokenizer": {
            "_component_": "torchtune.models.llama3.llama3_tokenizer",
            "path": str(Path(job.model_dir) / "tokenizer.model"),
            "special_tokens_path": str(Path(job.model_dir) / "tokenizer.json"),
            "max_seq_len": job.seq_len,
        },
        "dataset": {
            "_component_": "torchtune.datasets.chat_dataset",
            "source": "json",
            "data_files": str(Path(job.rows_dir) / "plain.jsonl"),
            "conversation_column": "messages",
            "conversation_style": "openai",
            "split": "train",
            "packed": job.packed,
        },
        "shuffle": True,
        "batch_size": job.micro_batch_size,
        "gradient_accumulation_steps": job.rows_a_step // (job.micro_batch_size * job.ranks),
        "epochs": 1,
        "max_steps_per_epoch": job.steps,
        "optimizer": {
            "_component_": "torch.optim.AdamW",
            "fused": True,
            "lr": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
        },
        "optimizer_in_bwd": False,
        # Cosine without a cycle is constant.
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 0,
            "num_cycles": 0.0,
        },
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "clip_grad_norm": CLIP,
        "compile": job.compile,
        "enable_activation_checkpointing": bool(job.checkpointed),
        "enable_activation_offloading": False,
        "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": str(out)},
        "log_every_n_steps": 1,
        "log_peak_memory_stats": False,
    }


class DrawnCheckpoint:
    """A torchtune checkpointer that reads nothing and returns random base weights."""

    def __init__(self, model: dict[str, Any], dtype: str, device: str, **_: object):
        self._model, self._device = model, device
        self._dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]

    def load_checkpoint(self) -> dict[str, Any]:
        """Return a checkpoint in the structure of torchtune's checkpointers."""
        from omegaconf import OmegaConf
        from torchtune import config

        with torch.device("meta"):
            model = config.instantiate(OmegaConf.create(self._model))
        options: dict[str, Any] = {"dtype": self._dtype, "device": self._device}
        return {
            "model": {
                name: torch.randn(t.shape, **options).mul_(0.02) if t.ndim > 1 else torch.ones(t.shape, **options)
                for name, t in model.state_dict().items()
                if "lora_" not in name
            }
        }
