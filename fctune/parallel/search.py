"""Layouts of one run on the machines at hand: the memory and speed of each, and the config values that choose it."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError
from fctune.base.gpus import Gpu
from fctune.config.fields import SectionProblems
from fctune.config.schema import RunConfig
from fctune.data.chunk_encoder import Counts
from fctune.data.data_size import measure_data
from fctune.data.prepared_set import resolve_batch_size
from fctune.data.row_lengths import RowLengths, choose_seq_len, measure_lengths
from fctune.models.architecture import Architecture
from fctune.models.causal_lm import CausalLM
from fctune.models.planned_model import (
    extend_architecture,
    find_architecture,
    find_planned_tokens,
    shape_model,
    shape_teacher,
)
from fctune.models.sources import read_architecture
from fctune.parallel.context_parallel import check_context_parallelism
from fctune.parallel.expert_parallel import check_expert_parallelism
from fctune.parallel.footprint import GIB, SAFE_SHARE
from fctune.parallel.layout import (
    Hardware,
    check_layout,
    choose_faster,
    choose_layout,
    estimate_layout_time,
    list_contexts,
    list_mlp_tiles,
    make_setting,
    may_save_time,
    suggest_smaller_weights,
)
from fctune.parallel.memory import MemoryModel, Peak, Setting
from fctune.parallel.speed import Flops, KernelTimes, StepTime, count_flops, estimate_kernel_times, estimate_step_time

_FRACTIONS = (0.0, 0.5, 1.0)

# Times of a step that a plan does not tell apart.
_ABOUT_EQUAL = 1.01
# The fastest of 1, 2 and 4 packs on two cores (benchmarks/results/training_2026-11-23.json).
_MAX_PACKS_ON_CPU = 2

_MIN_PARAMETERS = 1e9  # smaller models wait for the launches of kernels, which is not modelled


@dataclass(frozen=True, slots=True)
class Variant:
    """A run's setting with the largest micro-batch that fits, or 1 if none does."""

    setting: Setting
    peak: Peak
    fits: bool
    time: StepTime
    tokens_per_s_per_gpu: float


class LayoutSearch:
    """Evaluates settings of one run on nodes of equal GPUs.

    Args:
        config: Config of the run.
        architecture: Sizes of its model.
        model_dir: Directory of the model; None if it is not on this machine.
        gpu: GPU, its memory and its links.
        nodes: Nodes that the run is configured for.
        gpus_per_node: GPUs of each.
        rows: Number of rows given by the user, if the data is not prepared.
        mean_tokens: Mean tokens per row given by the user.
        efficiency: Share of the GPU's peak rate that the user measured; None takes the rates of kernels.

    Raises:
        ConfigError: Only one of ``rows`` and ``mean_tokens`` is given, or a token to train is unknown.
        DataError: The prepared set is damaged.
    """

    def __init__(
        self,
        config: RunConfig,
        architecture: Architecture,
        model_dir: Path | None,
        gpu: Gpu,
        nodes: int,
        gpus_per_node: int,
        rows: int | None = None,
        mean_tokens: float | None = None,
        efficiency: float | None = None,
    ):
        self.gpu, self.gpus_per_node, self.world_size = gpu, gpus_per_node, nodes * gpus_per_node
        self.efficiency, self.architecture = efficiency, architecture
        tokens = find_planned_tokens(config, architecture, model_dir)
        self.tokens_note = tokens.note
        self.model = shape_model(config, architecture, token_ids=tokens.ids)
        self.rows = size = measure_data(
            config, model_dir, rows, mean_tokens, self.world_size // (config.parallel.context or 1)
        )
        # Without a known data size, packs are taken to be full, each one conversation of full length, fully supervised,
        # which costs most.
        seq_len = config.data.row_tokens
        self.config = resolve_batch_size(config, *((seq_len, 1) if size is None else (size.tokens, size.packs)))
        self.supervised_share = 1.0 if size is None else size.supervised / size.slots
        self.pairs_per_token = (seq_len + 1) / 2 if size is None else size.pairs / size.slots
        self.slots_per_pack = seq_len if size is None else size.slots / size.packs
        batch = self.config.global_batch_size
        self.packs = batch if size is None else min(batch, size.packs)  # of a step
        teacher = shape_teacher(config)
        self.memory = MemoryModel(self.model, self.config, gpu.memory_bytes, self.supervised_share, teacher=teacher)
        self.expert_reason, self._has_auto_experts = "", config.parallel.expert == "auto"
        if self._has_auto_experts:
            self._choose_expert_ranks(self.world_size)
        self.micro_batch_reason = ""
        if not isinstance(self.config.micro_batch_size, int):
            # As for the layout, which a run chooses before it knows which share of its data is supervised.
            memory = self.memory.with_supervised_share(1.0)
            chosen, self.micro_batch_reason = choose_micro_batch(self.model, self._hardware(self.world_size), memory)
            self.memory = self.memory.with_micro_batch(chosen)
            self.config = self.memory.config

    def _choose_expert_ranks(self, world_size: int) -> None:
        memory = self.memory.with_supervised_share(1.0)
        chosen, reason = choose_expert_ranks(self.model, self._hardware(world_size), memory)
        self.expert_reason = reason or ""
        self.memory = self.memory.with_expert_ranks(chosen)
        self.config = self.memory.config

    def configured(self) -> tuple[Setting, str]:
        """Return the setting that a run of this config chooses, and the reason for its layout."""
        config = self.config
        hardware = self._hardware(self.world_size)
        # A run chooses its layout before it knows which share of its data is supervised.
        layout = choose_layout(config, self.model, hardware, self.memory.with_supervised_share(1.0))
        return make_setting(self.memory, layout), layout.reason

    def flops(self, setting: Setting) -> Flops:
        """Return the FLOPs per token of a setting."""
        shares = setting.fraction, self.supervised_share, self.pairs_per_token
        size = setting.micro_batch_size / setting.context
        return count_flops(self.memory, *shares, setting.max_logits, size, setting.mlp_tiles)

    def time(self, setting: Setting) -> StepTime:
        """Return the step time of a setting."""
        return estimate_step_time(
            self.memory,
            self.gpu,
            setting,
            self.flops(setting),
            self.packs,
            self.gpus_per_node,
            self.efficiency,
            self.slots_per_pack,
        )

    def configured_speed(self) -> float:
        """Return the planned tokens per second and GPU of the configured setting, without padding."""
        setting, _ = self.configured()
        return self._speed(setting, self.time(setting))

    def kernel_times(self, setting: Setting) -> KernelTimes:
        """Return the time of each kind of kernel in a setting."""
        tokens = setting.micro_batch_size * self.slots_per_pack / setting.context
        shares = setting.fraction, self.flops(setting), tokens, setting.mlp_tiles
        return estimate_kernel_times(self.memory, self.gpu, *shares)

    def variants(self, nodes: int, context: int | None = None, mlp_tiles: int | None = None) -> list[Variant]:
        """Return every layout with every checkpointed fraction, each at the largest micro-batch that fits.

        Unless they are given or configured, the ranks that share a row and the tiles of MLPs are chosen as a run does:
        as few as a layout needs to fit, or more where they save time; so are those that experts are spread over.
        """
        local = self.gpus_per_node
        world_size = nodes * local
        if self._has_auto_experts and world_size != self.world_size:
            other = copy.copy(self)
            other.world_size = world_size
            other._choose_expert_ranks(world_size)
            return other.variants(nodes, context, mlp_tiles)
        if world_size == 1:
            layouts = [("none", 1, 1)]
        else:
            layouts = [("ddp", world_size, 1), ("fsdp", 1, world_size)]
            if nodes > 1 and local > 1:
                layouts.append(("hsdp", nodes, local))
            replicas = self.config.parallel.replicate
            if replicas is not None and world_size % replicas == 0 and 1 < replicas < world_size and replicas != nodes:
                layouts.append(("hsdp", replicas, world_size // replicas))
        chosen = context or self.config.parallel.context
        contexts = list_contexts(self.config, self.model, self._hardware(world_size)) if chosen is None else [chosen]
        all_tiles = list_mlp_tiles(self.config, self.architecture) if mlp_tiles is None else [mlp_tiles]
        fitting: list[list[Variant]] = []
        for tiles, ranks in itertools.product(all_tiles, contexts):
            if fitting and not may_save_time(self.config, world_size, tiles, ranks):
                continue
            variants = self._evaluate_all(layouts, ranks, tiles)
            if any(variant.fits for variant in variants):
                fitting.append(variants)
        if not fitting:
            return self._evaluate_all(layouts, contexts[0], all_tiles[-1])
        return choose_faster(fitting, lambda found: _find_fastest(found).tokens_per_s_per_gpu)

    def _evaluate_all(self, layouts: Sequence[tuple[str, int, int]], context: int, mlp_tiles: int) -> list[Variant]:
        """Evaluate layouts, given as mode, replicas and shards, with each fraction of checkpointed blocks."""
        rows: dict[str, Any] = {"context": context, "mlp_tiles": mlp_tiles, "expert": self.config.parallel.expert_ranks}
        settings = [
            Setting(*layout, fraction, self.config.micro_batch_packs, **rows)
            for layout in layouts
            for fraction in _FRACTIONS
        ]
        return [self._evaluate(setting) for setting in settings if self._is_valid(setting)]

    def _hardware(self, world_size: int) -> Hardware:
        return Hardware("cuda", world_size, self.gpus_per_node, self.gpu.memory_bytes, self.gpu)

    def find_larger_context(self, setting: Setting) -> int | None:
        """Return the next number of ranks that could share a row of this setting; None if there is none."""
        possible = list_contexts(self.config, self.model, self._hardware(setting.world_size))
        return next((ranks for ranks in possible if ranks > setting.context), None)

    def largest_micro_batch(self, setting: Setting) -> int:
        """Return the most packs per micro-batch that fit with a safety margin; 0 if none does."""
        batch = self.config.global_batch_size
        return self.memory.largest_micro_batch(setting, math.ceil(batch / setting.num_shares), batch)

    def _evaluate(self, setting: Setting) -> Variant:
        largest = self.largest_micro_batch(setting)
        setting = self.memory.with_accumulation(replace(setting, micro_batch_size=largest or 1))
        time = self.time(setting)
        return Variant(setting, self.memory.peak(setting), largest > 0, time, self._speed(setting, time))

    def _speed(self, setting: Setting, time: StepTime) -> float:
        padding_share = 0.0 if self.rows is None else self.rows.padding_share
        tokens = self.packs * self.slots_per_pack * (1 - padding_share)
        return tokens / time.total_s / setting.world_size

    def _is_valid(self, setting: Setting) -> bool:
        """Return True if the config accepts the layout of a setting, and a run can start with it."""
        config, problems = self.config, SectionProblems()
        changed = list_overrides(config, setting)
        names = {key.removeprefix("parallel."): value for key, value in changed.items() if key.startswith("parallel.")}
        replace(config.parallel, **names).check("parallel", problems)
        try:
            check_layout(config, self.model, setting.mode, setting.shard)
            check_expert_parallelism(self.model, setting.expert, setting.world_size)
            check_context_parallelism(self.model, setting.context, setting.world_size)
        except ConfigError:
            return False
        return not problems.lines

    def list_remedies(self, peaks: Sequence[Peak]) -> list[str]:
        """List changes that could help a run that fits in no layout; ``peaks`` are those of the layouts."""
        config, remedies = self.config, ["more or larger GPUs"]
        if config.adapter is None:
            remedies += ["an adapter instead of all weights", "an 8-bit optimizer"]
        elif smaller := suggest_smaller_weights(config, self.model):
            remedies.append(smaller)
        smallest = min((peak.footprint for peak in peaks), key=lambda footprint: footprint.total)
        if smallest.of_batch > smallest.total / 4:
            remedies.append(f"data.seq_len below {config.data.row_tokens}")
        if config.parallel.cpu_offload or config.parallel.expert_ranks > 1:  # experts that are spread are not offloaded
            return remedies
        return [*remedies, f"parallel.cpu_offload=true{' parallel.mode=fsdp' if config.parallel.mode == 'ddp' else ''}"]


def _find_fastest(variants: Sequence[Variant]) -> Variant:
    return max((v for v in variants if v.fits), key=lambda v: v.tokens_per_s_per_gpu)


def choose_micro_batch(model: CausalLM, hardware: Hardware, memory: MemoryModel) -> tuple[int, str]:
    """Return the number of packs that ``micro_batch_size: auto`` stands for, and the reason for it.

    Of those that fit in memory with the layout that a run chooses, it is the fastest by the plan for full packs; of
    those within a percent, the largest, which launches the fewest kernels. It is 1 if none fits.

    Args:
        model: Model, which may be on the meta device.
        hardware: Ranks of the run; of an unknown kind of GPU, the proportions are those of an H100.
        memory: Memory of the model and the config.

    Raises:
        ConfigError: A layout that does not suit the ranks, the model or the optimizer.
    """
    config = memory.config
    share = math.ceil(config.global_batch_size * (config.parallel.context or 1) / hardware.world_size)
    # Equal parts of a rank's share, so that no micro-batch is filled up with padding.
    sizes = sorted({math.ceil(share / number) for number in range(1, share + 1)})
    found: list[tuple[float, int, Setting]] = []
    for size in sizes:
        if hardware.device_type == "cpu" and size > _MAX_PACKS_ON_CPU:
            break
        trial = memory.with_micro_batch(size)
        layout = choose_layout(trial.config, model, hardware, trial)
        setting = make_setting(trial, layout)
        if found and not hardware.can_hold(trial.peak(setting).footprint):
            break
        found.append((estimate_layout_time(trial, hardware, layout), size, setting))
    least_s, largest = min(time_s for time_s, _, _ in found), found[-1][1]
    _, chosen, setting = max((one for one in found if one[0] <= _ABOUT_EQUAL * least_s), key=lambda one: one[1])
    limit = "a rank's share of the batch" if largest == share else "the largest that fits"
    if hardware.device_type == "cpu":
        return chosen, "more are not faster on CPUs"
    why = limit if chosen == largest else f"faster than {largest}, {limit}"
    return chosen, f"{why}; {setting.fraction:g} of the blocks checkpointed"


def choose_expert_ranks(
    model: CausalLM, hardware: Hardware, memory: MemoryModel, kept: int | None = None
) -> tuple[int, str | None]:
    """Return the ranks that ``parallel.expert: auto`` stands for, and the reason; None if it is that they were kept.

    It is the smallest number with which a step fits in the layout that a run chooses, or a larger one that is faster by
    the plan; without a known GPU, the smallest.

    Args:
        model: Model, which may be on the meta device.
        hardware: Ranks of the run.
        memory: Memory of the model and the config, whose micro-batch may be open, too.
        kept: Ranks of the run that is resumed, which are taken if a step fits.

    Raises:
        ConfigError: A layout that does not suit the ranks, the model or the optimizer.
    """
    fitting: list[tuple[int, float]] = []
    others: list[tuple[int, int]] = []
    numbers, obstacle = _list_expert_ranks(memory.config, model, hardware.world_size)
    if obstacle is not None:
        return 1, obstacle
    for num_ranks in sorted(numbers, key=lambda number: (number != kept, number)):
        trial = memory.with_expert_ranks(num_ranks)
        try:
            if not isinstance(trial.config.micro_batch_size, int):
                trial = trial.with_micro_batch(choose_micro_batch(model, hardware, trial)[0])
            layout = choose_layout(trial.config, model, hardware, trial)
        except ConfigError:
            if num_ranks == 1:
                raise
            continue
        needed = trial.required(hardware.world_size, layout.shard, layout.max_logits, layout.fraction, **layout.rows)
        if not hardware.can_hold(needed):
            others.append((needed.total, num_ranks))
            continue
        if num_ranks == kept:
            return num_ranks, None
        fitting.append((num_ranks, estimate_layout_time(trial, hardware, layout)))
        if hardware.gpu is None:
            break
    if not fitting:
        return min(others)[1], "a step fits with no number; this one needs the least memory"
    (fewest, without_s), *_ = fitting
    chosen, time_s = choose_faster(fitting, lambda found: 1 / found[1])
    if chosen > fewest:
        return chosen, f"{time_s:.3g} s a step by the plan, {without_s:.3g} s with {fewest}"
    if fewest > 1:
        return chosen, "the fewest with which a step fits in memory"
    return 1, "more are not faster by the plan" if hardware.gpu is not None else "a step fits in memory without more"


def _list_expert_ranks(config: RunConfig, model: CausalLM, world_size: int) -> tuple[list[int], str | None]:
    """Return the numbers of ranks over which a run can spread its experts, ascending; and why 1 is the only one."""
    possible, obstacles = [1], ["there is one rank"] if world_size == 1 else []
    known = SectionProblems()  # of a config with both sizes of a batch, one of which the run has derived
    config.check("", known)
    for num_ranks in range(2, world_size + 1):
        if world_size % num_ranks:
            continue
        problems, parallel = SectionProblems(), replace(config.parallel, expert=num_ranks)
        try:
            check_expert_parallelism(model, num_ranks, world_size)
        except ConfigError as error:
            problems.lines.append(str(error))
        parallel.check("parallel", problems)
        replace(config, parallel=parallel).check("", problems)
        found = [line.rstrip(".") for line in problems.lines if line not in known.lines]
        possible += [] if found else [num_ranks]
        obstacles += found
    return possible, obstacles[0] if len(possible) == 1 else None


def fit_seq_len(
    config: RunConfig, lengths: RowLengths, architecture: Architecture, hardware: Hardware | None
) -> tuple[RunConfig, str]:
    """Return a config with the row length that ``data.seq_len: auto`` stands for, and the reason for it.

    Args:
        config: Config of a run.
        lengths: Lengths of its conversations.
        architecture: Sizes of its model.
        hardware: Ranks of the run, whose memory a row must fit in; None: it is unknown, and enough.

    Raises:
        ConfigError: No length can be trained on, or ``data.overlong`` is fail and not the longest.
    """

    def with_length(tokens: int) -> RunConfig:
        return replace(config, data=replace(config.data, seq_len=tokens))

    tokens, reason = choose_seq_len(
        *(lengths, architecture.max_position_embeddings, config.data.overlong),
        lambda tokens: _find_obstacle(with_length(tokens), architecture, hardware),
    )
    return with_length(tokens), reason


def prepare_seq_len(config: RunConfig, model_dir: Path, on_progress: Callable[[Counts], None]) -> tuple[RunConfig, str]:
    """Return what ``fit_seq_len`` does for rows that are prepared before a run, on a machine that need not be its own.

    Args:
        config: Config of the run.
        model_dir: Directory of its base.
        on_progress: See ``measure_lengths``.

    Raises:
        ConfigError, DataError: See ``fit_seq_len`` and ``measure_lengths``.
    """
    lengths = measure_lengths(config, model_dir, on_progress)
    config, reason = fit_seq_len(config, lengths, read_architecture(model_dir, config.model.source), None)
    return config, (
        f"data.seq_len: auto is {config.data.row_tokens:,} tokens ({reason}). A run whose devices cannot hold such "
        "rows takes shorter ones, and prepares them again; `fctune plan` says if"
    )


def _find_obstacle(config: RunConfig, architecture: Architecture, hardware: Hardware | None) -> str | None:
    """Return why a run cannot train on rows of its length; None if it can. It chooses its layout in the same way."""
    seq_len = config.data.row_tokens
    if not isinstance(config.micro_batch_size, int):
        config = replace(config, micro_batch_size=1)
    try:
        model = shape_model(config, architecture, device_type="cuda" if hardware is None else hardware.device_type)
        if hardware is None:
            return None
        # A row of nothing but supervised tokens takes the most memory.
        config = resolve_batch_size(config, seq_len, 1)
        teacher, is_cuda = shape_teacher(config, hardware.device_type), hardware.device_type == "cuda"
        memory = MemoryModel(model, config, hardware.memory_bytes, is_cuda=is_cuda, teacher=teacher)
        if config.parallel.expert == "auto":
            memory = memory.with_expert_ranks(choose_expert_ranks(model, hardware, memory)[0])
            config = memory.config
        layout = choose_layout(config, model, hardware, memory)
    except ConfigError as error:  # layers that attend otherwise at this length
        return str(error).rstrip(".")
    needed = memory.required(hardware.world_size, layout.shard, layout.max_logits, layout.fraction, **layout.rows)
    if hardware.can_hold(needed):
        return None
    assert hardware.memory_bytes is not None
    usable = SAFE_SHARE * hardware.memory_bytes / GIB
    return f"rows of {seq_len:,} tokens need {needed.total / GIB:.1f} GiB a rank, which can use {usable:.1f} GiB"


def plan_speed(config: RunConfig, model_dir: Path, gpu: Gpu, nodes: int, gpus_per_node: int) -> float | None:
    """Return the planned tokens per second and GPU of a run, without padding; None where the plan knows none.

    It knows none of runs with rollouts, whose steps wait for answers, and of small models.
    """
    if config.rollouts is not None:
        return None
    architecture, _, _ = find_architecture(str(model_dir), None, config.model.source)
    search = LayoutSearch(config, *extend_architecture(config, architecture, model_dir), gpu, nodes, gpus_per_node)
    if sum(tensor.numel for tensor in search.memory.all.tensors) < _MIN_PARAMETERS:
        return None
    return search.configured_speed()


def list_overrides(config: RunConfig, setting: Setting) -> dict[str, Any]:
    """Return the config values, by key, with which a run has a setting."""
    values: dict[str, Any] = {"parallel.mode": "auto" if setting.mode == "none" else setting.mode}
    if setting.mode == "hsdp":
        values["parallel.replicate"] = setting.replicate
    elif config.parallel.replicate is not None:
        values["parallel.replicate"] = None
    if setting.expert != config.parallel.expert:
        values["parallel.expert"] = setting.expert
    if setting.context != (config.parallel.context or 1):
        values["parallel.context"] = setting.context
    values["activation_checkpointing.fraction"] = setting.fraction
    if setting.mlp_tiles != (config.activation_checkpointing.mlp_tiles or 1):
        values["activation_checkpointing.mlp_tiles"] = setting.mlp_tiles
    if not setting.fraction and config.activation_checkpointing.offload:
        values["activation_checkpointing.offload"] = False
    return values | {"micro_batch_size": setting.micro_batch_size}


def format_overrides(values: Mapping[str, Any]) -> str:
    """Return config values as arguments of the command line."""
    texts = {key: f"{value:g}" if isinstance(value, float) else value for key, value in values.items()}
    return " ".join(f"{key}={text if isinstance(text, str) else json.dumps(text)}" for key, text in texts.items())
