"""Train rows with TRL's SFTTrainer, or merge the adapter of any tool that writes one as PEFT does, in this process.

    python -m benchmarks.head_to_head_trl train|merge JOB.json

``benchmarks.head_to_head`` writes the job, a ``Job`` as JSON. Training writes ``OUT/result.json`` and the adapter,
or all weights; merging writes ``OUT/merged``, a Hugging Face model directory with the tokenizer of the base.
"""

from __future__ import annotations

import json
import resource
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.train_trl import mixes_conversations
from fctune.base.files import write_atomically
from fctune.calls.server_parsers import write_server_parsers
from fctune.config.schema import LRSchedulerConfig
from fctune.data.chat_template import ChatTemplate
from fctune.training.setup import lr_factor

_WEIGHTS = ("*.safetensors*", "*.bin", "config.json")
_DEFAULT_BATCH = 8  # rows of a step in SFTConfig


@dataclass(frozen=True)
class Job:
    """Inputs and output directory of one training by a tool that builds on transformers' Trainer.

    Attributes:
        model_dir: The base.
        rows: JSON Lines in OpenAI's format.
        out: Directory to write.
        seed: Of the adapter and of the order of rows.
        settings: The config of fctune as a nested dict, whose settings the tool gets; None: the defaults of SFTConfig.
        tool: ``trl``, or one of ``benchmarks.head_to_head_peers``.
        python: Interpreter of an environment with the tool; None: this one.
    """

    model_dir: str
    rows: str
    out: str
    seed: int
    settings: Mapping[str, Any] | None
    tool: str = "trl"
    python: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Type of the frozen weights and of the merged model."""
        is_bf16 = self.settings is None or self.settings["precision"] == "bf16"
        return torch.bfloat16 if is_bf16 else torch.float32


def make_config(job: Job) -> Any:
    """Return the SFTConfig of a job.

    With settings, those: packs of the same length, with the loss on the assistant's turns. Without: SFTConfig's
    defaults, except that the 8 rows of a step are computed one at a time, which changes memory but not the gradient.
    """
    from trl import SFTConfig

    common: dict[str, Any] = {
        "output_dir": f"{job.out}/trainer",
        "per_device_train_batch_size": 1,
        "use_cpu": not torch.cuda.is_available(),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": job.seed,
    }
    if job.settings is None:
        return SFTConfig(**common, gradient_accumulation_steps=_DEFAULT_BATCH)
    settings, optimizer = job.settings, job.settings["optimizer"]
    return SFTConfig(
        **common,
        gradient_accumulation_steps=settings["global_batch_size"],
        num_train_epochs=settings["epochs"],
        max_steps=settings["max_steps"] or -1,
        learning_rate=optimizer["lr"],
        weight_decay=optimizer["weight_decay"],
        max_grad_norm=settings["clip_grad_norm"],
        optim="adamw_torch_fused",
        max_length=settings["data"]["seq_len"],
        packing=True,
        assistant_only_loss=True,
        bf16=settings["precision"] == "bf16",
        gradient_checkpointing=settings["activation_checkpointing"]["fraction"] != 0,
    )


def make_trainer(job: Job, rows_per_pack: int | None = None) -> Any:
    """Return TRL's trainer with the model, the rows, and an adapter if the settings have one.

    Args:
        job: The training.
        rows_per_pack: Do not pack, and take this many rows in place of a pack; None: pack.
    """
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
    from trl import SFTTrainer

    set_seed(job.seed)  # the trainer sets it after the adapter is drawn
    config = make_config(job)
    rows = load_dataset("json", data_files=job.rows, split="train", cache_dir=f"{job.out}/cache")
    if job.settings is None:
        return SFTTrainer(model=job.model_dir, args=config, train_dataset=rows)
    if rows_per_pack is not None:
        config.packing = False
        config.gradient_accumulation_steps *= rows_per_pack
    adapter = job.settings["adapter"]
    lora = adapter and LoraConfig(
        r=adapter["rank"],
        lora_alpha=adapter["alpha"],
        lora_dropout=adapter["dropout"],
        target_modules=adapter["modules"],
        task_type="CAUSAL_LM",
    )
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(job.model_dir, dtype=job.dtype),
        args=config,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(job.model_dir),
        peft_config=lora or None,
    )
    schedule = LRSchedulerConfig(**job.settings["lr_scheduler"])

    def create_scheduler(num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        """Follow fctune's schedule; transformers' warm-up begins at 0, which would lose one of few steps."""
        scheduler = LambdaLR(optimizer or trainer.optimizer, lr_factor(schedule, num_training_steps))
        trainer.lr_scheduler = scheduler
        return scheduler

    trainer.create_scheduler = create_scheduler
    return trainer


def train(job: Job) -> dict[str, Any]:
    """Train, save the adapter or all weights, and return what was counted."""
    from transformers import TrainerCallback

    counts, ends, losses = [], [], []

    class Listener(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    trainer = make_trainer(job)
    is_packed = trainer.args.packing
    if is_packed and mixes_conversations(trainer.model, len(trainer.processing_class)):
        num_packs, num_rows = len(trainer.train_dataset), len(Path(job.rows).read_bytes().splitlines())
        trainer, is_packed = make_trainer(job, max(1, round(num_rows / num_packs))), False
    trainer.add_callback(Listener())
    step = trainer.training_step

    def count(model: Any, inputs: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        real = ids.numel() if mask is None else int(mask.sum())
        counts.append((real, int((inputs["labels"] != -100).sum())))
        return step(model, inputs, *arguments, **options)

    trainer.training_step = count
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    trainer.save_model(f"{job.out}/trained")
    return {
        "is_packed": is_packed,
        "trained_parameters": trained,
        "steps": len(ends),
        "tokens": sum(real for real, _ in counts),
        "supervised_tokens": sum(supervised for _, supervised in counts),
        "training_s": seconds,
        "peak_gib": peak,
        "losses": losses,
    }


def merge(job: Job) -> None:
    """Merge the adapter in float32, and write a model directory with the base's tokenizer and chat template."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    trained, out, draft = (Path(job.out, name) for name in ("trained", "merged", "merged.draft"))
    shutil.rmtree(draft, ignore_errors=True)
    if (trained / "adapter_config.json").is_file():
        base = AutoModelForCausalLM.from_pretrained(job.model_dir, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, trained).merge_and_unload()
    else:
        model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)
    model.to(job.dtype).save_pretrained(draft)
    weights = {file for pattern in _WEIGHTS for file in Path(job.model_dir).glob(pattern)}
    for file in Path(job.model_dir).iterdir():
        if file.is_file() and file not in weights:
            shutil.copyfile(file, draft / file.name)
    write_server_parsers(draft, ChatTemplate(draft), {}, has_reasoning=False)
    draft.rename(out)


def main() -> None:
    """Do one step of a job."""
    step, file = sys.argv[1:]
    job = Job(**json.loads(Path(file).read_text(encoding="utf-8")))
    if step == "merge":
        merge(job)
    else:
        write_atomically(Path(job.out, "result.json"), json.dumps(train(job), indent=1) + "\n")


if __name__ == "__main__":
    main()
