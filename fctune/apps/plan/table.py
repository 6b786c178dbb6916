"""Terminal output of ``fctune plan``."""

from __future__ import annotations

from dataclasses import asdict, fields

from rich.console import Console
from rich.table import Table

from fctune.apps.plan.estimate import IMAGE_GB, PREPARED_TOKENS_S, RolloutPlan
from fctune.apps.plan.plan import MAX_EXTRA_COST, WORTHWHILE_SPEEDUP, Plan, ScalingPoint
from fctune.base.gpus import FAILURES_PER_GPU_DAY
from fctune.base.terminal import print_full_width
from fctune.config.intervals import AUTO, format_count, format_duration, parse_interval
from fctune.parallel.footprint import GIB, LABELS, SAFE_SHARE
from fctune.parallel.memory import Setting
from fctune.parallel.search import Variant, format_overrides, list_overrides
from fctune.parallel.speed import MEASURED_RANGE
from fctune.parallel.storage import KERNEL_CACHE_BYTES, MAX_LOST_SHARE, count_elastic_steps
from fctune.runs.prices import Cost


def print_plan(console: Console, plan: Plan) -> None:
    """Print a plan: memory, variants, time, cost, storage and, if requested, other numbers of nodes."""
    request, setting = plan.request, plan.setting
    gpus = f"{request.nodes} x {request.gpus_per_node} {request.gpu.name}"
    _say(console, f"{plan.config.model.path}: {plan.num_parameters:,} parameters, {plan.num_trained:,} trained")
    _say(console, f"  sizes from: {plan.shape_source}")
    if plan.search.tokens_note:
        _say(console, f"  {plan.search.tokens_note}")
    _say(console, f"{gpus} ({request.gpu.source}; {request.gpu.machine})")
    _say(console, f"  {_describe_layout(setting)} ({plan.layout_reason})")
    if plan.length_reason:
        _say(console, f"  data.seq_len: auto is {plan.config.data.row_tokens:,} tokens ({plan.length_reason})")
    if reason := plan.search.micro_batch_reason:
        packs = format_count(plan.search.config.micro_batch_packs, "pack")
        _say(console, f"  micro_batch_size: auto is {packs} ({reason})")
    if reason := plan.search.expert_reason:
        ranks = format_count(plan.search.config.parallel.expert_ranks, "rank")
        _say(console, f"  parallel.expert: auto is {ranks} ({reason})")
    if plan.num_idle:
        of, packs = f"{plan.num_idle} of {plan.search.world_size} GPUs", format_count(plan.search.packs, "pack")
        remedy = "use fewer GPUs, or a larger global_batch_size"
        _say(console, f"  {of} have no data: a step has {packs}; {remedy}", "yellow")
    console.print()
    _print_memory(console, plan)
    console.print()
    _print_variants(console, plan)
    console.print()
    _print_time(console, plan)
    _print_storage(console, plan)
    if plan.scaling:
        console.print()
        _print_search(console, plan)


def _print_memory(console: Console, plan: Plan) -> None:
    parts, memory = plan.peak.footprint, plan.request.gpu.memory_bytes
    table = Table("memory per GPU", "GiB", box=None, pad_edge=False)
    for part in fields(parts):
        size = getattr(parts, part.name)
        if size:
            table.add_row(LABELS.get(part.name, part.name), _gib(size))
    table.add_row("peak", _gib(parts.total), style="bold")
    print_full_width(console, table)
    _say(console, f"  peak in phase: {plan.peak.phase}")
    if plan.fits:
        margin = plan.margin_bytes / memory
        _say(console, f"fits: {_gib(plan.margin_bytes)} GiB ({margin:.0%}) of {_gib(memory)} GiB free")
        if plan.peak.footprint.total > SAFE_SHARE * memory:
            _say(console, "  narrow margin: keep a tenth free for memory that is not counted", "yellow")
    else:
        _say(console, f"does not fit: {_gib(-plan.margin_bytes)} GiB over the GPU's {_gib(memory)} GiB", "red")
    _say(console, f"largest micro_batch_size that fits with a tenth free: {plan.largest_micro_batch or 'none'}")


def _print_variants(console: Console, plan: Plan) -> None:
    names = ("layout", "checkpointed", "micro-batch", "GiB", "step", "tokens/s per GPU")
    table = Table(*names, box=None, pad_edge=False)
    fastest = plan.fastest
    for variant in plan.variants:
        setting = variant.setting
        table.add_row(
            _describe_layout(setting),
            f"{setting.fraction:g}",
            str(setting.micro_batch_size),
            _gib(variant.peak.footprint.total),
            _seconds(variant.time.total_s) if variant.fits else "does not fit",
            f"{variant.tokens_per_s_per_gpu:,.0f}" if variant.fits else "",
            style="bold" if variant is fastest else None if variant.fits else "dim",
        )
    print_full_width(console, table)
    if fastest is None:
        _say(console, f"nothing fits; options: {', '.join(plan.list_remedies())}", "red")
    else:
        overrides = format_overrides(list_overrides(plan.config, fastest.setting))
        _say(console, f"fastest that fits: {overrides}")


def _print_time(console: Console, plan: Plan) -> None:
    time, kernels = plan.estimate.time, plan.kernel_times
    rate = plan.gpu_rate
    host = f" or the host (of {_seconds(time.host_s)})" if time.host_s else ""
    traffic = f" + {_seconds(time.memory_traffic_s)} other kernels" if time.memory_traffic_s else ""
    _say(
        console,
        f"step time: {_seconds(time.total_s)} = {_seconds(time.compute_s)} arithmetic{traffic} + "
        f"{_seconds(time.exposed_s)} waiting for the network (of {_seconds(time.collectives_s)} in total){host} + "
        f"{_seconds(time.update_s)} update"
        + (f" + {_seconds(time.stragglers_s)} waiting for the slowest of many GPUs" if time.stragglers_s else ""),
    )
    parts = ", ".join(f"{name} {value:.1f}" for name, value in asdict(kernels).items() if value >= 0.05)
    shown = f"{plan.flops.total / 1e9:.3g} GFLOP per token at {plan.efficiency:.1%} of {rate:g} TFLOP/s"
    if plan.request.efficiency is None:
        shown += f": {kernels.total:.1f} microseconds ({parts})"
    _say(console, f"  {shown}")
    if plan.search.memory.precision.compute_dtype.itemsize > 2 and rate == plan.request.gpu.bf16_tflops:
        _say(
            console,
            f"  the rate of precision={plan.config.precision} is unknown for this GPU; bf16's was used",
            "yellow",
        )
    if plan.estimate.rollouts is not None:
        _print_rollouts(console, plan.estimate.rollouts)
    elif plan.rows is None:
        steps = "steps and hours are unknown" if plan.num_steps is None else "max_steps of full packs are assumed"
        _say(
            console,
            f"data: not prepared, so {steps}; run `fctune data prepare`, or pass --rows and --mean-tokens. All "
            "positions are assumed to be supervised",
            "yellow",
        )
    else:
        rows = plan.rows
        _say(
            console,
            f"data: {format_count(rows.packs, 'pack' if plan.config.data.packed else 'row')}, {rows.tokens:,} tokens "
            f"per epoch, {rows.supervised / rows.tokens:.0%} supervised, {rows.padding_share:.1%} of the positions "
            f"padding ({rows.source})",
        )
    _say(console, _describe_startup(plan))
    if plan.estimate.hours is not None:
        _say(console, _describe_cost(plan, plan.estimate.hours), "bold")
        if plan.hours_range is not None:
            _say(console, _describe_trust(plan), "dim")
        if plan.estimate.cost is not None:
            _say(console, _describe_parts(plan, plan.estimate.cost))
        _say(console, _describe_schedule(plan, plan.num_steps or 0))
    for warning in plan.warnings:
        _say(console, warning, "yellow")


def _print_rollouts(console: Console, rollouts: RolloutPlan) -> None:
    training = rollouts.training_bytes
    shared = f", next to {_gib(training)} GiB of training" if training else ""
    _say(
        console,
        f"generation on {format_count(rollouts.num_gpus, 'GPU')}: {_gib(rollouts.weights_bytes)} GiB of weights each, "
        f"{_gib(rollouts.cache_bytes)} GiB of KV cache for {rollouts.num_concurrent:,} answers in progress{shared}; at "
        f"most {rollouts.tokens_per_s:,.0f} tokens/s, as the memory's bandwidth and the peak rate allow",
    )
    if not rollouts.fits:
        _say(
            console,
            f"  {_gib(-rollouts.free_bytes)} GiB over the GPU's memory: fewer answers are in progress at a time",
            "yellow",
        )
    rows = f" and {format_count(rollouts.num_rows, 'row')}" if rollouts.num_rows else ""
    joined = "while the last batch is trained" if rollouts.is_overlapped else "then trained"
    _say(
        console,
        f"a batch of {format_count(rollouts.num_answers, 'answer')}{rows}: at least {_seconds(rollouts.generation_s)} "
        f"to generate, {joined} in at most {_seconds(rollouts.training_s)}; {_seconds(rollouts.batch_s)} in all",
    )


def _describe_parts(plan: Plan, cost: Cost) -> str:
    request, currency = plan.request, plan.config.currency
    sizes = f"{request.shared_gib:,.0f} GiB", f"{request.nodes} x {request.network_gib:,.0f} GiB"
    parts = {
        "GPUs": cost.gpus,
        f"shared disk of {sizes[0]}": cost.shared_disk,
        f"network disks of {sizes[1]}": cost.network_disks,
        f"traffic of {plan.egress_gib:,.1f} GiB": cost.traffic,
    }
    shown = [f"{name} {part:,.2f}" for name, part in parts.items() if part is not None]
    missing = [name for name, part in parts.items() if part is None]
    listed = request.prices.gpu_hour.get(request.gpu.name)
    is_listed = listed is not None and listed.price == request.price and plan.config.price_per_gpu_hour is None
    line = f"cost: {cost.total:,.2f} {currency} = {' + '.join(shown)}"
    line += f"; without {', '.join(missing)}, whose price is not known (--prices)" if missing else ""
    return line + (f"; {'list ' * bool(listed.source)}price of a GPU-hour: {listed}" if listed and is_listed else "")


def _describe_schedule(plan: Plan, num_steps: int) -> str:
    config, step_s = plan.config, plan.estimate.step_s
    validations = parse_interval(config.validation.every).in_steps(num_steps, step_s)
    evaluations = parse_interval(config.eval.every).in_steps(num_steps, step_s)
    saves = (num_steps - 1) // plan.save_steps if plan.save_steps else 0
    line = f"warm-up {format_count(plan.warmup_steps or 0, 'step')}; {format_count(saves + 1, 'checkpoint')}"
    first = plan.save_steps if saves and plan.save_steps else num_steps
    line += f", the first after {format_count(first, 'step')} ({format_duration(first * step_s)})"
    for name, every in (("validated", validations), ("evaluated", evaluations)):
        steps = min(every or 0, num_steps)
        line += f"; {name} {'never' if not steps else 'every step' if steps == 1 else f'every {steps:,} steps'}"
    return line


def _describe_startup(plan: Plan) -> str:
    startup, request = plan.estimate.startup, plan.request
    if startup.given_s is not None:
        return f"start-up: {_hours(startup.given_s / 3600)} (--startup-min)"
    hub, disk = f"{request.download_gb_s:g} GB/s (--download-gb-s)", f"{request.disk_gb_s:g} GB/s (--disk-gb-s)"
    parts = {
        f"image of {IMAGE_GB:g} GB (assumed) at {hub}": startup.image_s,
        "the base from the hub at the same rate": startup.download_s,
        f"preparation at {PREPARED_TOKENS_S:,} tokens/s (assumed for 16 cores)": startup.prepare_s,
        f"reading {startup.load_s * request.disk_gb_s:,.1f} GB of the base at {disk}": startup.load_s,
        "set-up": startup.setup_s,
        "compilation, both measured on an H100": startup.compile_s,
    }
    listed = "; ".join(f"{_seconds(value)} {name}" for name, value in parts.items() if value)
    return f"start-up: {_hours(startup.total_s / 3600)}: {listed}"


def _describe_cost(plan: Plan, hours: float) -> str:
    ends, gpus, price = plan.hours_range, plan.estimate.num_gpus, plan.request.price
    gpu_hours = hours * gpus
    line = f"{format_count(plan.num_steps or 0, 'step')}: {_hours(hours)} with start-up"
    if ends is not None:
        line += f" ({_hours(ends[0])} to {_hours(ends[1])})"
    line += f", {gpu_hours:,.1f} GPU-hours"
    if price is not None:
        line += f", {gpu_hours * price:,.2f} {plan.config.currency} at {price:g} {plan.config.currency} per GPU-hour"
        if ends is not None:
            line += f" ({ends[0] * gpus * price:,.2f} to {ends[1] * gpus * price:,.2f})"
    return f"{line}; without evaluation"


def _describe_trust(plan: Plan) -> str:
    low, high = plan.error_range
    whose = (
        "compiled runs measured on one H100 took"
        if plan.error_range == MEASURED_RANGE
        else "nothing like this run was measured; published runs of others took"
    )
    return f"  the range: {whose} {low:.0%} to {high:.0%} of the planned time (docs/plan.md)"


def _print_storage(console: Console, plan: Plan) -> None:
    storage = plan.estimate.storage
    _say(
        console,
        f"checkpoint: {_gib(storage.checkpoint_bytes)} GiB, {_seconds(storage.save_s)} to write at "
        f"{plan.request.disk_gb_s:g} GB/s (--disk-gb-s), training waits {_seconds(storage.stall_s)}",
    )
    interval_s = storage.best_interval_s
    if interval_s < float("inf"):
        steps = max(1, round(interval_s / plan.estimate.step_s))
        source = (
            " (the rate of Llama 3's training)" if plan.request.failures_per_gpu_day == FAILURES_PER_GPU_DAY else ""
        )
        _say(
            console,
            f"a failure every {_hours(storage.hours_between_failures)}{source}: saving every {interval_s / 60:,.1f} "
            f"min loses the least time, {storage.lost_share:.2%} (Young, Daly): checkpoint.every={steps}; "
            f"the config has {plan.config.checkpoint.every}",
        )
        if plan.config.checkpoint.elastic_every == AUTO and plan.num_steps is not None:
            every = count_elastic_steps(AUTO, plan.num_steps, plan.estimate.step_s, interval_s)
            _say(console, f"elastic checkpoints: every {every:,} steps, this interval or a third of the run")
    if storage.lost_share > MAX_LOST_SHARE:
        _say(
            console,
            "  the run hardly advances; use fewer GPUs or a faster disk. The hours above are a lower bound",
            "red",
        )
    _say(
        console,
        f"space on the shared disk (/mnt/shared in sky/): {_gib(storage.total_bytes)} GiB (checkpoints "
        f"{_gib(storage.checkpoints_bytes)} with checkpoint.keep_last={plan.config.checkpoint.keep_last}, "
        f"base {_gib(storage.base_bytes)}, export {_gib(storage.export_bytes)}"
        + (")" if storage.prepared_bytes is None else f", data {_gib(storage.prepared_bytes)})"),
    )
    kernels = KERNEL_CACHE_BYTES if plan.config.compile else 0
    _say(
        console,
        f"space on each node's own disk (/mnt/network in sky/): {_gib(kernels)} GiB for compiled kernels; "
        f"{_gib(storage.fallback_bytes)} more where checkpoint.fallback_dir is, "
        f"{_gib(storage.checkpoints_bytes + storage.export_bytes)} more with MIRROR_CHECKPOINTS=1",
    )


def _print_search(console: Console, plan: Plan) -> None:
    is_timed, is_priced = plan.num_steps is not None, plan.request.price is not None and plan.num_steps is not None
    names = ["nodes", "GPUs", "fastest that fits", "step", "tokens/s per GPU"]
    names += ["hours", "GPU-hours"] * is_timed + [f"cost, {plan.config.currency}"] * is_priced
    table = Table(*names, "recommended" if is_timed else "pays off", box=None, pad_edge=False)
    recommended = plan.recommended
    for point in plan.scaling:
        best = point.best
        cells = [str(point.nodes), str(point.nodes * plan.request.gpus_per_node)]
        if best is None:
            cells += ["nothing fits", "", ""]
        else:
            cells += [_describe_briefly(best), _seconds(best.time.total_s), f"{best.tokens_per_s_per_gpu:,.0f}"]
        figures = [point.hours, point.gpu_hours] * is_timed + [point.cost] * is_priced
        cells += ["" if value is None else f"{value:,.2f}" if value >= 0.1 else f"{value:.2g}" for value in figures]
        is_good = point is recommended if is_timed else point.pays
        table.add_row(*cells, "yes" if is_good else "no", style="bold" if is_timed and is_good else None)
    print_full_width(console, table)
    line = _recommend(plan, recommended) if is_timed else _describe_useful(plan)
    if line:
        _say(console, line)


def _recommend(plan: Plan, point: ScalingPoint | None) -> str:
    """Say which number of nodes the search recommends, and by which rule."""
    deadline = plan.request.deadline_hours
    timed = [(point.hours, point) for point in plan.scaling if point.hours is not None]
    if not timed:
        return ""
    if point is None or point.hours is None:
        hours, fastest = min(timed, key=lambda found: found[0])
        return f"no number of nodes is done within {deadline:g} h; the fastest, {fastest.nodes}, takes {_hours(hours)}"
    by = "cheapest" if plan.request.price is not None else "number with the fewest GPU-hours"
    rule = f"the {by} that is done within {deadline:g} h" if deadline is not None else ""
    rule = rule or f"the fastest that is at most {MAX_EXTRA_COST:.0%} dearer than the {by} (or set --deadline-hours)"
    return f"recommended: {format_count(point.nodes, 'node')}, {_hours(point.hours)} with start-up: {rule}"


def _describe_useful(plan: Plan) -> str:
    """Say up to which number of nodes a run of unknown length gets faster; empty if it fits nowhere."""
    paying = [point.nodes for point in plan.scaling if point.pays]
    if not paying:
        return ""
    most, batch = paying[-1], plan.config.global_batch_size
    best = plan.scaling[-1].best
    context = best.setting.context if best is not None else 1
    if most == plan.scaling[-1].nodes and 2 * most * plan.request.gpus_per_node // context > batch:
        why = f"global_batch_size={batch} packs cannot be split over twice as many GPUs"
    elif most == plan.scaling[-1].nodes:
        why = "more were not tried"
    else:
        why = f"twice as many would be less than {WORTHWHILE_SPEEDUP:g} times as fast"
    line = f"largest useful cluster: {format_count(most, 'node')}; {why}"
    return f"{line}. Pass --rows and --mean-tokens to weigh its cost"


def _describe_briefly(variant: Variant) -> str:
    setting = variant.setting
    layout = _describe_layout(setting)
    return f"{layout}, {setting.fraction:g} checkpointed, micro-batch {setting.micro_batch_size}"


def _describe_layout(setting: Setting) -> str:
    shape = {
        "none": "one GPU",
        "ddp": f"ddp, {setting.replicate} replicas",
        "fsdp": f"fsdp over {setting.shard}",
        "hsdp": f"hsdp, {setting.replicate} x {setting.shard}",
    }[setting.mode]
    shared = f", experts over {setting.expert}" if setting.expert > 1 else ""
    shared += f", rows over {setting.context}" if setting.context > 1 else ""
    return f"{shape}{shared}{f', MLPs in {setting.mlp_tiles} tiles' if setting.mlp_tiles > 1 else ''}"


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}" if size >= GIB / 200 or not size else "< 0.01"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 0.1 or not seconds else f"{seconds * 1e3:.3g} ms"


def _hours(hours: float) -> str:
    return f"{hours:,.1f} h" if hours >= 2 else f"{hours * 60:,.1f} min"


def _say(console: Console, line: str, style: str | None = None) -> None:
    console.print(line, style=style, highlight=False, soft_wrap=True)
