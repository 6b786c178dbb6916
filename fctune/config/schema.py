"""Schema of a training run's config; each field has its type, default, constraints and documentation in one place.

The sections are in ``fctune/config/sections/``. ``docs/reference/config.md`` and the JSON Schema are made of both
(``make reference``). To add a key, add a field with its documentation below it, annotate its range, and check what
involves several keys in the ``check`` method of its section.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from fctune.config.components import CallbackSpecs, OptimizerSpec
from fctune.config.fields import AT_LEAST_0, AT_LEAST_1, MAY_CHANGE, SAME_CONTENT, SHARE, Null, Range, SectionProblems
from fctune.config.intervals import INTERVAL, INTERVAL_OR_AUTO, STEPS_OR_SHARE, is_never
from fctune.config.recipes import find_recipe
from fctune.config.sections.adapter import AdapterConfig
from fctune.config.sections.data import DataConfig
from fctune.config.sections.distill import DistillConfig
from fctune.config.sections.evaluation import VALIDATION_CASES, EvalConfig, ValidationConfig
from fctune.config.sections.gate import GateConfig
from fctune.config.sections.grpo import GRPOConfig
from fctune.config.sections.model import ModelConfig
from fctune.config.sections.parallel import ActivationCheckpointingConfig, ParallelConfig
from fctune.config.sections.preference import PreferenceConfig
from fctune.config.sections.success import SuccessConfig
from fctune.config.sections.telemetry import ProfileConfig, TelemetryConfig

Precision = Literal["fp32", "bf16", "fp64", "bf16_mixed", "float8", "float8_mixed"]

DEFAULT_BATCH_SIZE = 128  # packs


@dataclass(kw_only=True, slots=True)
class LRSchedulerConfig:
    """Learning rate over the run, as a factor of `optimizer.lr`."""

    name: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay of the learning rate after the warm-up."""
    warmup: Annotated[int | str, STEPS_OR_SHARE] = 0
    """Linear warm-up from 0: a share of all steps (`3%`), or a number of steps."""
    min_factor: Annotated[float, SHARE] = 0.0
    """Factor at the end of a cosine or linear decay."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoints in `output_dir/checkpoints`; every run ends with an elastic one."""

    every: Annotated[int | str, INTERVAL] = "10min"
    """Interval of sharded checkpoints, which are fast and resume this run: a time (`10min`, `2h`), steps (`500`), or a
    share of the run (`5%`); 0: never."""
    elastic_every: Annotated[int | str, INTERVAL_OR_AUTO] = "auto"
    """Interval of elastic checkpoints, which any number of ranks and other tools can load; 0: only at the end. `auto`:
    the interval that loses the least time by the plan, at most a third of the run and at least a minute."""
    keep_last: Annotated[int, AT_LEAST_1] = 3
    """Checkpoints of each kind to keep."""
    keep_every_n_steps: Annotated[int | None, AT_LEAST_1, Null("only the last ones")] = None
    """Also keep the checkpoints of every N-th step."""
    async_save: bool = True
    """Write in the background; training waits only while the state is copied in memory."""
    max_failed_saves: Annotated[int, AT_LEAST_1] = 3
    """Failed saves in a row after which the run stops with exit code 74; a failed save is tried again 30 s later, or
    when the next one is due."""
    max_wait_s: Annotated[float, AT_LEAST_0] = 600.0
    """Seconds for which the last checkpoint and the exports wait for space."""
    fallback_dir: Annotated[str | None, Null("none")] = None
    """Directory on another disk for the last checkpoint and the exports if `output_dir` has no space; they are linked
    from there."""
    save_timeout_s: Annotated[float | None, Range(gt=0), Null("derived from the size and from earlier saves")] = None
    """Seconds after which a save or an export that has not finished ends the run, as on a disk that hangs."""

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check that checkpoints can be multiples of the steps to keep."""
        if self.keep_every_n_steps is None:
            return
        values = (self.every, self.elastic_every)
        if any(isinstance(value, str) and not value.isdigit() for value in values):
            problems.add(
                ("keep_every_n_steps", "every", "elastic_every"),
                f"{where}.keep_every_n_steps={self.keep_every_n_steps}: needs intervals in steps, or no checkpoint is "
                f"of such a step; set {where}.every and {where}.elastic_every to numbers of steps",
            )


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """A training run, from its model and data to its checkpoints and telemetry."""

    output_dir: Annotated[str, MAY_CHANGE]
    """Directory for the run's record, metrics, checkpoints and exports; one run per directory."""
    model: ModelConfig
    """Base model."""
    data: Annotated[DataConfig, SAME_CONTENT]
    """Training rows."""
    seed: Annotated[int, AT_LEAST_0] = 42
    """Seed of adapters, data order and dropout."""
    adapter: Annotated[AdapterConfig | None, Null("all weights train")] = None
    """LoRA adapters."""
    preference: Annotated[PreferenceConfig | None, Null("supervised training")] = None
    """Preference training, by `recipes/lora_dpo_distributed`."""
    grpo: Annotated[GRPOConfig | None, Null("supervised training")] = None
    """Reinforcement learning from verdicts, by `recipes/lora_grpo_distributed`."""
    distill: Annotated[DistillConfig | None, Null("supervised training")] = None
    """Distillation from a teacher, by `recipes/lora_distill_distributed` and `recipes/full_distill_distributed`."""
    precision: Annotated[
        Precision | None, Null("`fp32` on CPU; on CUDA `bf16` with adapters and `bf16_mixed` without")
    ] = None
    """Data type of weights and matrix products. `bf16_mixed`: weights and optimizer in float32, products in bfloat16,
    gradients reduced in float32. `float8`: `bf16` with the blocks' products in float8; `float8_mixed`: `bf16_mixed`
    likewise. With adapters, this is the base's data type; adapters are float32. A CPU without instructions for
    bfloat16, such as one with AVX2 alone, is several times faster in `fp32`."""
    global_batch_size: Annotated[int, AT_LEAST_1] = DEFAULT_BATCH_SIZE
    """Packs (rows of `data.seq_len` tokens) per optimizer step, over all ranks."""
    global_batch_tokens: Annotated[int | None, AT_LEAST_1, Null("use `global_batch_size`")] = None
    """Tokens per optimizer step, in place of `global_batch_size`: the number of packs follows from the mean tokens of a
    pack when the data is prepared."""
    micro_batch_size: Annotated[int | Literal["auto"], AT_LEAST_1, MAY_CHANGE] = 2
    """Packs per rank and forward pass; gradient accumulation follows from both sizes and the number of ranks. `auto`:
    the number that is fastest by the plan among those that fit in memory, the largest of about equally fast ones, and
    at most 2 on CPUs. The log has the choice and its reason; a resumed run keeps it while it fits."""
    epochs: Annotated[int, AT_LEAST_1, MAY_CHANGE] = 3
    """Passes over the training rows."""
    max_steps: Annotated[int | None, AT_LEAST_1, Null("no limit but `epochs`"), MAY_CHANGE] = None
    """Optimizer steps after which the run ends."""
    optimizer: Annotated[dict[str, Any], OptimizerSpec()] = field(
        default_factory=lambda: {"_component_": "torch.optim.AdamW", "lr": 2e-4}
    )
    """Import path of the optimizer in `_component_`, and its arguments; merged over the default. It is imported from
    `torch.optim`, `torchao.optim`, `torchtune` or `bitsandbytes`; `--allow-component NAME` allows others. Optimizers
    without `fused` or `foreach` ignore these two, which only affect speed."""
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    """Learning-rate schedule."""
    clip_grad_norm: Annotated[float | None, Range(gt=0), Null("no clipping")] = 1.0
    """Largest norm of the gradients; larger ones are scaled down to it."""
    on_nonfinite: Annotated[Literal["stop", "skip"], MAY_CHANGE] = "stop"
    """A loss or gradient norm that is not finite: end the run, or skip the step's update."""
    max_nonfinite: Annotated[int, AT_LEAST_1, MAY_CHANGE] = 10
    """With `skip`: end the run after this many non-finite steps in a row."""
    parallel: Annotated[ParallelConfig, MAY_CHANGE] = field(default_factory=ParallelConfig)
    """Distribution over ranks."""
    activation_checkpointing: Annotated[ActivationCheckpointingConfig, MAY_CHANGE] = field(
        default_factory=ActivationCheckpointingConfig
    )
    """Recomputation of activations."""
    compile: Annotated[bool, MAY_CHANGE] = False
    """Compile the blocks with torch.compile, by Inductor or the backend in TORCH_COMPILE_BACKEND."""
    run_ahead: Annotated[bool, MAY_CHANGE] = False
    """On CUDA, start a step before the results of the one before are read, where the optimizer is a fused one of torch,
    without rollouts and `parallel.cpu_offload`. Not yet measured on a GPU."""
    checkpoint: Annotated[CheckpointConfig, MAY_CHANGE] = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    resume: Annotated[str, MAY_CHANGE] = "auto"
    """`auto`: from the newest complete checkpoint of `output_dir`; `never`: start over; or the path of a checkpoint to
    start from. An unfinished run that is started again with the same path resumes as with `auto`; with `never`, it does
    if its launcher (Slurm, SkyPilot or Kubernetes) restarts it."""
    step_timeout_s: Annotated[float | None, Range(gt=0), Null("derived from the run's own steps"), MAY_CHANGE] = None
    """Seconds after which a step that has not finished ends the run."""
    validation: Annotated[ValidationConfig, MAY_CHANGE] = field(default_factory=ValidationConfig)
    """Validation loss."""
    eval: Annotated[EvalConfig, MAY_CHANGE] = field(default_factory=EvalConfig)
    """Tool-call accuracy during training."""
    gate: Annotated[GateConfig | None, Null("`fctune gate` uses the section's defaults"), MAY_CHANGE] = None
    """Comparison of base and result before the release."""
    log_every_n_steps: Annotated[int, AT_LEAST_1, MAY_CHANGE] = 10
    """Steps between lines on the console; `metrics.jsonl` has every step."""
    telemetry: Annotated[TelemetryConfig | None, Null("files and console only"), MAY_CHANGE] = None
    """Additional destinations of metrics."""
    profile: Annotated[ProfileConfig | None, Null("no profile"), MAY_CHANGE] = None
    """Operator profile."""
    price_per_gpu_hour: Annotated[float | None, AT_LEAST_0, Null("cost is not reported"), MAY_CHANGE] = None
    """Price of a GPU-hour, in `currency`. Runs on CPUs have no cost."""
    currency: Annotated[str, MAY_CHANGE] = "USD"
    """Currency of `price_per_gpu_hour`; a label, nothing is converted."""
    success: Annotated[SuccessConfig | None, Null("the run is not judged"), MAY_CHANGE] = None
    """Success criteria."""
    callbacks: Annotated[list[dict[str, Any]], CallbackSpecs(), MAY_CHANGE] = field(default_factory=list)
    """Your own callbacks: `_component_` is the import path of a subclass of `fctune.training.callbacks.base.Callback`,
    and the other keys are its arguments, such as `{_component_: my_package.WeightNorms, every: 100}`. Every rank makes
    them and calls their hooks, after those of the run. They need `--allow-component my_package`."""

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check what involves several sections, and the output directory."""
        if self.adapter is not None and self.precision in ("bf16_mixed", "float8", "float8_mixed"):
            problems.add(
                ("precision", "adapter"),
                f"precision={self.precision}: is for training all weights; with adapters use bf16, which keeps them in "
                "float32, and adapter.base for the storage of the frozen base",
            )
        length = self.data.seq_len
        if self.has_float8_products and isinstance(length, int) and length % 16:
            problems.add(
                ("data", "precision"),
                f"data.seq_len={length}: float8 products need a multiple of 16 tokens, and "
                f"precision={self.precision}; use {length // 16 * 16 or 16}",
            )
        if (tiles := self.activation_checkpointing.mlp_tiles or 1) > 1 and self.has_float8_products:
            problems.add(
                ("activation_checkpointing", "precision"),
                f"activation_checkpointing.mlp_tiles={tiles}: with precision={self.precision}, the numbers of a row "
                "share a scale, and those of a tile would have another; leave it out, or use precision=bf16",
            )
        if self.parallel.expert_ranks > 1:
            key = f"parallel.expert={self.parallel.expert}"
            if self.compile:
                problems.add(
                    ("parallel", "compile"), f"{key}: blocks that exchange tokens are not compiled; set compile=false"
                )
            if not is_never(self.eval.every):
                problems.add(
                    ("parallel", "eval"),
                    f"{key}: ranks generate at their own pace while training, and cannot exchange tokens then; set "
                    "eval.every=0",
                )
        self._check_preference(problems)
        self._check_sources(problems)
        self._check_grpo(problems)
        self._check_distill(problems)
        if (self.parallel.context or 1) > 1 and self.compares_answers:
            name = "preference" if self.preference is not None else "grpo" if self.grpo is not None else "distill"
            problems.add(
                ("parallel", name),
                f"parallel.context={self.parallel.context}: {name} compares whole answers, which cannot be split over "
                "ranks; leave it out",
            )
        is_held_out = self.eval.cases == VALIDATION_CASES
        if not is_never(self.eval.every) and is_held_out and self.data.validation_share == 0:
            problems.add(
                ("eval", "data"),
                f"eval.cases={VALIDATION_CASES}: data.validation_share=0 holds out no rows; specify a JSONL file of "
                "cases, or set data.validation_share=0.02",
            )
        if self.global_batch_tokens is not None and self.global_batch_size != DEFAULT_BATCH_SIZE:
            problems.add(
                ("global_batch_tokens", "global_batch_size"),
                f"global_batch_tokens={self.global_batch_tokens}: global_batch_size={self.global_batch_size} is set "
                "too; keep one (~global_batch_size on the command line drops the other)",
            )
        output = Path(self.output_dir)
        if os.path.exists(output) and not os.path.isdir(output):
            problems.add(("output_dir",), f"output_dir={output}: is a file; choose a directory")

    def _check_preference(self, problems: SectionProblems) -> None:
        """Check that preference training has pairs, an adapter and cases of its own."""
        if self.preference is None:
            if self.data.pairs:
                problems.add(
                    ("data", "preference"),
                    "data.pairs=true: rows are preference pairs, but preference is missing; add preference: {}",
                )
            return
        if not self.data.pairs:
            problems.add(("preference", "data"), "preference: trains on preference pairs; set data.pairs=true")
        if self.adapter is None:
            remedy = "add e.g. adapter: {rank: 16, alpha: 32}"
            reason = (
                "the reference is the base with the adapter switched off"
                if self.preference.needs_reference
                else ("preference training is for adapters")
            )
            problems.add(("preference", "adapter"), f"preference: {reason}, but adapter is missing; {remedy}")
        if not is_never(self.eval.every) and self.eval.cases == VALIDATION_CASES:
            problems.add(
                ("eval", "preference"),
                f"eval.cases={VALIDATION_CASES}: pairs have no expected calls; specify a JSONL file of cases, or set "
                "eval.every=0",
            )

    def _check_sources(self, problems: SectionProblems) -> None:
        """Check that a run has one kind of data, and the room for its own answers if it learns from them."""
        names = [name for name in ("preference", "grpo", "distill") if getattr(self, name) is not None]
        if len(names) > 1:
            learns = "learns from preference pairs, from verdicts or from a teacher"
            problems.add(names, f"{names[1]}: a run {learns}; remove {' or '.join(names)}")
        if self.grpo is None and (self.distill is None or self.distill.rows_per_step) and not self.data.sources:
            problems.add(("data", "grpo", "distill"), "data.sources=[]: empty; write e.g. [{path: train.jsonl}]")
        if (section := self.grpo or self.distill) is None:
            return
        name = section.section
        if not isinstance(self.data.seq_len, int):
            problems.add(
                (name, "data"),
                f"data.seq_len={self.data.seq_len}: is chosen from training rows, and a run with {name} has "
                f"{'none' if name == 'grpo' else 'answers, too'}; set a number of tokens",
            )
        elif section.prompts_per_step and section.max_new_tokens >= self.data.seq_len:
            problems.add(
                (name, "data"),
                f"{name}.max_new_tokens={section.max_new_tokens}: prompt and answer must fit in data.seq_len="
                f"{self.data.seq_len}; lower the former or raise the latter",
            )
        if self.global_batch_tokens is not None:
            key = "prompts_per_step" if name == "grpo" else "answers_per_step"
            problems.add(
                ("global_batch_tokens", name),
                f"global_batch_tokens: a step of {name} has all answers of its batch; set {name}.{key} instead",
            )
        if not is_never(self.eval.every) and self.eval.cases == VALIDATION_CASES and not self.data.sources:
            problems.add(
                ("eval", name),
                f"eval.cases={VALIDATION_CASES}: a run with {name} holds out no rows; specify a JSONL file of cases, "
                "or set eval.every=0",
            )

    def _check_grpo(self, problems: SectionProblems) -> None:
        """Check that reinforcement learning has an adapter without dropout, and no rows."""
        if self.grpo is None:
            return
        if self.data.sources:
            problems.add(
                ("data", "grpo"),
                f"data.sources: a run with grpo learns from its own answers to {self.grpo.cases}; remove it",
            )
        for key in ("augment", "replay"):
            if getattr(self.data, key) is not None:
                problems.add(
                    ("data", "grpo"), f"data.{key}: is for training rows, and a run with grpo has none; remove it"
                )
        if self.adapter is None:
            problems.add(
                ("grpo", "adapter"),
                "grpo: trains adapters, but adapter is missing; add e.g. adapter: {rank: 16, alpha: 32}",
            )
        elif self.adapter.dropout:
            problems.add(
                ("adapter", "grpo"),
                f"adapter.dropout={self.adapter.dropout:g}: answers are generated without dropout, so their "
                "log-probabilities would be another model's; set adapter.dropout=0",
            )

    def _check_distill(self, problems: SectionProblems) -> None:
        """Check that distillation uses its rows, and can publish what it trains."""
        if self.distill is None:
            return
        if not self.distill.rows_per_step and self.data.sources:
            problems.add(
                ("data", "distill"),
                f"data.sources: with distill.on_policy_share={self.distill.on_policy_share:g} a run learns from its "
                f"own answers to {self.distill.cases} alone; remove it, or lower the share",
            )
        if self.data.call_weight != 1.0:
            problems.add(
                ("data", "distill"),
                f"data.call_weight={self.data.call_weight:g}: all tokens of a distillation have the same weight; leave "
                "it out",
            )
        if self.distill.engine == "server" and self.adapter is None:
            problems.add(
                ("distill", "adapter"),
                "distill.engine=server: the server loads adapters, and this run trains all weights; add an adapter, or "
                "set distill.engine=in_process",
            )

    @property
    def rollouts(self) -> GRPOConfig | DistillConfig | None:
        """The section that says how the model in training answers cases; None in a run without its own answers."""
        if self.distill is not None and not self.distill.prompts_per_step:
            return None
        return self.grpo or self.distill

    @property
    def compares_answers(self) -> bool:
        """A step's objective needs complete answers, which cannot be split over ranks."""
        return self.preference is not None or self.grpo is not None or self.distill is not None

    @property
    def has_float8_products(self) -> bool:
        """Products are computed in float8, with a scale for each tensor."""
        return self.precision in ("float8", "float8_mixed")

    @property
    def micro_batch_packs(self) -> int:
        """The number of packs that ``micro_batch_size`` is, once it is chosen if it was auto."""
        assert isinstance(self.micro_batch_size, int), "micro_batch_size is not chosen yet"
        return self.micro_batch_size

    @property
    def has_reference(self) -> bool:
        """A step compares the policy with the base, which takes a forward pass more."""
        if self.grpo is not None:
            return self.grpo.kl_beta > 0
        return self.preference is not None and self.preference.needs_reference

    @property
    def recipe(self) -> str:
        """Name of the recipe that trains this config."""
        return find_recipe({name: getattr(self, name) for name in ("adapter", "preference", "grpo", "distill")})

    def to_dict(self) -> dict[str, Any]:
        """Return the config as nested plain dicts, like its YAML."""
        return dataclasses.asdict(self)
