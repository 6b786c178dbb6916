"""The plan as a terminal shows it."""

from __future__ import annotations

from dataclasses import fields

from rich.console import Console
from rich.table import Table

from fctune.planner.gpus import GIB
from fctune.planner.memory import SAFE_SHARE
from fctune.planner.plan import Plan, Variant
from fctune.planner.storage import FAILURES_PER_GPU_DAY

_LABELS = {
    "gathered": "weights held whole",
    "reducing": "gradients held whole",
    "working": "computed again, temporaries",
    "context": "CUDA and NCCL (assumed)",
    "fragmentation": "fragmentation (assumed)",
}


def print_plan(console: Console, plan: Plan) -> None:
    """Print all of it."""
    ask, setting = plan.ask, plan.setting
    gpus = f"{ask.nodes} x {ask.gpus_per_node} {ask.gpu.name}"
    _say(console, f"{plan.config.model.path}: {plan.num_parameters:,} parameters, {plan.num_trained:,} train")
    _say(console, f"  shape: {plan.shape_source}")
    _say(console, f"{gpus} ({ask.gpu.source})")
    _say(console, f"  {_describe_layout(setting.mode, setting.replicate, setting.shard)} ({plan.layout_reason})")
    console.print()
    _print_memory(console, plan)
    console.print()
    _print_variants(console, plan)
    console.print()
    _print_time(console, plan)
    _print_storage(console, plan)
    if plan.scales:
        console.print()
        _print_search(console, plan)


def _print_memory(console: Console, plan: Plan) -> None:
    parts, memory = plan.peak.parts, plan.ask.gpu.memory_bytes
    table = Table("memory of a GPU", "GiB", box=None, pad_edge=False)
    for part in fields(parts):
        size = getattr(parts, part.name)
        if size:
            table.add_row(_LABELS.get(part.name, part.name), _gib(size))
    table.add_row("peak", _gib(parts.total), style="bold")
    _show(console, table)
    _say(console, f"  highest at: {plan.peak.moment}")
    if plan.fits:
        margin = plan.margin_bytes / memory
        _say(console, f"fits: {_gib(plan.margin_bytes)} GiB ({margin:.0%}) of {_gib(memory)} GiB left")
        if plan.peak.parts.total > SAFE_SHARE * memory:
            _say(console, "  a narrow margin: peaks measured by others are up to a tenth over such plans", "yellow")
    else:
        _say(console, f"does not fit: {_gib(-plan.margin_bytes)} GiB over the {_gib(memory)} GiB there are", "red")
    _say(console, f"largest micro_batch_size that fits, a tenth left free: {plan.largest_micro_batch or 'none'}")
    hand = plan.hand
    _say(
        console,
        f"by hand, (weights + gradients + optimizer) / GPUs + activations: {hand.state_gib:.2f} + "
        f"{hand.activations_gib:.2f} = {hand.total_gib:.2f} GiB; it takes all as sharded and one tensor a block, and "
        "leaves out the feed-forward, logits, what sharding holds whole, CUDA and fragmentation",
        "dim",
    )


def _print_variants(console: Console, plan: Plan) -> None:
    names = ("layout", "recomputed", "micro-batch", "GiB", "step s", "tokens/s a GPU")
    table = Table(*names, box=None, pad_edge=False)
    fastest = plan.fastest
    for variant in plan.variants:
        setting = variant.setting
        table.add_row(
            _describe_layout(setting.mode, setting.replicate, setting.shard),
            f"{setting.fraction:g}",
            str(setting.micro_batch_size),
            _gib(variant.peak.parts.total),
            f"{variant.time.total_s:.2f}" if variant.fits else "does not fit",
            f"{variant.tokens_per_s_per_gpu:,.0f}" if variant.fits else "",
            style="bold" if variant is fastest else None if variant.fits else "dim",
        )
    _show(console, table)
    if fastest is None:
        _say(console, "nothing fits: more or larger GPUs, adapter.base=nf4, or parallel.cpu_offload=true", "red")
    else:
        _say(console, f"fastest that fits: {_as_overrides(fastest)}")


def _print_time(console: Console, plan: Plan) -> None:
    time, flops = plan.time, plan.flops
    _say(
        console,
        f"a step: {time.total_s:.2f} s = {time.compute_s:.2f} arithmetic ({flops.total / 1e9:.1f} GFLOP a token at "
        f"{plan.efficiency:.0%} of {plan.ask.gpu.bf16_tflops:g} TFLOP/s) + {time.exposed_s:.3f} waiting for "
        f"the network (of {time.collectives_s:.3f} sending) + {time.update_s:.3f} update",
    )
    if plan.rows is None:
        _say(
            console,
            "data: not prepared here, so steps and hours are not known; run `fctune data prepare`, or pass --rows and "
            "--mean-tokens. All places are taken as learnt",
            "yellow",
        )
    else:
        rows = plan.rows
        _say(
            console,
            f"data: {rows.packs:,} {'packs' if plan.config.data.packed else 'rows'}, {rows.tokens:,} tokens an epoch, "
            f"{rows.supervised / rows.tokens:.0%} learnt, {rows.padding_share:.1%} of the places padding "
            f"({rows.source})",
        )
    if plan.hours is not None:
        gpu_hours = plan.hours * plan.world_size
        cost = "" if plan.ask.price is None else f", {gpu_hours * plan.ask.price:,.2f} at {plan.ask.price:g} an hour"
        _say(console, f"{plan.num_steps:,} steps: {plan.hours:,.1f} h, {gpu_hours:,.1f} GPU-hours{cost}", "bold")
    if plan.hand_flops is not None:
        rate = plan.ask.gpu.bf16_tflops * 1e12 * plan.efficiency
        factor = 8 if plan.setting.fraction else 6
        _say(
            console,
            f"by hand, {factor} N D: {plan.hand_flops / rate / 3600:,.1f} GPU-hours; it counts a frozen base as "
            "trained and leaves out attention, padding and the network",
            "dim",
        )


def _print_storage(console: Console, plan: Plan) -> None:
    storage = plan.storage
    _say(
        console,
        f"a checkpoint: {_gib(storage.checkpoint_bytes)} GiB, {storage.save_s:.1f} s to write at "
        f"{plan.ask.disk_gb_s:g} GB/s, training waits {storage.stall_s:.2f} s",
    )
    rhythm = storage.best_interval_s
    if rhythm < float("inf"):
        steps = max(1, round(rhythm / plan.time.total_s))
        source = " (as Llama 3's)" if plan.ask.failures_per_gpu_day == FAILURES_PER_GPU_DAY else ""
        _say(
            console,
            f"a failure every {storage.hours_between_failures:,.0f} h{source}: saving every {rhythm / 60:,.1f} min, "
            f"checkpoint.every_n_steps={steps}, loses least, {storage.lost_share:.2%}",
        )
    _say(
        console,
        f"room on the shared disk: {_gib(storage.total_bytes)} GiB (checkpoints {_gib(storage.checkpoints_bytes)}, "
        f"base {_gib(storage.base_bytes)}, export {_gib(storage.export_bytes)}"
        + (")" if storage.prepared_bytes is None else f", data {_gib(storage.prepared_bytes)})"),
    )


def _print_search(console: Console, plan: Plan) -> None:
    table = Table("nodes", "layout", "step s", "hours", "GPU-hours", "cost", "pays", box=None, pad_edge=False)
    for scale in plan.scales:
        best = scale.best
        table.add_row(
            str(scale.nodes),
            "nothing fits" if best is None else _describe_briefly(best),
            "" if best is None else f"{best.time.total_s:.2f}",
            *("" if value is None else f"{value:,.1f}" for value in (scale.hours, scale.gpu_hours, scale.cost)),
            "yes" if scale.pays else "no",
        )
    _show(console, table)
    paying = [scale.nodes for scale in plan.scales if scale.pays]
    if paying:
        _say(
            console, f"more than {paying[-1]} nodes do not pay: twice the GPUs would not be 1.6 times as fast, or idle"
        )


def _describe_briefly(variant: Variant) -> str:
    setting = variant.setting
    layout = _describe_layout(setting.mode, setting.replicate, setting.shard)
    return f"{layout}, {setting.fraction:g} recomputed, {setting.micro_batch_size} at a time"


def _as_overrides(variant: Variant) -> str:
    setting = variant.setting
    mode = "auto" if setting.mode == "none" else setting.mode
    copies = f" parallel.replicate={setting.replicate}" if mode == "hsdp" else ""
    return (
        f"parallel.mode={mode}{copies} activation_checkpointing.fraction={setting.fraction:g} "
        f"micro_batch_size={setting.micro_batch_size}"
    )


def _describe_layout(mode: str, replicate: int, shard: int) -> str:
    return {
        "none": "one GPU",
        "ddp": f"ddp, {replicate} copies",
        "fsdp": f"fsdp over {shard}",
        "hsdp": f"hsdp, {replicate} x {shard}",
    }[mode]


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f}"


def _show(console: Console, table: Table) -> None:
    """As wide as it is, wherever it goes: figures broken over two lines cannot be compared."""
    width = console.measure(table, options=console.options.update(width=1000)).maximum
    Console(file=console.file, width=max(width, console.width), highlight=False).print(table)


def _say(console: Console, line: str, style: str | None = None) -> None:
    console.print(line, style=style, highlight=False, soft_wrap=True, markup=False)
