"""One config schema for every run: YAML in torchtune's shape plus ``key=value`` overrides, onto dataclasses.

Every problem of a config is found before any work starts and reported in one ConfigError. A key that is null takes the
default its field's comment gives. To add a key, add a field here; to add a rule, add a check in fctune.config.checks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from fctune.config.checks import ADAPTER_MODULES

Precision = Literal["fp32", "bf16", "fp64", "bf16_mixed", "float8", "float8_mixed"]
BaseDtype = Literal["bf16", "nf4", "float8"]


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Where the model comes from."""

    path: str  # a Hugging Face directory (config.json chooses the builder), or hf:NAME[@REVISION]


@dataclass(kw_only=True, slots=True)
class AdapterConfig:
    """LoRA (https://arxiv.org/abs/2106.09685); absent from a config, all weights train."""

    rank: int = 64
    alpha: float = 128.0
    dropout: float = 0.0
    modules: list[str] = field(default_factory=lambda: list(ADAPTER_MODULES[:-1]))
    scaling: Literal["standard", "rslora"] = "standard"  # alpha / rank, or alpha / sqrt(rank) (arXiv:2312.03732)
    dora: bool = False  # learns each row's length apart from its direction (arXiv:2402.09353)
    base: BaseDtype = "bf16"  # the blocks' linears: in the run's precision, in 4 bits (QLoRA), or in 8, multiplied so


@dataclass(kw_only=True, slots=True)
class SourceConfig:
    """One set of rows."""

    path: (
        str  # JSON, JSONL, JSONL.gz, Parquet, a directory of them, hf:NAME[:CONFIG][:SPLIT][@REV], synthetic:SPLIT:ROWS
    )
    format: str = "auto"  # a reader's name, or found from the rows
    weight: float = 1.0  # times its rows appear an epoch: 2.0 twice, 0.5 every second one (chosen by hash)


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Rows, how they are rendered, and what of them is learnt."""

    sources: list[SourceConfig]
    validation_share: float = 0.02  # by hash of the conversation, so it holds when rows are added
    max_samples: int | None = None  # rows read of each source; null: all
    seq_len: int = 4096  # tokens; the longest conversation kept
    packed: bool = True  # several whole conversations a row of seq_len tokens; false: one
    pad_to: Literal["longest", "seq_len"] = "longest"  # unpacked rows: of the micro-batch, or all of one shape
    train_on: Literal["assistant", "last_assistant", "calls"] = "assistant"
    call_weight: float = 1.0  # loss weight of a token of a turn that calls, against 1.0 for one of prose
    on_invalid: Literal["fail", "skip"] = "fail"  # rows that cannot be used
    overlong: Literal["fail", "drop", "cut"] = "fail"  # conversations over seq_len; cut: at a turn's end
    parallel_calls: Literal["error", "split"] = "error"  # where a template takes one call a turn
    prepared_dir: str | None = None  # null: `prepared` beside output_dir


@dataclass(kw_only=True, slots=True)
class LRSchedulerConfig:
    """Learning rate over the steps, as a factor of the optimizer's lr."""

    name: Literal["cosine", "linear", "constant"] = "cosine"
    num_warmup_steps: int = 0  # linear from 0
    warmup_share: float | None = None  # of all steps, instead of num_warmup_steps
    min_factor: float = 0.0  # what cosine and linear end at


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """How parameters lie on the ranks."""

    # ddp: a copy a rank; fsdp: one copy over all ranks; hsdp: several copies, each over some of the ranks; auto: plain
    # on one rank, else the one of them that sends least over the network and fits
    mode: Literal["auto", "ddp", "fsdp", "hsdp"] = "auto"
    replicate: int | None = None  # copies under hsdp; null: one a node
    reshard_after_forward: bool = True  # false: a block's weights stay whole until backward, more memory, less traffic
    cpu_offload: bool = False  # shards and optimizer in the host's memory; CUDA only


@dataclass(kw_only=True, slots=True)
class ActivationCheckpointingConfig:
    """Activations that are computed again in backward, for time less memory."""

    fraction: float = 0.0  # of the blocks, evenly spread
    policy: Literal["block", "op"] = "block"  # keeps a block's input; or also its attention and every second product
    offload: bool = False  # what is kept waits in the host's memory; CUDA only


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Saves, in ``output_dir/checkpoints``; the end of a run always has an elastic one."""

    every_n_steps: int = 500  # sharded: fast, for this run to go on; 0: never
    elastic_every_n_steps: int = 1000  # portable: for any number of ranks and other tools; 0: at the end alone
    keep_last: int = 3  # of each kind
    keep_every_n_steps: int | None = None  # kept beyond those
    async_save: bool = True  # training waits for a copy in memory alone
    on_error: Literal["continue", "stop"] = "continue"  # a save that fails: the next one is tried, or the run ends


@dataclass(kw_only=True, slots=True)
class ValidationConfig:
    """Loss on the validation split."""

    every_n_steps: int = 100  # 0: never


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """Tool-call accuracy while training, by generation on held-out cases."""

    every_n_steps: int = 0  # 0: never
    cases: str | None = None  # JSONL: messages, tools, expected_calls
    max_cases: int | None = None  # the first so many; null: all
    max_new_tokens: int = 256
    batch_size: int = 64  # prompts a rank answers at a time
    max_share_of_time: float = 0.1  # of the run's; an evaluation that would go over it is left out
    early_stop: int | None = None  # end after so many evaluations without a better accuracy; null: never


@dataclass(kw_only=True, slots=True)
class WandbConfig:
    """Weights & Biases; the key comes from WANDB_API_KEY or ``wandb login``, never from a config."""

    project: str
    entity: str | None = None  # team or user; null: the key's own
    name: str | None = None  # of the run; null: the last part of output_dir
    mode: Literal["online", "offline", "disabled"] = "online"  # online without key or network goes offline


@dataclass(kw_only=True, slots=True)
class PrometheusConfig:
    """An endpoint of rank 0 that a Prometheus server asks: http://HOST:PORT/metrics."""

    port: int | None = None  # null: none
    host: str = "0.0.0.0"  # the address that is listened on; 127.0.0.1: from this machine alone


@dataclass(kw_only=True, slots=True)
class TelemetryConfig:
    """Where metrics and alerts go beside the run's files and the console."""

    wandb: WandbConfig | None = None
    tensorboard: bool = False  # event files in output_dir/tensorboard
    prometheus: PrometheusConfig = field(default_factory=PrometheusConfig)


@dataclass(kw_only=True, slots=True)
class ProfileConfig:
    """Where the time of some steps goes, operator by operator, in ``output_dir/profile``."""

    first_step: int = 10
    last_step: int = 12  # each step is some 10 MB of trace in a large model
    ranks: list[int] = field(default_factory=lambda: [0])
    shapes: bool = False  # of what each operator was given
    stacks: bool = False  # the lines of source that called it; slower
    allocations: bool = False  # CUDA: who asked for each block of memory, for the snapshot of an out-of-memory; slower


@dataclass(kw_only=True, slots=True)
class SuccessConfig:
    """What a run must reach, judged at its end as PASS, FAIL or not measured; null: not asked for."""

    min_accuracy: float | None = 0.85  # of tool calls on held-out cases
    max_final_loss: float | None = None  # of training; null: 1.5 with adapters, 0.5 where all weights train
    min_gpu_utilization: float | None = 0.85
    min_memory_share: float | None = 0.7  # of a GPU's memory, the most that is held
    max_memory_share: float | None = 0.8
    min_tokens_per_s_per_gpu: float | None = 2000.0
    min_scaling: float | None = 0.9  # tokens/s a GPU, over those of a run on fewer
    no_out_of_memory: bool = True
    min_inference_tokens_per_s: float | None = 100.0


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """A training run, whole."""

    output_dir: str  # one run, one directory
    model: ModelConfig
    data: DataConfig
    seed: int = 42
    adapter: AdapterConfig | None = None  # absent: all weights train
    # bf16_mixed: weights and optimizer float32, products bfloat16, gradients reduced in float32; float8: bf16, with the
    # blocks' products in float8; float8_mixed: bf16_mixed likewise. With adapters this is of the base, and they are
    # float32. null: fp32 on CPU; on CUDA bf16 with adapters, bf16_mixed without
    precision: Precision | None = None
    global_batch_size: int = 128  # packs an optimizer step, whatever the world size
    micro_batch_size: int = 2  # packs a rank holds at a time; accumulation is derived
    epochs: int = 3
    max_steps: int | None = None
    optimizer: dict[str, Any] = field(default_factory=dict)  # over {_component_: torch.optim.AdamW, lr: 2e-4}
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    clip_grad_norm: float | None = 1.0  # null: not clipped
    on_nonfinite: Literal["stop", "skip"] = "stop"  # a loss or gradient norm that is not finite
    max_nonfinite: int = 10  # under skip: so many in a row, and the run stops all the same
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    activation_checkpointing: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    compile: bool = False  # the blocks, by torch.compile
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume: str = "auto"  # auto: from the newest whole checkpoint of output_dir; never; or a checkpoint's path
    step_timeout_s: float | None = None  # a step that takes longer ends the run; null: learnt from its steps
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log_every_n_steps: int = 10
    telemetry: TelemetryConfig | None = None  # absent: files and console alone
    profile: ProfileConfig | None = None  # absent: not profiled; {}: by these defaults
    price_per_gpu_hour: float | None = None  # in any currency; null: the cost is not told
    success: SuccessConfig | None = None  # absent: not judged; {}: judged by these defaults

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts, as the YAML would say it."""
        return dataclasses.asdict(self)
