"""Benchmark run of TRL: SFTTrainer with a PEFT adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.job import ALPHA, CLIP, LEARNING_RATE, MODULES, RANK, WEIGHT_DECAY, Job, Recorder

# The same text as the demo model's template, with the generation markers that TRL masks by.
TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}"
    "{%- if message.role == 'assistant' %}"
    "{%- generation %}{{- message.content + '<|eot_id|>' }}{%- endgeneration %}"
    "{%- else %}{{- message.content + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
)


def train(job: Job, recorder: Recorder) -> None:
    """Train with SFTTrainer and count tokens and steps."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(job.model_dir)
    tokenizer.chat_template = TEMPLATE
    rows = [json.loads(line) for line in open(Path(job.rows_dir) / "turns.jsonl", encoding="utf-8")]  # noqa: SIM115
    config = SFTConfig(
        output_dir=str(Path(job.rows_dir) / "out" / "trl"),
        max_steps=job.steps,
        per_device_train_batch_size=job.micro_batch_size,
        gradient_accumulation_steps=job.rows_a_step // (job.micro_batch_size * job.ranks),
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP,
        lr_scheduler_type="constant",
        max_length=job.seq_len,
        packing=job.packed,
        assistant_only_loss=True,
        torch_compile=job.compile,
        gradient_checkpointing=bool(job.checkpointed),
        use_liger_kernel=job.liger,
        bf16=job.dtype == "bf16",
        use_cpu=job.device == "cpu",
        optim="adamw_torch_fused",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=42,
    )
    adapter = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=MODULES, lora_dropout=0.0, task_type="CAUSAL_LM")

    class Listener(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            recorder.end_step()

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                recorder.losses.append(float(logs["loss"]))

    trainer = SFTTrainer(
        model=_build_transformers(job),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=adapter if job.adapter else None,
        callbacks=[Listener()],
    )
    step = trainer.training_step

    def count(model: Any, inputs: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        real = ids.numel() if mask is None else int(mask.sum())
        # A row's first token is a label that no position predicts.
        recorder.count(ids.numel(), real, int((inputs["labels"] != -100).sum()))
        return step(model, inputs, *arguments, **options)

    trainer.training_step = count
    recorder.begin()
    trainer.train()
    if job.packed:
        recorder.extra["mixes_conversations"] = mixes_conversations(trainer.model, len(tokenizer))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _build_transformers(job: Job) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[job.dtype]
    options = {} if job.attention is None else {"attn_implementation": job.attention}
    if job.has_weights:
        return AutoModelForCausalLM.from_pretrained(job.model_dir, dtype=dtype, **options)
    config = AutoConfig.from_pretrained(job.model_dir)
    if job.attention is not None:
        config._attn_implementation = job.attention
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(job.device):
            return AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def mixes_conversations(model: Any, num_tokens: int) -> bool:
    """Return True if the logits of a packed conversation depend on the conversation before it."""
    model.eval()
    device = next(model.parameters()).device
    ids = torch.randint(num_tokens, (1, 64), generator=torch.Generator().manual_seed(0)).to(device)
    positions = torch.arange(32, device=device).repeat(2)[None]
    other = ids.clone()
    other[:, :32] = (other[:, :32] + 1) % num_tokens
    first, second = (model(input_ids=i, position_ids=positions).logits[:, 32:].float() for i in (ids, other))
    return not torch.allclose(first, second, atol=1e-2 * float(first.abs().max()))
