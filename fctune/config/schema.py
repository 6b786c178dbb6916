"""Schema of a training run's config; each field has its type, default, constraints and documentation in one place.

``docs/reference/config.md`` and the JSON Schema are generated from this module (``make reference``). To add a key, add
a field with its documentation below it, annotate its range, and check what involves several keys in the ``check``
method of its section.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from fctune.config.chat_templates import read_chat_template
from fctune.config.components import OptimizerSpec
from fctune.config.fields import NotEmpty, Null, Range, join_key
from fctune.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp64", "bf16_mixed", "float8", "float8_mixed"]
BaseDtype = Literal["bf16", "nf4", "float8"]
ModelSource = Literal["auto", "torchtune", "transformers"]

_AT_LEAST_1 = Range(ge=1)
_AT_LEAST_0 = Range(ge=0)
_SHARE = Range(ge=0, le=1)

# Variables that every rendering of a chat template sets itself.
_TEMPLATE_INPUTS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The base model: its weights, tokenizer and chat template."""

    path: str
    """Hugging Face model directory (its `config.json` selects the architecture), or `hf:NAME[@REVISION]`, which is
    downloaded from the hub."""
    source: ModelSource = "auto"
    """Library that the model is built by. `auto`: torchtune for models that it builds exactly (Llama 3, Qwen2), else
    transformers; `torchtune` or `transformers` forces one."""
    chat_template: Annotated[str | None, Null("the model's own")] = None
    """Chat template in place of the model's own: a Jinja file, or `hermes`, `llama3` or `pythonic`, which work with any
    tokenizer that has an end-of-text token. Used in training and evaluation, and written to the exports."""

    add_tokens: list[str] = field(default_factory=list)
    """Tokens to add to the tokenizer, such as markers that it lacks. Their rows start as the mean of their text's,
    train with adapters too, and are part of the exports."""
    router_aux_loss: Annotated[
        float | None, _AT_LEAST_0, Null("`router_aux_loss_coef` of config.json if its `output_router_logits` is set")
    ] = None
    """Coefficient of the load-balancing loss of a mixture of experts, over all tokens of a global batch but padding;
    0: none. With several micro-batches a step, it takes a second forward pass."""
    template_args: dict[str, Any] = field(default_factory=dict)
    """Switches of the chat template by name, such as `{enable_thinking: true}` or `{reasoning_effort: low}`; used alike
    for training, evaluation and serving. A row's own are merged over them."""

    def check(self, where: str, problems: list[str]) -> None:
        """Check the chat template and its switches, and that a local model directory exists."""
        problems += find_template_args_problems(self.template_args, join_key(where, "template_args"))
        if any(not token.strip() for token in self.add_tokens):
            problems.append(f"{join_key(where, 'add_tokens')}: holds an empty token; leave it out")
        if repeated := sorted({token for token in self.add_tokens if self.add_tokens.count(token) > 1}):
            problems.append(f"{join_key(where, 'add_tokens')}: {', '.join(map(repr, repeated))} is listed twice")
        if self.chat_template is not None:
            try:
                read_chat_template(self.chat_template)
            except ConfigError as error:
                problems.append(f"{join_key(where, 'chat_template')}={error}")
        key = join_key(where, "path")
        if self.path.startswith("hf:"):
            return
        if not Path(self.path).is_dir():
            problems.append(
                f"{key}={self.path}: no such directory; expected a Hugging Face model directory, or hf:NAME@REVISION"
            )
        elif not (Path(self.path) / "config.json").is_file():
            problems.append(f"{key}={self.path}: holds no config.json, so it is not a Hugging Face model directory")


def find_template_args_problems(template_args: dict[str, Any], where: str) -> list[str]:
    """Return a line for each switch of a chat template that cannot be one; the template itself is not read."""
    problems = []
    for name, value in template_args.items():
        if not isinstance(name, str) or not name.isidentifier():
            problems.append(f"{where}: {name!r} cannot be the name of a template's variable")
        elif name in _TEMPLATE_INPUTS:
            problems.append(f"{where}.{name}: is set from each row, not by a switch; leave it out")
        else:
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                problems.append(f"{where}.{name}={value!r}: expected a value that JSON can hold")
    return problems


@dataclass(kw_only=True, slots=True)
class AdapterConfig:
    """LoRA adapters (https://arxiv.org/abs/2106.09685); without this section all weights train."""

    rank: Annotated[int, _AT_LEAST_1] = 64
    """Rank of the low-rank matrices."""
    alpha: Annotated[float, Range(gt=0)] = 128.0
    """Numerator of the factor on the low-rank product; see `scaling`."""
    dropout: Annotated[float, Range(ge=0, lt=1)] = 0.0
    """Probability of dropping an input of an adapter."""
    modules: Literal["all-linear"] | list[str] = "all-linear"
    """Linears that get an adapter, by their names in Hugging Face checkpoints, such as `q_proj`; of a mixture of
    experts also `experts.gate_up_proj` and `experts.down_proj`, with an adapter for each expert, and its router, such
    as `gate`. `all-linear`: every linear and expert of the blocks, without routers and the output head."""
    scaling: Literal["standard", "rslora"] = "standard"
    """Factor on the low-rank product: alpha / rank, or alpha / sqrt(rank) (rsLoRA,
    https://arxiv.org/abs/2312.03732)."""
    dora: bool = False
    """Train each row's magnitude separately from its direction (DoRA, https://arxiv.org/abs/2402.09353)."""
    train_tokens: Literal["auto", "off"] | list[str] = "auto"
    """Tokens whose embedding and output rows train too. `auto`: those that the base never learned, of the supervised
    tokens and markers in the data, unless the output head has an adapter; `off`: none; or a list of tokens."""
    base: BaseDtype = "bf16"
    """Storage of the frozen linears: `bf16` keeps the run's precision, `nf4` quantises to 4 bits (QLoRA), `float8` to 8
    bits, and multiplies in 8 bits."""


@dataclass(kw_only=True, slots=True)
class SourceConfig:
    """A source of training rows."""

    path: str
    """JSON, JSONL, JSONL.gz, Parquet or CSV file, a directory of them or from `save_to_disk`,
    `hf:NAME[:CONFIG][:SPLIT][@REVISION]`, or `synthetic:SPLIT:ROWS[:SEED]`."""
    format: str = "auto"
    """Row format by the name of its reader; `auto` detects it from the rows."""
    weight: Annotated[float, Range(gt=0)] = 1.0
    """Times each row appears per epoch: 2.0 is twice, 0.5 every second row (chosen by hash)."""

    def check(self, where: str, problems: list[str]) -> None:
        """Check that a local source exists."""
        if not self.path.startswith(("hf:", "synthetic:")) and not Path(self.path).exists():
            problems.append(
                f"{join_key(where, 'path')}={self.path}: no such file or directory "
                f"(relative paths start at {Path.cwd()})"
            )


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Training rows: sources, rendering, supervision and packing."""

    sources: Annotated[list[SourceConfig], NotEmpty("[{path: train.jsonl}]")]
    """Sources, read in this order."""
    validation_share: Annotated[float, Range(ge=0, lt=1)] = 0.02
    """Share of conversations held out for validation; chosen by hash, so a conversation keeps its split when rows are
    added. At least one is held out of 20 or more; 0: none."""
    max_samples: Annotated[int | None, _AT_LEAST_1, Null("all rows")] = None
    """Rows to read from each source."""
    seq_len: Annotated[int, Range(ge=8)] = 4096
    """Length of a training row in tokens; no conversation may be longer (see `overlong`)."""
    packed: bool = True
    """Pack several complete conversations into each row; attention never crosses them. Off: one conversation per
    row."""
    pad_to: Literal["longest", "seq_len"] = "longest"
    """Length to pad unpacked rows to: the longest of the micro-batch, or `seq_len`."""
    train_on: Literal["assistant", "last_assistant", "calls"] = "assistant"
    """Supervised turns: all of the assistant's, its last one, or those that call a function."""
    train_reasoning: Literal["all", "last", "none"] = "all"
    """Supervised reasoning: that of every supervised turn, only that of turns after the last user message, or none.
    Reasoning that is not supervised stays in the context of what follows. The empty block of a turn without reasoning
    is always supervised, unless the generation prompt holds it."""
    call_weight: Annotated[float, Range(gt=0)] = 1.0
    """Loss weight of a token in a turn that calls a function, relative to 1.0 for other supervised tokens."""
    on_invalid: Literal["fail", "skip"] = "fail"
    """Rows that cannot be used: stop with a report, or skip and count them."""
    overlong: Literal["fail", "drop", "cut"] = "fail"
    """Conversations longer than `seq_len`: stop, drop them, or cut them at the end of a turn."""
    parallel_calls: Literal["error", "split"] = "error"
    """Turns with several calls where the chat template renders only one per turn: report the row as invalid, or split
    the turn."""
    content_with_calls: Literal["error", "drop"] = "error"
    """Text next to a call where the chat template prints only the call: report the row as invalid, or drop the text."""
    reasoning: Literal["keep", "keep_printed", "in_content", "drop"] = "keep"
    """Reasoning of rows: `keep` passes it to the chat template under the template's own name for it, and reports rows
    whose reasoning the template does not print; `keep_printed` leaves such reasoning out; `in_content` writes it before
    the content of a turn as `<think>...</think>` where that turn is trained, for templates that read none; `drop`
    trains without any."""
    thinking: Literal["auto", "rows", "config"] = "auto"
    """Thinking switch of the chat template, such as `enable_thinking`. `auto`: if any row has reasoning, on for rows
    with reasoning and off for the others, so that a hybrid model stays one; a row's own switches come first. `rows`:
    only the rows' own switches; `config`: only `model.template_args`, for all rows."""
    special_tokens_in_content: Literal["fail", "escape", "keep"] = "fail"
    """Rows that spell a special token of the tokenizer, such as `<|im_end|>`, in a message, tool or argument: report
    them as invalid, encode the token as plain text, or keep it as the control token."""
    prepared_dir: Annotated[str | None, Null("`prepared` next to `output_dir`")] = None
    """Directory of prepared (tokenised and packed) sets."""


@dataclass(kw_only=True, slots=True)
class LRSchedulerConfig:
    """Learning rate over the run, as a factor of `optimizer.lr`."""

    name: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay after the warm-up."""
    num_warmup_steps: Annotated[int, _AT_LEAST_0] = 0
    """Steps of linear warm-up from 0."""
    warmup_share: Annotated[float | None, Range(ge=0, lt=1), Null("use `num_warmup_steps`")] = None
    """Warm-up as a share of all steps."""
    min_factor: float = 0.0
    """Factor at the end of a cosine or linear decay."""

    def check(self, where: str, problems: list[str]) -> None:
        """Check that the warm-up is given once."""
        if self.warmup_share is not None and self.num_warmup_steps:
            problems.append(f"{where}: num_warmup_steps and warmup_share are both set; keep one")


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """Distribution of parameters over ranks."""

    mode: Literal["auto", "ddp", "fsdp", "hsdp"] = "auto"
    """`ddp`: a replica per rank; `fsdp`: one replica sharded over all ranks; `hsdp`: several replicas, each sharded
    over a group of ranks; `auto`: no distribution on one rank, otherwise the mode with the least network traffic that
    fits in memory."""
    replicate: Annotated[int | None, _AT_LEAST_1, Null("one replica per node")] = None
    """Number of replicas with `hsdp`."""
    reshard_after_forward: bool = True
    """Free a block's gathered weights after its forward pass. Off: keep them for the backward pass, which takes more
    memory and less traffic."""
    cpu_offload: bool = False
    """Keep shards and optimizer state in host memory (CUDA only)."""

    def check(self, where: str, problems: list[str]) -> None:
        """Check keys that only some modes have."""
        if self.replicate is not None and self.mode != "hsdp":
            problems.append(
                f"{where}.replicate={self.replicate}: only hsdp counts replicas, and {where}.mode is {self.mode}; "
                f"set {where}.mode=hsdp, or leave replicate out"
            )
        if self.cpu_offload and self.mode == "ddp":
            problems.append(f"{where}.cpu_offload: offloads shards, and ddp has none; set {where}.mode=fsdp or hsdp")


@dataclass(kw_only=True, slots=True)
class ActivationCheckpointingConfig:
    """Activations to recompute in the backward pass, which trades time for memory."""

    fraction: Annotated[float, _SHARE] = 0.0
    """Share of the blocks to checkpoint, spread evenly."""
    policy: Literal["block", "op"] = "block"
    """Tensors to keep: a block's input only, or also its attention output and every second matrix product."""
    offload: bool = False
    """Move the inputs of checkpointed blocks to host memory until the backward pass (CUDA only)."""

    def check(self, where: str, problems: list[str]) -> None:
        """Check that offloading has something to offload, and offloads all of it."""
        if self.offload and self.policy == "op":
            problems.append(
                f"{where}.offload: moves the inputs of blocks, and {where}.policy=op keeps products on the device too; "
                f"set {where}.policy=block"
            )
        if self.offload and not self.fraction:
            problems.append(
                f"{where}.offload: moves what checkpointed blocks keep, and no block is checkpointed; set "
                f"{where}.fraction over 0"
            )


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoints in `output_dir/checkpoints`; every run ends with an elastic one."""

    every_n_steps: Annotated[int, _AT_LEAST_0] = 500
    """Steps between sharded checkpoints, which are fast and resume this run; 0: never."""
    elastic_every_n_steps: Annotated[int, _AT_LEAST_0] = 1000
    """Steps between elastic checkpoints, which any number of ranks and other tools can load; 0: only at the end."""
    keep_last: Annotated[int, _AT_LEAST_1] = 3
    """Checkpoints of each kind to keep."""
    keep_every_n_steps: Annotated[int | None, _AT_LEAST_1, Null("only the last ones")] = None
    """Also keep the checkpoints of every N-th step."""
    async_save: bool = True
    """Write in the background; training waits only while the state is copied in memory."""
    on_error: Literal["continue", "stop"] = "continue"
    """After a failed save: continue to the next one, or end the run."""


@dataclass(kw_only=True, slots=True)
class ValidationConfig:
    """Loss on the validation split."""

    every_n_steps: Annotated[int, _AT_LEAST_0] = 100
    """Steps between measurements; 0: never."""


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """Tool-call accuracy during training, by generation on held-out cases."""

    every_n_steps: Annotated[int, _AT_LEAST_0] = 0
    """Steps between evaluations; 0: never."""
    cases: str | None = None
    """JSONL file of cases with `messages`, `tools` and `expected_calls`; required if `every_n_steps` is set."""
    max_cases: Annotated[int | None, _AT_LEAST_1, Null("all cases")] = None
    """Use only the first N cases."""
    max_new_tokens: Annotated[int, _AT_LEAST_1] = 256
    """Longest answer in tokens."""
    batch_size: Annotated[int, _AT_LEAST_1] = 64
    """Prompts per rank and batch."""
    max_share_of_time: Annotated[float, Range(gt=0, le=1)] = 0.1
    """Share of the run's time to spend; an evaluation that would exceed it is skipped."""
    early_stop: Annotated[int | None, _AT_LEAST_1, Null("never")] = None
    """End the run after this many evaluations without a better accuracy."""

    def check(self, where: str, problems: list[str]) -> None:
        """Check that the cases exist."""
        if self.every_n_steps and self.cases is None:
            problems.append(
                f"{where}.cases: missing; name a JSONL file of held-out cases, or set {where}.every_n_steps=0"
            )
        if self.cases is not None and not Path(self.cases).is_file():
            problems.append(f"{where}.cases={self.cases}: no such file (relative paths start at {Path.cwd()})")


@dataclass(kw_only=True, slots=True)
class WandbConfig:
    """Weights & Biases. The API key is read from WANDB_API_KEY or `wandb login`, never from a config."""

    project: str
    """Project name."""
    entity: Annotated[str | None, Null("the key's default")] = None
    """Team or user."""
    name: Annotated[str | None, Null("the last component of `output_dir`")] = None
    """Name of the run."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """`online` falls back to offline without a key or network."""


@dataclass(kw_only=True, slots=True)
class PrometheusConfig:
    """Metrics endpoint of rank 0, http://HOST:PORT/metrics, for a Prometheus server to scrape."""

    port: Annotated[int | None, Range(ge=1, le=65535), Null("no endpoint")] = None
    """TCP port."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 accepts connections of other machines, from anyone who can reach the port."""


@dataclass(kw_only=True, slots=True)
class TelemetryConfig:
    """Destinations of metrics and alerts in addition to the run's files and the console."""

    wandb: Annotated[WandbConfig | None, Null("off")] = None
    """Weights & Biases."""
    tensorboard: bool = False
    """Write event files to `output_dir/tensorboard`."""
    prometheus: PrometheusConfig = field(default_factory=PrometheusConfig)
    """Prometheus endpoint."""


@dataclass(kw_only=True, slots=True)
class ProfileConfig:
    """Operator profile of some steps, in `output_dir/profile`; `profile: {}` uses these defaults."""

    first_step: Annotated[int, _AT_LEAST_1] = 10
    """First step to profile."""
    last_step: int = 12
    """Last step to profile; in a large model a step is about 10 MB of trace."""
    ranks: Annotated[list[int], NotEmpty("[0]"), _AT_LEAST_0] = field(default_factory=lambda: [0])
    """Ranks to profile."""
    shapes: bool = False
    """Record the input shapes of each operator."""
    stacks: bool = False
    """Record the source lines that called each operator; slower."""
    allocations: bool = False
    """Record the call stack of each allocation, for the memory snapshot that an out-of-memory error leaves (CUDA only);
    slower."""

    def check(self, where: str, problems: list[str]) -> None:
        """Check the order of the steps."""
        if self.last_step < self.first_step:
            problems.append(f"{where}.last_step={self.last_step}: less than {where}.first_step={self.first_step}")


_NO_CRITERION = Null("no criterion")


@dataclass(kw_only=True, slots=True)
class SuccessConfig:
    """Criteria that are judged at the end of a run as PASS, FAIL or not measured; `success: {}` uses these defaults."""

    min_accuracy: Annotated[float | None, _SHARE, _NO_CRITERION] = 0.85
    """Tool-call accuracy on held-out cases."""
    max_final_loss: Annotated[float | None, Null("1.5 with adapters, 0.5 where all weights train")] = None
    """Final training loss."""
    min_gpu_utilization: Annotated[float | None, _SHARE, _NO_CRITERION] = 0.85
    """Mean utilisation of the GPUs."""
    min_memory_share: Annotated[float | None, _SHARE, _NO_CRITERION] = 0.7
    """Least peak memory, as a share of a GPU's memory."""
    max_memory_share: Annotated[float | None, _SHARE, _NO_CRITERION] = 0.8
    """Greatest peak memory, as a share of a GPU's memory."""
    min_tokens_per_s_per_gpu: Annotated[float | None, _NO_CRITERION] = 2000.0
    """Training throughput in tokens/s per GPU."""
    min_scaling: Annotated[float | None, _NO_CRITERION] = 0.9
    """Tokens/s per GPU relative to a run on fewer GPUs."""
    no_out_of_memory: bool = True
    """No out-of-memory error."""
    min_inference_tokens_per_s: Annotated[float | None, _NO_CRITERION] = 100.0
    """Inference speed in tokens/s."""


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """A training run, from its model and data to its checkpoints and telemetry."""

    output_dir: str
    """Directory of the run: record, metrics, checkpoints, exports. One run per directory."""
    model: ModelConfig
    """Base model."""
    data: DataConfig
    """Training rows."""
    seed: int = 42
    """Seed of adapters, data order and dropout."""
    adapter: Annotated[AdapterConfig | None, Null("all weights train")] = None
    """LoRA adapters."""
    precision: Annotated[
        Precision | None, Null("`fp32` on CPU; on CUDA `bf16` with adapters and `bf16_mixed` without")
    ] = None
    """Data type of weights and products. `bf16_mixed`: weights and optimizer in float32, products in bfloat16,
    gradients reduced in float32. `float8`: `bf16` with the blocks' products in float8; `float8_mixed`: `bf16_mixed`
    likewise. With adapters it is the base's, and adapters are float32."""
    global_batch_size: Annotated[int, _AT_LEAST_1] = 128
    """Packs (rows of `data.seq_len` tokens) per optimizer step, over all ranks."""
    micro_batch_size: Annotated[int, _AT_LEAST_1] = 2
    """Packs per rank and forward pass; gradient accumulation follows from both sizes and the number of ranks."""
    epochs: Annotated[int, _AT_LEAST_1] = 3
    """Passes over the training rows."""
    max_steps: Annotated[int | None, _AT_LEAST_1, Null("no limit but `epochs`")] = None
    """Optimizer steps after which to end."""
    optimizer: Annotated[dict[str, Any], OptimizerSpec()] = field(
        default_factory=lambda: {"_component_": "torch.optim.AdamW", "lr": 2e-4}
    )
    """Import path of the optimizer in `_component_`, and its arguments; merged over the default. Optimizers without
    `fused` or `foreach` ignore these two, which change speed only."""
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    """Learning-rate schedule."""
    clip_grad_norm: Annotated[float | None, Range(gt=0), Null("no clipping")] = 1.0
    """Largest norm of the gradients; larger ones are scaled down to it."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A loss or gradient norm that is not finite: end the run, or skip the step's update."""
    max_nonfinite: Annotated[int, _AT_LEAST_1] = 10
    """With `skip`: end the run after this many non-finite steps in a row."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Distribution over ranks."""
    activation_checkpointing: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    """Recomputation of activations."""
    compile: bool = False
    """Compile the blocks with torch.compile."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    resume: str = "auto"
    """`auto`: from the newest complete checkpoint of `output_dir`; `never`: start over; or the path of a checkpoint."""
    step_timeout_s: Annotated[float | None, Range(gt=0), Null("derived from the run's own steps")] = None
    """Seconds after which a step that has not finished ends the run."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """Validation loss."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Tool-call accuracy during training."""
    log_every_n_steps: Annotated[int, _AT_LEAST_1] = 10
    """Steps between lines on the console; `metrics.jsonl` has every step."""
    telemetry: Annotated[TelemetryConfig | None, Null("files and console only")] = None
    """Further destinations of metrics."""
    profile: Annotated[ProfileConfig | None, Null("no profile")] = None
    """Operator profile."""
    price_per_gpu_hour: Annotated[float | None, _AT_LEAST_0, Null("cost is not reported")] = None
    """Price of a GPU-hour, in `currency`. Runs on CPUs have no cost."""
    currency: str = "USD"
    """Currency of `price_per_gpu_hour`; a label, nothing is converted."""
    success: Annotated[SuccessConfig | None, Null("the run is not judged")] = None
    """Success criteria."""

    def check(self, where: str, problems: list[str]) -> None:
        """Check what involves several sections, and the output directory."""
        if self.adapter is not None and self.precision in ("bf16_mixed", "float8", "float8_mixed"):
            problems.append(
                f"precision={self.precision}: is for training all weights; with adapters use bf16, which keeps them in "
                "float32, and adapter.base for the storage of the frozen base"
            )
        if self.precision in ("float8", "float8_mixed") and self.data.seq_len % 16:
            problems.append(
                f"data.seq_len={self.data.seq_len}: float8 products need a multiple of 16 tokens, and "
                f"precision={self.precision}; use {self.data.seq_len // 16 * 16 or 16}"
            )
        output = Path(self.output_dir)
        if output.exists() and not output.is_dir():
            problems.append(f"output_dir={output}: is a file; name a directory")

    def to_dict(self) -> dict[str, Any]:
        """Return the config as nested plain dicts, like its YAML."""
        return dataclasses.asdict(self)
