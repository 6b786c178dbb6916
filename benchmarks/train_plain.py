"""Benchmark run of a plain loop: transformers' model with a PEFT adapter, on the batches that fctune trains on."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.job import ALPHA, CLIP, LEARNING_RATE, MODULES, RANK, WEIGHT_DECAY, Job, Recorder


def train(job: Job, recorder: Recorder) -> None:
    """Train on packed rows, whose conversations transformers separates by their positions."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from benchmarks.train_fctune import fctune_config
    from fctune.config.loading import parse_config
    from fctune.config.schema import RunConfig
    from fctune.data.prepared_set import prepare
    from fctune.training.loop import build_loader

    problems: list[str] = []
    out = Path(job.rows_dir) / "out" / "plain"
    parsed = parse_config(fctune_config(job, out), problems)
    assert not problems, problems
    config: RunConfig = parsed  # type: ignore[assignment]
    loader = build_loader(config, prepare(config.data, Path(job.model_dir), out / "prepared"))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[job.dtype]
    base = AutoModelForCausalLM.from_pretrained(job.model_dir, dtype=dtype)
    adapter = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=MODULES, lora_dropout=0.0, task_type="CAUSAL_LM")
    model = get_peft_model(base, adapter).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    recorder.begin()
    for step in range(1, job.steps + 1):
        batches = loader.micro_batches(loader.step_at(step), 0, 1, job.micro_batch_size)
        total = sum(batch.num_supervised for batch in batches)
        losses = []
        for batch in batches:
            loss = model(
                input_ids=batch.tokens,
                position_ids=batch.positions,
                labels=batch.labels,
                shift_labels=batch.labels,
                num_items_in_batch=total,
                use_cache=False,
            ).loss
            loss.backward()
            losses.append(float(loss.detach()))
            recorder.count(batch.tokens.numel(), batch.num_tokens, batch.num_supervised)
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recorder.losses.append(sum(losses))
        recorder.end_step()
