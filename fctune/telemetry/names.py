"""Every metric of a run, once: its name, its unit, what it means and how it is counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["number", "flag", "text"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, as ``metrics.jsonl`` and every other sink name it."""

    name: str
    unit: str
    meaning: str
    convention: str = ""  # over which ranks and steps, and what is counted
    kind: Kind = "number"  # flags stand only in the steps where they are true

    @property
    def prometheus(self) -> str:
        """Its name at the Prometheus endpoint; ``_total`` is left to counters there."""
        return "fctune_" + self.name.removesuffix("_total").replace("/*", "_by_category")


_EACH = "of this step, over all ranks"
_STRETCH = "since the last line that has it (log_every_n_steps)"
_WILSON = "95 % interval by Wilson's method"
_RATE = "share of held-out cases, where an evaluation was due"

METRICS = (
    Metric("step", "steps", "optimizer steps taken", "from 1, over restarts"),
    Metric("epoch", "epochs", "pass over the training split that the step's last pack is of", "as the loader counts"),
    Metric("loss", "nats/token", "mean cross entropy of supervised tokens, by weight", _EACH + ", before the update"),
    Metric("lr", "", "learning rate that the step was taken with", "of the first parameter group"),
    Metric("grad_norm", "", "2-norm of the gradient of all that trains", "before clipping"),
    Metric("tokens_total", "tokens", "tokens of conversations", _EACH + ", without padding"),
    Metric("tokens_supervised", "tokens", "tokens that are learnt", _EACH),
    Metric("tokens_padding", "tokens", "slots of the batch that hold no conversation", _EACH),
    Metric("tokens_per_s", "tokens/s", "tokens_total over step_time_s", "all ranks together, padding not counted"),
    Metric("tokens_per_s_per_device", "tokens/s", "tokens_per_s over the ranks", "a rank is a GPU"),
    Metric("step_time_s", "s", "from asking for data to the end of the update", "rank 0; no validation, no evaluation"),
    Metric("step_time_p50_s", "s", "median of step_time_s", "rank 0; last 1,000 steps, the first 3 left out"),
    Metric("step_time_p99_s", "s", "99th percentile of step_time_s", "as step_time_p50_s; nearest rank"),
    Metric("data_time_s", "s", "of step_time_s, waiting for data", "rank 0"),
    Metric("data_time_max_s", "s", "waiting for data, of the rank that waited longest", _STRETCH),
    Metric("save_wait_s", "s", "of step_time_s, waiting for a save to have its copy of the weights", "rank 0"),
    Metric("save_wait_max_s", "s", "the same, of the rank that waited longest", _STRETCH),
    Metric("save_time_s", "s", "starting saves", "rank 0; between the step before and this one, in neither's time"),
    Metric("compute_time_s", "s", "forward and backward", "mean of ranks, of the step before"),
    Metric("compute_skew", "ratio", "slowest rank's compute time over the ranks' (lower) median", "of the step before"),
    Metric("slowest_rank", "rank", "which rank that was", "of the step before"),
    Metric(
        "tflops_per_device",
        "TFLOP/s",
        "what the model's work needs, over step_time_s and ranks",
        "6N a token (4N over a frozen base) and attention within conversations; recomputation not counted",
    ),
    Metric(
        "hardware_tflops_per_device",
        "TFLOP/s",
        "what the device computes for it, over step_time_s and ranks",
        "padding and recomputed activations counted, the head at supervised tokens alone",
    ),
    Metric(
        "mfu", "share", "tflops_per_device over the GPU's dense bf16 rate", "by its datasheet, whatever the precision"
    ),
    Metric("peak_memory_gib", "GiB", "most memory held since the start", "rank 0; allocated on CUDA, else resident"),
    Metric("peak_memory_max_gib", "GiB", "peak_memory_gib of the rank with the most", "every log_every_n_steps"),
    Metric("memory_active_gib", "GiB", "memory in use now, of the rank with the most", "active on CUDA, else resident"),
    Metric("memory_reserved_gib", "GiB", "memory that torch holds now, of the rank with the most", "CUDA"),
    Metric("alloc_retries", "", "times that memory was freed to go on", "CUDA; since the start, all ranks"),
    Metric("gpu_utilization", "share", "time in which a kernel ran, by NVML", "mean of ranks, " + _STRETCH),
    Metric("gpu_utilization_min", "share", "the same of the rank with the least", _STRETCH),
    Metric("gpu_temperature_c", "degrees C", "of the hottest GPU, by NVML", _STRETCH),
    Metric("gpu_power_w", "W", "of all GPUs together, by NVML", "mean, " + _STRETCH),
    Metric("gpu_hours", "GPU-hours", "since the run began, over restarts", "a rank is a GPU; every log_every_n_steps"),
    Metric("cost", "", "gpu_hours times price_per_gpu_hour", "in the currency of the price"),
    Metric("data_digest", "", "hash of the step's conversations", "the same on any number of ranks", "text"),
    Metric("validation_loss", "nats/token", "loss over the validation split", "where it was due; weights as they are"),
    Metric("validation_time_s", "s", "time of the validation", "rank 0; not of step_time_s"),
    Metric("is_skipped", "", "the update was left out: loss or gradient norm not finite", "", "flag"),
    Metric("is_spike", "", "the loss stands out from the 50 before it", "Hampel's rule", "flag"),
    Metric("eval_accuracy", "share", "held-out cases whose calls are all right", "where an evaluation was due"),
    Metric("eval_accuracy_low", "share", "lower end of eval_accuracy", _WILSON),
    Metric("eval_accuracy_high", "share", "upper end of eval_accuracy", _WILSON),
    Metric("eval_accuracy/*", "share", "eval_accuracy of one category", "where there are several; * is the category"),
    Metric("eval_tool_selection", "share", "calls' tools are those expected", _RATE),
    Metric("eval_tool_f1", "share", "F1 of tools over calls", _RATE),
    Metric("eval_argument_f1", "share", "F1 of arguments over calls", _RATE),
    Metric("eval_schema_valid", "share", "calls that fit their tool's schema", _RATE),
    Metric("eval_false_call", "share", "calls where none was expected", _RATE),
    Metric("eval_missed_call", "share", "no call where one was expected", _RATE),
    Metric("eval_num_cases", "cases", "cases that were asked", "all ranks together"),
    Metric("eval_time_s", "s", "time of the evaluation", "rank 0"),
    Metric("eval_skipped", "", "why an evaluation that was due was left out", "", "text"),
)

_BY_NAME = {metric.name: metric for metric in METRICS}


def find_metric(name: str) -> Metric | None:
    """The metric of a key; None where no metric is called so."""
    family, slash, _ = name.partition("/")
    return _BY_NAME.get(f"{family}/*" if slash else name)
